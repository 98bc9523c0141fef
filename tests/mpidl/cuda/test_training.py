"""Features of training with DDP and ZeRO beyond the plain step, on a GPU as in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from tests.mpidl.cuda.models import placed
from tests.mpidl.small_models import MODELS, SMALL_GPT2, Recipe, fresh, largest_difference, sequences, train
from tests.mpidl.zero.ways import WAYS, every_way

pytestmark = pytest.mark.mpi

SHORT = Recipe(steps=3, clip=0.5)


def compared(
    comm: Communicator, place: Any, engine: str, recipe: Recipe, model: str = "gpt2", bound: float = 1e-4
) -> Any:
    """Trains on the device and in the host's memory, by the same engine and ranks; gives the former."""
    expected = train(fresh(MODELS[model]), recipe, engine, comm)
    found = train(placed(fresh(MODELS[model], comm.rank), place), recipe, engine, comm)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=bound)
    if comm.rank == 0:
        weights = {name: t.cpu() for name, t in found.weights.items()}
        assert largest_difference(expected.weights, weights) < bound
    return found


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(comm: Communicator, place: Any, way: str, dtype: torch.dtype) -> None:
    precision = mpidl.Precision(dtype, torch.float32, [nn.LayerNorm])
    recipe = Recipe(steps=2, clip=0.5, engine={"precision": precision})
    found = compared(comm, place, way, recipe, bound=2e-2)
    assert found.model.lm_head.weight.dtype == dtype


def test_the_step_within_the_backward_pass_of_ddp(comm: Communicator, place: Any) -> None:
    found = []
    for in_backward in (False, True):
        model = placed(fresh(MODELS["gpt2"], comm.rank), place)
        ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=0.002)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if in_backward:
            ddp.step_in_backward(optimizer)
        for step in range(3):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
            ddp(x, y).backward()
            if in_backward:
                with pytest.raises(mpidl.TrainingError, match="step_in_backward"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@every_way
def test_an_optimizer_that_needs_whole_parameters(comm: Communicator, place: Any, way: str) -> None:
    """Its state goes over the ranks and back, between steps; numbers of steps stay in the host's memory."""
    recipe = Recipe(torch.optim.Adafactor, {"lr": 1e-3}, steps=3, clip=0.5)
    found = compared(comm, place, way, recipe)
    found.optimizer.load_state_dict(found.state)
    model = found.model
    for step in (3, 4):
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        model(x, y).backward()
        found.optimizer.step()
        found.optimizer.zero_grad()
    state = found.optimizer.state_dict()
    if comm.rank == 0:
        assert all(int(entry["step"]) == 5 for entry in state["state"].values())


@pytest.mark.parametrize("way", ["stage 2", "stage 3", "stage 3 gathered"])
@pytest.mark.parametrize("offload", ["cpu", "disk", "delayed", "delayed on disk", "half"])
def test_offload(comm: Communicator, place: Any, tmp_path: Path, way: str, offload: str) -> None:
    """In sub-groups of a few parameters, so that some are copied while others are stepped on."""
    chosen = mpidl.Offload(
        "disk" if "disk" in offload else "cpu",
        path=tmp_path if "disk" in offload else None,
        buffer_mb=0.01,
        delayed_update="delayed" in offload,
        delay_from=1,
    )
    settings: dict[str, Any] = {"offload": chosen}
    if offload == "half":
        settings["precision"] = mpidl.Precision(torch.bfloat16, torch.float32, [nn.LayerNorm])
    recipe = Recipe(steps=4, clip=0.5, engine=settings)
    found = compared(comm, place, way, recipe, bound=2e-2 if offload == "half" else 1e-4)
    measured = mpidl.memory.measure(found.model, found.optimizer)
    assert measured.offloaded > 8 * sum(p.numel() for p in found.model.parameters()) / comm.size * 0.99
    assert all(not part.is_cuda for part in found.optimizer.state)


@every_way
def test_whole_states_go_from_the_host_to_the_gpu_and_back(comm: Communicator, place: Any, way: str) -> None:
    recipe = Recipe(steps=2, clip=0.5)
    of_host = train(fresh(MODELS["gpt2"]), recipe, way, comm)
    on_gpu = train(placed(fresh(MODELS["gpt2"]), place), recipe, way, comm)
    state, weights = of_host.optimizer.state_dict(), of_host.optimizer.model_state_dict()
    on_gpu.optimizer.load_state_dict(state)
    on_gpu.optimizer.load_model_state_dict(weights)
    again, state_again = on_gpu.optimizer.model_state_dict(), on_gpu.optimizer.state_dict()
    if comm.rank == 0:
        assert largest_difference(weights, again) == 0
        for number, entry in state_again["state"].items():
            for key, value in state["state"][number].items():
                assert torch.equal(value, entry[key]), key
    on_gpu.optimizer.load_state_dict(state)
    with on_gpu.optimizer.gathered(from_rank=0):
        if comm.rank == 0:
            with torch.no_grad():
                on_gpu.model.lm_head.weight.mul_(2)
    mpidl.check_replicas(on_gpu.model, on_gpu.optimizer, gather=True)
    plain = on_gpu.optimizer.unwrap()
    doubled = weights["lm_head.weight"] * 2 if comm.rank == 0 else torch.empty_like(plain.lm_head.weight, device="cpu")
    comm.broadcast(doubled)
    assert torch.equal(plain.lm_head.weight.detach().cpu(), doubled)


def steps(call: Any, optimizer: Any, comm: Communicator, count: int, scaler: Any = None) -> list[float]:
    """Losses of this rank; with its model and inputs wherever they are."""
    losses = []
    for step in range(count):
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        loss = call(x, y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["ddp", *WAYS])
def test_checkpoints_go_from_the_host_to_the_gpu_and_back(
    comm: Communicator, place: Any, tmp_path: Path, kind: str
) -> None:
    def make(where: Any) -> tuple[Any, Any]:
        model = placed(fresh(MODELS["gpt2"]), where)
        if kind == "ddp":
            return mpidl.DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, **WAYS[kind])

    folder = mpidl.broadcast_object(comm, str(tmp_path))
    for step, (source, target) in enumerate(((torch.device("cpu"), place), (place, torch.device("cpu")))):
        call, optimizer = make(source)
        steps(call, optimizer, comm, 2)
        mpidl.checkpoint.save(folder, call, optimizer, step=step)
        other, into = make(target)
        mpidl.checkpoint.load(mpidl.checkpoint.named(Path(folder))[-1], other, into)
        assert np.allclose(steps(call, optimizer, comm, 2), steps(other, into, comm, 2), rtol=1e-4)
    comm.barrier()


