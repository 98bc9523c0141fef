"""DiLoCo against a float64 simulation of all ranks: outer steps, fragments that overlap, few bits, nodes, states."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl.checkpoint.reading import CheckpointReader
from mpidl.errors import ConfigurationError, MpidlError, TrainingError
from mpidl.job.objects import broadcast_object
from mpidl.mesh import placement
from mpidl.models.gpt2 import GPT2
from mpidl.optim import DiLoCo, PostLocalSGDState, post_local_sgd_hook
from mpidl.optim.rank_mean import RankMean
from tests.mpidl.optim.test_post_local import equal_on_all
from tests.mpidl.small_models import MODELS, SMALL_GPT2, fresh, sequences
from tests.mpidl.zero.offload.test_offload import Replaces
from tests.mpidl.zero.ways import ENGINES, WAYS

pytestmark = pytest.mark.mpi
SHAPES = ((5, 3), (7,), (4, 2), (1,))


def slope(step: int, rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(100 * step + rank)
    return [random.normal(size=shape) for shape in SHAPES]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, 1.0 + n, dtype=dtype)) for n, shape in enumerate(SHAPES)]


def steps(own: list[nn.Parameter], optimizer: Any, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        for p, g in zip(own, slope(step, rank), strict=True):
            p.grad = torch.from_numpy(g).to(p.dtype)
        optimizer.step()


class Simulation:
    """All ranks, of which each steps by plain SGD. The outer step is SGD with Nesterov momentum."""

    def __init__(self, ranks: int, period: int, fragments: int, overlap: int, mixing: float, lr: float) -> None:
        start = [np.full(shape, 1.0 + n) for n, shape in enumerate(SHAPES)]
        self.local = [copy.deepcopy(start) for _ in range(ranks)]
        self.outer, self.velocity = start, [np.zeros(shape) for shape in SHAPES]
        self.period, self.fragments, self.overlap = period, fragments, overlap
        self.mixing, self.lr = mixing, lr
        self.fragment = {1: [0, 0, 0, 0], 2: [0, 1, 1, 1]}[fragments]  # 15 and 16 of 31 elements
        self.taken: dict[int, np.ndarray] = {}

    def run(self, last: int) -> None:
        for step in range(1, last + 1):
            for rank, local in enumerate(self.local):
                for w, g in zip(local, slope(step - 1, rank), strict=True):
                    w -= self.lr * g
            for n, fragment in enumerate(self.fragment):
                due = self.period * (fragment + 1) // self.fragments % self.period
                if (step + self.overlap) % self.period == due:
                    self.taken[n] = np.mean([self.outer[n] - local[n] for local in self.local], 0)
                if step % self.period == due and n in self.taken:
                    g = self.taken.pop(n)
                    self.velocity[n] = 0.9 * self.velocity[n] + g
                    self.outer[n] = self.outer[n] - 0.7 * (g + 0.9 * self.velocity[n])
                    for local in self.local:
                        local[n] = self.outer[n] + self.mixing * (local[n] - self.outer[n])


@pytest.mark.parametrize(
    ("period", "fragments", "overlap", "mixing"), [(3, 1, 0, 0.0), (6, 2, 0, 0.0), (6, 2, 2, 0.0), (7, 2, 1, 0.5)]
)
def test_weights_follow_the_formulas(comm, period: int, fragments: int, overlap: int, mixing: float) -> None:
    own, lr = parameters(), 0.1
    inner = torch.optim.SGD(own, lr=lr)
    optimizer = DiLoCo(inner, period, comm, fragments=fragments, overlap=overlap, mixing=mixing)
    steps(own, optimizer, comm.rank, 0, 3 * period + 1)
    expected = Simulation(comm.size, period, fragments, overlap, mixing, lr)
    expected.run(3 * period + 1)
    for n, p in enumerate(own):
        np.testing.assert_allclose(p.detach().numpy(), expected.local[comm.rank][n], rtol=1e-11, atol=1e-12)
    for kept, reference in zip(optimizer.averager.global_parameters(), expected.outer, strict=True):
        np.testing.assert_allclose(kept.numpy(), reference, rtol=1e-11, atol=1e-12)
        assert equal_on_all(comm, kept)


def batch(comm: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))  # type: ignore[return-value]


def test_with_a_step_of_plain_sgd_it_is_ddp(comm) -> None:
    plain = mpidl.DistributedDataParallel(fresh(MODELS["gpt2"]), process_group=comm)
    reference = torch.optim.SGD(plain.parameters(), lr=0.3)
    model = fresh(MODELS["gpt2"], comm.rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer = DiLoCo(inner, 1, comm, outer_settings={"lr": 1.0, "momentum": 0.0})
    for step in range(5):
        for call, each in ((plain, reference), (model, optimizer)):
            each.zero_grad()
            call(*batch(comm, step)).backward()
            each.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)
        assert equal_on_all(comm, q)


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 1)])
def test_after_first_steps_of_averaged_gradients_it_is_as_if_it_began_there(comm, fragments: int, overlap: int) -> None:
    settings: dict[str, Any] = {"fragments": fragments, "overlap": overlap}
    early, late = parameters(), parameters()

    def average(own: list[nn.Parameter], inner: Any, first: int, last: int) -> None:
        for step in range(first, last):
            for p, *gradients in zip(own, *(slope(step, rank) for rank in range(comm.size)), strict=True):
                p.grad = torch.from_numpy(np.mean(gradients, 0))
            inner.step()

    inner = torch.optim.AdamW(late, lr=0.1)
    average(late, inner, 0, 5)
    expected = DiLoCo(inner, 6, comm, **settings)
    optimizer = DiLoCo(torch.optim.AdamW(early, lr=0.1), 6, comm, warmup_steps=5, **settings)
    average(early, optimizer, 0, 5)
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
    for own, each in ((early, optimizer), (late, expected)):
        steps(own, each, comm.rank, 5, 20)
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
    theta = zip(optimizer.averager.global_parameters(), expected.averager.global_parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in theta)


def test_ddp_averages_gradients_in_the_first_steps_alone(comm) -> None:
    model = fresh(MODELS["gpt2"])
    ddp = mpidl.DistributedDataParallel(model, process_group=comm)
    optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=0.01), 3, comm, warmup_steps=2)
    state = PostLocalSGDState(comm, averager=optimizer.averager)
    ddp.register_comm_hook(state, post_local_sgd_hook)
    same = []
    for step in range(5):
        x, y = sequences(step, comm.rank)
        ddp(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        same.append(all(equal_on_all(comm, p) for p in model.parameters()))
    assert same == [True, True, comm.size == 1, comm.size == 1, True]


@pytest.mark.mpi(min_size=2)
def test_gradients_that_nothing_averages_in_the_first_steps_are_told_at_their_end(comm) -> None:
    own = parameters()
    optimizer = DiLoCo(torch.optim.SGD(own, lr=0.1), 3, comm, warmup_steps=2)
    steps(own, optimizer, comm.rank, 0, 1)
    with pytest.raises(TrainingError, match=r"weights differ after the 2 warmup_steps.*post_local_sgd_hook"):
        steps(own, optimizer, comm.rank, 1, 2)


@pytest.mark.parametrize("outer", [torch.optim.AdamW, torch.optim.Adafactor, Replaces])
def test_any_class_steps_on_the_mean(comm, outer: Any) -> None:
    own = parameters(torch.float32)
    optimizer = DiLoCo(torch.optim.SGD(own, lr=0.1), 4, comm, outer_class=outer, outer_settings={"lr": 0.05})
    steps(own, optimizer, comm.rank, 0, 4)
    expected = parameters(torch.float32)
    for n, p in enumerate(expected):
        gone = [sum(0.1 * slope(s, rank)[n] for s in range(4)) for rank in range(comm.size)]
        p.grad = torch.from_numpy(np.mean(gone, 0)).float()
    outer(expected, lr=0.05).step()
    for p, q in zip(own, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ---- few bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("size", [1000, 3])
def test_what_is_sent_and_what_is_left_is_the_sum_of_all(comm, compress: str, size: int) -> None:
    mean = RankMean(comm, None, [size], compress)
    given = [torch.from_numpy(np.random.default_rng(10 * k + comm.rank).normal(size=size)) for k in range(4)]
    total, found = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for own in given:
        reduction = mean.begin(0, own.clone())
        result = reduction.wait()
        assert equal_on_all(comm, result)
        mean.finish(reduction)
        found += result
        total += own
    comm.all_reduce(total, "avg")
    (owed,) = mean.mean_remainders()
    torch.testing.assert_close(found + owed, total, rtol=0, atol=2e-6)  # of fp32
    # On another rank's place, and any number of ranks, the sum of errors is the same.
    again = RankMean(comm, None, [size], compress)
    again.load_remainders([owed])
    torch.testing.assert_close(again.mean_remainders()[0], owed, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_few_bits_with_error_feedback_stay_near_full_precision(comm, compress: str) -> None:
    """Constant slopes of which rounding would lose the small ones for ever."""

    def run(**settings: Any) -> torch.Tensor:
        p = nn.Parameter(torch.zeros(300))
        optimizer = DiLoCo(torch.optim.SGD([p], lr=1.0), 2, comm, outer_settings={"lr": 1.0}, **settings)
        for _ in range(400):
            p.grad = torch.full((300,), 1e-3)
            p.grad[0] = 1.0 + comm.rank
            optimizer.step()
        assert equal_on_all(comm, p)
        return p.detach()

    whole = run()
    close = (run(compress=compress)[1:] / whole[1:] - 1).abs().max()
    far = (run(compress=compress, error_feedback=False)[1:] / whole[1:] - 1).abs().max()
    assert close < {"bf16": 1e-3, "int8": 0.1}[compress]
    assert far > 2 * close


# ---- nodes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ENGINES)
@pytest.mark.parametrize("compress", [None, "int8"])
def test_ranks_of_a_node_train_together(comm, inside: str, compress: str | None) -> None:
    """Four ranks are nodes of two, others nodes of one; the judge are ranks that each have a node's batch."""
    of = 2 if comm.size == 4 else 1
    node = comm.split(comm.rank // of)
    ranks, settings = comm.size // of, {"lr": 0.1, "momentum": 0.9}
    peers = comm.split(comm.rank % of)

    def train(optimizer: Any, call: Any, group: Any, number: int) -> None:
        for step in range(6):
            optimizer.zero_grad()
            x, y = (part.chunk(ranks)[number] for part in sequences(step, 0))
            call(*(part.chunk(group.size)[group.rank] for part in (x, y))).backward()
            optimizer.step()

    single = comm.split_self()
    expected = fresh(MODELS["gpt2"])
    trains = [p for p in expected.parameters() if p.requires_grad]
    reference = DiLoCo(torch.optim.SGD(trains, **settings), 3, peers, fragments=1)
    train(reference, expected, single, comm.rank // of)

    model = fresh(MODELS["gpt2"], comm.rank)
    few = {"compress": compress, "fragments": 2 if compress else 1, "overlap": 1 if compress else 0}
    if inside == "ddp":
        call = mpidl.DistributedDataParallel(model, process_group=node)
        own = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **settings)
        optimizer = DiLoCo(own, 3 if not compress else 4, comm, node, **few)
    else:
        own = mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=node, **WAYS[inside], **settings)
        call, optimizer = model, DiLoCo(own, 3 if not compress else 4, comm, **few)
    train(optimizer, call, node, comm.rank // of)
    whole = own.model_state_dict() if inside != "ddp" else dict(model.state_dict())
    if inside == "ddp" or node.rank == 0:
        for name, p in expected.named_parameters():
            if compress is None:
                torch.testing.assert_close(whole[name], p.detach(), rtol=0, atol=1e-5, msg=name)
            elif p.requires_grad:
                assert whole[name].isfinite().all()
    for kept in optimizer.averager.global_parameters():
        assert equal_on_all(comm if inside == "ddp" else peers, kept)
    if compress is None and inside == "ddp":
        assert all(equal_on_all(comm, p) for p in model.parameters())
    for each in (node, peers, single):
        each.close()


# ---- state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [None, "bf16", "int8", "int4"])
def test_a_loaded_state_goes_on_the_same(comm, compress: str | None) -> None:
    """Saved while a reduction is in flight, loaded, saved again before its end, and loaded again."""
    few = {"fragments": 2, "overlap": 2, "mixing": 0.25, "compress": compress}

    def make() -> tuple[list[nn.Parameter], DiLoCo]:
        own = parameters(torch.float32)
        return own, DiLoCo(torch.optim.SGD(own, lr=0.1, momentum=0.9), 6, comm, **few)

    def loaded(state: dict[str, Any]) -> tuple[list[nn.Parameter], DiLoCo]:
        made, other = make()
        for p, q in zip(own, made, strict=True):
            q.data.copy_(p.data)
        other.load_state_dict(copy.deepcopy(state))
        return made, other

    own, optimizer = make()
    steps(own, optimizer, comm.rank, 0, 11)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["averager"]["in flight"] is not None
    assert all((error is None) == (compress is None) for error in state["averager"]["errors"])
    once = loaded(state)
    state_of_loaded = copy.deepcopy(once[1].state_dict())
    torch.testing.assert_close(state_of_loaded["averager"], state["averager"], rtol=1e-6, atol=1e-9)
    runs = [(own, optimizer), once, loaded(state_of_loaded)]
    for each in runs:
        steps(*each, comm.rank, 11, 12)  # the outer step of what was in flight
        owed = each[1].averager.state_dict()["errors"]
        torch.testing.assert_close(owed, state["averager"]["errors"], rtol=1e-6, atol=1e-9)
        steps(*each, comm.rank, 12, 16)
    off = {None: 0.0, "bf16": 5e-2, "int8": 5e-2, "int4": 0.5}[compress]  # errors lie on other ranks than they arose on
    for other, _ in runs[1:]:
        for p, q in zip(own, other, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=off)
    with pytest.raises(
        ConfigurationError, match=r"load_state_dict: got fragments of \[15, 16\] elements; needs \[31\]"
    ):
        DiLoCo(torch.optim.SGD(parameters(), lr=0.1), 6, comm).averager.load_state_dict(state["averager"])


def test_a_checkpoint_keeps_theta_and_each_rank_s_own_weights(comm, tmp_path: Path) -> None:
    shared = Path(broadcast_object(comm, str(tmp_path)))

    def run(rank: int) -> tuple[Any, DiLoCo]:
        model = fresh(MODELS["gpt2"], rank)
        return model, DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), 4, comm)

    def train(model: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            model(*batch(comm, step)).backward()
            optimizer.step()

    model, optimizer = run(0)
    train(model, optimizer, 0, 6)
    mpidl.checkpoint.save(shared, model, optimizer, process_group=comm)
    train(model, optimizer, 6, 9)
    again, optimizer_again = run(1)
    mpidl.checkpoint.load(shared, again, optimizer_again, process_group=comm)
    train(again, optimizer_again, 6, 9)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    held = optimizer.held_tensors()["optimizer"]
    elements = sum(p.numel() for p in model.parameters())
    assert sum(t.numel() for t in held) == 4 * elements  # Adam's two, theta_0, and momentum


@pytest.mark.parametrize("verify", [True, False])
def test_what_it_keeps_is_compared_with_its_checksums(comm, tmp_path: Path, monkeypatch, verify: bool) -> None:
    shared = Path(broadcast_object(comm, str(tmp_path)))
    model = fresh(MODELS["gpt2"], 0)
    optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), 4, comm)
    mpidl.checkpoint.save(shared, model, optimizer, process_group=comm)
    checked: list[str] = []
    check = CheckpointReader.check

    def noted(self: CheckpointReader, name: str, *place: Any) -> None:
        checked.append(name)
        check(self, name, *place)

    monkeypatch.setattr(CheckpointReader, "check", noted)
    mpidl.checkpoint.load(shared, model, optimizer, process_group=comm, verify=verify)
    assert any(name.startswith("averager/") for name in checked) == verify


