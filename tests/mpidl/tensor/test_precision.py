"""Half precision on a model that is cut over tp, and one decision of all ranks about what is not finite."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh, TrainingError
from mpidl.mesh import placement
from mpidl.zero import Precision
from tests.mpidl.tensor.engines import ENGINES, MESHES, Recipe, engine_of
from tests.mpidl.tensor.reference import build, loss_of, tokens
from tests.mpidl.zero.ways import WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh"), pytest.mark.filterwarnings("ignore:units")]

GPT2 = "gpt2"
SPOILT = 2  # the step in which a gradient of one rank is infinite


def spoil(model: Any, mesh: Mesh, step: list[int]) -> None:
    """Makes a gradient of the last rank of tp, and of no other, infinite in one step."""
    is_last = mesh.rank("tp") == mesh.size("tp") - 1 and mesh.rank("dp") == mesh.size("dp") - 1
    p = model.transformer["wte"].weight
    p.register_hook(lambda g: torch.full_like(g, torch.inf) if is_last and step[0] == SPOILT else g)


def weights(model: Any, optimizer: Any) -> torch.Tensor:
    """This rank's weights, flat."""
    gathered = optimizer.gathered() if isinstance(optimizer, mpidl.ZeroOptimizer) else contextlib.nullcontext()
    with gathered:
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.mark.at_most(4)
@pytest.mark.each("engine")
@pytest.mark.parametrize(
    ("engine", "scaler"), [*((engine, "mpidl") for engine in ENGINES), *((way, "torch") for way in WAYS)]
)
def test_an_overflow_on_one_rank_of_tp_skips_the_step_on_all(comm: Communicator, engine: str, scaler: str) -> None:
    for dp, tp in MESHES[comm.size]:
        if (engine == "torch" and dp > 1) or (scaler == "torch" and tp == 1):
            continue
        with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
            model = mpidl.parallelize(build(GPT2, torch.float32), mesh)
            step = [0]
            spoil(model, mesh, step)
            scaling: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
            if scaler == "mpidl":
                scaling = mpidl.GradScaler(init_scale=8.0, mesh=mesh)
            scales, changed = [], []
            with engine_of(engine, model, mesh, Recipe()) as (call, optimizer):
                for step[0] in range(4):
                    before = weights(model, optimizer)
                    scaling.scale(loss_of(call, tokens(step[0]))).backward()
                    scaling.step(optimizer)
                    scaling.update()
                    optimizer.zero_grad()
                    changed.append(not torch.equal(weights(model, optimizer), before))
                    scales.append(scaling.get_scale())
            assert changed == [number != SPOILT for number in range(4)]
            assert scales == [8.0, 8.0, 4.0, 4.0]


@pytest.mark.ranks(2, 3)
def test_torchs_scaler_is_refused_where_an_optimizer_has_parts(comm: Communicator) -> None:
    whole = torch.nn.Linear(2, 2)
    with Mesh(dp=1, tp=comm.size, comm=comm) as mesh:
        model = mpidl.parallelize(build(GPT2, torch.float32), mesh)
        for each, scaled in ((whole, whole(torch.ones(1, 2)).sum()), (model, loss_of(model, tokens(0)))):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            scaling = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaling.scale(scaled).backward()
            if each is whole:
                scaling.step(optimizer)
                continue
            with pytest.raises(ConfigurationError, match=r"needs mpidl\.GradScaler\(mesh=mesh\)"):
                scaling.step(optimizer)
            torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


@pytest.mark.at_most(4)
@pytest.mark.each("engine")
@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_guard_decides_for_all_ranks(comm: Communicator, engine: str, with_norm: bool, watch: bool) -> None:
    for dp, tp in MESHES[comm.size]:
        if engine == "torch" and dp > 1:
            continue
        with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
            model = mpidl.parallelize(build(GPT2, torch.float32), mesh, sequence_parallel=True)
            step = [0]
            spoil(model, mesh, step)
            with engine_of(engine, model, mesh, Recipe()) as (call, optimizer):
                guard = mpidl.NonfiniteGuard(call, optimizer, "skip", watch=watch, mesh=mesh, give_up_after=2)
                allowed, said = [], ""
                for step[0] in (0, 1, SPOILT, SPOILT):
                    loss = loss_of(call, tokens(step[0]))
                    loss.backward()
                    norm = None
                    if with_norm and engine in WAYS:
                        norm = optimizer.clip_grad_norm_(1.0)
                    elif with_norm:
                        norm = mpidl.clip_grad_norm_(model, 1.0, mesh=mesh)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        try:
                            allowed.append(guard.allows(loss.item(), norm))
                        except TrainingError as error:
                            said = str(error)
                    if allowed[-1]:
                        optimizer.step()
                    optimizer.zero_grad()
                guard.close()
            assert allowed == [True, True, False]
            assert "steps skipped in a row: 2, and give_up_after is 2" in said
            if watch or not with_norm:
                assert "the gradient of transformer.wte.weight" in said
            assert len(set(mpidl.all_gather_object(comm, said))) == 1


@pytest.mark.at_most(4)
@pytest.mark.each("way")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_16_bit_parameters_have_masters(comm: Communicator, way: str, sequence_parallel: bool) -> None:
    """Losses near those of one process in the same precision; what ranks of tp share has the same bits."""
    steps = 12

    def train(mesh: Mesh | None, group: Communicator | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = build(GPT2, torch.float32)
        if mesh is not None:
            mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        optimizer = mpidl.ZeroOptimizer(
            model,
            torch.optim.AdamW,
            mesh=mesh,
            process_group=group,
            precision=Precision(param_dtype=torch.bfloat16),
            lr=1e-3,
            **WAYS[way],
        )
        losses = []
        for step in range(steps):
            loss = loss_of(model, tokens(step))  # the same on every rank of dp
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.unwrap()
        return losses, {name: p for name, p in model.named_parameters() if placement(p).cut is None}

    alone = comm.split_self()
    expected, _ = train(None, alone)
    alone.close()
    for dp, tp in MESHES[comm.size]:
        with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
            losses, replicated = train(mesh, None)
            assert losses == pytest.approx(expected, rel=5e-3)
            assert all(p.dtype == torch.float32 for p in replicated.values())
            mpidl.check_replicas(replicated, process_group=mesh["tp"])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast(comm: Communicator, sequence_parallel: bool) -> None:
    whole = build(GPT2, torch.float32)
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = mpidl.parallelize(build(GPT2, torch.float32), mesh, sequence_parallel=sequence_parallel)
        losses = []
        for each in (whole, model):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(each, tokens(0))
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=5e-3)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            cut = placement(p).cut
            expected = q.grad if cut is None else cut.of(q.grad)
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad, expected, rtol=0.1, atol=0.02 * float(expected.abs().max()), msg=name)
