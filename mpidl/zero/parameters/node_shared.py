"""Stage 3 on one node, on CPUs or one GPU: parameters in memory that all ranks share; each rank updates its shard.

    shared memory   [ unit 0 | unit 1 | ... ]      one copy for the node: the model's parameters are views of it
    rank 0 updates  [ ##     | ##     | ... ]      each rank's optimizer writes its shard of each unit, in place;
    rank 1 updates  [    ##  |    ##  | ... ]      then the ranks meet, and all see all of it

Parameters are whole at any time, and forward and backward copy none. A rank's share of the node's copy is 1 / ranks.

Collectives separate the writes and reads of that memory in time, all in the thread of the program: a rank writes its
shards in a step only after the step's agreement, which each rank reaches after its backward pass; it reads them again
after the barrier in `publish`. A rank waits in these alone, and every rank calls them in the same order. Steps within
the backward pass: see `backward_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from collectives import Communicator
from collectives.devices import Place

from ...gradients.buckets import aligned
from ..parameter_shard import ParameterShard
from ..traffic import ZeroTraffic
from .private_copy import PrivateCopy, close_copies, discard_copies, open_copies
from .strategy import NamesOf, ParameterStrategy, unfreeze_shards
from .units import FlatGroup, UnitLayout, backward_order


class NodeSharedParameters(ParameterStrategy):
    """Moves a model's parameters into shared memory.

    layouts: from `units.lay_out`.
    arenas: from `shared_arenas`.
    place: where both lie.
    """

    write_effect: ClassVar = "the node has one copy, which every rank that did so has changed once more"

    def __init__(
        self, layouts: Sequence[UnitLayout], comm: Communicator, arenas: dict[torch.dtype, torch.Tensor], place: Place
    ) -> None:
        self._comm, self._place = comm, place
        self._arenas = arenas
        self._flats = []
        used_elements = dict.fromkeys(arenas, 0)
        for group in _groups(layouts):
            start = used_elements[group.dtype]
            used_elements[group.dtype] += aligned(group.layout.padded, group.dtype)
            whole = arenas[group.dtype][start : start + group.layout.padded]
            self._flats.append(_SharedFlat(group, whole, comm.rank, place))
        if comm.local_rank == 0:
            for flat in self._flats:
                flat.fill()
                flat.share()  # at once, so that no more than one flat is there twice
        self._wait_for_all()
        for flat in self._flats:
            flat.share()
        self.shards = [flat.shard for flat in self._flats]

    @property
    def traffic(self) -> ZeroTraffic:
        """Zeros: memory that all ranks share is never gathered."""
        return ZeroTraffic()

    def unfreeze(self, parameters: Sequence[torch.nn.Parameter], names_of: NamesOf) -> list[ParameterShard]:
        """Lets frozen shards train; errors as of `unfreeze_shards`."""
        return unfreeze_shards(self.shards, parameters, names_of)

    def step_problem(self) -> str | None:
        """Tells that the copies of a writable `gathered` block are in place of the parameters."""
        if any(flat.is_copied for flat in self._flats):
            return "inside `with optimizer.gathered(...):` no step can be taken, as the block's end would undo it"
        return None

    def release(self, *, inside_gathered: bool = False) -> None:
        """Returns when this rank's backward has ended; the step's agreement on what it reached says that all have."""
        self._place.synchronize()

    def publish(self) -> None:
        """Waits until every rank has written its shards; copies of open `gathered` blocks follow them."""
        self._wait_for_all()
        for flat in self._flats:
            flat.follow()

    def _wait_for_all(self) -> None:
        """Waits until every rank's work on the shared memory is complete."""
        self._place.synchronize()
        self._comm.barrier()

    @contextmanager
    def gathered(self, parameters: Iterable[torch.nn.Parameter] | None = None, writable: bool = True) -> Iterator[None]:
        """Whole parameters inside, of every unit that holds any of `parameters` (default: all). Collective.

        writable: as copies of this rank's own, of which its shard is kept; every rank must make the same changes. A
            block inside another has that one's copies.
        """
        if not writable:
            yield
            return
        wanted = None if parameters is None else set(parameters)
        chosen = [flat for flat in self._flats if wanted is None or wanted & set(flat.shard.parameters)]
        open_copies(chosen)
        try:
            yield
        finally:
            try:
                self._wait_for_all()
            except BaseException:  # others may be reading still
                discard_copies(chosen)
                raise
            close_copies(chosen)
            self._wait_for_all()

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """This rank's share of the node's copy: its shards."""
        return {"parameters": [shard.values for shard in self.shards]}


class _SharedFlat:
    """A flat group in the memory that ranks share. whole: its place in the arena."""

    def __init__(self, group: FlatGroup, whole: torch.Tensor, rank: int, place: Place) -> None:
        self._whole = whole
        self._views = group.layout.views(whole, group.shapes)
        own = place.with_own_storage(group.layout.shard(whole, rank))
        self.shard = ParameterShard(list(group.parameters), group.layout, own, group.trains)
        self._private = PrivateCopy(self.shard, rank)

    @property
    def is_copied(self) -> bool:
        """Tells if the parameters are views of a copy of this rank's own."""
        return self._private.is_open

    def fill(self) -> None:
        """Writes the parameters' values and the padding."""
        self._whole.index_fill_(0, self.shard.layout.padding.to(self._whole.device), 0)
        for p, view in zip(self.shard.parameters, self._views, strict=True):
            view.copy_(p.detach())

    def share(self) -> None:
        """Makes the parameters views of the shared memory."""
        self._point_to(self._views)

    def _point_to(self, views: Sequence[torch.Tensor]) -> None:
        for p, view in zip(self.shard.parameters, views, strict=True):
            p.data = view

    def copy(self) -> None:
        """Makes the parameters views of a copy, for one block more."""
        self._private.open(self._whole, self._point_to, self.share)

    def follow(self) -> None:
        """Updates the copy, if there is one, with what the shards have been given meanwhile."""
        self._private.follow(self._whole)

    def keep_changes(self) -> None:
        """Takes this rank's shard from the copy, and gives the copy up at the end of the outermost block."""
        self._private.close(self.share)

    def discard_copy(self) -> None:
        """Ends a block without its changes."""
        self._private.discard(self.share)


def _groups(layouts: Sequence[UnitLayout]) -> list[FlatGroup]:
    return [group for layout in backward_order(layouts) for group in layout.groups]


def shared_arenas(
    layouts: Sequence[UnitLayout], comm: Communicator, place: Place
) -> dict[torch.dtype, torch.Tensor] | None:
    """Memory that all ranks share for the units' parameters, one array a dtype; None if they cannot. Collective.

    Ranks with GPUs of their own would reach that of one of them only at the speed of what connects them.
    """
    if not place.is_same_for_all(comm):
        return None
    sizes: dict[torch.dtype, int] = {}
    for group in _groups(layouts):
        sizes[group.dtype] = sizes.get(group.dtype, 0) + aligned(group.layout.padded, group.dtype)
    arenas = {dtype: comm.shared(size, dtype, device=place.device) for dtype, size in sizes.items()}
    return arenas if comm.size == 1 or all(comm.is_shared(arena) for arena in arenas.values()) else None
