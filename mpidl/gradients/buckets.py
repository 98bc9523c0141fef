"""Layout of gradients in buckets: each parameter's slot in a flat buffer, and the buffer's cuts over the ranks.

    parameters, in reverse     p9  p8  p7 | p6 p5 | p4 ...       about the order in which gradients arrive
    bucket 0                  [g9 0 | g8 0 | g7 0 | 0 0 ]        each is aligned to a cache line
    cut over 4 ranks          [  0  |   1   |  2  |  3  ]        so is each shard; a cut may go through a parameter

DDP and the three stages of ZeRO use it. A `BucketLayout` says where each parameter lies and how the buffer is cut. A
`GradientBucket` is the storage of one layout's gradients; `bucket_queue` fills and launches them.

Alignment keeps results bit-equal: a matrix product chooses its loop by the address of an operand, and torch aligns
memory of the host to cache lines. Padding is zero in every buffer and shard, so sums and norms of a shard are those of
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from collectives import Communicator, Work

MIB = 1 << 20
FIRST_BUCKET_MB = 1.0  # of DDP
CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class Piece:
    """The part of one parameter in a shard: elements start..stop of it, from `offset` in the shard on."""

    start: int
    stop: int
    offset: int

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """The piece's place in a flat shard, as a view."""
        return flat[self.offset : self.offset + self.stop - self.start]


