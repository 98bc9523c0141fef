"""`compress=` with all else that an engine does: it follows one process, or is refused by name on every rank."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression.undo import reductions_of
from mpidl.mesh import Mesh
from mpidl.zero import Precision
from tests.mpidl.mesh.test_experts import STEPS, experts_of, tokens, train_alone
from tests.mpidl.small_models import MODELS, Branching, Mixture, Recipe, fresh, sequences, train
from tests.mpidl.step_in_backward import CallsBlocksTwice
from tests.mpidl.zero.ways import ENGINES, STAGES, WAYS, zero

pytestmark = pytest.mark.mpi
engines = pytest.mark.parametrize("engine", ENGINES)
zeros = pytest.mark.parametrize("engine", STAGES)
# Of bf16 the mean alone is rounded; int8 feeds back what it rounds.
FEEDING_BACK = Compression("int8", where="everywhere")


class Heads(nn.Module):
    """Two heads to choose from, which nothing joins. A gradient of an output's sum does not depend on the weights."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(width, out, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...] = (0, 1)) -> list[torch.Tensor]:
        return [self.heads[number](x) for number in chosen]


def follow(comm: Communicator, engine: str, compress: Any = FEEDING_BACK, make: Any = None, **recipe: Any) -> Any:
    """Losses are those of one process that sends nothing. Weights are the same on all ranks."""
    make = make or MODELS["gpt2"]
    settings = recipe.pop("arguments", {})
    given = Recipe(steps=6, engine={**settings, "compress": compress}, **recipe)
    expected = train(fresh(make), Recipe(steps=6, **recipe))
    found = train(fresh(make), given, engine, comm)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=0.02)
    return found


@engines
@pytest.mark.parametrize("sync_each", [True, False])
def test_gradients_of_several_passes_add_up_and_are_clipped(comm: Communicator, engine: str, sync_each: bool) -> None:
    """With no_sync only the last pass is reduced."""
    follow(comm, engine, micro=2, sync_each=sync_each, clip=0.5)


