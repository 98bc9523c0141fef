"""Pool of flat buffers in symmetric memory, in which gradients are collected and reduced.

    dedicated   [ the model's own ]       one for each of some buckets, which fill all through a pass
    shared      [ a block ] [ a block ]   some for each dtype, as large as the largest of the other buckets, the second
                                          largest, ...; a bucket holds one from its first gradient until it is reduced

All ranks allocate symmetric memory together, so at construction. How many buckets have a buffer at a time, and in which
order they take them, may differ between the ranks; taking and releasing are local.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives import Communicator

from ...gradients.buckets import GradientBucket, aligned


class BufferPool:
    """Buffers for the gradients of buckets. Construction is collective.

    shared: int; buffers of each dtype that buckets share.
    dedicated: list of buckets that have buffers of their own.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        comm: Communicator,
        shared: int,
        dedicated: Sequence[GradientBucket],
        device: torch.device,
    ) -> None:
        self._dedicated: dict[GradientBucket, torch.Tensor] = {}
        self._shared: list[torch.Tensor] = []  # those that no bucket has now
        for dtype in dict.fromkeys(bucket.dtype for bucket in buckets):
            of_dtype = [bucket for bucket in buckets if bucket.dtype == dtype]
            own = [bucket for bucket in of_dtype if bucket in dedicated]
            others = sorted((b.layout.padded for b in of_dtype if b not in dedicated), reverse=True)[:shared]
            sizes = [aligned(size, dtype) for size in [*(b.layout.padded for b in own), *others]]
            if not any(sizes):
                continue
            # One allocation, in which each rank may choose another buffer.
            flats = comm.empty(sum(sizes), dtype, device=device).split(sizes)
            self._dedicated.update(zip(own, flats, strict=False))
            self._shared += [flat for flat in flats[len(own) :] if flat.numel()]
        self._places = {flat.data_ptr(): flat for flat in self._shared}

    @property
    def free(self) -> list[torch.Tensor]:
        """The buffers that no bucket has."""
        return [*self._shared, *(flat for bucket, flat in self._dedicated.items() if bucket.flat is None)]

    def take(self, bucket: GradientBucket) -> torch.Tensor | None:
        """A buffer for the bucket: its own, or the smallest that is free and large enough; None if there is none."""
        if bucket in self._dedicated:
            return self._dedicated[bucket]
        fitting = [
            number
            for number, flat in enumerate(self._shared)
            if flat.dtype == bucket.dtype and flat.numel() >= bucket.layout.padded
        ]
        if not fitting:
            return None
        return self._shared.pop(min(fitting, key=lambda number: self._shared[number].numel()))

    def release(self, flat: torch.Tensor) -> None:
        """Takes a buffer back from its bucket; a dedicated one stays that bucket's."""
        if flat.data_ptr() in self._places:
            self._shared.append(self._places[flat.data_ptr()])