@dataclass(frozen=True)
class BucketLayout:
    """Parameters of one dtype in a flat buffer, each from the start of a cache line, cut into `ranks` equal shards.

    sizes: elements of each parameter.
    line: elements of a cache line, or of several that no edge may cut.
    """

    sizes: tuple[int, ...]
    ranks: int
    line: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each parameter."""
        return self._starts[:-1]

    @property
    def padded(self) -> int:
        """Elements of the buffer."""
        return self.shard_size * self.ranks

    @cached_property
    def shard_size(self) -> int:
        """Elements of a rank's shard, whole lines."""
        return _round_up(-(-self._starts[-1] // self.ranks), self.line)

    @cached_property
    def padding(self) -> torch.Tensor:
        """The numbers of the elements that belong to no parameter: int64, on the CPU."""
        ends = [start + size for start, size in zip(self.offsets, self.sizes, strict=True)]
        gaps = zip([0, *ends], [*self.offsets, self.padded], strict=True)
        return torch.tensor([number for gap in gaps for number in range(*gap)], dtype=torch.int64)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate((_round_up(size, self.line) for size in self.sizes), initial=0))

    def shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's shard of a buffer, as a view."""
        return flat[rank * self.shard_size : (rank + 1) * self.shard_size]

    def views(self, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """The parameters' slots in a buffer, as views of the given shapes."""
        places = zip(self.offsets, self.sizes, shapes, strict=True)
        return [flat[offset : offset + size].view(shape) for offset, size, shape in places]

    def piece(self, index: int, rank: int) -> Piece:
        """The piece of a parameter in a rank's shard; empty if the shard holds nothing of it."""
        low, high = rank * self.shard_size, (rank + 1) * self.shard_size
        offset, size = self.offsets[index], self.sizes[index]
        start = min(max(low - offset, 0), size)
        stop = max(min(high - offset, size), start)
        return Piece(start, stop, min(max(offset - low, 0), self.shard_size))

    def whole(self, index: int) -> Piece:
        """The whole of a parameter in the buffer."""
        return Piece(0, self.sizes[index], self.offsets[index])

    def pieces(self, rank: int) -> list[Piece]:
        """The piece of each parameter in a rank's shard."""
        return [self.piece(index, rank) for index in range(len(self.sizes))]


def layout_of(parameters: Sequence[torch.Tensor], ranks: int, block: int = 1) -> BucketLayout:
    """The layout of these parameters, in their order. block: elements that no shard's edge may separate."""
    line = math.lcm(line_of(parameters[0].dtype), block)
    return BucketLayout(tuple(p.numel() for p in parameters), ranks, line)


def line_of(dtype: torch.dtype) -> int:
    """Elements of a cache line."""
    return max(1, CACHE_LINE // dtype.itemsize)


def _round_up(elements: int, line: int) -> int:
    return -(-elements // line) * line


def assign(
    parameters: Iterable[torch.nn.Parameter], cap_bytes: float, first_cap_bytes: float | None = None
) -> list[list[torch.nn.Parameter]]:
    """Groups parameters, in their order, one dtype a bucket, each bucket closed once it reaches the cap.

    parameters: in the order in which their gradients arrive, which is about the reverse of the model's.
    first_cap_bytes: the cap of the first bucket, small so that communication starts early.
    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2.
    """
    closed: list[list[torch.nn.Parameter]] = []
    filling: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for p in parameters:
        bucket = filling.setdefault(p.dtype, [])
        bucket.append(p)
        cap = first_cap_bytes if first_cap_bytes is not None and not closed else cap_bytes
        if sum(q.numel() for q in bucket) * p.element_size() >= cap:
            closed.append(filling.pop(p.dtype))
    return closed + list(filling.values())


def rank_order_algorithm(comm: Communicator, operation: str) -> str:
    """Returns the algorithm that adds in rank order if ranks of a node share memory: bucket sizes change no bit.

    MPI's own reductions, which "auto" takes for small buffers, add in an order that depends on the size. Over several
    nodes it also sends the fewest bytes between them.
    """
    offered = comm.algorithms(operation)
    return next((name for name in ("symmetric", "hierarchical") if name in offered), "auto")


def parameter_view(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's slot, a flat piece of storage, as a view of its shape and, where it is dense, of its strides."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return flat.view(parameter.shape)
        expected *= size
    return flat.as_strided(parameter.shape, parameter.stride())


def aligned(elements: int, dtype: torch.dtype) -> int:
    """Rounds a number of elements up to whole cache lines, so that what lies behind them begins with one."""
    return _round_up(elements, line_of(dtype))


class GradientBucket:
    """The flat gradient storage of a group of parameters of one dtype.

    layout: where each parameter lies, and how the bucket is cut over the ranks; by default not cut.
    flat: the storage, `layout.padded` elements, or None while it is not needed.
    views: the parameters' slots in it.
    ready: per parameter, whether this backward pass has finished it.
    launched: whether this pass has started the collective.
    work: the collective under way.
    streams: those whose work has filled it in this pass (`Place.stream`).
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: BucketLayout | None = None) -> None:
        self.parameters = list(parameters)
        self.layout = layout_of(parameters, 1) if layout is None else layout
        self.dtype = parameters[0].dtype
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.ready = [False] * len(self.parameters)
        self.launched = False
        self.work: Work | None = None
        self.streams: set[Any] = set()
        self._padding = self.layout.padding

    def allocate(self, storage: torch.Tensor) -> None:
        """Lays the bucket out in `storage`, at least `layout.padded` elements."""
        self.flat = storage[: self.layout.padded]
        self._padding = self._padding.to(storage.device)
        self.clear_padding()
        places = zip(self.parameters, self.layout.offsets, self.layout.sizes, strict=True)
        self.views = [parameter_view(self.flat[offset : offset + size], p) for p, offset, size in places]

    def clear_padding(self) -> None:
        """Zeroes what belongs to no parameter."""
        assert self.flat is not None
        self.flat.index_fill_(0, self._padding, 0)

    def release(self) -> None:
        """Forgets the storage."""
        self.flat, self.views = None, []

    @property
    def nbytes(self) -> int:
        """Bytes of the storage when it is there."""
        return self.layout.padded * self.dtype.itemsize


def bucket_stats(buckets: Sequence[GradientBucket], names: Mapping[torch.nn.Parameter, str]) -> dict[str, Any]:
    """Describes the buckets of an engine for its `stats`: names of their parameters, and their bytes."""
    return {
        "buckets": [[names[p] for p in bucket.parameters] for bucket in buckets],
        "bucket_bytes": [bucket.nbytes for bucket in buckets],
    }