def test_a_sampler_that_one_rank_refuses_leaves_it_as_it_was(comm, tmp_path: Path) -> None:
    shared = Path(broadcast_object(comm, str(tmp_path)))
    samplers = [mpidl.data.DistributedSampler(range(n), process_group=comm) for n in (20, 24)]
    models = [fresh(MODELS["gpt2"], seed) for seed in (0, 1)]
    first, second = (DiLoCo(torch.optim.AdamW(m.parameters(), lr=1e-3), 4, comm) for m in models)
    mpidl.checkpoint.save(shared, models[0], first, sampler=samplers[0], process_group=comm)
    before = [t.clone() for t in second.held_tensors()["optimizer"]]
    other = samplers[comm.rank == comm.size - 1]
    with pytest.raises(mpidl.CheckpointError, match=r"sampler: .*20"):
        mpidl.checkpoint.load(shared, models[1], second, sampler=other, process_group=comm)
    assert all(torch.equal(a, b) for a, b in zip(before, second.held_tensors()["optimizer"], strict=True))
    mpidl.checkpoint.load(shared, models[1], second, sampler=samplers[0], process_group=comm)


# ---- what is refused --------------------------------------------------------------------------------------


def test_outer_weights_go_on_by_less_than_weights_of_16_bits_can_show(comm) -> None:
    """One rank goes by the least that bf16 has between 1 and 2, in each period; the outer step is a quarter of it."""
    least, periods = 2.0**-7, 12
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    plain = {"lr": 0.25, "momentum": 0.0}
    optimizer = DiLoCo(torch.optim.SGD([weight], lr=1.0), 1, comm, outer_class=torch.optim.SGD, outer_settings=plain)
    for _ in range(periods):
        weight.grad = torch.full_like(weight, -least if comm.rank == 0 else 0.0)
        optimizer.step()
    (outer,) = optimizer.averager.global_parameters()
    assert outer.double().sub(1.0 + periods * 0.25 * least / comm.size).abs().max() < 1e-6
    assert torch.equal(weight, outer.bfloat16())


