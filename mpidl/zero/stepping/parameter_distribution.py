"""Distribution of a parameter over ranks: which of its elements each has, where it is cut over dp, and perhaps tp too.

    dp x tp = 2 x 2, a weight [3, 4] cut by columns over tp, and each part, flat, over dp

    whole   a a b b      rank 0 (dp 0, tp 0)   a a a       rank 1 (dp 0, tp 1)   b b b
            a a b b      rank 2 (dp 1, tp 0)   a a a       rank 3 (dp 1, tp 1)   b b b
            a a b b

A parameter that is the same on all ranks of tp is given by the first of them and goes to all, so that its bits stay
equal. So is a part that several ranks of tp share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from collectives import Communicator

from ...errors import ConfigurationError
from ...job.objects import all_gather_object
from ...mesh import Cut, Mesh, Placement
from ...mesh.groups import DATA
from ..shard_group import ShardGroup


@dataclass(frozen=True)
class RankElements:
    """A rank's elements of one parameter. tp: its number there.

    count: of elements of its part of the parameter, the next ones in order.
    cut: the part's place in the whole parameter; None: it is the whole.
    is_source: whether the whole is made of it.
    """

    tp: int
    count: int
    cut: Cut | None
    is_source: bool


@dataclass(frozen=True)
class Distribution:
    """The elements of one parameter, by rank.

    shape: of the whole.
    by_rank: each rank's.
    """

    shape: torch.Size
    by_rank: tuple[RankElements, ...]

    @property
    def counts(self) -> list[int]:
        """Elements by rank."""
        return [held.count for held in self.by_rank]

    @property
    def source_counts(self) -> list[int]:
        """Elements of which the whole is made, by rank."""
        return [held.count if held.is_source else 0 for held in self.by_rank]

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Makes the whole of the ranks' pieces, flat, by rank, those that give none empty ones. Returns it flat."""
        whole = pieces[0].new_empty(self.shape.numel())
        parts = {held.tp: held.cut for held in self.by_rank if held.is_source}
        for tp, cut in parts.items():
            own = [piece for piece, held in zip(pieces, self.by_rank, strict=True) if held.is_source and held.tp == tp]
            if cut is None:
                torch.cat(own, out=whole)
            else:
                cut.write(torch.cat(own).view(cut.part_shape), whole.view(self.shape))
        return whole

    def concatenated(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' pieces of a whole, one after the other."""
        is_in_order = all(held.is_source and held.cut is None for held in self.by_rank)
        return whole.reshape(-1) if is_in_order else torch.cat(self.split(whole))

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's piece of a whole, flat, by rank."""
        parts: dict[int, torch.Tensor] = {}
        starts: dict[int, int] = {}
        pieces = []
        for held in self.by_rank:
            if held.tp not in parts:
                parts[held.tp] = (whole if held.cut is None else held.cut.of(whole.view(self.shape))).reshape(-1)
            start = starts.get(held.tp, 0)
            starts[held.tp] = start + held.count
            pieces.append(parts[held.tp][start : start + held.count])
        return pieces


def ranks_with_slices(over: ShardGroup, mesh: Mesh | None) -> Communicator:
    """The ranks that together hold the parameters that `over` has slices of. Collective over the mesh with tp."""
    if mesh is None or mesh.size("tp") == 1:
        return over.shard_comm
    axes = DATA if over.world is mesh.along(*DATA) else ("edp",)
    everyone = mesh.along(*axes, "tp")
    if over.replica_comm is None:
        return everyone
    first = np.array([everyone.rank])
    over.shard_comm.broadcast(first)
    mesh["tp"].all_reduce(first, "min")
    made = everyone.split(int(first[0]), everyone.rank)
    assert made is not None
    if made.size != over.size * mesh.size("tp"):
        raise ConfigurationError(
            f"shard_group: got groups of {over.size} ranks that differ over the {mesh.size('tp')} ranks of tp; needs "
            "the same ranks of dp x cp in each"
        )
    return made


def distributions(
    comm: Communicator, tp: int | None, parts: Sequence[tuple[torch.Size, list[int], int, Placement]]
) -> list[Distribution]:
    """Returns the distribution of each parameter. Collective over `comm` with tp, else local.

    comm: of `ranks_with_slices`.
    tp: this rank's number on tp; None where that has one rank.
    parts: of each parameter the shape here, the elements of every rank that has slices of it, this rank's number among
        these, and the placement.
    """
    if tp is None:
        return [
            Distribution(shape, tuple(RankElements(0, count, None, True) for count in counts))
            for shape, counts, _, _ in parts
        ]
    mine: list[Any] = []
    for _, counts, rank, placed in parts:
        is_cut = "tp" in placed.axes
        is_source = placed.counted if is_cut else tp == 0
        mine.append(RankElements(tp, counts[rank], placed.cut if is_cut else None, is_source))
    everyone = all_gather_object(comm, mine)
    found = []
    for number, (shape, _, _, placed) in enumerate(parts):
        whole = shape if mine[number].cut is None else torch.Size(placed.cut.shape)  # type: ignore[union-attr]
        found.append(Distribution(whole, tuple(held[number] for held in everyone)))
        given = sum(found[-1].source_counts)
        if given != whole.numel():
            raise ConfigurationError(
                f"place: the ranks of tp count {given} elements of a parameter of shape {tuple(whole)}; needs each of "
                f"its {whole.numel()} once: counted=False where another rank has the same"
            )
    return found
