"""The mean over ranks of flat tensors that ranks hold whole: in full precision, in bfloat16, or in blocks of int8.

    None      [ own ]            all-reduce                                              [ mean ]
    "bf16"    [ own + error ]    rounded, all-reduce                                     [ mean ]
    "int8"    [ own + error ]    codes, all-to-all  [ chunk's mean + error ] codes, all-gather   [ mean ]

What rounding leaves is this rank's error, which is added to the tensor of the same number the next time (error
feedback). With int8 a chunk's owner rounds the mean again, and keeps the error of that. int8: blocks of 256 elements,
each with an fp32 scale, its largest magnitude / 127.

Where the ranks of a node hold equal tensors (`node`), each reduces a piece with the ranks of its number on the other
nodes, and the node gathers the pieces: between nodes every element is sent once a node.

Who runs what: a reduction is one compound operation on a Communicator that nothing else uses, in its progress thread,
begun by all ranks in the same order. In it the node's gathering runs on a second one that only such reductions use; so
neither waits for an operation of the program. Errors change in `finish`, in the caller's thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives import Communicator, Work

from ..job.communicator_pool import take

BLOCK = 256  # elements of an int8 block
BITS = (None, "bf16", "int8")

_across: weakref.WeakKeyDictionary[Communicator, weakref.WeakKeyDictionary[Communicator, Communicator]] = (
    weakref.WeakKeyDictionary()  # by all ranks and by the node, as MPI has few communicators
)


@dataclass(eq=False)
class Reduction:
    """A reduction under way. number: of the tensor. mean: becomes it, on every rank to the same bits.

    sent, owned: the errors that this rank keeps if the mean is used.
    """

    number: int
    mean: torch.Tensor
    work: Work | None = None
    sent: torch.Tensor | None = None
    owned: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Blocks until the mean is there, and returns it."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.mean


class RankMean:
    """Reduces flat tensors of given sizes, each known by its number, to their means over the ranks.

    comm: the ranks. node: those of this rank's node, if they hold equal tensors; as many on every node.
    sizes: elements of each tensor. compress: None, "bf16" or "int8". feedback: keep errors. Collective.
    """

    def __init__(
        self,
        comm: Communicator,
        node: Communicator | None,
        sizes: Sequence[int],
        compress: str | None = None,
        feedback: bool = True,
    ) -> None:
        pooled = [take(comm if node is None else across(comm, node))]
        if node is not None and node.size > 1:
            pooled.append(take(node))
        for each in pooled:
            weakref.finalize(self, each.give_back).atexit = False
        self._peers = pooled[0].comm
        self._node = pooled[1].comm if len(pooled) > 1 else None
        self.sizes, self.compress = list(sizes), compress
        self.feedback = feedback and compress is not None
        self._sent: dict[int, torch.Tensor] = {}
        self._owned: dict[int, torch.Tensor] = {}

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes of each tensor that this rank sends between nodes in one direction of a reduction, if fp32."""
        found = []
        for size in self.sizes:
            piece = self._counts(size)[0 if self._node is None else self._node.rank]
            chunk = self._chunk(piece)
            bits = {None: 4 * piece, "bf16": 2 * piece, "int8": self._peers.size * _coded_bytes(chunk)}
            found.append(bits[self.compress])
        return found

    def begin(self, number: int, whole: torch.Tensor) -> Reduction:
        """Starts the reduction of a tensor: fp32 or fp64 [sizes[number]], overwritten. Collective."""
        made = Reduction(number, whole)
        pieces = whole.split(self._counts(whole.numel()))
        piece = pieces[0 if self._node is None else self._node.rank]
        task = {None: self._plain, "bf16": self._bf16, "int8": self._int8}[self.compress]

        def both() -> None:
            with torch.no_grad():
                task(made, piece)
                if self._node is not None:
                    self._node.all_gather(whole, piece.clone(), [each.numel() for each in pieces])

        made.work = self._peers.compound("mean of pseudo-gradients", both, async_op=True)
        return made

    def finish(self, reduction: Reduction) -> None:
        """Keeps the errors of a reduction whose mean is used."""
        if self.feedback:
            for kept, new in ((self._sent, reduction.sent), (self._owned, reduction.owned)):
                if new is not None:
                    kept[reduction.number] = new

    def held_tensors(self) -> list[torch.Tensor]:
        """The errors."""
        return [*self._sent.values(), *self._owned.values()]

    # ---- what is sent ----------------------------------------------------------------------------------------

    def _plain(self, made: Reduction, piece: torch.Tensor) -> None:
        self._peers.all_reduce(piece, "avg")

    def _bf16(self, made: Reduction, piece: torch.Tensor) -> None:
        if made.number in self._sent:
            piece.add_(self._sent[made.number])
        rounded = piece.bfloat16()
        made.sent = piece - rounded.to(piece.dtype)
        self._peers.all_reduce(rounded, "avg")
        piece.copy_(rounded)

    def _int8(self, made: Reduction, piece: torch.Tensor) -> None:
        ranks, chunk = self._peers.size, self._chunk(piece.numel())
        own = torch.zeros(ranks * chunk, dtype=piece.dtype)
        own[: piece.numel()] = piece
        if made.number in self._sent:
            own[: piece.numel()] += self._sent[made.number]
        codes = torch.stack([encode(part) for part in own.view(ranks, chunk)])
        received = torch.empty_like(codes)
        self._peers.all_to_all(received.view(-1), codes.view(-1))
        made.sent = torch.cat([own[r * chunk : (r + 1) * chunk] - decode(codes[r], own.dtype) for r in range(ranks)])
        made.sent = made.sent[: piece.numel()]
        mean = torch.zeros(chunk, dtype=piece.dtype)
        for each in received:
            mean += decode(each, mean.dtype)
        mean /= ranks
        if made.number in self._owned:
            mean += self._owned[made.number]
        coded = encode(mean)
        made.owned = mean - decode(coded, mean.dtype)
        self._peers.all_gather(codes.view(-1), coded)
        piece.copy_(torch.cat([decode(each, piece.dtype) for each in codes])[: piece.numel()])

    def _counts(self, size: int) -> list[int]:
        ranks = 1 if self._node is None else self._node.size
        return [size // ranks + (rank < size % ranks) for rank in range(ranks)]

    def _chunk(self, size: int) -> int:
        """Elements of the chunk of a piece that each peer owns: whole blocks."""
        return -(-size // (self._peers.size * BLOCK)) * BLOCK

    # ---- state -------------------------------------------------------------------------------------------------

    def errors(self, flying: Reduction | None = None) -> list[torch.Tensor | None]:
        """The mean over the ranks of what each tensor's reductions still owe, whole, on every rank. Collective.

        A rank that loads it in place of its own errors keeps their sum, whatever the number of ranks. flying: a
        reduction that has not been finished, whose errors count as those of its tensor.
        """
        found: list[torch.Tensor | None] = []
        for number, size in enumerate(self.sizes):
            sent, owned = self._sent.get(number), self._owned.get(number)
            if self.feedback and flying is not None and flying.number == number:
                sent, owned = flying.sent, flying.owned
            if sent is None:  # on all ranks
                found.append(None)
                continue
            owed = sent.clone()
            if owned is not None:
                first = self._peers.rank * owned.numel()
                place = owed[first : first + owned.numel()]
                place += self._peers.size * owned[: place.numel()]
            self._peers.all_reduce(owed, "avg")
            if self._node is not None:
                whole = owed.new_empty(size)
                self._node.all_gather(whole, owed, self._counts(size))
                owed = whole
            found.append(owed)
        return found

    def load_errors(self, errors: Sequence[torch.Tensor | None]) -> None:
        """Replaces the errors by what `errors` gave, on any number of ranks."""
        self._sent, self._owned = {}, {}
        for number, owed in enumerate(errors if self.feedback else ()):
            if owed is not None:
                piece = owed.split(self._counts(owed.numel()))[0 if self._node is None else self._node.rank]
                self._sent[number] = piece.clone()


def across(comm: Communicator, node: Communicator) -> Communicator:
    """The Communicator of the ranks of `comm` that have this rank's number in their nodes. Collective at first."""
    known = _across.setdefault(comm, weakref.WeakKeyDictionary())
    if node not in known:
        made = comm.split(node.rank, comm.rank)
        assert made is not None
        known[node] = made
    return known[node]


def encode(values: torch.Tensor) -> torch.Tensor:
    """Rounds whole blocks to int8: uint8 [blocks * 260], all codes, then the scales' bytes.

    A block with a value that is not finite becomes NaN.
    """
    blocks = values.float().view(-1, BLOCK)
    scales = blocks.abs().amax(1) / 127
    codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().clamp_(-127, 127)
    codes = codes.nan_to_num_(0.0).to(torch.int8)
    return torch.cat([codes.view(-1).view(torch.uint8), scales.view(torch.uint8)])


def decode(coded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that `encode` rounded to."""
    blocks = coded.numel() // (BLOCK + 4)
    codes = coded[: blocks * BLOCK].view(torch.int8).view(-1, BLOCK)
    scales = coded[blocks * BLOCK :].clone().view(torch.float32)
    values: Any = codes.to(dtype) * scales.to(dtype)[:, None]
    return values.view(-1)


def _coded_bytes(elements: int) -> int:
    return elements // BLOCK * (BLOCK + 4)
