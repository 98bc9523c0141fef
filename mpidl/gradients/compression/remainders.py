"""The remainder of a section: what compression has not sent, added to the next step's gradients (error feedback).

On a rank it is the memory of the section's values, fp32. Summed over all ranks, and divided by the number of
contributions, remainders are what the mean of the gradients still lacks. That mean can move: into other
buckets, as DDP cuts them anew after its first pass, and through a checkpoint to any number of ranks.

    mean remainder of a parameter  =  sum over the ranks of their elements of it / contributions, in rows of its shape
    taken over by a section        =  mean remainder * contributions / peers, on each of the peers

A mean that waits for a section lies on the ranks in parts, one on each (`MeanPart`): together they hold it once.

The further arrays of a compressor (`Compressor.arrays`) are rows behind the remainder, and go the same way.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent", section 3; Karimireddy et al. 2019, "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import torch

from collectives import Communicator

from .section_layout import SectionLayout

Made = TypeVar("Made")
_UNEVEN = 1.5  # times the mean of the ranks' parts that the largest may have, for them to be runs of elements


@dataclass(eq=False)
class BucketSection:
    """A bucket's section, as it stays from step to step.

    parameters: of the bucket, starts: the first element of each in it, forms: its shape and strides there.
    values: the remainder, a row of the section's elements, and a row for each of the compressor's arrays; None without
    error feedback.
    former: the values of before the window `window`, which undo it; in later windows memory for their new values.
    repeats: how often a pass has reduced it again.
    kept: while a pass is under way, the values of before it of parameters that it does not reach, and their places.
    """

    parameters: list[torch.nn.Parameter]
    starts: list[int]
    forms: list[tuple[torch.Size, tuple[int, ...]]]
    layout: SectionLayout
    values: torch.Tensor | None = None
    former: torch.Tensor | None = None
    window: int | None = None
    repeats: int = 0
    kept: list[tuple[torch.nn.Parameter, slice, torch.Tensor]] = field(default_factory=list)

    def add(
        self,
        summed: torch.Tensor,
        window: int | None,
        absorb: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        """Adds a pass's sums to the remainder and returns it; without a remainder returns the sums.

        window: to be undone; None: never.
        absorb: makes of the sums what is added; gets the further arrays too.
        """
        if self.values is None:
            return absorb(summed, ())
        target = self.values
        if window is None:
            self.former = self.window = None
        elif window != self.window:
            target = torch.empty_like(self.values) if self.former is None else self.former
            target[1:] = self.values[1:]
        torch.add(self.values[0], absorb(summed, [*target[1:]]), out=target[0])
        if target is not self.values:
            self.former, self.values, self.window = self.values, target, window
        return target[0]

    def undo(self, window: int, parameters: Collection[torch.Tensor] | None) -> None:
        """Takes the remainders of these parameters, or of all, back to those of before a window."""
        if self.window != window or self.values is None or self.former is None:
            return
        if parameters is None or all(p in parameters for p in self.parameters):
            self.values, self.former, self.window = self.former, self.values, None
            return
        for p, place in self._places():
            if p in parameters:
                self.values[:, place] = self.former[:, place]

    def keep(self, parameters: Collection[torch.Tensor]) -> None:
        """Keeps the values of these parameters, before a pass's sums are added, for `put_back`."""
        if self.values is not None:
            self.kept = [(p, place, self.values[:, place].clone()) for p, place in self._places() if p in parameters]

    def put_back(self, reached: Collection[torch.Tensor]) -> None:
        """Takes the kept values of all parameters but these back."""
        for p, place, values in self.kept:
            if p not in reached and self.values is not None:
                self.values[:, place] = values
        self.kept = []

    def _places(self) -> Iterator[tuple[torch.nn.Parameter, slice]]:
        """Where each parameter lies in the section: a slice for each part of a block that has something of it."""
        for p, begin in zip(self.parameters, self.starts, strict=True):
            for at, start, stop in self.layout.parts():
                low, high = max(start, begin), min(stop, begin + p.numel())
                if low < high:
                    yield p, slice(at + low - start, at + high - start)

    def own_parameters(self) -> set[torch.nn.Parameter]:
        """The parameters that begin in this rank's part of the bucket."""
        parts = [(start, stop) for _, start, stop in self.layout.parts()]
        pairs = zip(self.parameters, self.starts, strict=True)
        return {p for p, at in pairs if any(start <= at < stop for start, stop in parts)}

    def begins(self) -> Iterator[tuple[torch.nn.Parameter, int]]:
        """The first parameter that begins in each local rank's part of the bucket, and the elements of that part."""
        for block in self.layout.blocks:
            for rank, elements in enumerate(block.counts):
                start, stop = block.part(rank)
                inside = (p for p, at in zip(self.parameters, self.starts, strict=True) if start <= at < stop)
                for p in islice(inside, 1):
                    yield p, elements

    def views(self, whole: torch.Tensor) -> list[list[torch.Tensor]]:
        """The places of each parameter in rows of the bucket's elements, as views of its shape."""
        places = list(zip(self.starts, self.forms, strict=True))
        return [[row[start:].as_strided(shape, strides) for row in whole] for start, (shape, strides) in places]