@zeros
def test_the_norm_is_that_of_gradients_alone(comm: Communicator, engine: str) -> None:
    """Parameters are short, there is room between them, and the second step reaches one of them alone."""
    model = fresh(lambda: Heads(5, 1))
    stage = int(engine[-1])
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage, process_group=comm, compress="sign", lr=0.1)
    for step, chosen in enumerate([(0, 1), (0,)]):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        torch.cat(model(x, chosen)).square().sum().backward()
        found = optimizer.clip_grad_norm_(math.inf)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        assert found > 0
        assert found == pytest.approx(float(expected), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()


@engines
def test_steps_in_backward(comm: Communicator, engine: str) -> None:
    if engine != "ddp":
        follow(comm, engine, arguments={"step_in_backward": True})
        return
    model = fresh(MODELS["gpt2"])
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, compress=FEEDING_BACK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    wrapped.step_in_backward(optimizer)
    losses = []
    for step in range(6):
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        loss = wrapped(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        comm.all_reduce(mean, "avg")
        losses.append(mean.item())
    np.testing.assert_allclose(losses, train(fresh(MODELS["gpt2"]), Recipe(steps=6)).losses, rtol=0, atol=0.02)


@pytest.mark.parametrize("static", [True, False])
def test_parameters_that_get_no_gradient(comm: Communicator, static: bool) -> None:
    if static:
        follow(comm, "ddp", make=Mixture, arguments={"static_graph": True})
    else:
        follow(comm, "ddp", make=Branching, arguments={"find_unused_parameters": True})
    follow(comm, "stage 2", make=Branching)


@zeros
@pytest.mark.parametrize("reduce", [None, torch.float32], ids=str)
def test_parameters_of_16_bits(comm: Communicator, engine: str, reduce: Any) -> None:
    precision = Precision(torch.bfloat16, reduce)
    expected = train(fresh(MODELS["gpt2"]), Recipe(steps=6, engine={"precision": precision}), engine, comm)
    found = train(
        fresh(MODELS["gpt2"]), Recipe(steps=6, engine={"precision": precision, "compress": FEEDING_BACK}), engine, comm
    )
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=0.03)


@pytest.mark.parametrize("method", ["randomk:0.1", "int4"])
@pytest.mark.parametrize("way", ["an output each", "a forward pass each", "a step each"])
def test_what_was_sent_and_what_remains_are_the_gradients_where_a_pass_reaches_one_head(
    comm: Communicator, way: str, method: str
) -> None:
    model = fresh(lambda: Heads(20, 20))
    start = {name: p.detach().double() for name, p in model.named_parameters()}
    wrapped = mpidl.DistributedDataParallel(
        model, process_group=comm, compress=method, find_unused_parameters=way != "an output each"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if way == "a step each":
        wrapped.step_in_backward(optimizer)
    given = {name: torch.zeros(20, 20, dtype=torch.float64) for name in start}
    for step in range(3):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        outputs = wrapped(x) if way == "an output each" else []
        for number, name in enumerate(start):
            (outputs[number] if outputs else wrapped(x, (number,))[0]).sum().backward()
            given[name] += x.double().sum(0)
            if way == "a step each":
                optimizer.step()
        if way != "a step each":
            optimizer.step()
        optimizer.zero_grad()
    assert wrapped.compressed is not None
    remainders = wrapped.compressed.state_dict()["remainders"]
    for name, p in model.named_parameters():
        comm.all_reduce(given[name], "avg")
        found = start[name] - p.detach().double() + remainders.get(name, torch.zeros(()))
        torch.testing.assert_close(found, given[name], rtol=1e-5, atol=1e-5)


def test_ranks_with_fewer_batches_join(comm: Communicator) -> None:
    def weights(compress: Any) -> torch.Tensor:
        model = fresh(MODELS["gpt2"])
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm, compress=compress)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with wrapped.join():
            for step in range(3 + comm.rank):
                x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
                wrapped(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(weights(FEEDING_BACK), weights(None), rtol=0.05, atol=5e-3)


def test_a_join_refuses_to_undo_steps(comm: Communicator) -> None:
    how = mpidl.Compression("int8", where="everywhere", undo=True)
    wrapped = mpidl.DistributedDataParallel(fresh(MODELS["gpt2"]), process_group=comm, compress=how)
    with pytest.raises(mpidl.ConfigurationError, match="join: got compress with undo=True"):
        wrapped.join().__enter__()
    with wrapped.join(throw_on_early_termination=True):
        pass


def test_a_step_that_is_skipped_after_a_join_undoes_one_pass_on_every_rank(comm: Communicator) -> None:
    how = mpidl.Compression("powersgd:1", where="everywhere", start_step=0)
    wrapped = mpidl.DistributedDataParallel(fresh(MODELS["gpt2"]), process_group=comm, compress=how)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    compressed = wrapped.compressed
    assert compressed is not None
    compressed.announce_skips()

    def pass_of(step: int) -> None:
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        wrapped(x, y).backward()

    with wrapped.join():
        for step in range(1 + comm.rank):
            pass_of(step)
            optimizer.step()
            optimizer.zero_grad()
    steps, before = compressed.steps, compressed.state_dict()
    pass_of(9)
    compressed.undo()
    after = compressed.state_dict()
    assert compressed.steps == steps
    for name, mean in before["remainders"].items():
        assert torch.equal(after["remainders"][name], mean), name


@pytest.mark.parametrize("by", ["deepcopy", "pickle"])
def test_a_copy_compresses_by_itself(comm: Communicator, by: str) -> None:
    wrapped = mpidl.DistributedDataParallel(fresh(MODELS["gpt2"]), process_group=comm, compress=FEEDING_BACK)
    twin = copy.deepcopy(wrapped)
    if by == "pickle":
        twin = pickle.loads(pickle.dumps(twin))
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(0, 0))
    for each in (wrapped, twin, twin):
        each(x, y).backward()
        each.zero_grad()
    assert wrapped.compressed is not None
    assert twin.compressed is not None
    first, second = wrapped.compressed.state_dict(), twin.compressed.state_dict()
    assert (first["steps"], second["steps"]) == (1, 2)
    assert first["remainders"].keys() == second["remainders"].keys()
    assert (comm.size > 1) == any(mean.any() for mean in second["remainders"].values())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert reductions_of(optimizer) == [twin.compressed]


@pytest.mark.ranks(4, exactly=True)
@zeros
def test_hybrid_sharding(comm: Communicator, engine: str) -> None:
    group = comm.split(comm.rank // 2)
    found = follow(comm, engine, "int8", arguments={"shard_group": group})
    assert found.optimizer.compressed.where == "between_nodes"
    assert found.optimizer.compressed.state_dict()["remainders"]


@pytest.mark.ranks(4, exactly=True)
@pytest.mark.parametrize("method", ["int8", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_sums_of_fp16_inside_a_node_do_not_overflow(
    comm: Communicator, engine: str, dtype: torch.dtype, method: str
) -> None:
    """Where the mean does not. Over one host the ranks of a shard group are those that add up."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(64, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w * x).sum()

    model = Weighted()
    settings: dict[str, Any] = {"process_group": comm, "compress": method}
    called: Any = model
    if engine == "ddp":
        called = mpidl.DistributedDataParallel(model, **settings)
    else:
        settings["shard_group"] = comm.split(comm.rank // 2)
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, 2, lr=0.1, **settings)
    called(torch.full((64,), 40000.0, dtype=dtype)).backward()
    gradient: Any = model.w.grad
    found = gradient if engine == "ddp" else gradient.full_tensor()
    torch.testing.assert_close(found.float(), torch.full((64,), 40000.0), rtol=0.01, atol=0)
    if engine != "ddp":
        optimizer.unwrap()


def test_sparse_gradients_are_sent_as_they_are(comm: Communicator) -> None:
    """They are sent by themselves, and the buckets of others are compressed."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(37, 6, sparse=True), nn.Linear(6, 37)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets.flatten())

    follow(comm, "ddp", make=Words, optimizer=torch.optim.SGD, settings={"lr": 0.1})


@engines
def test_complex_parameters_are_refused(comm: Communicator, engine: str) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4, dtype=torch.complex64))})
    settings: dict[str, Any] = {"process_group": comm, "compress": "int8"}
    make: Any = partial(mpidl.DistributedDataParallel, model, **settings)
    if engine != "ddp":
        make = partial(mpidl.ZeroOptimizer, model, torch.optim.SGD, lr=0.1, **WAYS[engine], **settings)
    with pytest.raises(mpidl.ConfigurationError, match="complex"):
        make()


