"""Saved by any engine on any number of ranks, loaded by any other: training goes on as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpidl.checkpoint import index
from mpidl.checkpoint.tensorfile import TensorFile
from mpidl.gradients import buckets
from mpidl.models.gpt2 import GPT2
from tests.mpidl.checkpoint.training import Run, name_in_checkpoints
from tests.mpidl.small_models import MODELS, SMALL_GPT2, fresh, largest_difference
from tests.mpidl.zero.ways import ENGINES, STAGES

pytestmark = pytest.mark.mpi
SAVED, TRAINED = 2, 3  # steps


def engines_and_sizes(comm) -> list[tuple[str, int]]:
    return [(engine, size) for engine in ENGINES for size in range(1, comm.size + 1)]


@pytest.mark.limit(240)
def test_any_engine_and_number_of_ranks_loads_any_other(comm, shared: Path) -> None:
    """The judge is one process that trains without interruption."""
    alone = Run("plain", comm)
    losses = alone.steps(0, TRAINED)
    expected = alone.weights()
    groups = {size: comm.split(0 if comm.rank < size else None) for size in range(1, comm.size + 1)}
    for engine, size in engines_and_sizes(comm):
        if comm.rank < size:
            run = Run(engine, groups[size])
            run.steps(0, SAVED)
            run.save(shared / f"{engine}-{size}", SAVED, extra={"of": engine})
    comm.barrier()
    for engine, size in engines_and_sizes(comm):
        if comm.rank >= size:
            continue
        run = Run(engine, groups[size], fresh(MODELS["gpt2"], rank=1))  # other weights
        for saved, on in engines_and_sizes(comm):
            loaded = run.load(shared / f"{saved}-{on}")
            assert (loaded.step, loaded.ranks, loaded.extra) == (SAVED, on, {"of": saved})
            assert loaded.engine == name_in_checkpoints(saved)
            found = run.steps(SAVED, TRAINED)
            what = f"{saved} on {on} -> {engine} on {size}"
            np.testing.assert_allclose(found, losses[SAVED:], rtol=0, atol=1e-6, err_msg=what)
            weights = run.weights()
            if comm.rank == 0:
                assert largest_difference(weights, expected) < 1e-6, what
    for group in groups.values():
        if group is not None:
            group.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [*MODELS, "dropout"])
def test_the_same_engine_goes_on_to_the_bit(comm, shared: Path, engine: str, model: str) -> None:
    unused = {"find_unused_parameters": True} if engine == "ddp" else {}
    makers = {**MODELS, "dropout": lambda: GPT2(replace(SMALL_GPT2, dropout=0.2))}
    torch.manual_seed(comm.rank)
    run = Run(engine, comm, fresh(makers[model]), **unused)
    run.steps(0, 2)
    run.save(shared, 2)
    losses = run.steps(2, 5)
    weights, state = run.weights(), flat(run.optimizer.state_dict())
    again = Run(engine, comm, fresh(makers[model], rank=1), **unused)
    again.load(shared)
    assert again.steps(2, 5) == losses
    found, state_found = again.weights(), flat(again.optimizer.state_dict())
    for one, other in ((weights, found), (state, state_found)):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name], name


@pytest.mark.parametrize("engine", STAGES)
def test_checkpoints_of_another_layout_are_loaded(comm, shared: Path, engine: str, monkeypatch) -> None:
    """Parameters side by side without padding, as they lay in earlier versions."""
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "CACHE_LINE", 1)
        run = Run(engine, comm, fresh(MODELS["mixture"]))
        run.steps(0, 2)
        run.save(shared, 2)
        weights, state = run.weights(), flat(run.optimizer.state_dict())
    again = Run(engine, comm, fresh(MODELS["mixture"], rank=1))
    again.load(shared)
    found = {**again.weights(), **flat(again.optimizer.state_dict())}
    for name, value in {**weights, **state}.items():
        assert torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name], name


def flat(state: dict[str, Any]) -> dict[Any, Any]:
    """An optimizer's state_dict, by number and key; groups too."""
    entries = {(n, key): value for n, entry in state.get("state", {}).items() for key, value in entry.items()}
    return {**entries, "groups": str(state.get("param_groups"))}


def test_units_that_are_gathered_go_on_to_the_bit(comm, shared: Path) -> None:
    """Stage 3 as over several nodes; saved with a unit left whole by a pass without backward."""
    run = Run("stage 3 gathered", comm)
    run.steps(0, 2)
    run.model(torch.zeros(1, 8, dtype=torch.int64))
    run.save(shared, 2)
    losses = run.steps(2, 4)
    again = Run("stage 3 gathered", comm, fresh(MODELS["gpt2"], rank=1))
    again.model(torch.zeros(1, 8, dtype=torch.int64))
    again.load(shared)
    assert again.steps(2, 4) == losses


@pytest.mark.parametrize("verify", [False, True])
def test_each_rank_reads_what_it_holds_and_checks_its_share(comm, shared: Path, monkeypatch, verify: bool) -> None:
    """All ranks together read once what one rank saved, and once more to compare checksums."""
    alone = comm.split(0 if comm.rank == 0 else None)
    if alone is not None:
        run = Run("ddp", alone)
        run.steps(0, 1)
        run.save(shared, 1)
        alone.close()
    comm.barrier()
    run = Run("stage 3", comm, fresh(MODELS["gpt2"], rank=1))
    nbytes = 0
    read = TensorFile.read_into

    def counted(file: TensorFile, target: memoryview, offset: int) -> None:
        nonlocal nbytes
        nbytes += len(target)
        read(file, target, offset)

    monkeypatch.setattr(TensorFile, "read_into", counted)
    run.load(shared, verify=verify, random_states=False)
    held = sum(part.values.nbytes for part in run.optimizer.owned_state().slices())
    held += sum(v.nbytes for entry in run.optimizer.state.values() for v in entry.values() if v.dim())
    assert held > 0
    if not verify:
        assert nbytes == held
    compared = np.array([nbytes - held, held])
    comm.all_reduce(compared)
    assert compared[0] == compared[1] * verify


class Odd(nn.Module):
    """Sizes that no number of ranks divides, no elements, no dimensions, a frozen one, an unreached one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MODELS["mixture"]()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.large = nn.Parameter(torch.randn(300, 331), requires_grad=False)  # more than all ranks write as one

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.factor * self.net(tokens, targets) + 0 * (self.large.sum() + self.nothing.sum())


def test_odd_parameters_pass_from_engine_to_engine(comm, shared: Path) -> None:
    def run(engine: str, rank: int) -> Run:
        return Run(engine, comm, fresh(Odd, rank), **({"find_unused_parameters": True} if engine == "ddp" else {}))

    expected: dict[str, torch.Tensor] = {}
    engines = [*ENGINES, "ddp"]
    for number, engine in enumerate(engines):
        passed_on = run(engine, rank=1 if number else 0)
        if number:
            passed_on.load(shared)
            weights = passed_on.weights()
            assert not weights or weights.keys() == expected.keys()
            for name, tensor in weights.items():
                assert torch.equal(tensor, expected[name]), (engine, name)
        else:
            passed_on.steps(0, 2)
            expected = passed_on.weights()
        passed_on.save(shared, number + 1)
        comm.barrier()
        passed_on.steps(2, 3)
    if comm.rank == 0:
        first, last = (index.read(shared / f"step-{number:08d}") for number in (1, len(engines)))
        assert last.tensors["model/nothing"].shape == (0, 3)
        assert len(first.tensors["model/large"].slices) == comm.size
        assert first.tensors.keys() == last.tensors.keys()
