"""Weights that are changed behind the optimizer's back, and models that another engine trains, are refused by name."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.zero.reference import Plain, Several, check, engine, made, plainly
from tests.mpidl.zero.ways import every_way, zero

pytestmark = pytest.mark.mpi

BF16 = mpidl.Precision(torch.bfloat16)
# Where writing in place is wrong, and a look at the parameter is not refused already.
WRITTEN = pytest.mark.parametrize(
    ("way", "precision"), [("stage 3", None), ("stage 3", BF16), ("stage 1", BF16), ("stage 2", BF16)], ids=str
)
ALL = pytest.mark.parametrize("way", ["stage 1", "stage 3", "stage 3 gathered"])
MOVES: dict[str, Callable[[nn.Module], object]] = {
    "data": lambda m: setattr(m.head.weight, "data", torch.ones(m.head.weight.shape)),
    "shape": lambda m: setattr(m.head.weight, "data", torch.ones(7, 3)),
    "dtype": lambda m: setattr(m.head.weight, "data", torch.ones(m.head.weight.shape, dtype=torch.float64)),
    "to": lambda m: m.to(torch.bfloat16),
}


def train(model: nn.Module, optimizer: mpidl.ZeroOptimizer, rank: int, step: int) -> None:
    plainly(model, rank, step).float().backward()
    optimizer.step()
    optimizer.zero_grad()


def trains_as_new(comm, model: nn.Module, optimizer: mpidl.ZeroOptimizer) -> None:
    """From the plain model's weights; there was no step before."""
    optimizer.zero_grad()
    plain = Plain(Several, comm.size)
    optimizer.load_model_state_dict(plain.model.state_dict())
    plain.step(lambda m, rank: plainly(m, rank, 0).backward())
    train(model, optimizer, comm.rank, 0)
    check(model, optimizer, plain.model)


def refused_at_once(comm, way: str, parameter: nn.Parameter) -> bool:
    """Over several nodes no rank has stage 3's weights to write to, and is told so."""
    if not way.startswith("stage 3") or comm.nodes == 1:
        return False
    with pytest.raises(mpidl.TrainingError, match="mul_ of a parameter that is sharded"), torch.no_grad():
        parameter.mul_(0.5)
    return True


@WRITTEN
def test_what_is_written_in_place_is_named_at_the_step(comm, way: str, precision) -> None:
    model, optimizer = engine(comm, Several, way, precision=precision)
    if refused_at_once(comm, way, model.blocks[1].inner.weight):
        return
    with torch.no_grad():
        model.blocks[1].inner.weight.mul_(0.5)
    plainly(model, comm.rank, 0).float().backward()
    before = {name: values.clone() for name, values in optimizer.owned_weights().values().items()}
    for attempt in (optimizer.step, optimizer.model_state_dict):
        with pytest.raises(mpidl.TrainingError, match=r"^blocks\.1\.inner\.weight: changed in place outside .*gather"):
            attempt()
    assert all(torch.equal(before[name], values) for name, values in optimizer.owned_weights().values().items())
    if precision is None:
        trains_as_new(comm, model, optimizer)


@WRITTEN
def test_what_one_rank_writes_is_an_error_on_all(comm, way: str, precision) -> None:
    model, optimizer = engine(comm, Several, way, precision=precision)
    if refused_at_once(comm, way, model.head.bias):
        return
    if comm.rank == comm.size - 1:
        nn.init.zeros_(model.head.bias)
    plainly(model, comm.rank, 0).float().backward()
    where = "" if comm.rank == comm.size - 1 else rf".*\(on rank {comm.size - 1}\)"
    with pytest.raises(mpidl.TrainingError, match=r"head\.bias: changed in place" + where):
        optimizer.step()


