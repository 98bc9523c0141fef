"""Functions at the borders of a region by themselves, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from collectives import Communicator, even_counts
from mpidl.tensor.communication import TensorGroup
from mpidl.tensor.functions import (
    CutProduct,
    column_product,
    copy_to_region,
    cut_sequence,
    gather_to_region,
    join_sequence,
    sum_of_region,
    summed_gradients,
)

pytestmark = pytest.mark.mpi

BATCH, LENGTH, WIDTH = 2, 11, 3


def tensors(ranks: int, seed: int) -> torch.Tensor:
    """The ranks' tensors of whole sequences, [rank, batch, length, width], known on all."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(ranks, BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=random)


@dataclass(frozen=True)
class Border:
    """A function, and what it is to make of the inputs and the gradients of all ranks.

    whole: whether an input is of whole sequences, and a result. forward, backward: from those of all ranks, as
    whole sequences, to this rank's, as a whole sequence, of which a piece is this rank's piece.
    """

    call: Callable[[torch.Tensor, TensorGroup], torch.Tensor]
    whole: tuple[bool, bool]
    forward: Callable[[torch.Tensor, int], torch.Tensor]
    backward: Callable[[torch.Tensor, int], torch.Tensor]


def joined(pieces: torch.Tensor, rank: int) -> torch.Tensor:
    """Each rank's piece, one after the other."""
    counts = even_counts(LENGTH, len(pieces))
    starts = [sum(counts[:n]) for n in range(len(pieces))]
    return torch.cat([x[:, s : s + n] for x, s, n in zip(pieces, starts, counts, strict=True)], 1)


def own(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x[rank]


def total(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.sum(0)


BORDERS: dict[str, Border] = {
    "f of Shoeybi": Border(copy_to_region, (True, True), own, total),
    "g of Shoeybi": Border(sum_of_region, (True, True), total, own),
    "a parameter": Border(lambda x, group: summed_gradients([x], group)[0], (True, True), own, total),
    "into a region": Border(lambda x, group: gather_to_region(x, group, LENGTH), (False, True), joined, total),
    "cut": Border(cut_sequence, (True, False), own, joined),
    "joined where all compute the same": Border(
        lambda x, group: join_sequence(x, group, LENGTH), (False, True), joined, own
    ),
}


@pytest.mark.parametrize("name", BORDERS)
def test_forward_and_backward(comm: Communicator, name: str) -> None:
    border, group = BORDERS[name], TensorGroup(comm)
    counts = even_counts(LENGTH, comm.size)
    start = sum(counts[: comm.rank])
    piece = slice(start, start + counts[comm.rank])

    def here(x: torch.Tensor, is_whole: bool) -> Any:
        return (x if is_whole else x[:, piece]).contiguous()

    inputs, gradients = tensors(comm.size, 0), tensors(comm.size, 1)
    x = here(inputs[comm.rank], border.whole[0]).requires_grad_()
    y = border.call(x, group)
    torch.testing.assert_close(y.detach(), here(border.forward(inputs, comm.rank), border.whole[1]))
    y.backward(here(gradients[comm.rank], border.whole[1]))
    torch.testing.assert_close(x.grad, here(border.backward(gradients, comm.rank), border.whole[0]))


def test_the_sum_of_an_input_s_gradient_is_on_its_way_while_the_weight_s_is_computed(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            done.append(name)
            return plain(*arguments)

        monkeypatch.setattr(owner, name, call)

    noted(TensorGroup, "begin_all_reduce")
    noted(CutProduct, "weight_gradient")
    noted(TensorGroup, "finish_all_reduce")
    x = tensors(comm.size, 0)[0].requires_grad_()
    weight = torch.ones(5, WIDTH, dtype=torch.float64, requires_grad=True)
    column_product(x, weight, None, CutProduct(TensorGroup(comm), True, None)).sum().backward()
    assert done == ["begin_all_reduce", "weight_gradient", "finish_all_reduce"]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 5.0 * comm.size))
