"""Top-k: the largest values of a section, with their indices.

    values     [ piece | piece | piece ]       each rank takes the k largest of each piece
    message    [ k int32 indices | k fp32 values ]       of a piece: 8 bytes a value

    owners need their pieces    each rank sends each owner the message of its piece
    all ranks need the mean     each rank sends all its messages to all others, 8 k (N - 1) bytes, or, where that is
                                shorter, owners add up and send their dense sums: (8 k + 4 n) (N - 1) / N

What is not sent remains, and is fed back. Sums are formed in the order of the ranks, so that all have the same bits.
A rank takes the k largest of its own piece too, so all engines have the same means. A value that is not finite is sent
before all others, and the others like it that are not sent are dropped.

Source: Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with Memory".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from .compressor import Exchange, Section, Steps, started
from .fraction import FractionCompressor, count_of

_SAMPLE = 1 << 15  # values
_CHUNK = 1 << 16  # values: 256 KiB of fp32


class TopK(FractionCompressor):
    """Sends the largest values of each piece, "topk:0.01": which fraction of them.

    Raises ConfigurationError for another fraction than above 0 and up to 1.
    """

    phases = 2
    method = "topk"

    def fraction_at(self, step: int) -> float:
        """The part of the values that a step sends."""
        return self.fraction

    def reduce(self, section: Section, exchange: Exchange) -> Steps:
        """Sends the largest values to the owners of their pieces, or to all ranks."""
        me, elements, fraction = exchange.rank, section.values.numel(), self.fraction_at(section.step)
        if not elements:
            yield []
            yield []
            return
        sizes = [count_of(stop - start, fraction) for start, stop in section.pieces]
        sent = torch.cat([_take(section, *piece, size) for piece, size in zip(section.pieces, sizes, strict=True)])
        lengths = [2 * size for size in sizes]
        if section.needs_all and not _is_shorter_dense(elements, fraction, exchange.size):
            received = sent.new_empty(exchange.size * sent.numel())
            yield started(exchange.phases[0].all_gather(received, sent, async_op=True))
            section.result.zero_()
            for theirs in received.view(exchange.size, sent.numel()):
                for (start, stop), message in zip(section.pieces, theirs.split(lengths), strict=True):
                    _add(section.result[start:stop], message, section.contributions)
            yield []
            return
        arriving = [lengths[me]] * exchange.size
        received = sent.new_empty(sum(arriving))
        yield started(exchange.phases[0].all_to_all(received, sent, arriving, lengths, async_op=True))
        start, stop = section.pieces[me]
        own = section.result[start:stop] if section.needs_all else section.result
        own.zero_()
        for message in received.split(arriving):
            _add(own, message, section.contributions)
        if not section.needs_all:
            yield []
            return
        counts = [stop - start for start, stop in section.pieces]
        yield started(exchange.phases[1].all_gather(section.result, own, counts=counts, async_op=True))

    def sent_bytes(self, elements: int, ranks: int, needs_all: bool, shapes: Sequence[torch.Size] = ()) -> float:
        """8 bytes a value: to all ranks, or to the owners, and the dense sums of these where that is shorter."""
        piece = -(-elements // ranks)
        to_owners = (ranks - 1) * 8 * count_of(piece, self.fraction)
        if not needs_all:
            return to_owners
        if _is_shorter_dense(elements, self.fraction, ranks):
            return to_owners + (ranks - 1) * 4 * piece
        return to_owners * ranks


def largest_indices(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the largest magnitudes, int64, in no order; values that are not finite are the largest.

    The threshold of a sample lets about twice as many pass, of which the largest are taken. So few values are sorted,
    and the others are read once.
    """
    stride = values.numel() // _SAMPLE
    if stride > 1:
        sample = _magnitudes(values[::stride])
        rank = min(len(sample), 8 + 2 * count * len(sample) // values.numel())
        candidates = _places_from(values, float(sample.topk(rank).values[-1]))
        if count <= len(candidates) < values.numel() // 2:
            return candidates[torch.topk(_magnitudes(values[candidates]), count, sorted=False).indices]
    return torch.topk(_magnitudes(values), count, sorted=False).indices


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    return values.abs().nan_to_num_(math.inf, math.inf)


def _places_from(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """The indices of magnitudes from a threshold up, and of what is not finite, ascending."""
    if values.device.type != "cpu":
        return (values.abs() < threshold).logical_not_().nonzero().flatten()
    # NumPy's comparisons and searches are several times as fast; the chunks stay in the cache.
    array, found = values.numpy(), []
    scratch, below = np.empty(_CHUNK, array.dtype), np.empty(_CHUNK, np.bool_)
    for start in range(0, len(array), _CHUNK):
        chunk = array[start : start + _CHUNK]
        size = len(chunk)
        np.less(np.abs(chunk, out=scratch[:size]), threshold, out=below[:size])  # False of NaN
        found.append(np.flatnonzero(np.logical_not(below[:size], out=below[:size])) + start)
    return torch.from_numpy(np.concatenate(found))


def _take(section: Section, start: int, stop: int, size: int) -> torch.Tensor:
    """Makes the message of a piece. What is sent leaves the section's values, and its arrays."""
    piece = section.values[start:stop]
    message = torch.empty(2 * size, dtype=torch.int32, device=piece.device)
    if not size:
        return message
    indices, values = largest_indices(piece, size), message[size:].view(torch.float32)
    message[:size] = indices
    torch.index_select(piece, 0, indices, out=values)
    if section.keeps_remainder:
        is_finite = bool(torch.isfinite(values).all())
        for kept in (piece, *(array[start:stop] for array in section.arrays)):
            kept[indices] = 0.0
            if not is_finite:
                kept.nan_to_num_(0.0, 0.0, 0.0)
    return message


def _is_shorter_dense(elements: int, fraction: float, ranks: int) -> bool:
    """Returns whether dense sums from the owners are shorter than all messages to all ranks."""
    kept = 8 * count_of(elements, fraction)
    return kept > (kept + 4 * elements) / ranks


def _add(values: torch.Tensor, message: torch.Tensor, contributions: int) -> None:
    """Adds a message's part of the mean at its indices."""
    size = message.numel() // 2
    values.index_add_(0, message[:size], message[size:].view(torch.float32) / contributions)