@engines
def test_a_frozen_complex_parameter_has_no_gradient_to_be_refused(comm: Communicator, engine: str) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w * self.turn.abs() * x).sum()

    model = Turned()
    called: Any = model
    settings: dict[str, Any] = {"process_group": comm, "compress": "int8"}
    if engine == "ddp":
        called = mpidl.DistributedDataParallel(model, **settings)
    else:
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, int(engine[-1]), lr=0.1, **settings)
    called(torch.ones(4)).backward()
    gradient: Any = model.w.grad
    found = gradient if engine == "ddp" else gradient.full_tensor()
    torch.testing.assert_close(found, torch.ones(4), rtol=0.01, atol=0)
    if engine != "ddp":
        model.turn.requires_grad_()
        with pytest.raises(mpidl.ConfigurationError, match="compress: turn is torch"):
            optimizer.add_param_group({"params": [model.turn]})


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_over_tp_values_that_every_rank_has_are_not_rounded_by_others(comm: Communicator, engine: str) -> None:
    def made(mesh: Mesh, compress: Any) -> Any:
        model = mpidl.parallelize(fresh(MODELS["gpt2"]), mesh)
        if engine == "ddp":
            wrapped = mpidl.DistributedDataParallel(model, mesh=mesh, compress=compress)
            return wrapped, torch.optim.SGD(model.parameters(), lr=0.1)
        return model, mpidl.ZeroOptimizer(model, torch.optim.SGD, 2, mesh=mesh, compress=compress, lr=0.1)

    with Mesh(tp=2, comm=comm) as mesh:
        with pytest.raises(mpidl.ConfigurationError, match="compress: int8 rounds"):
            made(mesh, "int8")
        called, optimizer = made(mesh, Compression("bf16", error_feedback=True))
        for step in range(3):
            x, y = (part.chunk(comm.size // 2)[mesh.rank("dp")] for part in sequences(step, 0))
            called(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        norms = torch.cat([p.detach().flatten() for name, p in called.named_parameters() if "ln_" in name])
        theirs = norms.clone()
        mesh["tp"].broadcast(theirs)
        assert torch.equal(norms, theirs)


@pytest.mark.ranks(4, exactly=True)
@pytest.mark.filterwarnings("ignore:Mesh")
@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_experts_are_compressed_over_their_replicas(comm: Communicator, engine: str) -> None:
    """In double precision, of which the compressor sees fp32."""
    with Mesh(ep=2, comm=comm) as mesh:
        ep = mesh.rank("ep")
        senders = [mesh.layout.rank_along(rank, "dp", "cp") for rank in mesh.ranks("ep")]
        module = experts_of(ep)
        called: Any = module
        settings = {"lr": 0.1, "momentum": 0.9}
        optimizer: Any
        if engine == "ddp":
            called = mpidl.DistributedDataParallel(module, mesh=mesh, compress=FEEDING_BACK)
            optimizer = torch.optim.SGD(module.parameters(), **settings)
        else:
            optimizer = mpidl.ZeroOptimizer(module, torch.optim.SGD, 2, mesh=mesh, compress=FEEDING_BACK, **settings)
        for step in range(STEPS):
            for micro in range(2):
                x = torch.cat([tokens(step, micro, sender, ep) for sender in senders])
                called(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if engine != "ddp":
            optimizer.unwrap()
        expected = train_alone(ep, comm.size)
        for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0.05, atol=0.02)


@zeros
def test_a_bucket_that_is_reduced_twice_in_a_pass_counts_the_pass_once(comm: Communicator, engine: str) -> None:
    """Where re-entrant checkpoints share layers. What alternates would send the same half in every pass."""
    compress = Compression("powersgd:1,alternating,min_rate=1", where="everywhere", start_step=2)
    model, plain = fresh(CallsBlocksTwice), fresh(CallsBlocksTwice)
    settings = {} if engine == "stage 3" else {"bucket_cap_mb": 1e-5}
    optimizer = zero(model, comm, engine, torch.optim.SGD, lr=0.0, compress=compress, **settings)
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(40):
        model(torch.ones(2, 3, requires_grad=True)).square().sum().backward()
        assert optimizer.compressed.steps == step + 1
        for total, p in zip(sums, model.parameters(), strict=True):
            total += p.grad.full_tensor()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    plain(torch.ones(2, 3, requires_grad=True)).square().sum().backward()
    for total, p in zip(sums, plain.parameters(), strict=True):
        torch.testing.assert_close(total / 40, p.grad, rtol=0.1, atol=0.1)
