"""The compressors under test, and a reduction of one section by them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from collectives import Communicator
from mpidl.gradients.compression import Compressor, Exchange, Matrix, Section
from mpidl.gradients.compression.pipeline import Pipeline

# The name for `compress=`, and the largest error of one reduction's mean of normal values, of their norm.
METHODS = {"bf16": 8e-3, "fp16": 1e-3, "int8": 1.5e-2, "int4": 0.3, "sign": 4.0}

# How far losses may go from those of full precision in a few steps, where that is more than 0.05; and the steps in
# which errors vanish, where these are more than 20.
LOSS_TOLERANCES = {"sign": 0.25}
STEPS_TO_VANISH = {"sign": 200}


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
) -> torch.Tensor:
    """Reduces `values`, which then hold the remainder. Returns the mean, with needs_all=False of the own piece."""
    elements = values.numel()
    edges = [number * elements // comm.size for number in range(comm.size + 1)]
    pieces = list(pairwise(edges))
    start, stop = pieces[comm.rank]
    starts = [sum(p.numel() for p in parameters[:number]) for number in range(len(parameters))]
    section = Section(
        key=key,
        values=values,
        result=torch.empty(elements if needs_all else stop - start),
        pieces=pieces,
        parameters=[Matrix(p, at) for p, at in zip(parameters, starts, strict=True)],
        contributions=comm.size,
        needs_all=needs_all,
        keeps_remainder=keeps_remainder,
        step=step,
    )
    exchange = exchange or Exchange([comm.duplicate() for _ in range(compressor.phases)])
    Pipeline().start(compressor.reduce(section, exchange), lambda: None).wait()
    return section.result


def contribution(rank: int, elements: int, step: int = 0) -> torch.Tensor:
    """Normal values of a rank, of sizes that differ from place to place."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(elements, generator=random) * torch.logspace(-2, 2, elements)


def total(comm: Communicator, values: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, in float64."""
    summed = values.double()
    comm.all_reduce(summed)
    return summed
