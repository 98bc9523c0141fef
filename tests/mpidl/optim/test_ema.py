"""EMA: the average that torch's AveragedModel keeps in one process, with every engine, shown, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpidl
from mpidl.absent_state import absent_state
from mpidl.optim import EMA
from tests.mpidl.checkpoint.cut_model import Training as Cut
from tests.mpidl.checkpoint.cut_model import training
from tests.mpidl.zero import reference as zero
from tests.mpidl.zero.ways import ENGINES, WAYS

pytestmark = pytest.mark.mpi
DECAY = 0.9
every_engine = pytest.mark.parametrize("way", ["plain", "ddp", *WAYS])
every_sharded = pytest.mark.parametrize("way", WAYS)
HALF = mpidl.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Model(nn.Module):
    """Blocks, an odd number of elements, something frozen, a tied weight and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = zero.Several()
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.back = nn.Linear(2, 3, bias=False)
        self.again = self.back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.norm(self.body(x)) + self.frozen)


class Training:
    """One step after another, of an engine on this rank's data, or of a plain model on all ranks'."""

    def __init__(self, comm, way: str, make: Callable[[], nn.Module] = zero.Several, **settings: Any) -> None:
        self.model: Any = zero.made(make, comm.rank if way in WAYS else 0)
        self.ranks = range(comm.size) if way == "plain" else [comm.rank]
        self.called = self.model
        if way == "ddp":
            self.called = mpidl.DistributedDataParallel(self.model, process_group=comm)
        if way in WAYS:
            kind = torch.optim.SGD
            settings = {**zero.SETTINGS[way], **zero.SGD, **settings}
            self.optimizer: Any = mpidl.ZeroOptimizer(self.model, kind, process_group=comm, **settings)
        else:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.SGD(trained, **zero.SGD)

    def step(self, number: int) -> None:
        for rank in self.ranks:
            (self.called(zero.data(rank, number)).square().sum() / len(self.ranks)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def output(self) -> torch.Tensor:
        """Without gradients, as in an evaluation."""
        self.model.eval()
        with torch.no_grad():
            found = self.called(zero.data(7))
        self.model.train()
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, on every rank."""
        if isinstance(self.optimizer, mpidl.ZeroOptimizer):
            with self.optimizer.gathered(writable=False):
                return {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def by_torch(comm, steps: int, make: Callable[[], nn.Module] = zero.Several, every: int = 1) -> AveragedModel:
    """The judge: one process."""
    training = Training(comm, "plain", make)
    average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(steps):
        training.step(step)
        if (step + 1) % every == 0:
            average.update_parameters(training.model)
    return average


def check(found: dict[str, torch.Tensor], expected: nn.Module, **tolerance: Any) -> None:
    for name, p in expected.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), msg=name, **(tolerance or {"rtol": 1e-6, "atol": 1e-6}))


@every_engine
@pytest.mark.parametrize("every", [1, 2])
def test_the_average_is_that_of_torch(comm, way: str, every: int) -> None:
    training = Training(comm, way)
    ema = EMA(training.called, DECAY, interval=every)
    averaged = []
    for step in range(5):
        training.step(step)
        averaged.append(ema.update())
    assert averaged == [(step + 1) % every == 0 for step in range(5)]
    expected = by_torch(comm, 5, every=every).module
    before = training.weights()
    state = ema.model_state_dict()
    if comm.rank == 0 or way not in WAYS:
        assert state.keys() == expected.state_dict().keys()
        check(state, expected)
    else:
        assert state == absent_state(comm.rank)
    with ema.averaged():
        check(training.weights(), expected)
        torch.testing.assert_close(training.output(), expected.eval()(zero.data(7)), rtol=1e-5, atol=1e-6)
    after = training.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    training.step(5)


@every_sharded
def test_slices_are_averaged_to_the_bit(comm, way: str) -> None:
    training = Training(comm, way)
    ema = EMA(training.model, DECAY)
    plain = zero.Several()
    judge = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(4):
        training.step(step)
        ema.update()
        plain.load_state_dict(training.weights())
        judge.update_parameters(plain)
    with ema.averaged():
        check(training.weights(), judge.module, rtol=0, atol=0)


@every_engine
def test_before_the_first_update_it_is_the_first_weights(comm, way: str) -> None:
    training = Training(comm, way)
    first = training.weights()
    ema = EMA(training.called)
    training.step(0)
    with ema.averaged():
        assert all(torch.equal(p, first[name]) for name, p in training.weights().items())


@every_engine
def test_warm_up(comm, way: str) -> None:
    training = Training(comm, way)
    ema = EMA(training.called, 0.2, warmup=True)
    expected: dict[str, torch.Tensor] = {}
    for step in range(4):
        training.step(step)
        ema.update()
        decay = min(0.2, (1 + step) / (10 + step))
        for name, p in training.weights().items():
            expected[name] = expected[name].lerp(p, 1 - decay) if step else p
    with ema.averaged():
        for name, p in training.weights().items():
            torch.testing.assert_close(p, expected[name], rtol=1e-6, atol=1e-6)


@every_engine
def test_restored_after_an_exception(comm, way: str) -> None:
    training = Training(comm, way)
    ema = EMA(training.called, DECAY)
    for step in range(2):
        training.step(step)
        ema.update()
    before = training.weights()
    with pytest.raises(ZeroDivisionError), ema.averaged():
        assert 1 / 0
    assert all(torch.equal(p, before[name]) for name, p in training.weights().items())
    with ema.averaged():
        assert not torch.equal(training.weights()["head.weight"], before["head.weight"])


@every_engine
def test_no_step_inside(comm, way: str) -> None:
    training = Training(comm, way)
    ema = EMA(training.called, DECAY)
    training.step(0)
    ema.update()
    before = training.weights()
    with pytest.raises(mpidl.TrainingError, match=r"inside `with ema\.averaged\(\):`"), ema.averaged():
        training.step(1)
    with ema.averaged():
        with pytest.raises(mpidl.TrainingError, match=r"EMA\.update: inside"):
            ema.update()
        with pytest.raises(mpidl.TrainingError, match="inside another"), ema.averaged():
            pass
    assert all(torch.equal(p, before[name]) for name, p in training.weights().items())


@pytest.mark.parametrize("way", ["stage 1", pytest.param("stage 3", marks=pytest.mark.one_node)])
def test_weights_changed_inside_on_one_rank(comm, way: str) -> None:
    training = Training(comm, way, precision=HALF)
    ema = EMA(training.model, DECAY)
    before = training.weights()

    def change() -> None:
        with ema.averaged(), torch.no_grad():
            if comm.rank == comm.size - 1:
                training.model.head.weight.add_(1)

    with pytest.raises(mpidl.TrainingError, match=rf"on rank {comm.size - 1}.*head\.weight: changed in place"):
        change()
    assert all(torch.equal(p, before[name]) for name, p in training.weights().items())


@pytest.mark.parametrize("way", ["plain", "ddp", *WAYS])
def test_16_bit_parameters_have_an_average_in_fp32(comm, way: str) -> None:
    settings = {"precision": HALF} if way in WAYS else {}
    training = Training(comm, way, **settings)
    if way not in WAYS:
        training.model.to(torch.bfloat16)
    ema = EMA(training.model if way == "plain" else training.called, DECAY)
    for _ in range(3):
        ema.update()
    assert all(average.dtype == torch.float32 for average in ema.averages.values())
    before = training.weights()
    whole = ema.model_state_dict()
    if comm.rank == 0:
        assert all(t.dtype == torch.float32 for t in whole.values())
    with ema.averaged():
        inside = training.weights()
    assert all(torch.equal(inside[name], before[name]) for name in before)


@pytest.mark.parametrize("way", ["ddp", *WAYS])
@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers_frozen_and_tied_parameters(comm, way: str, use_buffers: bool) -> None:
    training = Training(comm, way, Model)
    ema = EMA(training.called, DECAY, use_buffers=use_buffers)
    means = []
    for step in range(3):
        training.step(step)
        ema.update()
        means.append(training.model.norm.running_mean.clone())
    now = means[2]
    expected = means[0].lerp(means[1], 1 - DECAY).lerp(means[2], 1 - DECAY) if use_buffers else now
    with ema.averaged():
        torch.testing.assert_close(training.model.norm.running_mean, expected)
        assert int(training.model.norm.num_batches_tracked) == 3
    assert torch.equal(training.model.norm.running_mean, now)
    state = ema.model_state_dict()
    if comm.rank == 0 or way == "ddp":
        assert torch.equal(state["frozen"], torch.ones(2))
        assert torch.equal(state["again.weight"], state["back.weight"])
        torch.testing.assert_close(state["norm.running_mean"], expected)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_unfrozen_later(comm, way: str) -> None:
    training = Training(comm, way, Model)
    ema = EMA(training.model, DECAY)
    training.step(0)
    ema.update()
    training.model.frozen.requires_grad_()
    training.optimizer.add_param_group({"params": [training.model.frozen]})
    values = []
    for step in range(2):
        training.step(step)
        ema.update()
        values.append(training.weights()["frozen"])
    with ema.averaged():
        torch.testing.assert_close(training.weights()["frozen"], values[0].lerp(values[1], 1 - DECAY))


@pytest.mark.parametrize("of", ["plain", "stage 1", "stage 3 gathered"])
@pytest.mark.parametrize("into", ["ddp", "stage 2", "stage 3", "stage 3 gathered"])
def test_states_go_into_any_engine(comm, of: str, into: str) -> None:
    first = Training(comm, of, Model)
    ema = EMA(first.called, DECAY, use_buffers=True)
    for step in range(3):
        first.step(step)
        ema.update()
    state = ema.state_dict()
    assert ("averages" in state) == (comm.rank == 0 or of == "plain")
    expected = mpidl.broadcast_object(comm, ema.model_state_dict())
    state = mpidl.broadcast_object(comm, state) if into == "ddp" else state
    second = Training(comm, into, Model)
    other = EMA(second.called, 0.5, use_buffers=True)
    other.load_state_dict(state if comm.rank == 0 or into == "ddp" else {})
    assert (other.steps, other.updates) == (3, 3)
    found = mpidl.broadcast_object(comm, other.model_state_dict())
    assert all(torch.equal(found[name], expected[name]) for name in other.averages)
    assert torch.equal(found["norm.running_var"], expected["norm.running_var"])
    second.step(0)
    other.update()


@every_sharded
def test_only_rank_0_needs_to_give_a_state(comm, way: str) -> None:
    training = Training(comm, way)
    ema = EMA(training.called, DECAY)
    training.step(0)
    ema.update()
    state, expected = ema.state_dict(), ema.model_state_dict()
    other = Training(comm, way)
    loaded = EMA(other.called, DECAY)
    loaded.load_state_dict(state if comm.rank == 0 else None)
    found = loaded.model_state_dict()
    if comm.rank == 0:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@every_engine
def test_states_that_do_not_fit(comm, way: str) -> None:
    training = Training(comm, way)
    ema = EMA(training.called)
    state = ema.state_dict()
    whole = state.get("averages", {})
    for wrong, match in (
        ({**state, "averages": {**whole, "head.weight": torch.ones(1)}}, r"head\.weight has shape \(1,\); needs"),
        ({**state, "averages": {"other": torch.ones(1)}}, "unexpected names .'other'"),
        ({"steps": 1}, "needs what an EMA's state_dict"),
        ({**state, "steps": -1}, "counts of -1"),
        ({**state, "averages": None}, "needs what an EMA's state_dict"),
        ({**state, "averages": {**whole, "head.weight": [1.0]}}, "needs what an EMA's state_dict"),
    ):
        with pytest.raises(mpidl.ConfigurationError, match=match):
            ema.load_state_dict(wrong)


@pytest.mark.filterwarnings("ignore:Mesh")
@pytest.mark.parametrize("way", ["plain", *ENGINES])
def test_states_of_a_model_that_is_cut_over_tp_are_whole(comm, tmp_path, way: str) -> None:
    judge = Cut("plain", None)
    expected = EMA(judge.model, 0.5)
    path = mpidl.broadcast_object(comm, str(tmp_path))
    with training(way, (comm.size, 1), comm) as run:
        ema = EMA(run.call, 0.5)
        for _ in range(3):
            judge.step()
            expected.update()
            run.step()
            ema.update()
        before = {name: kept.clone() for name, kept in ema.averages.items()}
        whole = {name: kept.clone() for name, kept in expected.averages.items()}
        for found, wanted in (
            (ema.state_dict()["averages"], expected.averages),
            (ema.model_state_dict(), expected.model_state_dict()),
        ):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        run.save(path, extra={"ema": ema.state_dict()})
        for _ in range(2):
            run.step()
            ema.update()
        ema.load_state_dict(run.load(path).extra["ema"])
        assert (ema.steps, ema.updates) == (3, 3)
        assert all(torch.equal(ema.averages[name], kept) for name, kept in before.items())
        wrong = {**expected.state_dict(), **({"averages": {}} if comm.rank == comm.size - 1 else {})}
        with pytest.raises(mpidl.ConfigurationError, match="averages: missing names"):
            ema.load_state_dict(wrong)
    alone = comm.split_self()
    expected.load_state_dict(mpidl.checkpoint.load(path, judge.model, process_group=alone).extra["ema"])
    assert all(torch.equal(expected.averages[name], kept) for name, kept in whole.items())
    alone.close()


@pytest.mark.filterwarnings("ignore:Mesh")
@pytest.mark.parametrize("way", ["plain", "ddp", "stage 2"])
def test_parts_whose_place_is_not_known_are_refused(comm, way: str) -> None:
    with training(way, (comm.size, 1), comm) as run:
        ema = EMA(run.call)
        mpidl.mesh.place(run.model.kv, "tp")
        for call in (ema.state_dict, ema.model_state_dict):
            if comm.size == 1:
                call()
                continue
            with pytest.raises(mpidl.ConfigurationError, match=r"kv is placed on tp without a cut"):
                call()


@pytest.mark.filterwarnings("ignore:Mesh")
def test_averaged_buffers_that_differ_over_tp_are_refused(comm) -> None:
    with training("ddp", (comm.size, 1), comm) as run:
        run.model.mean += comm.rank
        ema = EMA(run.call, use_buffers=True)
        if comm.size == 1:
            ema.state_dict()
            return
        with pytest.raises(mpidl.ConfigurationError, match="buffers differs over tp mean on rank"):
            ema.state_dict()


@pytest.mark.parametrize("way", ["plain", "ddp", "stage 1", "stage 3"])
@pytest.mark.parametrize("state", [{"batches": 3}, 3, None, torch.ones(2)])
def test_extra_states_of_modules_are_given_as_they_are(comm, way: str, state: Any) -> None:
    class Counting(zero.Several):
        def get_extra_state(self) -> Any:
            return state

        def set_extra_state(self, state: Any) -> None:
            pass

    training = Training(comm, way, Counting)
    found = EMA(training.called).model_state_dict()
    if comm.rank == 0 or way not in WAYS:
        kept = found["_extra_state"]
        assert torch.equal(kept, state) if torch.is_tensor(state) else kept == state


def test_wrong_arguments(comm) -> None:
    model = zero.Several()
    for arguments, match in (
        ({"decay": 1.5}, "decay: got 1.5; needs"),
        ({"decay": True}, "decay: got True"),
        ({"interval": 0}, "interval: got 0"),
        ({"warmup": 1}, "warmup: got 1"),
    ):
        with pytest.raises(mpidl.ConfigurationError, match=match):
            EMA(model, **arguments)
    with pytest.raises(mpidl.ConfigurationError, match="model: got 'int'"):
        EMA(3)  # type: ignore[arg-type]
    assert EMA(model, np.float32(0.5)).decay == 0.5  # type: ignore[arg-type]
    ema = EMA(model)
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=1, process_group=comm, lr=0.1)
    with pytest.raises(mpidl.ConfigurationError, match="make the EMA after it"):
        ema.update()
    with pytest.raises(mpidl.ConfigurationError, match="make the EMA after it"):
        EMA(model.blocks[0])
    if comm.size > 1:
        with pytest.raises(mpidl.ModelMismatch, match="EMA: rank 0 has decay"):
            EMA(model, 0.9 + 0.01 * comm.rank)
    optimizer.unwrap()
    EMA(model)


def test_delayed_updates_are_refused(comm) -> None:
    training = Training(comm, "stage 3", offload=mpidl.Offload("cpu", delayed_update=True))
    with pytest.raises(mpidl.ConfigurationError, match="delayed_update"):
        EMA(training.model)


def test_masters_on_the_disk(comm) -> None:
    training = Training(comm, "stage 3", offload="disk", precision=HALF)
    other = Training(comm, "stage 3", precision=HALF)
    averages = [EMA(each.model, DECAY) for each in (training, other)]
    for step in range(3):
        for each, ema in zip((training, other), averages, strict=True):
            each.step(step)
            ema.update()
    before = training.optimizer.model_state_dict()
    with averages[0].averaged(), averages[1].averaged():
        one, two = training.weights(), other.weights()
    assert all(torch.equal(one[name], two[name]) for name in one)
    after = training.optimizer.model_state_dict()
    assert comm.rank or all(torch.equal(after[name], before[name]) for name in before)
