"""The compressors under test, and a reduction of one section by them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from collectives import Communicator
from mpidl.gradients.compression import Compressor, Exchange, Matrix, Section
from mpidl.gradients.compression.pipeline import Pipeline

# The name for `compress=`, and the largest error of one reduction's mean of normal values, of their norm.
METHODS = {
    "bf16": 8e-3,
    "fp16": 1e-3,
    "int8": 1.5e-2,
    "int4": 0.3,
    "sign": 4.0,
    "powersgd:4": 1.0,
    "gradzip:4": 1.0,
    "topk:0.1": 0.7,
    "randomk:0.25": 1.0,
    "sketch:0.05,rows=3,columns=2": 1.0,
}
# Other settings of them, which the tests of single reductions go over too.
VARIANTS = METHODS | {
    "powersgd:2,fp16,batched": 1.0,
    "powersgd:3,bf16,alternating": 1.0,
    "powersgd:2,cold": 1.0,
    "topk:0.9": 0.5,
    "dgc:0.1": 0.7,
}
# Settings of PowerSGD that change what is sent, as engines run them in addition to METHODS.
ENGINE_VARIANTS = (
    "powersgd:4,batched",
    "powersgd:4,alternating",
    "powersgd:4,cold",
    "powersgd:4,fp16",
    "powersgd:4,bf16",
    "powersgd:2,fp16,batched",
    "powersgd:3,bf16,alternating",
)

# How far losses may go from those of full precision in a few steps, where that is more than 0.05: steps that send a
# small part of the gradients lag behind, until the errors fed back arrive.
LOSS_TOLERANCES = {"sign": 0.25, "powersgd:4": 0.2, "gradzip:4": 0.2, "topk:0.1": 0.2, "randomk:0.25": 0.2}
LOSS_TOLERANCES |= dict.fromkeys(ENGINE_VARIANTS, 0.2)
LOSS_TOLERANCES["sketch:0.05,rows=3,columns=2"] = 0.3
# The steps in which errors vanish, where these are more than 20.
_SLOW = ("powersgd", "gradzip", "topk", "randomk", "dgc", "sketch")
STEPS_TO_VANISH = {"sign": 200, **{name: 60 for name in VARIANTS if name.startswith(_SLOW)}}


class Counted:
    """A Communicator that counts the bytes which a rank sends in its operations. sent: since it was made."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.sent = comm, 0.0
        self.rank, self.size = comm.rank, comm.size

    def all_reduce(self, values: torch.Tensor, *given: Any, **settings: Any) -> Any:
        self.sent += 2 * (self.size - 1) / self.size * values.nbytes
        return self.comm.all_reduce(values, *given, **settings)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, **settings: Any) -> Any:
        self.sent += (self.size - 1) * own.nbytes
        return self.comm.all_gather(out, own, **settings)

    def reduce_scatter(self, out: torch.Tensor, values: torch.Tensor, **settings: Any) -> Any:
        self.sent += values.nbytes - out.nbytes
        return self.comm.reduce_scatter(out, values, **settings)

    def all_to_all(
        self, out: torch.Tensor, values: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], **settings: Any
    ) -> Any:
        self.sent += (sum(leaving) - leaving[self.rank]) * values.itemsize
        return self.comm.all_to_all(out, values, arriving, leaving, **settings)


def exchange_over(comm: Communicator, compressor: Compressor) -> Exchange:
    """An exchange over all ranks, whose Communicators count."""
    phases: list[Any] = [Counted(comm.duplicate()) for _ in range(compressor.phases)]
    return Exchange(phases)


def reduce_section(
    compressor: Compressor,
    comm: Communicator,
    values: torch.Tensor,
    needs_all: bool = True,
    keeps_remainder: bool = True,
    parameters: Sequence[torch.nn.Parameter] = (),
    key: object = None,
    step: int = 0,
    exchange: Exchange | None = None,
    needed: tuple[int, int] | None = None,
    arrays: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Reduces `values`, which then hold the remainder. Returns the mean, with needs_all=False of the own piece.

    A method of whole parameters always gets all of the mean; parameters: by default a matrix and a vector. arrays: of
    the compressor, by default zeros.
    """
    elements = values.numel()
    needs_all = needs_all or compressor.needs_whole
    parameters = parameters or (whole_parameters(elements) if compressor.needs_whole else ())
    edges = [number * elements // comm.size for number in range(comm.size + 1)]
    pieces = list(pairwise(edges))
    start, stop = pieces[comm.rank]
    starts = [sum(p.numel() for p in parameters[:number]) for number in range(len(parameters))]
    section = Section(
        key=key,
        values=values,
        result=torch.empty(elements if needs_all else stop - start),
        pieces=pieces,
        parameters=[Matrix(p, at, f"p{at}") for p, at in zip(parameters, starts, strict=True)],
        contributions=comm.size,
        needs_all=needs_all,
        keeps_remainder=keeps_remainder,
        step=step,
        needed=needed,
        arrays=[torch.zeros(elements) for _ in compressor.arrays] if arrays is None else arrays,
    )
    exchange = exchange or exchange_over(comm, compressor)
    Pipeline().start(compressor.reduce(section, exchange), lambda: None).wait()
    return section.result


@functools.cache
def whole_parameters(elements: int) -> list[torch.nn.Parameter]:
    """A matrix that is nearly square, and a vector of the other elements; always the same ones."""
    side = math.isqrt(elements)
    sizes = [(side, side)] + [(elements - side * side,)] * (elements > side * side)
    return [torch.nn.Parameter(torch.empty(size)) for size in sizes]


def contribution(rank: int, elements: int, step: int = 0) -> torch.Tensor:
    """Normal values of a rank, of sizes that differ from place to place."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(elements, generator=random) * torch.logspace(-2, 2, elements)


def total(comm: Communicator, values: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, in float64."""
    summed = values.double()
    comm.all_reduce(summed)
    return summed
