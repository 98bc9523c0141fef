"""`compress=` in DDP and the stages of ZeRO."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression.dgc import DeepGradient
from mpidl.gradients.compression.powersgd import PowerSGD
from mpidl.gradients.compression.settings import compression
from mpidl.job.objects import all_gather_object
from tests.mpidl.gradients.compression.methods import ENGINE_VARIANTS, LOSS_TOLERANCES, METHODS
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.reference import SETTINGS
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi
ENGINES = ("ddp", *WAYS)
engines = pytest.mark.parametrize("engine", ENGINES)


class Training:
    """A small GPT-2 on a part of every batch. optimizer: settings of SGD."""

    def __init__(
        self, comm: Communicator, engine: str, compress: Any = None, optimizer: Any = None, **settings: Any
    ) -> None:
        self.comm, self.model = comm, fresh(MODELS["gpt2"], comm.rank)
        sgd: dict[str, Any] = optimizer or {"lr": 0.1, "momentum": 0.9}
        self.called: Any = self.model
        if engine == "ddp":
            self.called = mpidl.DistributedDataParallel(
                self.model, process_group=comm, bucket_cap_mb=0.005, compress=compress, **settings
            )
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), **sgd)
            self.compressed = self.called.compressed
        else:
            given = {"process_group": comm, "compress": compress, **SETTINGS[engine], **sgd, **settings}
            self.optimizer = mpidl.ZeroOptimizer(self.model, torch.optim.SGD, **given)
            self.compressed = self.optimizer.compressed

    def run(self, steps: int, first: int = 0) -> list[float]:
        """Trains; returns the mean losses."""
        losses = []
        for step in range(first, first + steps):
            x, y = (part.tensor_split(self.comm.size)[self.comm.rank] for part in sequences(step, 0))
            loss = self.called(x, y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            self.comm.all_reduce(mean, "avg")
            losses.append(mean.item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole weights, on every rank."""
        if isinstance(self.optimizer, mpidl.ZeroOptimizer):
            with self.optimizer.gathered(writable=False):
                return {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def check_equal_on_all_ranks(comm: Communicator, weights: dict[str, torch.Tensor]) -> None:
    for name, values in weights.items():
        theirs = values.clone()
        comm.broadcast(theirs)
        assert torch.equal(theirs, values), name


@engines
@pytest.mark.each("method")
@pytest.mark.parametrize("method", [*METHODS, *ENGINE_VARIANTS])
def test_training_follows_full_precision_with_the_same_weights_on_all_ranks(
    comm: Communicator, engine: str, method: str
) -> None:
    plain, compressed = Training(comm, engine), Training(comm, engine, Compression(method, start_step=0))
    expected, found = plain.run(6), compressed.run(6)
    weights = compressed.weights()
    check_equal_on_all_ranks(comm, weights)
    assert found == pytest.approx(expected, abs=LOSS_TOLERANCES.get(method, 0.05))
    if comm.size > 1:
        exact = plain.weights()
        assert any(not torch.equal(weights[name], exact[name]) for name in exact)


@engines
@pytest.mark.parametrize("method", ["powersgd:999", "powersgd:99,batched,min_rate=1", "gradzip:99,batched,min_rate=1"])
def test_a_rank_above_the_size_of_the_gradients_sends_them_whole(comm: Communicator, engine: str, method: str) -> None:
    plain, compressed = Training(comm, engine), Training(comm, engine, Compression(method, start_step=0))
    assert compressed.run(3) == pytest.approx(plain.run(3), abs=1e-3)
    check_equal_on_all_ranks(comm, compressed.weights())


@engines
def test_full_precision_comes_first(comm: Communicator, engine: str) -> None:
    plain = Training(comm, engine)
    compressed = Training(comm, engine, Compression("int4", where="everywhere", start_step=2))
    assert compressed.run(2) == plain.run(2)
    for name, values in plain.weights().items():
        torch.testing.assert_close(compressed.weights()[name], values, rtol=1e-6, atol=1e-7)
    compressed.run(1, first=2)
    assert comm.size == 1 or compressed.compressed.state_dict()["remainders"]


@engines
def test_remainders_go_on_from_a_state(comm: Communicator, engine: str) -> None:
    """A state taken in the middle gives a new engine the same mean remainders; they are the same on every rank."""
    first = Training(comm, engine, "int4")
    first.run(3)
    state = first.compressed.state_dict()
    other = Training(comm, engine, "int4")
    other.compressed.load_state_dict(state)
    again = other.compressed.state_dict()
    assert again["steps"] == state["steps"] == 3
    assert set(again["remainders"]) == set(state["remainders"])
    for name, mean in state["remainders"].items():
        assert torch.equal(again["remainders"][name], mean)
    other.run(1, first=3)  # sections take the remainders over, and reduce
    for name, mean in other.compressed.state_dict()["remainders"].items():
        assert torch.isfinite(mean).all(), name
        theirs = mean.clone()
        comm.broadcast(theirs)
        assert torch.equal(theirs, mean)


def test_remainders_move_when_ddp_cuts_its_buckets_anew(comm: Communicator) -> None:
    training = Training(comm, "ddp", Compression("int4", where="everywhere"))
    training.run(1)
    before = training.compressed.state_dict()["remainders"]
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(0, 0))
    (0 * training.called(x, y)).backward()  # gradients of zeros: the mean sent is of the remainders alone
    after = training.compressed.state_dict()["remainders"]
    for name, p in training.model.named_parameters():
        if name in before:
            assert p.grad is not None
            sent = p.grad.double() + after[name].double()
            torch.testing.assert_close(sent, before[name].double(), rtol=1e-5, atol=1e-7)


