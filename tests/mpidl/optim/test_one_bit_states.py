"""1-bit optimizers next to others, and states that are loaded into ones that have stepped already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.job.objects import broadcast_object
from tests.mpidl.optim.one_bit_training import CLASSES, Slopes, Training, classes, engines, slopes

pytestmark = pytest.mark.mpi


def trained(comm: Communicator, engine: str, name: str, steps: int, model: nn.Module | None = None) -> Training:
    """Training after so many steps; after 9 the classes have frozen what they freeze, and the weights are equal."""
    model = Slopes() if model is None else model
    training = Training(comm, engine, CLASSES[name][0], model, lr=0.01, **CLASSES[name][1])
    training.run(0, steps)
    return training


@classes
def test_gradients_of_another_optimizer_are_averaged(comm: Communicator, name: str) -> None:
    model = Slopes()
    first, *rest = model.parameters()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    own = CLASSES[name][0](rest, lr=0.01, process_group=comm, **CLASSES[name][1])
    wrapped.register_comm_hook(own, mpidl.optim.one_bit_hook)
    other = torch.optim.SGD([first], lr=0.1)
    expected = first.detach().clone()
    for step in range(9):
        wrapped([g.float() for g in slopes(step, comm.rank)]).backward()
        expected -= 0.1 * torch.stack([slopes(step, rank)[0].float() for rank in range(comm.size)]).mean(0)
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(first.detach(), expected, rtol=1e-5, atol=1e-5)


@engines
@classes
@pytest.mark.parametrize("way", ["state", "checkpoint", "saved again"])
@pytest.mark.parametrize("saved_at", [2, 9])
def test_what_has_stepped_goes_on_from_a_loaded_state_like_what_has_not(
    comm: Communicator, engine: str, name: str, way: str, saved_at: int, tmp_path: Path
) -> None:
    """Before the freeze, to which it goes back, and after it, where it forgets its own errors."""
    folder = Path(broadcast_object(comm, str(tmp_path)))
    first = trained(comm, engine, name, saved_at)
    mpidl.checkpoint.save(folder, first.called, first.optimizer, step=saved_at)
    state = first.state()
    made = []
    for steps in (0, 14):
        second = trained(comm, engine, name, steps)
        if way != "state":
            mpidl.checkpoint.load(folder, second.called, second.optimizer)
        if way == "saved again":
            again = folder / f"after-{steps}"
            mpidl.checkpoint.save(again, second.called, second.optimizer, step=saved_at)
            second = trained(comm, engine, name, 0)
            mpidl.checkpoint.load(again, second.called, second.optimizer)
        if way == "state":
            second.load(first, state)
        second.run(saved_at, 6)
        if name != "zero_one" or saved_at != 2:  # where 0/1 Adam is between exchanges
            second.check_equal_on_all_ranks()
        made.append(second.weights())
    assert torch.equal(*made)


LOCAL: dict[str, Any] = {"renewals": 2, "local_after": 4, "local_interval_steps": 2}  # exchanges at 5, 6, 8, 12


@engines
def test_weights_that_local_steps_keep_are_counted(comm: Communicator, engine: str) -> None:
    """There is a copy of all weights after step 11 and none after step 12."""
    training = Training(comm, engine, mpidl.optim.ZeroOneAdam, Slopes(), lr=0.01, **LOCAL)
    sizes = []
    for first, steps in ((0, 11), (11, 1)):
        training.run(first, steps)
        sizes.append(sum(t.numel() for t in training.inner.held_tensors()["optimizer"]))
    assert sizes[0] - sizes[1] == sum(p.numel() for p in training.model.parameters())


@engines
@pytest.mark.parametrize("saved_at", [3, 6, 8])
def test_a_load_between_exchanges_goes_on_like_one_into_a_new_engine(
    comm: Communicator, engine: str, saved_at: int, tmp_path: Path
) -> None:
    """After step 11 each rank has weights of its own, which a load replaces, and nothing else may read."""
    folder = Path(broadcast_object(comm, str(tmp_path)))

    def after(steps: int) -> Training:
        training = Training(comm, engine, mpidl.optim.ZeroOneAdam, Slopes(), lr=0.01, **LOCAL)
        training.run(0, steps)
        return training

    first = after(saved_at)
    mpidl.checkpoint.save(folder, first.called, first.optimizer, step=saved_at)
    made = []
    for steps in (0, 11):
        second = after(steps)
        if steps:
            assert not second.inner.is_synchronised
            with pytest.raises(mpidl.TrainingError, match="after step 11 each rank has its own weights"):
                mpidl.checkpoint.save(folder, second.called, second.optimizer, step=steps)
            with pytest.raises(mpidl.TrainingError, match="after step 11 each rank has its own weights"):
                mpidl.checkpoint.load(folder, second.called)  # the weights alone
        mpidl.checkpoint.load(folder, second.called, second.optimizer)
        assert second.inner.is_synchronised
        second.check_equal_on_all_ranks()
        assert torch.equal(second.weights(), first.weights())
        second.optimizer.state_dict()  # the loaded state, which every rank has
        second.run(saved_at, 12 - saved_at)
        second.check_equal_on_all_ranks()
        made.append(second.weights())
    assert torch.equal(*made)


@engines
def test_a_load_between_exchanges_that_fails_changes_nothing(comm: Communicator, engine: str, tmp_path: Path) -> None:
    folder = Path(broadcast_object(comm, str(tmp_path)))
    made = [Training(comm, engine, mpidl.optim.ZeroOneAdam, Slopes(), lr=0.01, **LOCAL) for _ in range(2)]
    mpidl.checkpoint.save(folder, Slopes(), process_group=comm)
    for training in made:
        training.run(0, 11)
    with pytest.raises(mpidl.CheckpointError, match="was saved without an optimizer"):
        mpidl.checkpoint.load(folder, made[0].called, made[0].optimizer)
    for training in made:
        training.run(11, 4)
    assert torch.equal(*(training.weights() for training in made))


@engines
@classes
def test_the_state_of_another_optimizer_is_refused(comm: Communicator, engine: str, name: str) -> None:
    """The first steps are those of Adam, and so are the names of its states; its counters are not there."""
    model = Slopes()
    adam = torch.optim.AdamW(model.parameters())
    model([g.float() for g in slopes(0, 0)]).backward()
    adam.step()
    training, alone = (trained(comm, engine, name, 2) for _ in range(2))
    with pytest.raises(mpidl.ConfigurationError, match="load_state_dict: got the state of another optimizer"):
        training.optimizer.load_state_dict(adam.state_dict())
    for each in (training, alone):
        each.run(2, 1)
    assert torch.equal(training.weights(), alone.weights())


@pytest.mark.parametrize("optimizer", [mpidl.optim.OneBitAdam, mpidl.optim.Adam8bit, mpidl.optim.Dion])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_16_bit_parameters_come_back_in_fp32(
    comm: Communicator, optimizer: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = Path(broadcast_object(comm, str(tmp_path)))

    def engine() -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        wrapped = mpidl.DistributedDataParallel(nn.Linear(70, 80, bias=False).to(dtype), process_group=comm)
        grouped = {} if optimizer is mpidl.optim.Adam8bit else {"process_group": comm}
        own = optimizer(wrapped.parameters(), lr=1e-2, **grouped)
        if optimizer is mpidl.optim.OneBitAdam:
            wrapped.register_comm_hook(own, mpidl.optim.one_bit_hook)
        elif optimizer is mpidl.optim.Dion:
            wrapped.register_comm_hook(mpidl.optim.DionState(own), mpidl.optim.dion_hook)
        return wrapped, own

    def train(wrapped: nn.Module, own: Any, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 70, generator=torch.Generator().manual_seed(9 * step + comm.rank)).to(dtype)
            (wrapped(x).float().square().mean() * 1e-4).backward()
            own.step()
            own.zero_grad()

    first, second, third = engine(), engine(), engine()
    train(*first, 0, 3)
    mpidl.checkpoint.save(folder, *first, step=3)
    mpidl.checkpoint.load(folder, *second)
    third[0].load_state_dict(first[0].state_dict())
    if optimizer is mpidl.optim.Dion:
        first[1].average_momenta()
    third[1].load_state_dict(first[1].state_dict())
    for each in (first, second, third):
        train(*each, 3, 6)
    weights = [torch.cat([p.detach().flatten() for p in each[0].parameters()]) for each in (first, second, third)]
    assert torch.equal(weights[1], weights[0])
    assert torch.equal(weights[2], weights[0])


def test_weights_and_gradients_of_each_rank_are_not_the_model_s(comm: Communicator) -> None:
    training = trained(comm, "stage 1", "zero_one", 0)
    ema = mpidl.optim.EMA(training.model, decay=0.9)
    for step in range(9):
        own = comm.size > 1 and not training.inner.is_synchronised
        for refused in (training.optimizer.model_state_dict, ema.update, training.optimizer.unwrap) if own else ():
            with pytest.raises(mpidl.TrainingError, match="each rank has its own weights"):
                refused()
        training.called([g.float() for g in slopes(step, comm.rank)]).backward()
        if comm.size > 1 and not training.inner.averages_gradients:
            with pytest.raises(mpidl.TrainingError, match="each rank has gradients of its own"):
                training.optimizer.gradients()
        training.optimizer.step()
        training.optimizer.zero_grad()


@classes
def test_ranks_may_run_the_backward_passes_of_several_engines_in_another_order(comm: Communicator, name: str) -> None:
    """From the first pass on, over the freeze: each engine has its own Communicators."""
    found = []
    for turns in (False, True):
        settings = {"lr": 0.01, "bucket_cap_mb": 1e-4, **CLASSES[name][1]}
        made = [Training(comm, "stage 1", CLASSES[name][0], Slopes(), **settings) for _ in range(2)]
        for step in range(12):
            order = (1, 0) if turns and (comm.rank + step) % 2 else (0, 1)
            # Autograd goes through what was computed last first.
            losses = {n: made[n].called([g.float() for g in slopes(step + 50 * n, comm.rank)]) for n in order}
            (losses[0] + losses[1]).backward()
            for each in made:
                each.optimizer.step()
                each.optimizer.zero_grad()
        for each in made:
            each.check_equal_on_all_ranks()
        found.append(torch.stack([each.weights() for each in made]))
    assert torch.equal(*found)
