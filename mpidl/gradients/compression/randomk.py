"""Random-k: values of a section at random indices, the same ones on every rank.

    section    [ . x . . | x . . . | . . x . | . . . x ]       one index in each of k even runs, drawn anew each step
    message    [ x x x x ]                                     an all-reduce, or a reduce-scatter, of k fp32 values

No indices are sent: every rank draws them from the number of the step and the size of the section, with a generator of
its own. What is not sent remains, and is fed back. A rank with a value that is not finite, wherever it is, sends NaN
alone, and keeps nothing of such values.

Source: Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with Memory".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .compressor import Exchange, Section, Steps, started
from .fraction import FractionCompressor, count_of


class RandomK(FractionCompressor):
    """Sends values at random indices, "randomk:0.01": which fraction of them.

    Raises ConfigurationError for another fraction than above 0 and up to 1.
    """

    method = "randomk"

    def reduce(self, section: Section, exchange: Exchange) -> Steps:
        """Adds up the values at the indices of the step."""
        elements = section.values.numel()
        if not elements:
            yield []
            return
        indices = self.indices(elements, section.step)
        counts = [0] * exchange.size
        if not section.needs_all:
            edges = torch.tensor([section.pieces[0][0], *(stop for _, stop in section.pieces)])
            counts = torch.searchsorted(indices, edges).diff().tolist()
        indices = indices.to(section.values.device)
        sent = section.values[indices]
        if not all(math.isfinite(limit) for limit in torch.aminmax(section.values)):
            sent.fill_(math.nan)
            section.values.nan_to_num_(0.0, 0.0, 0.0)
        if section.keeps_remainder:
            section.values[indices] = 0.0
        if section.needs_all:
            start = 0
            yield started(exchange.phases[0].all_reduce(sent, async_op=True))
        else:
            start, first = section.pieces[exchange.rank][0], sum(counts[: exchange.rank])
            indices = indices[first : first + counts[exchange.rank]]
            summed = sent.new_empty(len(indices))
            yield started(exchange.phases[0].reduce_scatter(summed, sent, counts=counts, async_op=True))
            sent = summed
        section.result.zero_()
        section.result[indices - start] = sent.div_(section.contributions)

    def indices(self, elements: int, step: int) -> torch.Tensor:
        """The indices of a step: one in each of k even runs, int64, ascending, on the CPU."""
        kept = count_of(elements, self.fraction)
        random = torch.Generator().manual_seed(step * 1_000_003 + elements)
        edges = torch.arange(kept + 1) * elements // max(kept, 1)
        offsets = torch.rand(kept, generator=random, dtype=torch.float64) * edges.diff()
        return edges[:-1] + offsets.long()

    def sent_bytes(self, elements: int, ranks: int, needs_all: bool, shapes: Sequence[torch.Size] = ()) -> float:
        """2 (N-1)/N of 4 bytes a value, half of it where owners need their pieces."""
        return (8 if needs_all else 4) * (ranks - 1) / ranks * count_of(elements, self.fraction)
