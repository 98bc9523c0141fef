"""The mean of flat arrays over the ranks, sent in one bit an element, twice: to the owner of a chunk, and back.

    array + errors of rank r      [ chunk 0 | chunk 1 | chunk 2 ]        fp32
    all-to-all                    signs and a scale of chunk k to rank k, which adds up; what they lack stays as error
    owner                         its own chunk, which is not sent, is added as it is; the mean is compressed anew
    all-gather                    signs and a scale of each chunk's mean; every rank computes with these, the owner too

The error of a chunk on a rank is what its messages lack: on its owner those of the second phase (the server's errors of
the paper), on the others those of the first (the workers'). So errors are one array of the size of the values.

Between nodes only, the array is the same on all ranks of a node, the mean of theirs. Each of them exchanges its part
with those of the same number on the other nodes, and the parts are gathered inside the node.

Arrays are exchanged one after the other, phase by phase (`gradients.compression.pipeline`): while one is on the wire,
the next is compressed. All of it runs in the thread of the step; the operations in the progress threads of
Communicators of their own, in the order of the arrays on every rank. So nothing can deadlock.

Source: Tang et al. 2021, "1-bit Adam", section 4.
"""

from __future__ import annotations

import weakref

import torch

from collectives import ArgumentError, Communicator, Work

from ...errors import ConfigurationError
from ...gradients.buckets import BucketLayout
from ...gradients.compression.compressor import Steps, started
from ...gradients.compression.layout import SectionLayout, by_pieces
from ...gradients.compression.pipeline import Pipeline, Reduction
from ...gradients.compression.sign import Sign
from ...job import communicator_pool

WHERE = ("between_nodes", "everywhere")


class Errors:
    """What this rank's messages of an array lack, and which elements are none.

    layout: which elements this rank exchanges: its section. values: fp32, those elements; None without error feedback.
    masked: int64, the numbers of the array's elements that are zero in every mean; None before they are known.
    """

    def __init__(self, layout: SectionLayout, device: torch.device, feeds_back: bool) -> None:
        self.layout = layout
        self.values = torch.zeros(layout.size, device=device) if feeds_back else None
        self.mask(None)

    def clear(self) -> None:
        """Forgets all errors."""
        if self.values is not None:
            self.values.zero_()

    def mask(self, masked: torch.Tensor | None) -> None:
        """Sets `masked`."""
        self.masked = masked
        self._of_pieces: list[torch.Tensor] | None = None
        if masked is None:
            return
        flags = torch.zeros(self.layout.elements, dtype=torch.bool, device=masked.device)
        flags.index_fill_(0, masked, True)
        section = torch.cat([flags[start:stop] for _, start, stop in self.layout.parts()])
        self._of_pieces = [section[start:stop].nonzero().flatten() for start, stop in self.layout.pieces]

    def counted(self, piece: int) -> int:
        """The elements of a piece that are not masked."""
        start, stop = self.layout.pieces[piece]
        return stop - start - (0 if self._of_pieces is None else self._of_pieces[piece].numel())

    def zero_masked(self, piece: int, values: torch.Tensor) -> None:
        """Zeroes the masked elements among the values of a piece."""
        if self._of_pieces is not None:
            values.index_fill_(0, self._of_pieces[piece], 0.0)