def test_remainders_of_parameters_whose_elements_lie_in_another_order(comm: Communicator) -> None:
    """Those of channels_last: they have the parameter's shape in a state, and for models of either order."""

    def made(order: torch.memory_format) -> Any:
        torch.manual_seed(3)
        return torch.nn.Conv2d(3, 8, 3, bias=False).to(memory_format=order)

    def wrapped(model: Any, start_step: int) -> mpidl.DistributedDataParallel:
        how = Compression("topk:0.1", where="everywhere", start_step=start_step)
        return mpidl.DistributedDataParallel(model, process_group=comm, compress=how)

    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(comm.rank))
    model, alone = made(torch.channels_last), made(torch.contiguous_format)
    ddp = wrapped(model, 0)
    ddp(x).square().sum().backward()
    alone(x).square().sum().backward()
    mean = alone.weight.grad.contiguous()
    comm.all_reduce(mean, "avg")
    assert ddp.compressed is not None
    state = ddp.compressed.state_dict()
    left = state["remainders"].get("weight", torch.zeros_like(mean))  # none on one rank
    torch.testing.assert_close(left, mean - model.weight.grad, rtol=1e-3, atol=1e-3)
    for order in (torch.channels_last, torch.contiguous_format):
        other = wrapped(made(order), 9)
        assert other.compressed is not None
        other.compressed.load_state_dict(state)
        (0 * other(x)).sum().backward()  # in full precision: what was left, and nothing else
        torch.testing.assert_close(other.module.weight.grad, left, rtol=1e-5, atol=1e-6)
    model.to(memory_format=torch.contiguous_format)
    ddp.zero_grad()
    (0 * ddp(x)).sum().backward()
    after = ddp.compressed.state_dict()["remainders"].get("weight", torch.zeros_like(mean))
    torch.testing.assert_close(model.weight.grad + after, left, rtol=1e-5, atol=1e-6)


