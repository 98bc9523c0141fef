"""A unit of stage 3 over several nodes: a rank's shards of it, and the memory in which its node keeps it whole.

shard         this rank's part of each flat group of parameters; the optimizer steps on it; always in memory
whole         the flat group, in memory that the node's ranks share; `gather` brings its pages, `discard` gives them
              back; the addresses stay, so that what autograd has saved of it is right once gathered anew. It holds
              the shards' values; with `compress_parameters=` decompressed ones, except in `gathered`
views         of `whole`, of the parameters' shapes: the parameters' data while the unit is held
placeholders  one NaN each, expanded to the parameter's shape: the parameters' data while the unit is released
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch

from collectives import Communicator
from collectives.devices import DevicePages, Pages

from ..parameter_shard import ParameterShard
from ..placeholder import placeholder
from .private_copy import PrivateCopy
from .released_parameter import BeforeRead, release, restore
from .units import FlatGroup, UnitLayout

if TYPE_CHECKING:
    from .compressed_gather import CompressedGather  # at run time where it is made: few programs need it


class FlatParameters:
    """A flat group that is whole at times. start: of `whole` in the pages, bytes."""

    def __init__(self, group: FlatGroup, comm: Communicator, pages: Pages | DevicePages, start: int) -> None:
        self._pages, self._start = pages, start
        self._parameters, self._shapes, self._dtype = list(group.parameters), group.shapes, group.dtype
        self.layout, self.nbytes = group.layout, group.nbytes
        device = group.parameters[0].device
        values = comm.empty(self.layout.shard_size, self._dtype, device=device).zero_()
        for p, piece in zip(self._parameters, self.layout.pieces(comm.rank), strict=True):
            part = p.detach().reshape(-1)[piece.start : piece.stop]
            values[piece.offset : piece.offset + part.numel()] = part
        self.shard = ParameterShard(self._parameters, self.layout, values, group.trains)
        self._placeholders = [placeholder(shape, self._dtype, device) for shape in self._shapes]
        self._private = PrivateCopy(self.shard, comm.rank)

    @property
    def whole(self) -> torch.Tensor:
        """The memory in which it is gathered."""
        return self._pages.tensor(self._start, self.layout.padded, self._dtype)

    def places(self) -> dict[torch.nn.Parameter, int]:
        """The addresses of the parameters in `whole`."""
        start, each = self._pages.address_of(self._start), self._dtype.itemsize
        places = zip(self._parameters, self.layout.offsets, strict=True)
        return {p: start + offset * each if p.numel() else 0 for p, offset in places}

    def covers(self, address: int) -> bool:
        """Tells if an address lies in `whole`."""
        start = self._pages.address_of(self._start)
        return start <= address < start + self.nbytes

    @staticmethod
    def page_bytes(group: FlatGroup) -> int:
        """Bytes of the whole pages that a group takes."""
        return -(-group.nbytes // Pages.SIZE) * Pages.SIZE

    def gather(self, comm: Communicator, reserves: bool, compressed: CompressedGather | None) -> int:
        """Gathers `whole` from all shards, in full precision or compressed. Collective. Returns the gathered bytes.

        reserves: whether this rank brings the pages of its node.
        """
        if reserves:
            self._pages.reserve(self._start, self.nbytes)
        if compressed is not None:
            return compressed.gather(self.whole, self.shard.values)
        comm.all_gather(self.whole, self.shard.values)
        return self.nbytes

    def discard(self) -> None:
        """Gives the pages of `whole` back."""
        self._pages.discard(self._start, self.nbytes)

    def hold(self, watched: bool = False) -> None:
        """Makes the parameters views of what was gathered. watched: operators on them go on to call back."""
        self._point_to(self.layout.views(self.whole, self._shapes), watched)

    def release(self, before_read: BeforeRead) -> None:
        """Makes the parameters placeholders, which are not to be used."""
        for p, empty in zip(self._parameters, self._placeholders, strict=True):
            release(p, empty, before_read)

    def copy(self) -> None:
        """Makes the parameters views of a copy of this rank's own, of what was gathered, for one block more."""
        self._private.open(self.whole, self._point_to, self.hold)

    def follow(self) -> None:
        """Lets the copy, if there is one, take what was gathered meanwhile."""
        self._private.follow(self.whole)

    def keep_changes(self) -> None:
        """Takes this rank's shard from the copy, and gives the copy up at the end of the outermost block."""
        self._private.close(self.hold)

    def discard_copy(self) -> None:
        """Ends a block without its changes."""
        self._private.discard(self.hold)

    def _point_to(self, tensors: Sequence[torch.Tensor], watched: bool = False) -> None:
        for p, tensor in zip(self._parameters, tensors, strict=True):
            restore(p, tensor, watched)


