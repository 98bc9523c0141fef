"""A parameter's slice whose master may lie in CPU memory or in a file, and whose new values may be held back.

values      what the optimizer steps on: a view of the shard for fp32 parameters on the CPU; else a master, in CPU
            memory or in the file
staged      new values in the parameters' dtype, in CPU memory, until they are published or copied to a GPU; used
            where `values` cannot be copied themselves, as they have a wider dtype or lie in the file
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from collectives.devices import Arrival, Copies

from ...gradients.buckets import Piece
from ..parameter_shard import ParameterShard
from ..slices import HALVES, Slice


class Gradient:
    """A slice's gradient where the optimizer steps. arrival: to be waited for before it is read."""

    def __init__(self, values: torch.Tensor, arrival: Arrival | None = None) -> None:
        self.values, self._arrival = values, arrival

    def range(self, start: int, stop: int) -> torch.Tensor:
        """Waits for elements start .. stop and returns them."""
        if self._arrival is not None:
            self._arrival.wait()
        return self.values[start:stop]


class OffloadedSlice(Slice):
    """A Slice that an OffloadedOptimizer steps on.

    make_master: gives the memory for a master in the storage, from a slice and its dtype; None: in CPU memory.
    delayed: new values are seen when `publish` is called.
    to_host, to_device: copy from and to where the parameters lie.

    index: of the parameter in the shard.
    on_accelerator: the parameters are.
    in_file: the master lies in the storage.
    gradient: what `attach` gave, in the dtype and on the device of the reduction.
    """

    def __init__(
        self,
        shard: ParameterShard,
        number: int,
        piece: Piece,
        index: int,
        *,
        to_host: Copies,
        to_device: Copies,
        make_master: Callable[[OffloadedSlice, torch.dtype], torch.Tensor] | None = None,
        delayed: bool = False,
    ) -> None:
        self._to_host, self._to_device = to_host, to_device
        self._inbox: torch.Tensor | None = None
        self.shard, self.number, self.piece, self.index = shard, number, piece, index
        own = self.view_in(shard.values)
        half, self.on_accelerator = own.dtype in HALVES, is_on_accelerator(own)
        self.gradient: torch.Tensor | None = None
        self.staged: torch.Tensor | None = None
        self.is_master = half or self.on_accelerator or delayed
        # Delayed weights are held in memory once more in any case: fp32 ones are their own masters.
        self.in_file = make_master is not None and (half or self.on_accelerator)
        self._delayed = delayed
        values = own
        if self.is_master:
            dtype = torch.float32 if half else own.dtype
            values = (
                make_master(self, dtype)
                if make_master is not None and self.in_file
                else to_device.room(own.numel(), dtype)
            )
            values.copy_(own)
        if (self.in_file and (delayed or self.on_accelerator)) or (half and self.on_accelerator):
            self.staged = to_device.room(own.numel(), own.dtype)
        self.values = torch.nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.piece.stop - self.piece.start

    @property
    def largest(self) -> int:
        """An upper bound of this parameter's slices on all ranks, in elements; the same on every rank."""
        return min(self.shard.layout.sizes[self.index], self.shard.layout.shard_size)

    def attach(self, gradient: torch.Tensor | None) -> None:
        """Remembers the slice's part of the bucket's reduced gradient; the step casts it, a part at a time."""
        self.gradient = None if gradient is None else self.view_in(gradient)

    def write_back(self) -> None:
        """Does nothing: the step has delivered the new values."""

    @torch.no_grad()
    def deliver(self, start: int, stop: int, new: torch.Tensor) -> None:
        """Writes new values of elements start .. stop into the parameters, or stages them until `publish`."""
        if not self.is_master:
            return
        if self.staged is not None:
            self.staged[start:stop].copy_(new)
        if not self._delayed:
            self._send(start, stop, new)

    @torch.no_grad()
    def publish(self) -> None:
        """Makes values that were held back the parameters'."""
        if self._delayed:
            self._send(0, self.size, self.values if self.staged is None else self.staged)

    def _send(self, start: int, stop: int, new: torch.Tensor) -> None:
        """Copies into the parameters; on a GPU from host memory that stays, so that no thread waits for the copy."""
        place = self.view_in(self.shard.values)[start:stop]
        if self.on_accelerator:
            kept = self.values.detach() if self.staged is None else self.staged
            self._to_device.start(place, kept[start:stop])
        else:
            place.copy_(new)

    def fetch(self, copied: bool) -> Gradient:
        """The gradient that `attach` gave, for a step. copied: as a copy, which passes that follow do not change."""
        given, self.gradient = self.gradient, None
        assert given is not None
        if not self.on_accelerator:
            return Gradient(given.clone() if copied else given)
        if self._inbox is None or self._inbox.dtype != given.dtype:
            self._inbox = self._to_host.room(self.size, given.dtype)
        return Gradient(self._inbox, self._to_host.start(self._inbox, given))

    @torch.no_grad()
    def publish_values(self) -> None:
        """Writes values that were set otherwise than by a step into the parameters' shard."""
        if self.is_master:
            self.view_in(self.shard.values).copy_(self.values)

    @torch.no_grad()
    def hold_back(self) -> None:
        """Stages values that no step has made, until `publish`."""
        if self.staged is not None:
            self.staged.copy_(self.values)

    def update_master_from_param(self) -> None:
        """Updates the master as `Slice` does; touches only what has changed, as masters may lie on a disk."""
        if self.is_master:
            own, master = self.view_in(self.shard.values).cpu(), self.values.detach()
            changed = own != master.to(own.dtype)
            if changed.any():
                master[changed] = own[changed].to(master.dtype)


def is_on_accelerator(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is outside CPU memory, where the optimizer steps."""
    return tensor.device.type != "cpu"
