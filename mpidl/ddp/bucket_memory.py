"""Memory of gradient buckets: one array of symmetric memory for each dtype, which outlives a new order.

arena of fp32    [ bucket 0: g9 g8 .. | bucket 1: g7 g6 g5 .. | ... ]      each bucket begins with a cache line
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives import Communicator

from ..gradients.buckets import GradientBucket, aligned


class BucketMemory:
    """The storage of buckets, one array a dtype, with room for the same parameters in any order and any buckets."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._arrays: dict[torch.dtype, torch.Tensor] = {}

    def lay_out(self, buckets: Sequence[GradientBucket]) -> None:
        """Gives each bucket its storage, whatever lay there before. Collective if there is too little room."""
        self._make_room([p for bucket in buckets for p in bucket.parameters])
        used_elements: dict[torch.dtype, int] = {}
        for bucket in buckets:
            start = used_elements.get(bucket.dtype, 0)
            used_elements[bucket.dtype] = start + aligned(bucket.layout.padded, bucket.dtype)
            bucket.allocate(self._arrays[bucket.dtype][start:])

    def _make_room(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        needed: dict[torch.dtype, int] = {}
        for p in parameters:
            needed[p.dtype] = needed.get(p.dtype, 0) + aligned(max(1, p.numel()), p.dtype)
        kept = {d: array for d, array in self._arrays.items() if len(array) >= needed.get(d, 1)}
        self._arrays = kept  # the others are given up before new ones are made
        for dtype, size in needed.items():
            if dtype not in kept:
                self._arrays[dtype] = self._comm.empty(size, dtype, device=self._device)
