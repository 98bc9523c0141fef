"""Pool of flat buffers in symmetric memory, in which gradients are collected and reduced.

    dedicated   [ the model's own ]       one for each of some buckets, which fill all through a pass
    shared      [ a block ] [ a block ]   some for each dtype, as large as the largest of the other buckets, the second
                                          largest, ...; a bucket holds one from its first gradient until it is reduced

All ranks allocate symmetric memory together, so at construction and in `set_buckets`. How many buckets have a buffer at
a time, and in which order they take them, may differ between the ranks; taking and releasing are local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives import Communicator
from collectives.devices import Place

from ...gradients.buckets import GradientBucket, aligned

# On a GPU, which the host may be ahead of: so many shared buffers of each dtype, if all together have so many bytes.
_GPU_BUFFERS, _GPU_BUFFER_BYTES = 8, 512 << 20

ROTATING = 3  # buckets of stage 2 that have memory at a time; of stage 3 the model's own, one that fills, one in flight


class BufferPool:
    """Buffers for the gradients of buckets. Construction is collective.

    buckets: those that take buffers; `set_buckets` sets others.
    num_shared: int; buffers of each dtype that buckets share.
    dedicated: list of buckets that have buffers of their own.
    place: where the parameters lie.
    saves_memory: shares no more than `num_shared` on a GPU either; else up to 8 there, see docs/gpu.md.

    readers: set of streams that last read a buffer; the caller makes the stream that fills a buffer wait for them, then
        clears the set.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        comm: Communicator,
        num_shared: int,
        dedicated: Sequence[GradientBucket],
        place: Place,
        saves_memory: bool,
    ) -> None:
        self._comm, self._place = comm, place
        self._num_shared, self._dedicated_buckets, self._saves_memory = num_shared, dedicated, saves_memory
        self.readers: set[Any] = set()
        self.set_buckets(buckets)

    def set_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Allocates buffers for these buckets, in place of those that there are. Collective.

        A bucket keeps the buffer that it has until it is released.
        """
        num_shared = self._count_shared(buckets)
        dedicated: dict[GradientBucket, torch.Tensor] = {}
        shared: list[torch.Tensor] = []
        for dtype in dict.fromkeys(bucket.dtype for bucket in buckets):
            of_dtype = [bucket for bucket in buckets if bucket.dtype == dtype]
            own = [bucket for bucket in of_dtype if bucket in self._dedicated_buckets]
            others = sorted((b.layout.padded for b in of_dtype if b not in self._dedicated_buckets), reverse=True)
            sizes = [aligned(size, dtype) for size in [*(b.layout.padded for b in own), *others[:num_shared]]]
            if not any(sizes):
                continue
            # One allocation, in which each rank may choose another buffer.
            flats = self._comm.empty(sum(sizes), dtype, device=self._place.device).split(sizes)
            dedicated.update(zip(own, flats, strict=False))
            shared += [flat for flat in flats[len(own) :] if flat.numel()]
        self._dedicated, self._shared = dedicated, shared  # shared: those that no bucket has now
        self._places = {flat.data_ptr(): flat for flat in shared}

    def _count_shared(self, buckets: Sequence[GradientBucket]) -> int:
        """The number of shared buffers of each dtype."""
        shared = self._num_shared
        if self._place.is_asynchronous and not self._saves_memory:
            others = sorted((b for b in buckets if b not in self._dedicated_buckets), key=lambda b: -b.nbytes)
            of_dtypes = [[b.nbytes for b in others if b.dtype == dtype] for dtype in {b.dtype for b in others}]
            while shared < _GPU_BUFFERS and sum(sum(s[: shared + 1]) for s in of_dtypes) <= _GPU_BUFFER_BYTES:
                shared += 1
        return shared

    @property
    def count(self) -> int:
        """The number of buffers, of all buckets together."""
        return len(self._places) + len(self._dedicated)

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

    def release(self, bucket: GradientBucket) -> None:
        """Takes a bucket's buffer back, which this stream was the last to read; a dedicated one stays the bucket's."""
        assert bucket.flat is not None
        address = bucket.flat.data_ptr()
        if address in self._places:
            self._shared.append(self._places[address])
        self.readers.add(self._place.stream())
        bucket.release()