@engines
def test_a_compressor_serves_one_engine_at_a_time(comm: Communicator, engine: str) -> None:
    given = PowerSGD(2)
    first = Training(comm, engine, given)
    first.run(1)
    copied = copy.deepcopy(given)  # has states of its own
    with pytest.raises(mpidl.ConfigurationError, match="powersgd:2, that serves another engine already"):
        Training(comm, engine, given).run(1)
    Training(comm, engine, copied).run(1)
    del first
    Training(comm, engine, given).run(1)
    unused = DeepGradient(0.1)
    if engine != "ddp":
        with pytest.raises(mpidl.ConfigurationError, match="has momentum"):
            Training(comm, engine, unused)
        Training(comm, engine, unused, {"lr": 0.1}).run(1)  # no engine had it


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("int9", "compress: got 'int9'; needs one of"),
        ("int8:3", "compress: got int8:3; int8 has no settings"),
        ("auto:3", "compress: got 'auto:3'; needs one of"),
        ("powersgd:0", "compress: got 'powersgd:0': rank '0'; needs an integer from 1 up"),
        ("topk:1.5", "compress: got 'topk:1.5': fraction '1.5'; needs a part of the values, above 0 and up to 1"),
        ("topk:5000", "compress: got 'topk:5000': fraction '5000'; needs a part of the values"),
        ("randomk:nan", "compress: got 'randomk:nan': fraction 'nan'; needs a part of the values"),
        ("dgc:2", "compress: got 'dgc:2': fraction '2'; needs a part of the values"),
        ("sketch:0", "compress: got 'sketch:0': fraction '0'; needs a part of the values"),
        (3, "compress: got int; needs a name"),
    ],
)
@engines
def test_wrong_settings_are_one_error_on_every_rank(comm: Communicator, engine: str, given: Any, message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        Training(comm, engine, given)
    with pytest.raises(mpidl.ConfigurationError, match="where: got 'here'"):
        Compression("int8", where="here")
    wrong = comm.rank == comm.size - 1
    where = "" if comm.size == 1 or wrong else rf".* \(on rank {comm.size - 1}\)$"
    with pytest.raises(mpidl.ConfigurationError, match=message + where):
        Training(comm, engine, given if wrong else "int8")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "given",
    [
        ("int8", "int4"),
        ("int8", None),
        ("topk:0.1", "topk:0.2"),
        (Compression("int8", start_step=1), Compression("int8", start_step=2)),
        (Compression("auto", allow=("int8",)), "auto"),
    ],
    ids=str,
)
@engines
def test_ranks_that_compress_otherwise_are_one_error_on_every_rank(
    comm: Communicator, engine: str, given: tuple[Any, Any]
) -> None:
    with pytest.raises(mpidl.errors.ModelMismatch) as raised:
        Training(comm, engine, given[comm.rank == comm.size - 1])
    told = all_gather_object(comm, str(raised.value))
    assert set(told) == {told[0]}
    made = [None if each is None else compression(each) for each in given]
    assert f"rank 0 has compress={made[0]}, rank {comm.size - 1} has compress={made[1]}" in told[0]


@engines
def test_another_hook_is_refused(comm: Communicator, engine: str) -> None:
    training = Training(comm, engine, "bf16")
    with pytest.raises(mpidl.ConfigurationConflict, match="has a hook already"):
        (training.called if engine == "ddp" else training.optimizer).register_comm_hook(
            None, mpidl.comm_hooks.allreduce
        )


@pytest.mark.parametrize("method", ["int8", "topk:0.5", "powersgd:1", "dgc:0.5"])
def test_another_default_dtype_of_torch_changes_no_bit(comm: Communicator, method: str) -> None:
    def trained() -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30, dtype=torch.float32)
        called = mpidl.DistributedDataParallel(model, process_group=comm, compress=method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        random = torch.Generator().manual_seed(comm.rank)
        for _ in range(4):
            called(torch.randn(5, 40, generator=random, dtype=torch.float32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().clone()

    expected = trained()
    torch.set_default_dtype(torch.float64)
    try:
        found = trained()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