class UnitState(Enum):
    """The memory that a unit takes on this rank, besides its shard, which is always there.

    RELEASED: the parameters are placeholders of one element. The node's memory of the whole unit has no pages, unless
        another rank of the node holds the unit.
    HELD: the parameters are views of the whole unit in its node's memory. Its module computes, or its backward pass is
        not complete; then it is released.
    HELD_TO_END: the same until the end of the pass, as something may read the weights that cannot be followed: an
        output that is a view of them, a use outside the module, gradients that come by other ways than the outputs.

    A unit that a `gathered` block pins (`pin_count`) is held, and not released before the block's end.
    """

    RELEASED = "released"
    HELD = "held"
    HELD_TO_END = "held to the end of the pass"


class GatheredUnit:
    """A unit's flat parameters, and their state on this rank. It does not keep the model, as graphs keep it.

    number: int; of the unit in messages between the ranks.
    name: of its module.
    flats: list of FlatParameters.
    whole_bytes: int; of all of them, whole.
    exact: whether it was gathered in full precision the last time; the same on all ranks.
    trained: int; parameters that train.
    frozen: whether any parameter does not.
    state: UnitState.
    pin_count: int; `gathered` blocks that hold it.
    arrived: set of trained parameters whose gradient this backward pass has given since the unit was last gathered.
    open_calls: dict of a call's id to int; calls whose backward has begun and not ended, and the number of their inputs
        whose gradient is to come.
    """

    def __init__(
        self,
        number: int,
        layout: UnitLayout,
        comm: Communicator,
        pages: Pages | DevicePages,
        start: int,
        compressed: CompressedGather | None = None,
    ) -> None:
        self.number, self.name = number, layout.unit.name
        self._compressed = compressed
        self._reserves = comm.local_rank == 0 or not pages.shared
        self.flats: list[FlatParameters] = []
        for group in layout.groups:
            self.flats.append(FlatParameters(group, comm, pages, start))
            start += FlatParameters.page_bytes(group)
        self.whole_bytes = sum(flat.nbytes for flat in self.flats)
        self.exact = compressed is None
        self.trained = sum(len(flat.shard.parameters) for flat in self.flats if flat.shard.trains)
        self.frozen = any(not flat.shard.trains for flat in self.flats)
        self.state = UnitState.RELEASED
        self.pin_count = 0
        self.arrived: set[torch.nn.Parameter] = set()
        self.open_calls: dict[int, int] = {}

    @staticmethod
    def page_bytes(layout: UnitLayout) -> int:
        """Bytes of the whole pages that a unit takes."""
        return sum(map(FlatParameters.page_bytes, layout.groups))

    @property
    def is_held(self) -> bool:
        """Tells if the parameters are whole on this rank."""
        return self.state is not UnitState.RELEASED

    @property
    def backward_done(self) -> bool:
        """Tells if this backward pass reads no weight of the unit any more.

        Once all trained parameters have their gradients; where it has frozen ones, once its inputs have theirs too.
        """
        return len(self.arrived) == self.trained and not (self.frozen and self.open_calls)

    @property
    def wants_exact(self) -> bool | None:
        """Tells if its values are to be in full precision, as a `gathered` block needs them; None: they always are."""
        return None if self._compressed is None else self.pin_count > 0

    @property
    def is_as_wanted(self) -> bool:
        """Tells if its values, where it is whole, are right."""
        return self.wants_exact in (None, self.exact)

    def gather(self, comm: Communicator, exact: bool) -> int:
        """Makes it whole in its node's memory, from all ranks' shards. Collective. Returns the gathered bytes."""
        self.exact = exact or self._compressed is None
        compressed = None if self.exact else self._compressed
        return sum(flat.gather(comm, self._reserves, compressed) for flat in self.flats)

    def discard(self) -> None:
        """Gives its node's memory back; no rank of the node holds it."""
        if self._reserves:
            for flat in self.flats:
                flat.discard()

    def shares(self, tensor: torch.Tensor) -> bool:
        """Tells if a tensor is a view of the whole parameters, and no parameter itself."""
        if isinstance(tensor, torch.nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
            return False
        return any(flat.covers(tensor.data_ptr()) for flat in self.flats)

    def hold(self, watched: bool = False) -> None:
        """Makes the parameters views of the whole unit, once it is gathered. watched: for a use outside its module."""
        self.state = UnitState.HELD
        for flat in self.flats:
            flat.hold(watched)

    def hold_to_end(self) -> None:
        """Lets a held unit stay held to the end of the pass."""
        if self.is_held:
            self.state = UnitState.HELD_TO_END

    def end_pass(self) -> None:
        """Lets the unit be released again, if it was held to the end of the pass."""
        if self.is_held:
            self.state = UnitState.HELD

    def release(self, before_read: BeforeRead) -> None:
        """Makes the parameters placeholders, until the unit is held again."""
        self.state = UnitState.RELEASED
        self.arrived.clear()
        self.open_calls.clear()
        for flat in self.flats:
            flat.release(before_read)
