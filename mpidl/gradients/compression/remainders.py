"""Means of remainders: what the mean of the gradients still lacks, as it moves to other buckets and ranks.

A remainder is what compression has not sent (`bucket_section`). Remainders, summed over all ranks and divided by the
number of contributions, are what the mean of the gradients still lacks. That mean can move: into other buckets, as DDP
cuts them anew after its first pass, and through a checkpoint to any number of ranks.

    mean remainder of a parameter  =  sum over the ranks of their elements of it / contributions, in rows of its shape
    taken over by a section        =  mean remainder * contributions / peers, on each of the peers

A mean that waits for a section lies on the ranks in parts, one on each (`MeanPart`): together they hold it once.

The further arrays of a compressor (`Compressor.arrays`) are rows behind the remainder, and go the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from collectives import Communicator

from .bucket_section import BucketSection

Made = TypeVar("Made")
_CHUNKS, _SMALLEST_CHUNK = 16, 1 << 14  # of a section, and elements: what is summed at a time, in double precision
_UNEVEN = 1.5  # times the mean of the ranks' parts that the largest may have, for them to be runs of elements


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
    # In double precision, so that the mean of equal values is that value, also over three ranks.
    for chunk in whole.view(-1).split(max(_SMALLEST_CHUNK, whole.numel() // _CHUNKS)):
        wide = chunk.double()
        comm.all_reduce(wide)
        chunk.copy_(wide.div_(comm.size))
    return {p: make(p, rows) for p, rows in zip(section.parameters, section.views(whole), strict=True)}


def take_over(
    section: BucketSection,
    means: Iterable[tuple[torch.nn.Parameter, torch.Tensor]],
    row_count: int,
    contributions: int,
    peers: int,
) -> torch.Tensor:
    """Makes a section's values, `row_count` rows, of its parameters' means; zero for those without."""
    device = section.parameters[0].device
    values = torch.zeros(row_count, section.layout.size, dtype=torch.float32, device=device)
    whole: torch.Tensor | None = None
    places: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
    for p, mean in means:
        if whole is None:
            whole = torch.zeros(row_count, section.layout.elements, dtype=torch.float32, device=device)
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
    row_count: int,
    comm: Communicator,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yields parameters with their means, `row_count` rows, of which each rank has a part. Collective.

    parts: this rank's; one that is missing counts as zeros.
    parameters: the same ones on every rank.
    """
    if not parameters:
        return
    places = [[part_of(p.shape, rank, comm.size) for p in parameters] for rank in range(comm.size)]
    sizes = [[row_count * math.prod(part.part_shape) for part in own] for own in places]
    all_parts = torch.empty(sum(map(sum, sizes)), dtype=torch.float32, device=parameters[0].device)
    pieces = [of_rank.split(own) for of_rank, own in zip(all_parts.split([*map(sum, sizes)]), sizes, strict=True)]
    for p, piece in zip(parameters, pieces[comm.rank], strict=True):
        if p in parts:
            piece.copy_(parts[p].reshape(-1))
        else:
            piece.zero_()
    counts = [sum(own) for own in sizes]
    if all_parts.numel():
        comm.all_gather(all_parts, all_parts.split(counts)[comm.rank], counts)
    for number, p in enumerate(parameters):
        whole = torch.empty(row_count, *places[0][number].shape, dtype=torch.float32, device=all_parts.device)
        for own, of_rank in zip(places, pieces, strict=True):
            part = own[number]
            target = whole.narrow(1 + part.dim, part.start, part.stop - part.start)
            target.copy_(of_rank[number].view(row_count, *part.part_shape))
        yield p, whole.view(row_count, *p.shape)
