"""Content of a checkpoint besides weights, and values of engines that differ between ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import mpidl
from mpidl.checkpoint import index, load, reading, save, writing
from mpidl.data import DistributedSampler
from mpidl.optim import PeriodicAverager, PostLocalSGDOptimizer
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.small_models import MODELS, fresh, largest_difference, sequences
from tests.mpidl.zero.ways import ENGINES, STAGES

pytestmark = pytest.mark.mpi


def test_each_rank_goes_on_with_its_random_numbers(comm, shared: Path) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + comm.rank)

    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(3).tolist()

    draw()
    model = fresh(lambda: torch.nn.Linear(3, 2))
    save(shared, model, process_group=comm)
    expected = draw()
    everyone = mpidl.all_gather_object(comm, expected)
    assert len(set(map(str, everyone))) == comm.size
    load(shared, model, process_group=comm)
    assert draw() == expected
    before = draw()
    load(shared, model, random_states=False, process_group=comm)
    assert draw() not in (expected, before)
    # On more ranks than saved it, the additional ones have numbers of their own, the same each time.
    alone = comm.split(0 if comm.rank == 0 else None)
    if alone is not None:
        save(shared / "one", model, process_group=alone)
        alone.close()
    comm.barrier()
    load(shared / "one", model, process_group=comm)
    first = draw()
    load(shared / "one", model, process_group=comm)
    assert draw() == first
    assert len(set(map(str, mpidl.all_gather_object(comm, first)))) == comm.size


def test_the_sampler_goes_on_where_it_was_on_other_ranks_too(comm, shared: Path) -> None:
    def sampler(ranks: int, rank: int) -> DistributedSampler:
        return DistributedSampler(range(24), seed=5, num_replicas=ranks, rank=rank)

    model = fresh(lambda: torch.nn.Linear(3, 2))
    mine = sampler(comm.size, comm.rank)
    mine.set_epoch(2)
    passing = iter(mine)
    for _ in range(3):
        next(passing)
    save(shared, model, sampler=mine, process_group=comm)
    again = sampler(comm.size, comm.rank)
    load(shared, model, sampler=again, process_group=comm)
    assert list(again) == list(passing)
    other = sampler(1, 0)
    load(shared, model, sampler=other, process_group=comm)
    whole = sampler(1, 0)
    whole.set_epoch(2)
    assert list(other) == list(whole)[3 * comm.size :]


def test_a_state_that_is_refused_leaves_the_others_as_they_were(comm, shared: Path) -> None:
    run = Run("stage 2", comm)
    run.steps(0, 1)
    run.save(shared, 1, sampler=DistributedSampler(range(10), comm))
    run.steps(1, 2)
    weights, scheduled = run.weights(), run.schedule.state_dict()
    of_rank = DistributedSampler(range(10 if comm.rank else 11), comm)
    with pytest.raises(mpidl.CheckpointMismatch, match=r"the sampler: .*a dataset of 10 samples; needs 11"):
        run.load(shared, sampler=of_rank)
    assert run.schedule.state_dict() == scheduled
    after = run.weights()
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())


class Particular:
    """Takes in half of a state before it refuses the rest."""

    def __init__(self, error: Exception | None = None) -> None:
        self.held, self.error = {"first": 0, "second": 0}, error

    def state_dict(self) -> dict[str, int]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.held["first"] = state["first"]
        if self.error is not None and state["first"]:
            raise self.error
        self.held["second"] = state["second"]


@pytest.mark.parametrize("error", [AttributeError("no field"), AssertionError(), ZeroDivisionError("by nothing")])
def test_whatever_a_state_is_refused_with_all_go_back(comm, shared: Path, error: Exception) -> None:
    model = fresh(lambda: torch.nn.Linear(3, 2))
    saved = Particular()
    saved.held = {"first": 1, "second": 2}
    save(shared, model, scaler=saved, sampler=saved, process_group=comm)
    scaler, sampler = Particular(), Particular(error if comm.rank == comm.size - 1 else None)
    weight = model.weight.data.zero_().clone()
    with pytest.raises(mpidl.CheckpointMismatch, match=f"the sampler: {str(error) or type(error).__name__}"):
        load(shared, model, scaler=scaler, sampler=sampler, process_group=comm)
    assert scaler.held == sampler.held == {"first": 0, "second": 0}
    assert torch.equal(model.weight.data, weight)


def test_a_scheduler_of_another_class_is_refused(comm, shared: Path) -> None:
    model = fresh(lambda: torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = torch.optim.lr_scheduler
    save(shared, model, optimizer, schedulers.StepLR(optimizer, 3), process_group=comm)
    other = schedulers.ExponentialLR(optimizer, 0.5)
    before = other.state_dict()
    with pytest.raises(mpidl.CheckpointError, match="holds the state of StepLR; the scheduler here is ExponentialLR"):
        load(shared, model, optimizer, other, process_group=comm)
    assert other.state_dict() == before
    path = shared / "step-00000000" / "index.json"
    comm.barrier()
    if comm.rank == 0:  # as written before the class was kept
        content = json.loads(path.read_text())
        del content["scheduler_class"], content["checksum"]
        path.write_text(json.dumps({**content, "checksum": index.content_checksum(content)}))
    comm.barrier()
    load(shared, model, optimizer, schedulers.StepLR(optimizer, 3), process_group=comm)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_accumulation_goes_on_after_its_first_micro_step(comm, shared: Path, engine: str) -> None:
    run = Run(engine, comm)
    run.steps(0, 1)
    run.micro_step(1, 0, of=2)
    run.save(shared, 1, micro_step=1)
    run.micro_step(1, 1, of=2)
    run.finish()
    expected = run.weights()
    again = Run(engine, comm, fresh(MODELS["gpt2"], rank=1))
    assert again.load(shared).micro_step == 1
    again.micro_step(1, 1, of=2)
    again.finish()
    found = again.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for other in ("stage 3", "ddp"):
        across = Run(other, comm, fresh(MODELS["gpt2"], rank=1))
        across.load(shared)
        across.micro_step(1, 1, of=2)
        across.finish()
        found = across.weights()
        assert not (found and expected) or largest_difference(found, expected) < 1e-6


def test_gradients_that_each_rank_has_for_itself_are_kept_for_each(comm, shared: Path) -> None:
    run = Run("ddp", comm)
    run.steps(0, 1)
    with run.call.no_sync():
        run.micro_step(1, 0, of=2)
    own = {name: p.grad.clone() for name, p in run.model.named_parameters()}
    run.save(shared, 1, micro_step=1)
    run.micro_step(1, 1, of=2)
    run.finish()
    expected = run.weights()
    again = Run("ddp", comm, fresh(MODELS["gpt2"], rank=1))
    again.load(shared)
    assert all(torch.equal(p.grad, own[name]) for name, p in again.model.named_parameters())
    again.micro_step(1, 1, of=2)
    again.finish()
    assert all(torch.equal(again.weights()[name], tensor) for name, tensor in expected.items())
    sharded = Run("stage 2", comm, fresh(MODELS["gpt2"], rank=1))  # takes their mean
    sharded.load(shared)
    sharded.micro_step(1, 1, of=2)
    sharded.finish()
    found = sharded.weights()
    assert not (found and expected) or largest_difference(found, expected) < 1e-6


def test_gradients_that_zero_has_not_reduced_are_refused(comm, shared: Path) -> None:
    run = Run("stage 1", comm)
    with run.optimizer.no_sync():
        run.micro_step(0, 0, of=2)
    with pytest.raises(mpidl.TrainingError, match=r"under no_sync\(\) have not been reduced"):
        run.save(shared, 0, micro_step=1)


def test_post_local_sgd_goes_on_with_each_rank_s_own_weights(comm, shared: Path) -> None:
    def run(rank: int) -> tuple[Any, Any]:
        model = fresh(MODELS["gpt2"], rank)
        averager = PeriodicAverager(model.parameters(), comm, period=3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, PostLocalSGDOptimizer(sgd, averager)

    def train(model: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = run(0)
    train(model, optimizer, 0, 4)
    save(shared, model, optimizer, process_group=comm)
    mean = {name: tensor.detach().double().clone() for name, tensor in model.named_parameters()}
    comm.all_reduce(list(mean.values()), "avg")
    train(model, optimizer, 4, 7)
    again, optimizer_again = run(1)
    load(shared, again, optimizer_again, process_group=comm)
    train(again, optimizer_again, 4, 7)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    # Elsewhere their mean, also for engines on as many ranks whose weights are equal.
    ddp = Run("ddp", comm, fresh(MODELS["gpt2"], 1))
    load(shared, ddp.call)
    for name, p in ddp.model.named_parameters():
        torch.testing.assert_close(p.detach().double(), mean[name], rtol=0, atol=1e-7)
    other = comm.split(0 if comm.rank == 0 else None)
    if other is not None:
        plain = fresh(MODELS["gpt2"], 1)
        load(shared, plain, process_group=other)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(p.detach().double(), mean[name], rtol=0, atol=1e-7)
        other.close()


@pytest.mark.parametrize("way", STAGES)
def test_masters_go_to_16_bit_training_and_back(comm, shared: Path, way: str) -> None:
    half = mpidl.Precision(torch.bfloat16, torch.float32)
    run = Run(way, comm, precision=half)
    run.steps(0, 2)
    run.save(shared, 2)
    losses = run.steps(2, 4)
    again = Run(way, comm, fresh(MODELS["gpt2"], rank=1), precision=half)
    again.load(shared)
    with again.optimizer.gathered(writable=False):
        assert {p.dtype for p in again.model.parameters()} == {torch.bfloat16}
    assert again.steps(2, 4) == losses
    # fp32 training takes the masters to the bit, and gives them back.
    plain = Run("ddp", comm, fresh(MODELS["gpt2"], rank=1))
    plain.load(shared)
    plain.save(shared / "again", 2)
    run = Run(way, comm, fresh(MODELS["gpt2"], rank=1), precision=half)
    run.load(shared / "again")
    assert run.steps(2, 4) == losses


def test_a_model_in_16_bits_takes_fp32_and_gives_its_own(comm, shared: Path) -> None:
    run = Run("ddp", comm)
    run.steps(0, 1)
    run.save(shared, 1)
    narrow = Run("ddp", comm, fresh(MODELS["gpt2"], rank=1).bfloat16())
    narrow.load(shared)
    for (name, p), q in zip(run.model.named_parameters(), narrow.model.parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q), name
    states = [value for entry in narrow.optimizer.state.values() for value in entry.values() if value.dim()]
    assert {state.dtype for state in states} == {torch.bfloat16}


def test_the_scaler_comes_back(comm, shared: Path) -> None:
    run = Run("stage 3", comm, precision=mpidl.Precision(torch.float16))
    scaler = mpidl.GradScaler(init_scale=2.0**40, process_group=comm)
    for step in range(3):
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        scaler.scale(run.model(x, y)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    assert scaler.skipped_steps == 3
    run.save(shared, 3, scaler=scaler)
    again = mpidl.GradScaler(process_group=comm)
    run.load(shared, scaler=again)
    assert again.state_dict() == scaler.state_dict()


def test_running_statistics_and_odd_layouts_in_memory(comm, shared: Path) -> None:
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 4, 3))
    net = net.to(memory_format=torch.channels_last)
    net.register_buffer("mask", torch.ones(4, 4), persistent=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    save(shared, net, optimizer, process_group=comm)
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in net.parameters()]
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    load(shared, net, optimizer, process_group=comm)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    for p, momentum in zip(net.parameters(), momenta, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_files_are_readable_without_this_project(comm, shared: Path, monkeypatch, engine: str) -> None:
    """Only json and safetensors: the whole model put together from the index. Many files, of which few are open."""
    run = Run(engine, comm)
    run.steps(0, 1)
    run.save(shared, 1, file_bytes=20_000)
    expected = run.weights()
    folder = shared / (shared / "latest").read_text().strip()
    index = json.loads((folder / "index.json").read_text())
    assert index["format"] == "mpidl-checkpoint"
    written = sum((folder / name).stat().st_size for name in index["files"])
    psi = sum(p.numel() for p in run.model.parameters())
    assert 12 * psi < written < 12 * psi + 100_000  # nothing twice, tied weights once
    assert len(index["files"]) > comm.size
    monkeypatch.setattr(reading, "MOST_OPEN", 2)
    again = Run(engine, comm, fresh(MODELS["gpt2"], rank=1))
    again.load(shared)
    found = again.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    if comm.rank:
        return
    tied = index["model"]["tied"]
    assert tied == {"lm_head.weight": "transformer.wte.weight"}
    for name, tensor in expected.items():
        entry = index["tensors"][f"model/{tied.get(name, name)}"]
        parts = []
        for part in entry["slices"]:
            with safe_open(folder / part["file"], "pt") as file:
                parts.append(file.get_tensor(part["key"]).reshape(-1))
        assert torch.equal(torch.cat(parts).view(entry["shape"]), tensor), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_from_the_cpu_to_a_gpu_and_back(comm, shared: Path) -> None:
    def made(device: str) -> tuple[Any, Any]:
        model = fresh(MODELS["gpt2"], int(device != "cpu")).to(device)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: Any, optimizer: Any) -> None:
        x, y = (part.to(next(model.parameters()).device) for part in sequences(0, 0))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    there, back = made("cuda"), made("cpu")
    first = made("cpu")
    step(*first)
    save(shared, *first, step=1, process_group=comm)
    load(shared, *there, process_group=comm)
    save(shared, *there, step=2, background=True, process_group=comm)
    load(shared, *back, process_group=comm)
    for p, q in zip(first[0].parameters(), back[0].parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in first[1].state[p].items():
            assert torch.equal(value, back[1].state[q][key])
    step(*there)
    step(*back)
    for p, q in zip(there[0].parameters(), back[0].parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=0, atol=1e-5)


def test_tensors_without_values_or_places_of_their_own_are_refused_by_name(comm, shared: Path) -> None:
    plain = torch.nn.Linear(2, 2)
    spread = torch.nn.Linear(2, 2)
    spread.register_buffer("ones", torch.ones(1).expand(5))
    save(shared, spread, step=1, process_group=comm)
    before = spread.weight.detach().clone()
    refused = {
        "model: weight is on the meta device": lambda: save(shared, torch.nn.Linear(2, 2, device="meta"), step=2),
        "model: weight has no shape yet": lambda: save(shared, torch.nn.LazyLinear(2), step=2),
        "model: several elements of ones share memory": lambda: load(shared, spread, process_group=comm),
        r"extra: got a Tensor": lambda: save(shared, plain, extra=torch.ones(2, device="meta"), process_group=comm),
        r"extra: got a ndarray": lambda: save(shared, plain, extra=np.ones(2, ">f4"), process_group=comm),
        "extra: is nested too deeply, or holds itself": lambda: save(shared, plain, extra=loop, process_group=comm),
    }
    loop: list[Any] = []
    loop.append(loop)
    for said, attempt in refused.items():
        with pytest.raises(mpidl.ConfigurationError, match=said):
            attempt()
    assert torch.equal(spread.weight, before)
    with pytest.raises(mpidl.ConfigurationError, match="model: weight is on the meta device"):
        load(shared, torch.nn.Linear(2, 2, device="meta"), process_group=comm)
    assert sorted(path.name for path in shared.glob("step*")) == ["step-00000001"]


def test_an_error_of_the_program_s_own_while_writing_leaves_nothing_in_the_way(comm, shared: Path, monkeypatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("mine")

    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_file", fails)
        with pytest.raises(mpidl.CheckpointError, match="ValueError: mine; step-00000001 was not saved") as raised:
            save(shared, torch.nn.Linear(300, 300), step=1, process_group=comm)
    assert isinstance(raised.value.__cause__, ValueError)
    comm.barrier()
    assert not list(shared.glob("step*"))
    comm.barrier()
    save(shared, torch.nn.Linear(300, 300), step=1, process_group=comm)
