"""Mean of flat arrays over the ranks, sent in one bit an element, twice: to the owner of a chunk, and back.

    array + errors of rank r      [ chunk 0 | chunk 1 | chunk 2 ]        fp32
    all-to-all                    signs and a scale of chunk k to rank k, which adds up; what they lack stays as error
    owner                         its own chunk, which is not sent, is added as it is; the mean is compressed anew
    all-gather                    signs and a scale of each chunk's mean; every rank computes with these, the owner too

The error of a chunk is what the messages of a rank lack. On the chunk's owner these are the messages of the second
phase (the server's errors of the paper), on the other ranks those of the first (the workers'). So errors are one array
of the size of the values.

Between nodes only, the array is the mean of a node, the same on its ranks. Each of them exchanges its part with the
ranks of its local rank on the other nodes, and the parts are gathered inside the node.

Who runs what: arrays are exchanged one after the other, phase by phase (`gradients.compression.pipeline`), in the
thread of the step; the operations run in the progress threads of Communicators of their own, in the order of the arrays
on every rank. So nothing can deadlock.

Source: Tang et al. 2021, "1-bit Adam", section 4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence

import torch

from collectives import Communicator, Work

from ...gradients.buckets import BucketLayout
from ...gradients.compression.compressor import Steps, started
from ...gradients.compression.pipeline import Pipeline, PipelinedReduction
from ...gradients.compression.ranks import split_by_node
from ...gradients.compression.section_layout import SectionLayout, by_pieces
from ...gradients.compression.sign import CHUNK, Sign, sum_of_squares
from ...job import communicator_pool

WHERE = ("between_nodes", "everywhere")
RangeCallback = Callable[[int, int], None]  # is called with the first element, and the end, of a range


class MessageErrors:
    """Errors of this rank's messages of an array, and the elements that are zero in every mean.

    layout: which elements this rank exchanges: its section.
    values: fp32, those elements; None without error feedback.
    masked: int64, the numbers of the array's elements that are zero in every mean; None before they are known.
    """

    def __init__(self, layout: SectionLayout, device: torch.device, has_error_feedback: bool) -> None:
        self.layout = layout
        self.values = torch.zeros(layout.size, dtype=torch.float32, device=device) if has_error_feedback else None
        self.mask(None)

    def clear(self) -> None:
        """Forgets all errors."""
        if self.values is not None:
            self.values.zero_()

    def mask(self, masked: torch.Tensor | None) -> None:
        """Sets `masked`."""
        self.masked = masked
        # Of each piece, by the first element of a chunk.
        self._masked_in_chunks: list[dict[int, torch.Tensor]] | None = None
        if masked is None:
            return
        flags = torch.zeros(self.layout.elements, dtype=torch.bool, device=masked.device)
        flags.index_fill_(0, masked, True)
        section = torch.cat([flags[start:stop] for _, start, stop in self.layout.parts()])
        self._masked_in_chunks = []
        for start, stop in self.layout.pieces:
            found = [chunk.nonzero().flatten() for chunk in section[start:stop].split(CHUNK)]
            self._masked_in_chunks.append({number * CHUNK: each for number, each in enumerate(found) if len(each)})

    def held_tensors(self) -> list[torch.Tensor]:
        """The errors, and the numbers of masked elements, which take 16 bytes for each of these."""
        kept = [each for each in (self.values, self.masked) if each is not None]
        return [*kept, *(each for piece in self._masked_in_chunks or () for each in piece.values())]

    def unmasked_count(self, piece: int) -> int:
        """The elements of a piece that are not masked."""
        start, stop = self.layout.pieces[piece]
        found = {} if self._masked_in_chunks is None else self._masked_in_chunks[piece]
        return stop - start - sum(len(each) for each in found.values())

    def zero_masked(self, piece: int, values: torch.Tensor, first: int = 0) -> None:
        """Zeroes the masked elements among the values of a piece, or of its chunks from element `first` on."""
        for at, found in () if self._masked_in_chunks is None else self._masked_in_chunks[piece].items():
            if first <= at < first + values.numel():
                values[at - first : at - first + CHUNK].index_fill_(0, found, 0.0)


class OneBitExchange:
    """The ranks, and the Communicators of each phase. Collective.

    world: all ranks.
    where: "between_nodes", "everywhere", or None: between nodes, if there are several that fit.
    has_error_feedback: keeps errors for the next exchange.

    inside: the ranks of this node, where only nodes exchange and have several; else None.
    compresses: whether anything is sent in bits.

    Raises ConfigurationError on every rank where the nodes do not fit.
    """

    def __init__(self, world: Communicator, where: str | None, has_error_feedback: bool) -> None:
        self.world, self._has_error_feedback = world, has_error_feedback
        self.inside: Communicator | None = None
        exchanging, nodes = world, None
        if where == "between_nodes" or (where is None and world.nodes > 1):
            nodes = split_by_node(world, where)
        if nodes is not None:
            self.inside, exchanging = nodes
        if self.inside is not None and self.inside.size == 1:
            self.inside = None
        self.compresses = exchanging.size > 1
        self._sign = Sign()
        pooled = [communicator_pool.take(each) for each in (exchanging, exchanging, world)]
        self._phases, self.averaging = [each.comm for each in pooled[:2]], pooled[2].comm
        if self.inside is not None:
            pooled += [communicator_pool.take(self.inside), communicator_pool.take(self.inside)]
            self._gathers, self.inside = pooled[-2].comm, pooled[-1].comm
        for each in pooled:
            weakref.finalize(self, each.give_back).atexit = False
        self._pipeline = Pipeline()
        self.sent_bytes = 0.0

    def errors_of(self, layout: BucketLayout, device: torch.device) -> MessageErrors:
        """Makes the errors of arrays of a layout, whose shards are the chunks: zeros."""
        inside = (0, 1) if self.inside is None else (self.inside.rank, self.inside.size)
        made = by_pieces(layout.padded, layout.shard_size, inside, self._phases[0].size)
        return MessageErrors(made, device, self._has_error_feedback)

    def start(
        self,
        array: torch.Tensor,
        errors: MessageErrors,
        advance: RangeCallback | None = None,
        on_mean: RangeCallback | None = None,
    ) -> PipelinedReduction:
        """Starts the exchange of an array, which becomes the mean; the handle's `wait()` completes it.

        advance(start, stop): makes these elements of the array, once for each, before they are sent; by default they
        are there. on_mean(start, stop): called once for each element, when its mean is there.
        """
        return self._pipeline.start(self._steps(array, errors, advance, on_mean), lambda: None)

    def _steps(
        self, array: torch.Tensor, errors: MessageErrors, advance: RangeCallback | None, on_mean: RangeCallback | None
    ) -> Steps:
        layout, size = errors.layout, array.numel()
        if not self.compresses:
            _by_chunks(advance, 0, size)
            if errors.masked is not None:
                array.index_fill_(0, errors.masked, 0.0)
            _by_chunks(on_mean, 0, size)
            return
        values = array.new_zeros(layout.size) if errors.values is None else errors.values
        squares = self._add_to_errors(array, values, errors, advance)
        means = yield from self._means(values, squares, errors)
        messages = means.split([self._sign.message_bytes(stop - start) for start, stop in layout.pieces])
        if self.inside is None:
            for piece, (message, (_, start, stop)) in enumerate(zip(messages, layout.parts(), strict=True)):
                self._write_mean(message, array[start:stop], errors, piece, _shifted(on_mean, start))
            self._sign.pool.give_back(means)
            return
        own, works = array.new_empty(layout.size), []
        for piece, (message, (start, stop)) in enumerate(zip(messages, layout.pieces, strict=True)):
            self._write_mean(message, own[start:stop], errors, piece, None)
        self._sign.pool.give_back(means)
        for (at, start, stop), block in zip(layout.parts(), layout.blocks, strict=True):
            whole = array[block.start : block.stop]
            works += started(
                self._gathers.all_gather(whole, own[at : at + stop - start], counts=block.counts, async_op=True)
            )
        yield works
        _by_chunks(on_mean, 0, size)

    def _add_to_errors(
        self, array: torch.Tensor, values: torch.Tensor, errors: MessageErrors, advance: RangeCallback | None
    ) -> list[float]:
        """Adds this rank's section of the array to its errors; returns the sum of the squares of each piece."""
        found = []
        pairs = zip(errors.layout.pieces, errors.layout.parts(), strict=True)
        for piece, ((first, last), (_, start, _)) in enumerate(pairs):
            squares = 0.0
            for at in range(0, last - first, CHUNK):
                size = min(CHUNK, last - first - at)
                if advance is not None:
                    advance(start + at, start + at + size)
                chunk = values[first + at : first + at + size].add_(array[start + at : start + at + size])
                errors.zero_masked(piece, chunk, at)
                squares += sum_of_squares(chunk)
            found.append(squares)
        return found

    def _means(
        self, values: torch.Tensor, squares: Sequence[float], errors: MessageErrors
    ) -> Generator[list[Work], None, torch.Tensor]:
        """Runs both phases for a section; its values become its errors. Returns the messages of the pieces' means."""
        me, size, pieces, sign = self._phases[0].rank, self._phases[0].size, errors.layout.pieces, self._sign
        sizes = [sign.message_bytes(stop - start) for start, stop in pieces]
        send_bytes = [0 if rank == me else each for rank, each in enumerate(sizes)]
        receive_bytes = [0 if rank == me else sizes[me] for rank in range(size)]
        pool = sign.pool
        sent, received = (pool.take(sum(each), torch.uint8, values.device) for each in (send_bytes, receive_bytes))
        for rank, ((start, stop), message) in enumerate(zip(pieces, sent.split(send_bytes), strict=True)):
            if rank != me:
                piece = values[start:stop]
                sign.compress(piece, message, piece, count=errors.unmasked_count(rank), squares=squares[rank])
                errors.zero_masked(rank, piece)
        self.sent_bytes += sent.numel() + (size - 1) * sizes[me]
        yield started(self._phases[0].all_to_all(received, sent, receive_bytes, send_bytes, async_op=True))

        own, total = values[slice(*pieces[me])], 0.0
        readers = [sign.reader(message) for message in received.split(sizes[me])]
        for at in range(0, own.numel(), CHUNK):
            chunk = own[at : at + CHUNK]
            for reader in readers:
                reader.add_to(chunk, at)
            errors.zero_masked(me, chunk, at)
            total += sum_of_squares(chunk)
        for reader in readers:
            reader.close()
        pool.give_back(sent, received)
        messages = pool.take(sum(sizes), torch.uint8, values.device)
        each = messages.split(sizes)
        # Every rank computes with the decompressed mean, the owner too, so that all have the same bits.
        sign.compress(own, each[me], own, size, errors.unmasked_count(me), total)
        errors.zero_masked(me, own)
        yield started(self._phases[1].all_gather(messages, each[me], counts=sizes, async_op=True))
        return messages

    def _write_mean(
        self,
        message: torch.Tensor,
        result: torch.Tensor,
        errors: MessageErrors,
        piece: int,
        on_mean: RangeCallback | None,
    ) -> None:
        """Writes the mean of a piece."""
        reader = self._sign.reader(message)
        for at in range(0, result.numel(), CHUNK):
            chunk = result[at : at + CHUNK]
            reader.write(chunk, at)
            errors.zero_masked(piece, chunk, at)
            if on_mean is not None:
                on_mean(at, at + chunk.numel())
        reader.close()

    @property
    def computing_seconds(self) -> float:
        """Seconds that the step's thread has computed in exchanges so far, without its waits."""
        return self._pipeline.computing_seconds

    def message_buffers(self) -> list[torch.Tensor]:
        """Memory for what is sent and received, which the next exchanges use again; that in use is not counted."""
        return self._sign.pool.held_tensors()

    # ---- states -----------------------------------------------------------------------------------------------------

    def mean_errors(self, errors: MessageErrors, elements: int) -> torch.Tensor:
        """The error of the mean: fp32, one for each of the array's elements, on every rank. Collective."""
        assert errors.values is not None
        whole = errors.values.new_zeros(elements)
        for at, start, stop in errors.layout.parts():
            whole[start:stop] = errors.values[at : at + stop - start]
        self.averaging.all_reduce(whole)
        return whole.div_(self._phases[0].size)

    def set_errors_from_mean(self, errors: MessageErrors, mean: torch.Tensor) -> None:
        """Gives this rank its errors of a mean of such, so that their mean is this one. Local."""
        if errors.values is not None:
            for at, start, stop in errors.layout.parts():
                errors.values[at : at + stop - start] = mean[start:stop]


def _by_chunks(call: RangeCallback | None, start: int, stop: int) -> None:
    for at in range(start, stop if call else start, CHUNK):
        call(at, min(at + CHUNK, stop))  # type: ignore[misc]


def _shifted(call: RangeCallback | None, by: int) -> RangeCallback | None:
    return None if call is None else lambda start, stop: call(by + start, by + stop)