@pytest.mark.parametrize(("fragments", "overlap", "mixing"), [(1, 0, 0.0), (1, 2, 0.0), (2, 0, 0.0), (1, 0, 0.5)])
def test_it_tells_when_all_ranks_have_the_same_weights(comm, fragments: int, overlap: int, mixing: float) -> None:
    own, told = parameters(), []
    settings: dict[str, Any] = {"fragments": fragments, "overlap": overlap, "mixing": mixing}
    optimizer = DiLoCo(torch.optim.SGD(own, lr=0.1), 4, comm, **settings)
    assert optimizer.averager.is_synchronised
    for step in range(9):
        steps(own, optimizer, comm.rank, step, step + 1)
        told.append(optimizer.averager.is_synchronised)
        if comm.size > 1:
            assert told[-1] == all(equal_on_all(comm, p) for p in own)
    expected = [step + 1 for step, same in enumerate(told) if same]
    assert expected == ([4, 8] if fragments == 1 and not mixing else [])


def test_weights_that_are_not_finite_leave_no_trace(comm) -> None:
    for compress in (None, "bf16", "int8"):
        own = parameters(torch.float32)
        optimizer = DiLoCo(torch.optim.SGD(own, lr=0.1), 2, comm, compress=compress)
        steps(own, optimizer, comm.rank, 0, 3)
        before = copy.deepcopy(optimizer.averager.state_dict())
        if comm.rank == comm.size - 1:
            own[1].data[3] = torch.inf
        with pytest.raises(TrainingError, match="fragment 0 is not finite at step 4"):
            steps(own, optimizer, comm.rank, 3, 4)
        after = optimizer.averager.state_dict()
        for kept, now in zip(before["global"], after["global"], strict=True):
            assert torch.equal(kept, now)
        torch.testing.assert_close(before["errors"], after["errors"])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", [None, "bf16", "int8", "int4"])