def of_means(
    section: BucketSection,
    comm: Communicator,
    make: Callable[[torch.nn.Parameter, Sequence[torch.Tensor]], Made],
    values: torch.Tensor | None = None,
) -> dict[torch.nn.Parameter, Made]:
    """Returns what is made of each parameter's mean remainder and arrays. Collective over all ranks of `comm`.

    make: gets the parameter and views of its shape in a bucket's memory, of which it must keep none.
    values: the section's own by default.
    """
    values = section.values if values is None else values
    assert values is not None
    whole = values.new_zeros(len(values), section.layout.elements)
    for at, start, stop in section.layout.parts():
        whole[:, start:stop] = values[:, at : at + stop - start]
    comm.all_reduce(whole)
    whole /= comm.size
    return {p: make(p, rows) for p, rows in zip(section.parameters, section.views(whole), strict=True)}


def take_over(
    section: BucketSection,
    means: Iterable[tuple[torch.nn.Parameter, torch.Tensor]],
    rows: int,
    contributions: int,
    peers: int,
) -> torch.Tensor:
    """Makes a section's values, so many rows, of those of its parameters' means; zero for those without."""
    device = section.parameters[0].device
    values = torch.zeros(rows, section.layout.size, device=device)
    whole: torch.Tensor | None = None
    places: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
    for p, mean in means:
        if whole is None:
            whole = torch.zeros(rows, section.layout.elements, device=device)
            places = dict(zip(section.parameters, section.views(whole), strict=True))
        for view, row in zip(places[p], mean, strict=True):
            view.copy_(row).mul_(contributions / peers)
    for at, start, stop in section.layout.parts() if whole is not None else ():
        assert whole is not None
        values[:, at : at + stop - start] = whole[:, start:stop]
    return values


@dataclass(frozen=True)
class MeanPart:
    """A rank's part of the means of a parameter that wait for a section: some indices of one dimension.

    shape: of the parameter, (1,) for one without dimensions.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor, a view of it where its elements lie in order."""
        return whole.reshape(self.shape).narrow(self.dim, self.start, self.stop - self.start)


def part_of(shape: Sequence[int], rank: int, ranks: int) -> MeanPart:
    """The part of a parameter's means that a rank holds: of the first dimension that can be cut evenly."""
    shape = tuple(shape) or (1,)
    dim = min(range(len(shape)), key=lambda each: max(_UNEVEN, -(-shape[each] // ranks) * ranks / max(shape[each], 1)))
    return MeanPart(shape, dim, shape[dim] * rank // ranks, shape[dim] * (rank + 1) // ranks)


@dataclass(frozen=True, eq=False)
class OwnPart:
    """Holds this rank's part of a parameter's means: a row for the remainder, and one for each array."""

    rows: torch.Tensor


Rows = OwnPart | Sequence[torch.Tensor]  # a parameter's means: this rank's part, or whole ones


def own_part(rows: Rows, comm: Communicator) -> torch.Tensor:
    """This rank's part of a parameter's mean remainder and arrays; of whole ones a copy."""
    if isinstance(rows, OwnPart):
        return rows.rows
    part = part_of(rows[0].shape, comm.rank, comm.size)
    return torch.stack([part.of(row) for row in rows])


def gathered(
    parts: Mapping[torch.nn.Parameter, torch.Tensor],
    parameters: Sequence[torch.nn.Parameter],
    rows: int,
    comm: Communicator,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yields parameters with their means, so many rows, of which each rank has a part. Collective.

    parts: this rank's; one that is missing counts as zeros.
    parameters: the same ones on every rank.
    """
    if not parameters:
        return
    places = [[part_of(p.shape, rank, comm.size) for p in parameters] for rank in range(comm.size)]
    sizes = [[rows * math.prod(part.part_shape) for part in own] for own in places]
    everyone = torch.empty(sum(map(sum, sizes)), device=parameters[0].device)
    pieces = [of_rank.split(own) for of_rank, own in zip(everyone.split([*map(sum, sizes)]), sizes, strict=True)]
    for p, piece in zip(parameters, pieces[comm.rank], strict=True):
        if p in parts:
            piece.copy_(parts[p].reshape(-1))
        else:
            piece.zero_()
    counts = [sum(own) for own in sizes]
    if everyone.numel():
        comm.all_gather(everyone, everyone.split(counts)[comm.rank], counts)
    for number, p in enumerate(parameters):
        whole = torch.empty(rows, *places[0][number].shape, device=everyone.device)
        for own, of_rank in zip(places, pieces, strict=True):
            part = own[number]
            target = whole.narrow(1 + part.dim, part.start, part.stop - part.start)
            target.copy_(of_rank[number].view(rows, *part.part_shape))
        yield p, whole.view(rows, *p.shape)