@pytest.mark.parametrize("way", ["stage 1", "stage 2"])
def test_whole_parameters_without_masters_may_be_changed_the_same(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plain = Plain(Several, comm.size)
    for step in range(2):
        for m in (model, plain.model):
            with torch.no_grad():
                m.head.weight.mul_(0.5)
        plain.step(lambda m, rank, step=step: plainly(m, rank, step).backward())  # type: ignore[misc]
        train(model, optimizer, comm.rank, step)
        check(model, optimizer, plain.model)


@ALL
@pytest.mark.parametrize("move", MOVES)
def test_a_parameter_that_is_moved_is_named_before_it_is_trained_on(comm, way: str, move: str) -> None:
    model, optimizer = engine(comm, Several, way)
    released = (way == "stage 3 gathered" and comm.size > 1) or (way == "stage 3" and comm.nodes > 1)
    if released and move == "to":
        with pytest.raises(mpidl.TrainingError, match=r"weight: to of .*sharded"):
            MOVES[move](model)
        return
    MOVES[move](model)
    for attempt in (
        lambda: plainly(model, comm.rank, 0),
        optimizer.step,
        optimizer.model_state_dict,
        lambda: optimizer.gathered().__enter__(),
    ):
        with pytest.raises(mpidl.TrainingError, match=r"\w+\.(weight|bias): other memory .*`with optimizer\.gathered"):
            attempt()
    trains_as_new(comm, model, optimizer)


@pytest.mark.parametrize("way", ["stage 1", "stage 3 gathered"])
def test_what_one_rank_has_moved_opens_a_block_on_no_rank(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    if comm.rank == comm.size - 1:
        MOVES["data"](model)
    for writable in (True, False):
        with (
            pytest.raises(mpidl.TrainingError, match=r"head\.weight: other memory "),
            optimizer.gathered(None, writable),
        ):
            raise AssertionError("the block has begun")
    trains_as_new(comm, model, optimizer)


@pytest.mark.one_node
@pytest.mark.parametrize("way", ["stage 1", "stage 3"])
def test_loading_puts_another_shape_of_the_same_memory_right(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    model.head.weight.data = model.head.weight.data.view(3, 2)
    with pytest.raises(mpidl.TrainingError, match=r"head\.weight: other memory .* now \(3, 2\)"):
        optimizer.step()
    trains_as_new(comm, model, optimizer)


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@ALL
def test_a_plain_load_state_dict_is_refused_outside_gathered(comm, way: str, precision) -> None:
    model, optimizer = engine(comm, Several, way, precision=precision)
    state = {name: value + 1.0 for name, value in made(Several).state_dict().items()}
    for attempt in (
        lambda: model.load_state_dict(state),
        lambda: model.load_state_dict(state, assign=True),
        lambda: model.head.load_state_dict({"weight": state["head.weight"]}, strict=False),
    ):
        with pytest.raises(mpidl.TrainingError, match=r"trains \w.*weight.*optimizer\.load_model_state_dict"):
            attempt()
    with (
        pytest.raises(mpidl.TrainingError, match="load_model_state_dict"),
        optimizer.gathered(writable=False),
    ):
        model.load_state_dict(state)
    with optimizer.gathered(model.head):
        model.head.load_state_dict({name: state[f"head.{name}"] for name in ("weight", "bias")})
        with pytest.raises(mpidl.TrainingError, match=r"trains blocks\.0\.inner\.weight"):
            model.load_state_dict(state)
    with optimizer.gathered():
        model.load_state_dict(state)
    loaded = optimizer.model_state_dict()
    for name in loaded if comm.rank == 0 else ():
        torch.testing.assert_close(loaded[name].float(), state[name], rtol=0, atol=0 if precision is None else 0.02)
    train(model, optimizer, comm.rank, 0)


def test_buffers_may_be_loaded(comm) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    zero(model, comm, "stage 3")
    model.load_state_dict({"1.running_mean": torch.full((3,), 2.0)}, strict=False)
    assert (model[1].running_mean == 2).all()


@every_way
@pytest.mark.parametrize("frozen", [False, True])
def test_a_module_that_came_later_is_named(comm, way: str, frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = zero(model, comm, way)
    model[1] = nn.Linear(3, 3).requires_grad_(not frozen)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(mpidl.TrainingError, match=r"1\.weight: it came into the model after"):
        optimizer.step()


@pytest.mark.parametrize("way", ["stage 3", "stage 3 gathered"])
def test_writing_into_what_is_only_to_be_read_is_named_at_the_end_of_the_block(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    with (
        pytest.raises(mpidl.TrainingError, match=r"^head\.weight: changed in place without writable=True"),
        torch.no_grad(),
        optimizer.gathered(writable=False),
    ):
        model.head.weight.mul_(0.5)
    trains_as_new(comm, model, optimizer)


def write_and_fail(model: nn.Module, optimizer: mpidl.ZeroOptimizer) -> None:
    with optimizer.gathered(writable=False):
        model.head.weight.mul_(0.5)
        raise ZeroDivisionError


def test_an_error_inside_the_block_is_not_hidden(comm) -> None:
    model, optimizer = engine(comm, Several, "stage 3")
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        write_and_fail(model, optimizer)


def write_elsewhere(model: nn.Module, optimizer: mpidl.ZeroOptimizer) -> None:
    with optimizer.gathered(model.blocks[0]):
        model.blocks[0].inner.weight.mul_(2.0)
        model.head.bias.add_(1.0)


@pytest.mark.one_node
def test_writing_outside_the_module_that_is_gathered_is_named_at_the_end_of_the_block(comm) -> None:
    model, optimizer = engine(comm, Several, "stage 3")
    refused = pytest.raises(mpidl.TrainingError, match=r"^head\.bias: changed in place")
    with refused, torch.no_grad():
        write_elsewhere(model, optimizer)
    trains_as_new(comm, model, optimizer)


@pytest.mark.one_node
def test_no_step_inside_gathered_on_one_node(comm) -> None:
    model, optimizer = engine(comm, Several, "stage 3")
    plainly(model, comm.rank, 0).backward()
    with optimizer.gathered(), pytest.raises(mpidl.TrainingError, match="no step can be taken"):
        optimizer.step()
    trains_as_new(comm, model, optimizer)


@ALL
def test_what_is_no_weight_stays_free(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
        p.requires_grad_(True)
        p.note = "of a user"
    optimizer.zero_grad()
    model.eval()
    trains_as_new(comm, model, optimizer)


@every_way
def test_a_model_of_which_another_engine_trains_a_part_is_refused(comm, way: str) -> None:
    inner = nn.Linear(3, 3)
    first = zero(inner, comm, way)
    tied = nn.Linear(3, 3)
    tied.bias = inner.bias
    for model, name in (
        (inner, "weight"),
        (nn.Sequential(nn.Linear(3, 3), inner), r"1\.weight"),
        (tied, "bias"),
    ):
        with pytest.raises(mpidl.ConfigurationError, match=rf"trains it already, .*: {name}"):
            zero(model, comm, way)
    inner(torch.ones(1, 3)).sum().backward()
    first.step()
    del first
    gc.collect()
    with pytest.raises(mpidl.ConfigurationError, match=r"1\.weight was laid out by .*gone"):
        zero(nn.Sequential(nn.Linear(3, 3), inner), comm, way)
    zero(nn.Linear(3, 3), comm, way)


def test_a_frozen_part_that_is_not_cut_may_be_shared(comm) -> None:
    shared = nn.Linear(3, 3).requires_grad_(False)
    engines = [zero(nn.Sequential(shared, nn.Linear(3, 3)), comm, "stage 1") for _ in range(2)]
    for optimizer in engines:
        optimizer.model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


@every_way
def test_who_would_wrap_a_part_of_the_model_is_told_who_trains_it(comm, way: str) -> None:
    inner = nn.Linear(3, 3)
    optimizer = zero(inner, comm, way)
    for module, name in ((inner, "weight"), (nn.Sequential(nn.Linear(3, 3), inner), r"1\.weight")):
        with pytest.raises(mpidl.ConfigurationError, match=rf"module: .*trains it already, .*: {name}"):
            mpidl.DistributedDataParallel(module, process_group=comm)
    assert optimizer.model is inner  # which keeps the optimizer until here
    del optimizer
    gc.collect()
    with pytest.raises(mpidl.ConfigurationError, match=r"module: weight was laid out by .*gone"):
        mpidl.DistributedDataParallel(inner, process_group=comm)


@every_way
def test_a_distributed_data_parallel_is_refused(comm, way: str) -> None:
    wrapped = mpidl.DistributedDataParallel(nn.Linear(3, 3), process_group=comm)
    for model, name in ((wrapped, "it"), (nn.Sequential(nn.Linear(3, 3), wrapped), "1")):
        with pytest.raises(mpidl.ConfigurationError, match=f"model: {name} is a DistributedDataParallel"):
            zero(model, comm, way)


@pytest.mark.one_node
def test_parameters_can_still_be_saved(comm) -> None:
    model, _ = engine(comm, Several, "stage 3")
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    for p, q in zip(torch.load(file, weights_only=True), model.parameters(), strict=True):
        assert torch.equal(p, q)
