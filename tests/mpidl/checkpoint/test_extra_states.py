"""States that programs, modules and communication hooks have of their own come back with a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl.checkpoint import load, save
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.small_models import MODELS, fresh

pytestmark = pytest.mark.mpi


def test_extra_states_come_back_as_they_were(comm, shared: Path) -> None:
    extra = {
        "epoch": 3,
        "best": float("-inf"),
        "tuple": (1, None, True, "text", b"\x00\xff"),
        7: {"nested": [np.arange(3), torch.ones(2, 3, dtype=torch.bfloat16), np.float32(0.5)]},
        "$odd": {("a", 1): torch.tensor(2.5)},
        "dtype": torch.float16,
        "empty": torch.zeros(0, 3),
        "point": np.array(3.0),
    }
    model = fresh(lambda: torch.nn.Linear(3, 2))
    save(shared, model, step=4, extra=extra, process_group=comm)
    loaded = load(shared, model, process_group=comm)
    assert (loaded.step, loaded.engine, loaded.path) == (4, "plain", shared / "step-00000004")
    found = loaded.extra
    assert list(found) == list(extra)
    assert found["tuple"] == extra["tuple"]
    assert found["best"] == extra["best"]
    np.testing.assert_array_equal(found[7]["nested"][0], np.arange(3))
    assert torch.equal(found[7]["nested"][1], extra[7]["nested"][1])
    assert found[7]["nested"][2] == 0.5
    assert found["$odd"][("a", 1)] == torch.tensor(2.5)
    assert isinstance(found["point"], np.ndarray)
    assert (found["point"].shape, found["point"]) == ((), 3.0)
    assert (found["dtype"], found["empty"].shape) == (torch.float16, (0, 3))


def test_what_json_cannot_hold_is_refused_by_name(comm, shared: Path) -> None:
    model = fresh(lambda: torch.nn.Linear(3, 2))
    with pytest.raises(mpidl.ConfigurationError, match=r"extra\['a'\]\[1\]: got a object"):
        save(shared, model, extra={"a": [0, object()]}, process_group=comm)
    assert list(shared.iterdir()) == []


class Counting(nn.Module):
    """A GPT-2 that has more to keep than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MODELS["gpt2"]()
        self.seen: dict[str, Any] = {"batches": 0, "largest": torch.zeros(3)}

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen["batches"] += 1
        self.seen["largest"] += 0.5
        return self.net(tokens, targets)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        if state["batches"] > 3:
            raise ValueError("too many batches")
        self.seen = state


@pytest.mark.parametrize("engine", ["ddp", "stage 3"])
def test_extra_states_of_modules_come_back(comm, shared: Path, engine: str) -> None:
    run = Run(engine, comm, Counting())
    run.steps(0, 2)
    run.save(shared, 2)
    again = Run("stage 2" if engine == "ddp" else "ddp", comm, Counting())
    again.load(shared)
    assert again.model.seen["batches"] == 2
    assert again.model.seen["largest"].tolist() == [1.0] * 3
    # One that is refused leaves all as it was.
    run.steps(2, 4)
    run.save(shared, 4)
    weights = again.weights()
    with pytest.raises(mpidl.CheckpointMismatch, match=r"the _extra_state: too many batches"):
        again.load(shared)
    assert again.model.seen["batches"] == 2
    assert again.schedule.last_epoch == 2
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.weights().items())
    run.model.seen["odd"] = object()
    with pytest.raises(mpidl.ConfigurationError, match=r"model/_extra_state\['odd'\]: got a object"):
        run.save(shared, 5)


def test_extra_states_that_only_one_side_has_are_told(comm, shared: Path) -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = MODELS["gpt2"]()

    save(shared / "counting", Counting(), process_group=comm)
    save(shared / "silent", Silent(), process_group=comm)
    with pytest.raises(mpidl.CheckpointError, match="; unexpected: _extra_state"):
        load(shared / "counting", Silent(), process_group=comm)
    with pytest.raises(mpidl.CheckpointError, match="; missing: _extra_state"):
        load(shared / "silent", Counting(), process_group=comm)


class Averaging:
    """A hook's state with a residual of each rank's own."""

    def __init__(self, rank: int) -> None:
        self.residual = torch.full((3,), float(rank))

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self.residual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.residual = state["residual"]

    def reduce(self, _: None, bucket: mpidl.comm_hooks.GradBucket) -> Any:
        return mpidl.comm_hooks.completed()


def registers(run: Run) -> Any:
    """Returns what takes a hook: the wrapper, or the ZeroOptimizer."""
    return run.call if run.engine == "ddp" else run.optimizer


engines_of_hooks = pytest.mark.parametrize("engine", ["ddp", "stage 2"])


@engines_of_hooks
def test_the_state_of_a_communication_hook_comes_back_to_its_rank(comm, shared: Path, engine: str) -> None:
    def run(state: Averaging) -> Run:
        made = Run(engine, comm)
        registers(made).register_comm_hook(state, lambda _, bucket: bucket.reduce(process_group=comm))
        return made

    run(Averaging(comm.rank + 10)).save(shared, 0)
    state = Averaging(-1)
    run(state).load(shared)
    assert state.residual.tolist() == [comm.rank + 10.0] * 3
    # On fewer ranks, and where the hook is a method of what has the state.
    alone = comm.split(0 if comm.rank == 0 else None)
    if alone is not None:
        method = Run(engine, alone)
        registers(method).register_comm_hook(None, state.reduce)
        state.residual += 1
        method.load(shared)
        assert state.residual.tolist() == [10.0] * 3
        alone.close()


@engines_of_hooks
@pytest.mark.parametrize("saves", [True, False])
def test_a_hook_s_state_that_one_side_lacks_is_told(comm, shared: Path, engine: str, saves: bool) -> None:
    def run(with_hook: bool) -> Run:
        made = Run(engine, comm)
        if with_hook:
            registers(made).register_comm_hook(Averaging(comm.rank), lambda _, bucket: bucket.reduce())
        return made

    def load_into(with_hook: bool) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run(with_hook).load(shared)
        return [str(warning.message) for warning in told if "communication hook" in str(warning.message)]

    run(saves).save(shared, 0)
    assert load_into(saves) == []
    said = load_into(not saves)
    assert len(said) == (comm.rank == 0)
    assert all(("is dropped, as no hook" if saves else "the hook here keeps its own") in text for text in said)


@engines_of_hooks
def test_a_hook_s_state_that_cannot_be_kept_is_told(comm, shared: Path, engine: str) -> None:
    def save_with(state: Any) -> list[str]:
        run = Run(engine, comm)
        registers(run).register_comm_hook(state, lambda _, bucket: bucket.reduce(process_group=comm))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.save(shared, 0)
        return [str(warning.message) for warning in told if "communication hook" in str(warning.message)]

    assert save_with(None) == save_with(comm) == []
    said = save_with({"residual": torch.zeros(3)})
    assert len(said) == (comm.rank == 0)
    assert all("a dict, has no state_dict and load_state_dict, and is not kept" in text for text in said)