@pytest.mark.parametrize("kind", ["ddp", "stage 2", "stage 3"])
def test_an_overflow_on_one_rank_is_skipped_by_all(comm: Communicator, place: Any, kind: str) -> None:
    model = placed(fresh(MODELS["gpt2"]), place)
    scaler = mpidl.GradScaler(place.type if place.type == "cuda" else "cpu", init_scale=2.0)
    if kind == "ddp":
        call: Any = mpidl.DistributedDataParallel(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        call, optimizer = model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, int(kind[6]), lr=1e-2)

    def spoilt(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return call(x, y) * (float("inf") if comm.rank == comm.size - 1 else 1.0)

    steps(spoilt, optimizer, comm, 1, scaler)
    assert scaler.skipped_steps == 1
    steps(call, optimizer, comm, 1, scaler)
    assert scaler.skipped_steps == 1
    mpidl.check_replicas(call, optimizer)


def mean_gradients(comm: Communicator, place: Any, make: Callable[[], nn.Module], inputs: Any, **settings: Any) -> None:
    """DDP's on the device are those of the whole batch in the host's memory. inputs(rank): of the model."""
    torch.manual_seed(3)
    single = make()
    torch.manual_seed(3)
    wrapped = mpidl.DistributedDataParallel(placed(make(), place), **settings)
    for _ in range(2):
        single.zero_grad()
        wrapped.zero_grad()
        sum(single(inputs(rank)).square().mean() for rank in range(comm.size)).div(comm.size).backward()  # type: ignore[union-attr]
        wrapped(inputs(comm.rank)).square().mean().backward()
        for (name, p), q in zip(single.named_parameters(), wrapped.module.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(q.grad.cpu().to_dense(), p.grad.to_dense(), rtol=1e-4, atol=1e-6)


class Halves(nn.Module):
    """A third of it is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of[1](self.of[0](x))


@pytest.mark.parametrize("setting", ["find_unused_parameters", "static_graph"])
def test_unused_parameters(comm: Communicator, place: Any, setting: str) -> None:
    mean_gradients(comm, place, Halves, lambda rank: torch.full((4, 5), rank + 1.0), **{setting: True})


@pytest.mark.gpu  # torch ends the process where sparse tensors are to be on the stand-in's device
def test_gradients_of_sparse_embeddings(comm: Communicator, place: Any) -> None:
    """Each rank has other rows, one of which is common to all."""
    make = lambda: nn.Sequential(nn.Embedding(3 * comm.size, 4, sparse=True), nn.Linear(4, 2))  # noqa: E731
    mean_gradients(comm, place, make, lambda rank: torch.tensor([0, rank, rank, 2 * rank + 1]))


@pytest.mark.ranks(2, 4)
@every_way
def test_hybrid_sharding(comm: Communicator, place: Any, way: str) -> None:
    """Shards over pairs of ranks, or single ones, which the others repeat."""
    shards = comm.split(comm.rank // 2 if comm.size > 2 else comm.rank)
    compared(comm, place, way, Recipe(steps=3, clip=0.5, engine={"shard_group": shards}))


def test_sync_batch_norm(comm: Communicator, place: Any) -> None:
    make = lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten())  # noqa: E731
    torch.manual_seed(3)
    single = make()
    torch.manual_seed(3)
    layers = mpidl.SyncBatchNorm.convert_sync_batchnorm(make())
    wrapped = mpidl.DistributedDataParallel(placed(layers, place))
    batch = torch.randn(2 * comm.size, 2, 5, 5, generator=torch.Generator().manual_seed(1))
    out = wrapped(batch[2 * comm.rank : 2 * comm.rank + 2])
    expected = single(batch)
    torch.testing.assert_close(out.detach().cpu(), expected[2 * comm.rank : 2 * comm.rank + 2], rtol=1e-4, atol=1e-5)
    out.square().mean().backward()
    expected.square().mean().backward()
    for p, q in zip(single.parameters(), wrapped.module.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(wrapped.module[1].running_var.cpu(), single[1].running_var)


@pytest.mark.parametrize("hook", ["bf16_compress", "allreduce"])
def test_communication_hooks(comm: Communicator, place: Any, hook: str) -> None:
    model = placed(nn.Linear(7, 3), place)
    wrapped = mpidl.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, getattr(mpidl.comm_hooks, hook))
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((2, 7), comm.rank + 1.0)).sum().backward()
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad.cpu(), torch.full((3, 7), comm.size + 1.0))


def test_join(comm: Communicator, place: Any) -> None:
    model = placed(nn.Linear(3, 1), place)
    wrapped = mpidl.DistributedDataParallel(model)
    with wrapped.join():
        for number in range(1 + comm.rank):
            wrapped.zero_grad()
            wrapped(torch.ones(2, 3)).sum().backward()
            share = len([rank for rank in range(comm.size) if rank >= number]) / comm.size
            assert torch.allclose(model.weight.grad.cpu(), torch.full((1, 3), 2 * share))  # type: ignore[union-attr]
    mpidl.check_replicas(wrapped)


@pytest.mark.gpu  # the stand-in's tensors are of a class, which construction in place takes away
@pytest.mark.parametrize("way", ["stage 1", "stage 3", "stage 3 gathered"])
def test_a_deferred_model_gets_its_values_on_the_device(comm: Communicator, place: Any, way: str) -> None:
    """Values are those in the host's memory."""
    weights = []
    for device in ("cpu", place):
        torch.manual_seed(5)
        model = mpidl.deferred_init(mpidl.models.gpt2.GPT2, SMALL_GPT2)
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, device=device, **WAYS[way])
        weights.append(optimizer.model_state_dict())
        assert next(model.parameters()).device.type == torch.device(device).type
    if comm.rank == 0:
        assert largest_difference(*weights) == 0


def test_models_on_several_devices_are_refused(comm: Communicator, place: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), placed(nn.Linear(2, 2), place))
    for make in (
        lambda: mpidl.DistributedDataParallel(model),
        lambda: mpidl.ZeroOptimizer(model, torch.optim.SGD, 1, lr=0.1),
    ):
        with pytest.raises(mpidl.ConfigurationError, match=r"has 0.weight on cpu, 1.weight on \w+:\d; needs all"):
            make()


def test_buckets_share_more_buffers_on_a_gpu(comm: Communicator, place: Any) -> None:
    """So that the host, which fills them, may be ahead of it."""
    found = []
    for model in (fresh(MODELS["gpt2"]), placed(fresh(MODELS["gpt2"]), place)):
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, 2, bucket_cap_mb=0.002, lr=1.0)
        stats = optimizer.stats()
        found.append((len(stats["buckets"]), stats["gradient_buffers"]))
    (buckets, on_host), on_gpu = found
    assert buckets > 8
    assert (on_host, on_gpu) == (3, (buckets, 8))
