"""Outputs of row-parallel layers that lie where their summands were written, and those for which there is no place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from collectives.backends.symmetric.processor import Processor
from mpidl import Mesh
from mpidl.tensor import RowParallelLinear, sum_memory
from tests.mpidl.tensor.reference import all_in_float64, build, largest_difference, loss_of, part_of, tokens, train

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

IN, OUT, ROWS = 7, 256, 80  # 160 KiB in float64


def layers(mesh: Mesh) -> tuple[nn.Linear, RowParallelLinear]:
    made: list[Any] = []
    for cls, own in ((nn.Linear, {}), (RowParallelLinear, {"mesh": mesh})):
        torch.manual_seed(0)
        made.append(cls(IN, OUT, dtype=torch.float64, **own))
    return made[0], made[1]


def random_input(number: int) -> torch.Tensor:
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def run(layer: nn.Linear, number: int, comm: Communicator) -> torch.Tensor:
    """Gives a layer this rank's features of an input."""
    before = (IN // comm.size) * comm.rank + min(comm.rank, IN % comm.size)
    y: torch.Tensor = layer(random_input(number)[:, before : before + layer.in_features])
    return y


def test_an_output_that_is_dropped_makes_room_for_the_next(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        _, layer = layers(mesh)
        places = {run(layer, number, comm).data_ptr() for number in range(5)}
        assert len(places) == 1
        kept = run(layer, 0, comm)[3:4, ::2]  # a view keeps it as well
        others = {run(layer, number, comm).data_ptr() for number in range(5)}
        assert len(others) == 1
        assert kept.untyped_storage().data_ptr() in places
        assert not others & places


@pytest.mark.parametrize("keeps", ["all", "one rank"])
def test_outputs_that_are_kept_keep_their_values(comm: Communicator, keeps: str) -> None:
    """Also where the ranks keep different ones, and where a program writes into them."""
    with Mesh(tp=comm.size, comm=comm) as mesh:
        whole, layer = layers(mesh)
        kept = []
        for number in range(9):
            y = run(layer, number, comm)
            if number % 3 == 0:
                y += 1
            if keeps == "all" or comm.rank == 0 or number % comm.size == comm.rank:
                kept.append((y, whole(random_input(number)) + (number % 3 == 0)))
        for y, expected in kept:
            torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_what_autograd_keeps_is_there_in_backward(comm: Communicator) -> None:
    """The sine keeps its argument; more of them than there are places."""
    with Mesh(tp=comm.size, comm=comm) as mesh:
        whole, layer = layers(mesh)
        for first in (0, 6):
            torch.stack([whole(random_input(first + n)).sin().sum() for n in range(6)]).sum().backward()
            torch.stack([run(layer, first + n, comm).sin().sum() for n in range(6)]).sum().backward()
        for p, q in zip(layer.parameters(), whole.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_a_place_is_free_when_no_tensor_is_left(dtype: torch.dtype) -> None:
    """In any order of shapes, more of them than are remembered, and with memory that grows meanwhile."""
    like = torch.empty(0, dtype=dtype)
    memory = sum_memory.SumMemory(
        lambda nbytes, of_each: torch.empty(nbytes, dtype=torch.uint8), lambda array: lambda: array.fill_(7)
    )
    for number in [*range(100), 3, 99, 0]:
        shape = (100 + number, 1, 331)
        taken = [memory.take(shape, like) for _ in range(sum_memory._NUM_BUFFERS)]
        assert memory.take(shape, like) is None
        kept = [each.tensor if each is not None else None for each in taken]
        taken[0].reduce()  # type: ignore[union-attr]
        del taken
        first, second = (each for each in kept if each is not None)
        assert bool((first == 7).all())
        assert (first.shape, first.dtype, first.is_contiguous()) == (shape, dtype, True)
        assert not first._is_view()
        first.fill_(1)
        second.fill_(2)
        part, place = first[2:3].detach(), first.data_ptr()
        del first
        kept[0] = None
        assert memory.take(shape, like) is None
        assert bool((part == 1).all())
        del part
        again = memory.take(shape, like)
        assert again is not None
        assert again.tensor.data_ptr() == place
        del again, second, kept


@pytest.mark.parametrize("name", ["gpt2", "hf gpt2"])
def test_a_model_trains_as_one_process_whatever_the_sums_lie_in(
    comm: Communicator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of these models are small, and would be copied."""
    monkeypatch.setattr(sum_memory, "_SMALLEST_BUFFERED", 1)
    whole, model = build(name), build(name)
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        assert train(model, 5) == pytest.approx(train(whole, 5), abs=1e-10)
        for batch in (4, 1):  # places grow, and are then too large
            losses = [loss_of(each, tokens(7, batch)) for each in (whole, model)]
            assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-10)
            for loss in losses:
                loss.backward()
        assert largest_difference(model, whole) < 1e-10


@pytest.mark.one_node
@pytest.mark.ranks(2, 3, 4)
def test_a_sum_reads_and_writes_each_byte_once_on_some_rank(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of t ranks adds up its part of n bytes of all summands, and writes it to each of them: no byte is copied."""
    touched = {"read": 0, "written": 0, "copied": 0}
    few = 1 << 10  # bytes: of what the mesh compares
    plain = Processor.calls

    def calls(self: Processor, op: Any, inputs: Any, outputs: Any, *others: Any) -> Any:
        touched["read"] += sum(x.nbytes for x in inputs if x.nbytes > few)
        touched["written"] += sum(x.nbytes for x in outputs if x.nbytes > few)
        return plain(self, op, inputs, outputs, *others)

    def copy(self: Processor, target: Any, source: Any) -> None:
        touched["copied"] += source.nbytes * (source.nbytes > few)
        target[...] = source

    monkeypatch.setattr(Processor, "calls", calls)
    monkeypatch.setattr(Processor, "copy", copy)
    with Mesh(tp=comm.size, comm=comm) as mesh:
        whole, layer = layers(mesh)
        y = run(layer, 0, comm)
        torch.testing.assert_close(y, whole(random_input(0)))
    total = np.array([touched["read"], touched["written"]])
    comm.all_reduce(total)
    assert total.tolist() == [comm.size * y.nbytes] * 2
    assert touched["copied"] == 0
