"""Collectives of activations over the ranks of tp, through symmetric memory.

    partial         memory of this rank in which the others can read; a product is written straight into it
    summand         the same, which becomes the result of all_reduce, where there is a buffer for it (`sum_memory`)
    all_reduce      partial -> a new tensor, the sum over the ranks, the same bits on each; or the summand itself
    reduce_scatter  partial -> a new tensor, this rank's piece of the sum
    all_gather      a piece -> a new tensor, the pieces of all ranks
    all_gather_by_chunks    a piece -> the pieces of all ranks, some tokens at a time, while the caller computes

A result is in memory of its own, so autograd may keep it as long as it wants, and the memory of `partial` is free for
the next product when a call returns. Only the thread that computes calls these, in the same order on every rank, as all
ranks of tp run the same model on the same inputs. With `overlaps` the progress thread of the Communicator carries out
the all-gathers, in this same order; what is called next is queued behind them. Without, nothing is ever queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives import Communicator, PartitionedAllReduce, Work, even_counts

from .input_check import refuse_different_inputs
from .sum_memory import Summand, SumMemory

_MOST_PREPARED = 64  # prepared reductions, one for each number of elements
_CHUNKS = 4  # of an all-gather during a product: three quarters of it may be hidden, and its products stay large


@dataclass
class Traffic:
    """Counts since construction, in operations and in elements of the whole tensors that they summed or gathered."""

    all_reduces: int = 0
    reduced: int = 0
    reduce_scatters: int = 0
    scattered: int = 0
    all_gathers: int = 0
    gathered: int = 0

    def count_all_reduce(self, tensor: torch.Tensor) -> None:
        """Counts the sum of a tensor."""
        self.all_reduces += 1
        self.reduced += tensor.numel()

    def count_reduce_scatter(self, tensor: torch.Tensor) -> None:
        """Counts the sum of a whole tensor of which each rank has its piece."""
        self.reduce_scatters += 1
        self.scattered += tensor.numel()

    def count_all_gather(self, tensor: torch.Tensor) -> None:
        """Counts the gathering of a whole tensor."""
        self.all_gathers += 1
        self.gathered += tensor.numel()

    def sent(self, ranks: int) -> float:
        """Elements that a rank sends for all this by algorithms that send the least, such as a ring."""
        return (2 * self.reduced + self.scattered + self.gathered) * (ranks - 1) / ranks


class TensorGroup:
    """A group of ranks that share layers: collectives of activations, and the memory that they need.

    comm: the ranks of tp. Sequences are cut along dimension 1 of [batch, sequence, width], by `piece_lengths`.
    overlaps: the ranks gather pieces while they compute.
    """

    def __init__(self, comm: Communicator, *, overlaps: bool = False) -> None:
        self.comm, self.rank, self.ranks = comm, comm.rank, comm.size
        self.overlaps = overlaps
        self.traffic = Traffic()
        self.check = comm.is_debugging
        self._slots: dict[torch.device, torch.Tensor] = {}
        self._sums = SumMemory(self._allocate_sums, self._prepare)
        self._partials: dict[tuple[Any, ...], Summand] = {}  # by shape, dtype and device
        self._summand_in_use: Summand | None = None  # what `partial` or `summand` has given last
        self._shared: dict[torch.device, list[torch.Tensor]] = {}
        self._partitioned: dict[tuple[int, torch.dtype, torch.device], tuple[torch.Tensor, PartitionedAllReduce]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        return self  # copies of a model communicate with the same ranks

    @property
    def nbytes(self) -> int:
        """Bytes of the symmetric memory: of this rank, and its share of what the ranks of a node have in common."""
        shared = sum(tensor.nbytes for pair in self._shared.values() for tensor in pair)
        own = sum(slot.nbytes for slot in self._slots.values()) + self._sums.nbytes
        return own + shared // len(self.comm.node_ranks)

    def piece_lengths(self, length: int) -> list[int]:
        """Lengths of the ranks' pieces of a sequence."""
        return even_counts(length, self.ranks)

    def piece_bounds(self, length: int) -> tuple[int, int]:
        """Start and end of this rank's piece of a sequence."""
        before = sum(self.piece_lengths(length)[: self.rank])
        return before, before + self.piece_lengths(length)[self.rank]

    def partial(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory for one summand, of this shape and of the dtype and device of `like`. Collective.

        Reduce it before the next call of `partial`, which may return the same memory.
        """
        key = (*shape, like.dtype, like.device)
        summand = self._partials.get(key)
        if summand is None:
            with torch.inference_mode(False):  # others may write into it later
                nbytes = math.prod(shape) * like.element_size()
                memory = self._slot(nbytes, like.device)[:nbytes].view(like.dtype).view(*shape)
            if len(self._partials) == _MOST_PREPARED:
                self._partials.pop(next(iter(self._partials)))
            summand = self._partials[key] = Summand(memory, self._prepare(memory), is_kept_in_place=False)
        self._summand_in_use = summand
        return summand.tensor

    def _prepare(self, array: Any) -> Callable[[], object]:
        """Returns the sum of an array over the ranks, in place, checked and chosen once."""
        return self.comm.prepare("all_reduce", array)

    def _slot(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Returns the memory of `partial`, of at least so many bytes. Collective, if it has to grow for them."""
        slot = self._slots.get(device)
        if slot is None or slot.numel() < nbytes:
            self._partitioned.clear()
            self._partials.clear()
            slot = self._slots[device] = self.comm.empty(nbytes, torch.uint8, device=device)
        return slot

    def _allocate_sums(self, nbytes: int, of_each: int) -> torch.Tensor:
        """Makes memory for sums, and `partial`'s as large: one rank may lack a free buffer when others have one."""
        self._slot(of_each, torch.device("cpu"))
        return self.comm.empty(nbytes, torch.uint8)

    def summand(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory for one summand, which `all_reduce` makes the sum in place where it can. Collective.

        For results that the model soon drops, as there are few such buffers. Arguments: see `partial`.
        """
        summand = self._sums.take(shape, like)
        if summand is None:
            return self.partial(shape, like)
        self._summand_in_use = summand
        return summand.tensor

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks. partial: what `partial` or `summand` has given last, not to be used afterwards.

        Collective.
        """
        begun, self._summand_in_use = self._summand_in_use, None
        assert begun is not None
        assert begun.tensor is partial
        self.traffic.count_all_reduce(partial)
        begun.reduce()
        return partial if begun.is_kept_in_place else partial.clone()

    def sum(self, x: torch.Tensor, *, is_kept: bool) -> torch.Tensor:
        """Sums a tensor over the ranks, which stays as it is. is_kept: a model keeps the sum for long. Collective."""
        partial = self.partial(x.shape, x) if is_kept else self.summand(x.shape, x)
        partial.copy_(x)
        return self.all_reduce(partial)

    def reduce_rows(self, rows: torch.Tensor, op: str = "sum") -> None:
        """Sums over the ranks in place, or takes the largest with "max": of a few numbers a token. Collective."""
        self.traffic.count_all_reduce(rows)
        self.comm.all_reduce(rows, op)

    def begin_all_reduce(self, partial: torch.Tensor) -> PartitionedAllReduce:
        """Lets the other ranks begin to sum; `finish_all_reduce` waits. In between this rank may compute. Collective.

        partial: from `partial`; not to be touched in between.
        """
        self.traffic.count_all_reduce(partial)
        key = (partial.numel(), partial.dtype, partial.device)
        if key not in self._partitioned:
            if len(self._partitioned) == _MOST_PREPARED:
                self._partitioned.pop(next(iter(self._partitioned)))
            flat = partial.view(-1)
            self._partitioned[key] = flat, self.comm.partitioned_all_reduce([flat])
        flat, reduction = self._partitioned[key]
        reduction.hand_in(flat)
        return reduction

    def finish_all_reduce(self, partial: torch.Tensor, reduction: PartitionedAllReduce) -> torch.Tensor:
        """Returns the sum over the ranks of what `begin_all_reduce` was given. Collective."""
        reduction.wait()
        return partial.clone()

    def reduce_scatter(self, partial: torch.Tensor, batch: int, length: int, width: int) -> torch.Tensor:
        """Sums over the ranks, and returns this rank's piece, [batch, piece, width]. Collective.

        partial: the ranks' pieces of [batch, length, width] one after the other, flat.
        """
        self.traffic.count_reduce_scatter(partial)
        pieces = self.piece_lengths(length)
        piece = partial.new_empty(batch, pieces[self.rank], width)
        self.comm.reduce_scatter(piece.view(-1), partial.view(-1), counts=[batch * n * width for n in pieces])
        return piece

    def all_gather(self, piece: torch.Tensor, length: int) -> torch.Tensor:
        """Joins the ranks' pieces, [batch, piece, width], to [batch, length, width]. Collective."""
        return self.begin_all_gather(piece, length)()

    def begin_all_gather(self, piece: torch.Tensor, length: int) -> Callable[[], torch.Tensor]:
        """Begins to join the ranks' pieces; what it returns waits for it. With `overlaps` in between it goes on.

        Collective, as is the call of what it returns, before the next all-gather begins.
        """
        batch, _, width = piece.shape
        pieces = self.piece_lengths(length)
        everything = self._next_shared(batch * length * width, piece)
        self.traffic.count_all_gather(everything)
        parts = everything.split([batch * n * width for n in pieces])
        parts[self.rank].copy_(piece.reshape(-1))
        work = self._gather(everything, parts)

        def finish() -> torch.Tensor:
            if work is not None:
                work.wait()
            whole = piece.new_empty(batch, length, width)
            for part, target in zip(parts, whole.split(pieces, 1), strict=True):
                target.copy_(part.view(target.shape))
            return whole

        return finish

    def all_gather_by_chunks(self, piece: torch.Tensor, length: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Gathers the ranks' pieces of sequences, some tokens of each rank's at a time. Collective, to its end.

        Yields the index of the first token and [batch, some tokens, width], to be read before the next one: first this
        rank's own piece, which needs no communication, then those of others as they arrive. With `overlaps` the rest
        is gathered meanwhile.
        """
        batch, _, width = piece.shape
        pieces = self.piece_lengths(length)
        chunks = [even_counts(n, min(_CHUNKS, *pieces)) for n in pieces]  # by rank
        everything = self._next_shared(batch * length * width, piece)
        self.traffic.count_all_gather(everything)
        gathered, own, start = [], 0, 0
        for sizes in zip(*chunks, strict=True):
            counts = [batch * n * width for n in sizes]
            run = everything[start : start + sum(counts)]
            parts = run.split(counts)
            mine = sizes[self.rank]
            parts[self.rank].view(batch, mine, width).copy_(piece[:, own : own + mine])
            gathered.append((self._gather(run, parts), parts, sizes))
            own, start = own + mine, start + sum(counts)
        firsts = [sum(pieces[:rank]) for rank in range(self.ranks)]
        yield firsts[self.rank], piece
        for work, parts, sizes in gathered:
            if work is not None:
                work.wait()
            for rank, (part, n) in enumerate(zip(parts, sizes, strict=True)):
                if rank != self.rank:
                    yield firsts[rank], part.view(batch, n, width)
                firsts[rank] += n

    def _gather(self, everything: torch.Tensor, parts: Sequence[torch.Tensor]) -> Work | None:
        counts = [part.numel() for part in parts]
        in_background = self.overlaps and everything.device.type == "cpu"
        return self.comm.all_gather(everything, parts[self.rank], counts=counts, async_op=in_background)

    def _next_shared(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Returns memory that the node's ranks share: `count` elements of the dtype and device of `like`.

        Two such memories take turns. A rank writes to the first again only after the all-gather of the second, which
        every rank enters after it has read the first.
        """
        nbytes = count * like.element_size()
        pair = self._shared.get(like.device)
        if pair is None or pair[0].numel() < nbytes:
            pair = [self.comm.shared(max(1, nbytes), torch.uint8, device=like.device) for _ in range(2)]
            self._shared[like.device] = pair
        pair.reverse()
        return pair[0][:nbytes].view(like.dtype)

    def check_inputs(self, x: torch.Tensor, what: str = "the inputs") -> None:
        """Raises TrainingError on every rank if the ranks have different inputs. Collective, with MPIDL_DEBUG=1."""
        if self.check:
            refuse_different_inputs(self.comm, x, what)