def test_over_tp_only_methods_that_leave_whole_parameters_equal_are_taken(comm, compress: str | None) -> None:
    """Norms are whole on every rank of tp, next to weights of which each has another part."""
    with mpidl.Mesh(tp=2 if comm.size == 4 else comm.size, comm=comm) as mesh:
        model = fresh(lambda: GPT2(replace(SMALL_GPT2, heads=6, embd=24)))
        mpidl.parallelize(model, mesh)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        given: dict[str, Any] = {"period": 3, "process_group": mesh.along("dp", "cp"), "compress": compress}
        if compress in ("int8", "int4"):
            with pytest.raises(ConfigurationError, match=rf"compress: {compress} rounds .* cut over tp.*needs bf16 or"):
                DiLoCo(inner, **given)
            return
        optimizer = DiLoCo(inner, **given)
        for step in range(7):
            optimizer.zero_grad()
            model(*sequences(step, mesh.rank("dp"))).backward()
            optimizer.step()
        whole = [p for p in model.parameters() if "tp" not in placement(p).axes]
        assert whole
        assert all(equal_on_all(mesh["tp"], p) for p in whole)


def test_arguments_that_cannot_work_are_refused_on_every_rank(comm) -> None:
    for settings, message in (
        ({"period": 0}, "period: got 0; needs an integer of at least 1"),
        ({"fragments": 9}, "fragments: got 9; needs at most period, 6"),
        ({"fragments": 2, "overlap": 3}, "overlap: got 3; needs less than the steps between fragments, 3"),
        ({"mixing": 1.0}, "mixing: got 1.0; needs a number of at least 0 and below 1"),
        ({"compress": "sign"}, "compress: got 'sign'; needs one of bf16, int8, int4, or None"),
        ({"outer_class": "sgd"}, "outer_class: got 'sgd'; needs a class of torch.optim"),
        ({"node_group": 2}, "node_group: got 2; needs None or a Communicator"),
        ({"outer_settings": {"speed": 1}}, "speed"),
        ({"warmup_steps": -1}, "warmup_steps: got -1; needs an integer of at least 0"),
    ):
        given = {"period": 6, "process_group": comm, **settings}
        with pytest.raises((ConfigurationError, TypeError), match=message):
            DiLoCo(torch.optim.SGD(parameters(), lr=0.1), **given)
    if comm.size > 1:
        node = comm.split(comm.rank)
        alone = mpidl.ZeroOptimizer(fresh(MODELS["gpt2"]), torch.optim.SGD, 1, process_group=node, lr=0.1)
        with pytest.raises(ConfigurationError, match="warmup_steps: got 1; needs 0 over a ZeroOptimizer"):
            DiLoCo(alone, 4, comm, warmup_steps=1)
        with pytest.raises(MpidlError, match="period"):
            DiLoCo(torch.optim.SGD(parameters(), lr=0.1), 4 + comm.rank, comm)
        with pytest.raises(ConfigurationError, match="overlap"):
            DiLoCo(torch.optim.SGD(parameters(), lr=0.1), 4, comm, overlap=4 if comm.rank == 1 else 0)
        model = fresh(MODELS["gpt2"])
        zero = mpidl.ZeroOptimizer(model, torch.optim.SGD, 1, process_group=comm, lr=0.1)
        with pytest.raises(ConfigurationError, match="optimizer: got a ZeroOptimizer over all"):
            DiLoCo(zero, 4, comm)
    with pytest.raises(ConfigurationError, match=r"optimizer: got list; needs a torch\.optim\.Optimizer"):
        DiLoCo([], 4, comm)