class OneBitExchange:
    """The ranks, and the Communicators of each phase. Collective.

    world: all ranks. where: "between_nodes", "everywhere", or None: between nodes, if there are several that fit.
    feeds_back: keeps errors for the next exchange.

    inside: the ranks of this node, where only nodes exchange; else None. compresses: whether anything is sent in bits.

    Raises ConfigurationError on every rank where the nodes do not fit.
    """

    def __init__(self, world: Communicator, where: str | None, feeds_back: bool) -> None:
        self.world, self._feeds_back = world, feeds_back
        self.inside: Communicator | None = None
        exchanging, only_nodes = world, where == "between_nodes" or (where is None and world.nodes > 1)
        if only_nodes:
            try:
                self.inside, exchanging = world.split_by_node()
            except ArgumentError as error:
                if where is not None:
                    raise ConfigurationError(f"where={where!r}: {str(error).partition(':')[2].strip()}") from None
        self.compresses = exchanging.size > 1
        self._sign = Sign()
        taken = [communicator_pool.take(each) for each in (exchanging, exchanging, world)]
        self._phases, self.averaging = [each.comm for each in taken[:2]], taken[2].comm
        if self.inside is not None:
            taken += [communicator_pool.take(self.inside), communicator_pool.take(self.inside)]
            self._gathers, self.inside = taken[-2].comm, taken[-1].comm
        for each in taken:
            weakref.finalize(self, each.give_back).atexit = False
        self._pipeline = Pipeline()
        self.sent_bytes = 0.0

    def errors_of(self, layout: BucketLayout, device: torch.device) -> Errors:
        """Makes the errors of arrays of a layout, whose shards are the chunks: zeros."""
        inside = (0, 1) if self.inside is None else (self.inside.rank, self.inside.size)
        made = by_pieces(layout.padded, layout.shard_size, inside, self._phases[0].size)
        return Errors(made, device, self._feeds_back)

    def start(self, array: torch.Tensor, errors: Errors) -> Reduction:
        """Starts the exchange of an array, which becomes the mean; the handle's `wait()` completes it."""
        return self._pipeline.start(self._steps(array, errors), lambda: None)

    def _steps(self, array: torch.Tensor, errors: Errors) -> Steps:
        layout = errors.layout
        if errors.masked is not None:
            array.index_fill_(0, errors.masked, 0.0)
        if not self.compresses:
            return
        values = errors.values
        if values is None:
            values = array.new_zeros(layout.size)
        for at, start, stop in layout.parts():
            values[at : at + stop - start].add_(array[start:stop])
        result = array if self.inside is None else array.new_empty(layout.size)
        yield from self._exchange(values, result, errors)
        if self.inside is not None:
            works: list[Work] = []
            for (at, start, stop), block in zip(layout.parts(), layout.blocks, strict=True):
                whole, own = array[block.start : block.stop], result[at : at + stop - start]
                works += started(self._gathers.all_gather(whole, own, counts=block.counts, async_op=True))
            yield works

    def _exchange(self, values: torch.Tensor, result: torch.Tensor, errors: Errors) -> Steps:
        """Both phases, of a section's values, which become its errors. result: becomes the mean."""
        me, size, pieces, sign = self._phases[0].rank, self._phases[0].size, errors.layout.pieces, self._sign
        sizes = [sign.message_bytes(stop - start) for start, stop in pieces]
        leaving = [0 if rank == me else each for rank, each in enumerate(sizes)]
        coming = [0 if rank == me else sizes[me] for rank in range(size)]
        sent = torch.empty(sum(leaving), dtype=torch.uint8, device=values.device)
        received = torch.empty(sum(coming), dtype=torch.uint8, device=values.device)
        for rank, ((start, stop), message) in enumerate(zip(pieces, sent.split(leaving), strict=True)):
            if rank != me:
                piece = values[start:stop]
                sign.compress(piece, message, piece, errors.counted(rank))
                errors.zero_masked(rank, piece)
        self.sent_bytes += sent.numel() + (size - 1) * sizes[me]
        yield started(self._phases[0].all_to_all(received, sent, coming, leaving, async_op=True))

        own = values[slice(*pieces[me])]
        for message in received.split(sizes[me]):
            sign.decompress(message, own, add=True)
        errors.zero_masked(me, own)
        own.div_(size)
        messages = torch.empty(sum(sizes), dtype=torch.uint8, device=values.device)
        each = messages.split(sizes)
        # Every rank computes with the decompressed mean, the owner too, so that all have the same bits.
        sign.compress(own, each[me], own, errors.counted(me))
        errors.zero_masked(me, own)
        own.mul_(size)
        yield started(self._phases[1].all_gather(messages, each[me], counts=sizes, async_op=True))
        for rank, ((start, stop), message) in enumerate(zip(pieces, each, strict=True)):
            sign.decompress(message, result[start:stop])
            errors.zero_masked(rank, result[start:stop])

    # ---- states -----------------------------------------------------------------------------------------------------

    def mean_errors(self, errors: Errors, elements: int) -> torch.Tensor:
        """The error of the mean: fp32, one for each of the array's elements, on every rank. Collective."""
        assert errors.values is not None
        whole = errors.values.new_zeros(elements)
        for at, start, stop in errors.layout.parts():
            whole[start:stop] = errors.values[at : at + stop - start]
        self.averaging.all_reduce(whole)
        return whole.div_(self._phases[0].size)

    def take_over(self, errors: Errors, mean: torch.Tensor) -> None:
        """Gives this rank its errors of a mean of such, so that their mean is this one. Local."""
        if errors.values is not None:
            for at, start, stop in errors.layout.parts():
                errors.values[at : at + stop - start] = mean[start:stop]
