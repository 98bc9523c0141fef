"""Mean over ranks of flat tensors that ranks hold whole: in full precision, or compressed with error feedback.

    None             [ own ]                all-reduce                                                      [ mean ]
    "bf16", ...      [ own + remainder ]    messages to the owners of chunks, which send the means back     [ mean ]

The compressors, and what becomes of a message's error, are those of gradients (`gradients.compression`): a tensor's
remainder is added to the tensor of the same number the next time. On the owner of a chunk it is what the mean lacks
that the owner sends back.

Where the ranks of a node hold equal tensors (`node`), each reduces a piece with the ranks of its local rank on the
other nodes, and the node gathers the pieces: between nodes every element is sent once a node.

Who runs what: a reduction is one compound operation on a Communicator that nothing else uses, in its progress thread,
begun by all ranks in the same order. In it the node's gathering runs on a second one that only such reductions use; so
neither waits for an operation of the program. Remainders change in `finish`, in the caller's thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives import Communicator, Work

from ..gradients.compression.compressor import Exchange, OwnedCompressor, Section
from ..gradients.compression.section_layout import pieces_of
from ..gradients.compression.settings import COMPRESSORS
from ..job.communicator_pool import take

METHODS = ("bf16", "int8", "int4")  # of COMPRESSORS

_peers_of: weakref.WeakKeyDictionary[Communicator, weakref.WeakKeyDictionary[Communicator, Communicator]] = (
    weakref.WeakKeyDictionary()  # by all ranks and by the node, as MPI has few communicators
)


@dataclass(eq=False)
class PendingMean:
    """A reduction under way.

    number: of the tensor.
    mean: becomes it, on every rank to the same bits.
    remainder: fp32, what this rank's messages of its piece lack, if the mean is used.
    """

    number: int
    mean: torch.Tensor
    work: Work | None = None
    remainder: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Blocks until the mean is there, and returns it."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.mean


class RankMean:
    """Reduces flat tensors of given sizes, each known by its number, to their means over the ranks.

    comm: the ranks.
    node: those of this rank's node, if they hold equal tensors; as many on every node.
    sizes: elements of each tensor.
    compress: None, or one of METHODS.
    feedback: keep remainders.

    Collective.
    """

    def __init__(
        self,
        comm: Communicator,
        node: Communicator | None,
        sizes: Sequence[int],
        compress: str | None = None,
        feedback: bool = True,
    ) -> None:
        pooled = [take(comm if node is None else peers_on_other_nodes(comm, node))]
        if node is not None and node.size > 1:
            pooled.append(take(node))
        for each in pooled:
            weakref.finalize(self, each.give_back).atexit = False
        self._peers = pooled[0].comm
        self._node = pooled[1].comm if len(pooled) > 1 else None
        self.sizes, self._compressor = list(sizes), None if compress is None else _compressor(compress)
        self.feedback = feedback and compress is not None
        self._remainders: dict[int, torch.Tensor] = {}

    def begin(self, number: int, whole: torch.Tensor) -> PendingMean:
        """Starts the reduction of a tensor: fp32 or fp64 [sizes[number]], overwritten. Collective."""
        pending = PendingMean(number, whole)
        pieces = whole.split(self._counts(whole.numel()))
        piece = pieces[0 if self._node is None else self._node.rank]

        def reduce_and_gather() -> None:
            with torch.no_grad():
                if self._compressor is None:
                    self._peers.all_reduce(piece, "avg")
                else:
                    self._compressed(pending, piece, self._compressor)
                if self._node is not None:
                    self._node.all_gather(whole, piece.clone(), [each.numel() for each in pieces])

        pending.work = self._peers.compound("mean of pseudo-gradients", reduce_and_gather, async_op=True)
        return pending

    def _compressed(self, pending: PendingMean, piece: torch.Tensor, compressor: OwnedCompressor) -> None:
        values, ranks = piece.to(torch.float32, copy=True), self._peers.size
        if pending.number in self._remainders:
            values += self._remainders[pending.number]
        section = Section(
            key=pending,
            values=values,
            result=piece if piece.dtype == torch.float32 else torch.empty_like(values),
            pieces=pieces_of(piece.numel(), ranks),
            parameters=(),
            contributions=ranks,
            needs_all=True,
            keeps_remainder=self.feedback,
            step=0,
        )
        blocking: Any = _BlockingCommunicator(self._peers)
        for _ in compressor.reduce(section, Exchange([blocking] * compressor.phases)):
            pass  # its operations are complete
        if section.result is not piece:
            piece.copy_(section.result)
        pending.remainder = values if self.feedback else None

    def finish(self, reduction: PendingMean) -> None:
        """Keeps the remainder of a reduction whose mean is used."""
        if reduction.remainder is not None:
            self._remainders[reduction.number] = reduction.remainder

    def held_tensors(self) -> list[torch.Tensor]:
        """The remainders."""
        return [*self._remainders.values()]

    def _counts(self, size: int) -> list[int]:
        ranks = 1 if self._node is None else self._node.size
        return [size // ranks + (rank < size % ranks) for rank in range(ranks)]

    # ---- state -------------------------------------------------------------------------------------------------

    def mean_remainders(self, in_flight: PendingMean | None = None) -> list[torch.Tensor | None]:
        """Returns each tensor's remainder, averaged over the ranks: whole, on every rank. Collective.

        A rank that loads it in place of its own keeps their sum, whatever the number of ranks.

        in_flight: a reduction that has not been finished, whose remainder counts as that of its tensor.
        """
        found: list[torch.Tensor | None] = []
        for number, size in enumerate(self.sizes):
            own = self._remainders.get(number)
            if in_flight is not None and in_flight.number == number and in_flight.remainder is not None:
                own = in_flight.remainder  # of one that was loaded it is among the remainders
            if own is None:  # on all ranks
                found.append(None)
                continue
            mean = own.clone()
            self._peers.all_reduce(mean, "avg")
            if self._node is not None:
                whole = mean.new_empty(size)
                self._node.all_gather(whole, mean, self._counts(size))
                mean = whole
            found.append(mean)
        return found

    def load_remainders(self, mean_remainders: Sequence[torch.Tensor | None]) -> None:
        """Replaces the remainders by what `mean_remainders` gave, on any number of ranks."""
        self._remainders = {}
        for number, mean in enumerate(mean_remainders if self.feedback else ()):
            if mean is not None:
                piece = mean.split(self._counts(mean.numel()))[0 if self._node is None else self._node.rank]
                self._remainders[number] = piece.to(torch.float32, copy=True)


class _BlockingCommunicator:
    """A Communicator inside a compound operation, where operations are complete when they return."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def all_to_all(self, *given: Any, async_op: bool) -> Work:
        self._comm.all_to_all(*given)
        return _COMPLETE

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, counts: Sequence[int], async_op: bool) -> Work:
        self._comm.all_gather(whole, own, counts)
        return _COMPLETE


_COMPLETE: Any = ()


def is_elementwise(compress: str) -> bool:
    """Returns True if one of METHODS rounds each value by itself."""
    return _compressor(compress).elementwise


def _compressor(name: str) -> OwnedCompressor:
    compressor = COMPRESSORS[name](None)
    assert isinstance(compressor, OwnedCompressor)
    return compressor


def peers_on_other_nodes(comm: Communicator, node: Communicator) -> Communicator:
    """The Communicator of the ranks of `comm` that have this rank's number in their nodes. Collective at first."""
    by_node = _peers_of.setdefault(comm, weakref.WeakKeyDictionary())
    if node not in by_node:
        peers = comm.split(node.rank, comm.rank)
        assert peers is not None
        by_node[node] = peers
    return by_node[node]
