"""A parameter's slice whose master may lie elsewhere, and whose new values may be held back.

values      what the optimizer steps on: a view of the shard for fp32 parameters on the CPU; else a master, in CPU
            memory or in the file
staged      new values in the parameters' dtype that wait to be seen, where the masters are in the file
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...buckets import Piece
from ..shards import ParameterShard
from ..slices import Slice

HALVES = (torch.float16, torch.bfloat16)


class OffloadedSlice(Slice):
    """A Slice that an OffloadedOptimizer steps on.

    room: gives the memory for a master in the file, from a slice and its dtype; None: in CPU memory.
    delayed: new values are seen when `publish` is called.

    index: of the parameter in the shard. elsewhere: the parameters are on an accelerator. in_file: the master is there.
    gradient: what `attach` gave, in the dtype and on the device of the reduction.
    """

    def __init__(
        self,
        shard: ParameterShard,
        number: int,
        piece: Piece,
        index: int,
        *,
        room: Callable[[OffloadedSlice, torch.dtype], torch.Tensor] | None = None,
        delayed: bool = False,
    ) -> None:
        self.shard, self.number, self.piece, self.index = shard, number, piece, index
        own = self.of(shard.values)
        half, self.elsewhere = own.dtype in HALVES, is_elsewhere(own)
        self.gradient: torch.Tensor | None = None
        self.staged: torch.Tensor | None = None
        self.is_master = half or self.elsewhere or delayed
        # Delayed weights are held in memory once more in any case: fp32 ones are their own masters.
        self.in_file = room is not None and (half or self.elsewhere)
        self._delayed = delayed
        values = own
        if self.is_master:
            dtype = torch.float32 if half else own.dtype
            values = room(self, dtype) if room is not None and self.in_file else host_empty(own, dtype)
            values.copy_(own)
        if delayed and self.in_file:
            self.staged = host_empty(own, own.dtype)
        self.values = torch.nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex())

    @property
    def size(self) -> int:
        """In elements."""
        return self.piece.stop - self.piece.start

    @property
    def largest(self) -> int:
        """What no rank's slice of the parameter exceeds, in elements."""
        return min(self.shard.layout.sizes[self.index], self.shard.layout.shard_size)

    def attach(self, gradient: torch.Tensor | None) -> None:
        """Remembers the slice's part of the bucket's reduced gradient; the step casts it, a part at a time."""
        self.gradient = None if gradient is None else self.of(gradient)

    def write_back(self) -> None:
        """Nothing to do: the step has delivered the new values."""

    @torch.no_grad()
    def deliver(self, start: int, stop: int, new: torch.Tensor) -> None:
        """Takes the new values of elements start .. stop: into the parameters, or aside until `publish`."""
        if not self.is_master:
            return
        if not self._delayed:
            self.of(self.shard.values)[start:stop].copy_(new)
        elif self.staged is not None:
            self.staged[start:stop].copy_(new)

    @torch.no_grad()
    def publish(self) -> None:
        """Makes values that were held back the parameters'."""
        if self._delayed:
            self.of(self.shard.values).copy_(self.values if self.staged is None else self.staged)

    @torch.no_grad()
    def show(self) -> None:
        """Makes the values, that somebody else than a step has written, the parameters'."""
        if self.is_master:
            self.of(self.shard.values).copy_(self.values)

    @torch.no_grad()
    def hold_back(self) -> None:
        """Has the values, that somebody else than a step has written, wait for `publish`."""
        if self.staged is not None:
            self.staged.copy_(self.values)

    def read_back(self) -> None:
        """As of a Slice; touches only what has changed, since masters may have to be written to a disk."""
        if self.is_master:
            own, master = self.of(self.shard.values).cpu(), self.values.detach()
            changed = own != master.to(own.dtype)
            if changed.any():
                master[changed] = own[changed].to(master.dtype)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Not in CPU memory, where the optimizer steps."""
    return tensor.device.type != "cpu"


def host_empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """CPU memory of a tensor's size; page-locked where the tensor is on an accelerator, for copies at full speed."""
    return torch.empty(like.shape, dtype=dtype, pin_memory=like.device.type == "cuda")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in CPU memory, complete when this returns."""
    return host_empty(tensor, tensor.dtype).copy_(tensor)
