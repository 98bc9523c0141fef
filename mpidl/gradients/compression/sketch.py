"""Count sketches: sums of few columns by which the largest values of the mean are found, and then fetched.

    values    [ chunk | chunk | ch ]         chunks of c elements
    row j     += signs * chunk, rotated      by an offset of each chunk and row: r rows of c columns
    phase 0   an all-reduce of the sketch    sketches add up: it is that of the sum of all values
    estimate  of an element: the median over the rows of sign * column
    phase 1   an all-reduce of the values at the k indices of the largest estimates: exact, and sent without indices

k are the largest values of the sum, not those of each rank, and all else remains and is fed back. Where a sketch would
be longer than the section, all of that is sent. All ranks find the indices from the same sums by the same kernels. A
section whose sketch is not finite has a mean of NaN on all ranks.

Sources: Charikar, Chen, Farach-Colton 2002, "Finding Frequent Items in Data Streams"; Ivkin et al. 2019,
"Communication-efficient Distributed SGD with Sketching", algorithm 2, which fetches more than k values and keeps k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .compressor import Compressor, Exchange, Section, Steps, started
from .fraction import FRACTION, count_of
from .options import Option, check, read
from .topk import largest_indices

ROWS = Option(int, lambda value: isinstance(value, int) and value >= 1 and value % 2 == 1, "an odd number from 1 up")
_BLOCK = 1 << 13  # elements whose estimates are formed at once: their rows stay in the cache
COLUMNS = Option(float, lambda value: 1 <= value < math.inf, "a number from 1 up")


@dataclass(frozen=True)
class Hashes:
    """The hashes of a section's elements in a step.

    columns: c.
    signs: (r, 2 c) of +1 and -1, each row twice.
    offsets, turns: (chunks, r) numbers below c: by how much a chunk, and its signs, are rotated.

    Element i of chunk q is in column (i + offset of q) mod c: two elements of different chunks share a column with
    probability 1/c, those of one chunk never. So the variance of a row's estimate is at most the sum of squares over c,
    as with any such hashes, and a sketch is made by additions of whole chunks, at the speed of memory.
    """

    elements: int
    columns: int
    signs: torch.Tensor
    offsets: Sequence[Sequence[int]]
    turns: Sequence[Sequence[int]]

    @classmethod
    def of(cls, elements: int, rows: int, columns: int, step: int, device: torch.device) -> Hashes:
        """Draws them by the step and the section's size: the same on all ranks, and others in each step."""
        random = torch.Generator().manual_seed(step * 1_000_003 + elements)
        signs = torch.randint(2, (rows, columns), generator=random).mul_(2).sub_(1).float()
        chunks = -(-elements // columns)
        drawn = torch.randint(columns, (2, chunks, rows), generator=random).tolist()
        return cls(elements, columns, signs.repeat(1, 2).to(device), *drawn)

    def chunks(self) -> Iterator[tuple[int, int, Sequence[int], Sequence[int]]]:
        """(start, stop) of each chunk, its offsets and turns."""
        for number, (offsets, turns) in enumerate(zip(self.offsets, self.turns, strict=True)):
            start = number * self.columns
            yield start, min(start + self.columns, self.elements), offsets, turns

    def sketch(self, values: torch.Tensor) -> torch.Tensor:
        """Adds values up by columns: (r, c)."""
        made = values.new_zeros(len(self.signs), self.columns)
        signed = values.new_empty(self.columns)
        for start, stop, offsets, turns in self.chunks():
            size = stop - start
            for row, signs, offset, turn in zip(made, self.signs, offsets, turns, strict=True):
                torch.mul(values[start:stop], signs[turn : turn + size], out=signed[:size])
                first = min(size, self.columns - offset)
                row[offset : offset + first] += signed[:first]
                row[: size - first] += signed[first:size]
        return made

    def estimates(self, sketch: torch.Tensor) -> torch.Tensor:
        """Estimates the values of a sketch, one of each element."""
        found = sketch.new_empty(self.elements)
        twice = sketch.repeat(1, 2)
        of_rows = sketch.new_empty(len(sketch), _BLOCK)
        for start, stop, offsets, turns in self.chunks():
            for first in range(0, stop - start, _BLOCK):
                size = min(_BLOCK, stop - start - first)
                for out, row, signs, offset, turn in zip(of_rows, twice, self.signs, offsets, turns, strict=True):
                    at, sign_at = first + offset, first + turn
                    torch.mul(row[at : at + size], signs[sign_at : sign_at + size], out=out[:size])
                found[start + first : start + first + size] = _median(of_rows[:, :size])
        return found


class CountSketch(Compressor):
    """Sends a count sketch, then the values of its largest estimates, "sketch:0.001,rows=5": k's part of the values.

    rows: of the sketch, odd: estimates are their medians ("rows=5").
    columns: of a row, as a multiple of k ("columns=5").

    Raises ConfigurationError for wrong settings.
    """

    phases = 2

    def __init__(self, fraction: float = 0.001, *, rows: int = 5, columns: float = 5.0) -> None:
        check("sketch", "fraction", FRACTION, fraction)
        check("sketch", "rows", ROWS, rows)
        check("sketch", "columns", COLUMNS, columns)
        self.fraction, self.rows, self.columns = fraction, rows, columns

    @classmethod
    def of(cls, text: str | None) -> CountSketch:
        """Makes one of the settings in a name."""
        given = read("sketch", text, ("fraction", FRACTION), values={"rows": ROWS, "columns": COLUMNS})
        return cls(0.001 if given.first is None else given.first, **given.values)

    @property
    def name(self) -> str:
        """The method, and the settings that are not the default ones."""
        said = f"sketch:{self.fraction:g}"
        said += "" if self.rows == 5 else f",rows={self.rows}"
        return said + ("" if self.columns == 5 else f",columns={self.columns:g}")

    def columns_of(self, elements: int) -> int:
        """Columns of a row; 0 where the sketch and the values would be as long as the section."""
        kept = count_of(elements, self.fraction)
        columns = math.ceil(self.columns * kept)
        return columns if self.rows * columns + kept < elements else 0

    def hashes(self, elements: int, step: int, device: torch.device | None = None) -> Hashes:
        """The hashes of a step, on every rank the same."""
        return Hashes.of(elements, self.rows, self.columns_of(elements), step, device or torch.device("cpu"))

    def reduce(self, section: Section, exchange: Exchange) -> Steps:
        """Adds up sketches, and then the values that they tell."""
        values, elements = section.values, section.values.numel()
        indices: torch.Tensor | slice = slice(None)
        if self.columns_of(elements):
            hashes = self.hashes(elements, section.step, values.device)
            sketch = hashes.sketch(values)
            yield started(exchange.phases[0].all_reduce(sketch, async_op=True))
            if not bool(torch.isfinite(sketch).all()):
                section.result.fill_(math.nan)
                if section.keeps_remainder:
                    values.nan_to_num_(0.0, 0.0, 0.0)
                yield []
                return
            indices = largest_indices(hashes.estimates(sketch), count_of(elements, self.fraction))
        else:
            yield []
        sent = values[indices].clone()
        if section.keeps_remainder:
            values[indices] = 0.0
        yield started(exchange.phases[1].all_reduce(sent, async_op=True)) if elements else []
        sent.div_(section.contributions)
        start, stop = (0, elements) if section.needs_all else section.pieces[exchange.rank]
        if isinstance(indices, slice):
            section.result.copy_(sent[start:stop])
            return
        section.result.zero_()
        is_own = (indices >= start) & (indices < stop)
        section.result[indices[is_own] - start] = sent[is_own]

    def sent_bytes(self, elements: int, ranks: int, needs_all: bool, shapes: Sequence[torch.Size] = ()) -> float:
        """2 (N-1)/N of the fp32 sketch and of k values, or of all values; whatever is needed."""
        columns = self.columns_of(elements)
        sent = self.rows * columns + count_of(elements, self.fraction) if columns else elements
        return 2 * (ranks - 1) / ranks * 4 * sent


def _median(rows: torch.Tensor) -> torch.Tensor:
    """The median of an odd number of rows, which are overwritten: sorts them against each other."""
    ordered, spare = list(rows), rows.new_empty(rows.shape[1])
    for turn in range(len(ordered)):
        for number in range(turn % 2, len(ordered) - 1, 2):
            lower, upper = ordered[number], ordered[number + 1]
            torch.minimum(lower, upper, out=spare)
            torch.maximum(lower, upper, out=upper)
            ordered[number], spare = spare, lower
    return ordered[len(ordered) // 2]
