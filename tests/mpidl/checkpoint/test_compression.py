"""Remainders of `compress=` go through a checkpoint to any engine on any number of ranks, as their mean."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpidl
from mpidl import Compression
from mpidl.checkpoint.compression_state import KeptCompression
from mpidl.errors import CheckpointError
from mpidl.gradients.compression import low_rank
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.gradients.compression.test_engines import Training
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.ways import ENGINES

pytestmark = pytest.mark.mpi
# Methods that begin a step with factors of the last one, and which.
WARM = {"powersgd:2": {"right"}, "powersgd:2,alternating": {"left", "right"}, "gradzip:2": {"right"}}
WARM |= {"powersgd:2,batched": {"right"}}
BATCHED = ["powersgd:2,batched", "powersgd:1,batched,alternating", "gradzip:2,batched"]


def compressed(run: Run) -> Any:
    return run.call.compressed if run.engine == "ddp" else run.optimizer.compressed


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (found["method"], found["steps"]) == (expected["method"], expected["steps"])
    assert found["remainders"].keys() == expected["remainders"].keys()
    for name, mean in expected["remainders"].items():
        assert torch.equal(found["remainders"][name], mean), name


def check_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["states"].keys() == expected["states"].keys()
    for name, kept in expected["states"].items():
        assert found["states"][name].keys() == kept.keys()
        for key, values in kept.items():
            assert torch.equal(found["states"][name][key], values), f"{key} of {name}"


@pytest.mark.limit(240)
@pytest.mark.filterwarnings("ignore:compress")  # of factors of sections, which begin anew
@pytest.mark.each("method")
@pytest.mark.parametrize("method", ["int4", *WARM])
def test_any_engine_and_number_of_ranks_takes_over_the_mean(comm, shared: Path, method: str) -> None:
    fewer = comm.split(0 if comm.rank < max(1, comm.size - 1) else None)
    how, states = Compression(method, start_step=0), {}
    for engine in ENGINES:
        run = Run(engine, comm, compress=how)
        run.steps(0, 2)
        states[engine] = compressed(run).state_dict()
        run.save(shared / engine, 2)
        factors = [kept.keys() for kept in states[engine]["states"].values()]
        assert set().union(*factors) == (WARM.get(method, set()) if comm.size > 1 else set())
    assert comm.size == 1 or all(any(m.any() for m in s["remainders"].values()) for s in states.values())
    for number, engine in enumerate(ENGINES):
        saved = ENGINES[number - 1]  # each loads another's
        for group in (comm, fewer):
            if group is None:
                continue
            run = Run(engine, group, fresh(MODELS["gpt2"], rank=1), compress=how)
            run.load(shared / saved)
            check_same(compressed(run).state_dict(), states[saved])
            check_same_states(compressed(run).state_dict(), states[saved])
            losses = run.steps(2, 4)
            assert np.isfinite(losses).all()
            assert compressed(run).steps == 4
    if fewer is not None:
        fewer.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_training_goes_on_as_without_the_interruption(comm, shared: Path, engine: str) -> None:
    """Each rank's own remainder becomes the mean, so not to the bit; without remainders to the bit under ZeRO.

    DDP's first pass has other buckets, so that other ranks add up an element, whose own gradients are not rounded.
    """
    for method, tolerance in (("int8", 2e-3), ("bf16", 1e-5 if engine == "ddp" else 0.0)):
        run = Run(engine, comm, compress=method)
        run.steps(0, 2)
        run.save(shared / method, 2)
        expected = run.steps(2, 5)
        again = Run(engine, comm, fresh(MODELS["gpt2"], rank=1), compress=method)
        again.load(shared / method)
        np.testing.assert_allclose(again.steps(2, 5), expected, rtol=0, atol=tolerance)


def test_what_is_reset_is_said(comm, shared: Path) -> None:
    run = Run("stage 2", comm, compress="int4")
    run.steps(0, 2)
    state = compressed(run).state_dict()
    run.save(shared / "int4", 2)
    plain = Run("stage 2", comm)
    plain.steps(0, 2)
    plain.save(shared / "plain", 2)

    def said(engine: Run, path: str) -> Iterator[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.load(shared / path)
        return (str(each.message) for each in caught if "checkpoint.load" in str(each.message))

    def check(texts: Iterator[str], expected: str | None) -> None:
        found = list(texts)
        assert len(found) == (expected is not None and comm.rank == 0), found
        assert all(str(expected) in text for text in found)

    none_kept = comm.size == 1
    check(said(plain, "int4"), None if none_kept else "compress='int4' has not sent, which is dropped")
    check(said(run, "plain"), "was saved without compress=: remainders begin at zero")
    assert compressed(run).state_dict()["remainders"] == {}
    assert compressed(run).steps == 0
    other = Run("stage 2", comm, compress="int8")
    check(said(other, "int4"), None)
    assert {**compressed(other).state_dict(), "method": "int4"}.keys() == state.keys()
    for name, mean in state["remainders"].items():
        assert torch.equal(compressed(other).state_dict()["remainders"][name], mean)
    off = Run("stage 2", comm, compress=Compression("int4", error_feedback=False))
    check(said(off, "int4"), None if none_kept else "holds remainders of int4, which are dropped")
    if comm.nodes == 1:
        chooses_none = Run("stage 2", comm, compress="auto")
        check(said(chooses_none, "int4"), None if none_kept else "has not sent, which is dropped as 'auto' chose none")
        assert compressed(chooses_none).state_dict()["remainders"] == {}


class Crossed(torch.nn.Module):
    """Matrices that are used in another order than they are registered in.

    So DDP's buckets of the first pass and those of later ones begin with the same parameter, and have other sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in {"a": (40, 40), "b": (4, 400), "c": (40, 4), "d": (400, 4)}.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape) / 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in (self.a, self.c, self.b, self.d):
            x = (x @ matrix).tanh()
        return x.square().sum()


@pytest.mark.every_size
@pytest.mark.filterwarnings("ignore:compress")  # of the last load, which has factors of DDP's first buckets too
@pytest.mark.parametrize("method", BATCHED)
def test_factors_of_sections_wait_until_these_come(
    comm, shared: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP cuts its buckets anew after its first pass; in the second, sections and factors are those of the save."""
    draw, drawn = low_rank.drawn, []

    def counted(shape: tuple[int, int], name: str, step: int) -> torch.Tensor:
        drawn.append((name, shape))
        return draw(shape, name, step)

    def made() -> Any:
        how = Compression(method, start_step=0)
        settings = {"process_group": comm, "compress": how, "bucket_cap_mb": 7200 / (1 << 20)}
        call = mpidl.DistributedDataParallel(Crossed(), **settings)
        return call, torch.optim.SGD(call.parameters(), lr=0.01)

    def run(training: Any, steps: int) -> None:
        for _ in range(steps):
            training[0](torch.randn(3, 40, generator=torch.Generator().manual_seed(comm.rank))).backward()
            training[1].step()
            training[1].zero_grad()

    def save(training: Any, step: int) -> None:
        mpidl.checkpoint.save(shared, *training, step=step, process_group=comm)

    monkeypatch.setattr(low_rank, "drawn", counted)
    first, other, again = made(), made(), made()
    run(first, 4)
    of_d = {shape for name, shape in drawn if name == "d"}
    if comm.nodes in (1, comm.size):  # sections are whole buckets
        assert len(of_d) == (2 if comm.size > 1 else 0)
    save(first, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpidl.checkpoint.load(shared, *other, process_group=comm)
        check_same_states(other[0].compressed.state_dict(), first[0].compressed.state_dict())
        run(other, 1)
        save(other, 5)
        drawn.clear()
        run(other, 3)
        assert not drawn
    assert not [each for each in caught if "begin anew" in str(each.message)]
    assert other[0].compressed.state_dict()["states"].keys() == first[0].compressed.state_dict()["states"].keys()
    mpidl.checkpoint.load(shared, *again, process_group=comm)  # what was saved while some factors still waited
    run(again, 1)
    drawn.clear()
    run(again, 2)
    assert not drawn
    for name, p in again[0].named_parameters():
        assert torch.isfinite(p).all(), name


@pytest.mark.every_size
@pytest.mark.parametrize("method", BATCHED)
def test_factors_of_sections_that_do_not_come_are_told_of(comm, shared: Path, method: str) -> None:
    def made(engine: str, **settings: Any) -> Training:
        return Training(comm, engine, Compression(method, start_step=0), **settings)

    first = made("ddp")
    first.run(4)
    mpidl.checkpoint.save(shared, first.called, first.optimizer, step=4, process_group=comm)
    for engine in ("stage 2", "stage 3"):
        other = made(engine)
        mpidl.checkpoint.load(shared, other.called, other.optimizer, process_group=comm)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = other.run(4, first=4)
        assert np.isfinite(losses).all()
        said = [str(each.message) for each in caught if "begin anew" in str(each.message)]
        assert len(said) == (comm.rank == 0 and comm.size > 1)
        assert all(f"compress: {method}: " in text and "factors that were loaded begin anew" in text for text in said)


def test_velocities_go_to_other_engines_and_numbers_of_ranks(comm, shared: Path) -> None:
    def made(engine: str, group: Any, method: str = "dgc:0.05") -> Training:
        return Training(group, engine, method, optimizer={"lr": 0.05})

    fewer = comm.split(0 if comm.rank < max(1, comm.size - 1) else None)
    first = made("ddp", comm)
    first.run(2)
    expected = first.compressed.state_dict()
    assert any(kept["momentum"].any() for kept in expected["states"].values())
    mpidl.checkpoint.save(shared, first.called, first.optimizer, step=2, process_group=comm)
    for engine, group in (("stage 2", comm), ("ddp", fewer)):
        if group is None:
            continue
        other = made(engine, group)
        mpidl.checkpoint.load(shared, other.called, other.optimizer, process_group=group)
        found = other.compressed.state_dict()
        check_same(found, expected)
        for name, kept in expected["states"].items():
            assert torch.equal(found["states"][name]["momentum"], kept["momentum"]), name
        assert np.isfinite(other.run(2, first=2)).all()
        wrong = other.compressed.state_dict()
        next(iter(wrong["states"].values()))["momentum"] = torch.zeros(3)
        with pytest.raises(mpidl.ConfigurationError, match="got a momentum of shape"):
            other.compressed.load_state_dict(wrong)
    if fewer is not None:
        fewer.close()
    another = made("ddp", comm, "dgc:0.1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpidl.checkpoint.load(shared, another.called, another.optimizer, process_group=comm)
    assert sum("holds states of dgc:0.05, which begin anew" in str(each.message) for each in caught) == (comm.rank == 0)
    check_same({**another.compressed.state_dict(), "method": "dgc:0.05"}, expected)


def test_a_step_that_was_saved_between_its_passes_goes_on(comm, shared: Path) -> None:
    """Velocities decay as a step begins, and not again in its second pass."""

    def made() -> Training:
        return Training(comm, "stage 2", "dgc:0.05", optimizer={"lr": 0.05})

    def gradients(training: Training) -> dict[str, torch.Tensor]:
        return {name: p.grad.full_tensor().double() for name, p in training.model.named_parameters()}

    first = made()
    first.run(2)
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(2, 0))
    first.called(x, y).backward()
    state, before = first.compressed.state_dict(), gradients(first)
    mpidl.checkpoint.save(shared, first.called, first.optimizer, step=2, micro_step=1, process_group=comm)
    other = made()
    mpidl.checkpoint.load(shared, other.called, other.optimizer, process_group=comm)
    (0 * other.called(x, y)).backward()
    after = other.compressed.state_dict()["remainders"]
    assert any(kept["momentum"].any() for kept in state["states"].values())
    for name, gradient in gradients(other).items():
        found = gradient - before[name] + after[name].double()
        torch.testing.assert_close(found, state["remainders"][name].double(), rtol=1e-5, atol=1e-5)


def test_a_remainder_of_another_shape_is_refused_before_anything_changes(comm, shared: Path) -> None:
    run = Run("ddp", comm, compress="int4")
    run.steps(0, 1)
    kept = compressed(run)
    wrong = kept.state_dict()
    name = next(iter(dict(run.model.named_parameters())))
    wrong["remainders"] = {name: torch.zeros(3)}
    with pytest.raises(mpidl.ConfigurationError, match="got a remainder of shape"):
        kept.load_state_dict(wrong)
    run.save(shared, 1)
    missing = shared / "step-00000001" / "index.json"
    comm.barrier()
    if comm.rank == 0 and comm.size > 1:
        missing.write_text(missing.read_text().replace(f'"remainder/{name}"', '"remainder/other"', 1))
    comm.barrier()
    if comm.size > 1:
        with pytest.raises(CheckpointError):
            Run("ddp", comm, compress="int4").load(shared)


@pytest.mark.ranks(4, exactly=True)
@pytest.mark.filterwarnings("ignore:Mesh")
def test_remainders_of_parts_over_tp_make_the_whole_and_are_cut_again(comm, shared: Path) -> None:
    how = Compression("bf16", error_feedback=True)

    def made(mesh: mpidl.Mesh | None) -> Any:
        model = fresh(MODELS["gpt2"])
        if mesh is not None:
            mpidl.parallelize(model, mesh)
        over: dict[str, Any] = {"process_group": comm} if mesh is None else {"mesh": mesh}
        wrapped = mpidl.DistributedDataParallel(model, compress=how, **over)
        return wrapped, torch.optim.SGD(model.parameters(), lr=0.1), over

    with mpidl.Mesh(tp=2, comm=comm) as mesh:
        wrapped, optimizer, over = made(mesh)
        for step in range(2):
            x, y = (part.chunk(2)[mesh.rank("dp")] for part in sequences(step, 0))
            wrapped(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = wrapped.compressed.state_dict()
        assert any(mean.any() for mean in expected["remainders"].values())
        mpidl.checkpoint.save(shared / "cut", wrapped, optimizer, step=2, **over)
        whole, its_optimizer, of_whole = made(None)
        mpidl.checkpoint.load(shared / "cut", whole, its_optimizer, **of_whole)
        for name, p in whole.module.named_parameters():
            assert whole.compressed.state_dict()["remainders"][name].shape == p.shape
        mpidl.checkpoint.save(shared / "whole", whole, its_optimizer, step=2, **of_whole)
        again, its_optimizer, over = made(mesh)
        mpidl.checkpoint.load(shared / "whole", again, its_optimizer, **over)
        check_same(again.compressed.state_dict(), expected)


class Rows(torch.nn.Module):
    """A matrix, or a half of its rows."""

    def __init__(self, mesh: mpidl.Mesh | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64 if mesh is None else 32, 32))
        if mesh is not None:
            begin = 32 * mesh.rank("tp")
            cut = mpidl.mesh.Cut.along((64, 32), 0, [(begin, begin + 32)])
            mpidl.mesh.place(self.weight, "tp", cut=cut)

    def forward(self, rank: int) -> torch.Tensor:
        return ((self.weight + rank) * torch.linspace(0, 1, self.weight.numel()).view_as(self.weight)).square().sum()


@pytest.mark.ranks(4, exactly=True)
@pytest.mark.filterwarnings("ignore:Mesh")
@pytest.mark.parametrize("method", ["powersgd:1", "dgc:0.1", "int4"])
def test_states_of_parameters_that_are_cut_begin_anew_and_this_is_said(comm, shared: Path, method: str) -> None:
    keeps = method != "int4"

    def made(mesh: mpidl.Mesh, is_cut: bool) -> Any:
        over = mesh.along("dp", "cp") if is_cut else comm  # a mesh with tp is refused, as it may have what is not cut
        model = Rows(mesh if is_cut else None)
        wrapped = mpidl.DistributedDataParallel(
            model, process_group=over, compress=Compression(method, start_step=0), bucket_cap_mb=1
        )
        where: dict[str, Any] = {"mesh": mesh} if is_cut else {"process_group": comm}
        return wrapped, torch.optim.SGD(model.parameters(), lr=0.1), where

    with mpidl.Mesh(tp=2, comm=comm) as mesh:
        for was_cut in (True, False):
            wrapped, optimizer, where = made(mesh, was_cut)
            wrapped(comm.rank).backward()
            optimizer.step()
            assert bool(wrapped.compressed.state_dict()["states"]) == keeps
            mpidl.checkpoint.save(shared / str(was_cut), wrapped, optimizer, step=1, **where)
            for is_cut in (True, False):
                again, its_optimizer, where = made(mesh, is_cut)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    mpidl.checkpoint.load(shared / str(was_cut), again, its_optimizer, **where)
                said = [str(each.message) for each in caught if "begin anew" in str(each.message)]
                assert len(said) == (comm.rank == 0 and keeps and (was_cut or is_cut))
                assert all(
                    f"states of {method} begin anew for parameters that are cut over a mesh: weight" in s for s in said
                )
                kept = [v.any() for own in again.compressed.state_dict()["states"].values() for v in own.values()]
                assert any(kept) == (keeps and not (was_cut or is_cut))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_state_that_one_rank_cannot_read_is_an_error_on_every_rank(
    comm, shared: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(engine, comm, compress="int8")
    run.steps(0, 2)
    run.save(shared, 2)
    again = Run(engine, comm, compress="int8")
    if comm.rank == comm.size - 1:

        def install(*_: Any) -> None:
            raise CheckpointError("states: Input/output error")

        monkeypatch.setattr(KeptCompression, "install", install)
    with pytest.raises(CheckpointError, match=r"Input/output error.*load a checkpoint that is whole"):
        mpidl.checkpoint.load(shared, again.call, again.optimizer, process_group=comm)


class WithEmpty(torch.nn.Linear):
    """A layer with a parameter of no element."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.empty = torch.nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.empty.sum()


@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_a_model_with_an_empty_parameter_comes_back(comm, shared: Path, engine: str) -> None:
    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model, given = WithEmpty(), {"process_group": comm, "compress": "dgc:0.5"}
        if engine == "ddp":
            return mpidl.DistributedDataParallel(model, **given), torch.optim.SGD(model.parameters(), lr=0.1)
        return model, mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=2, lr=0.1, **given)

    called, optimizer = made(0)
    for _ in range(2):
        called(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mpidl.checkpoint.save(shared, called, optimizer, process_group=comm)
    again, optimizer_again = made(1)
    mpidl.checkpoint.load(shared, again, optimizer_again, process_group=comm)
    for p, q in zip(called.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
