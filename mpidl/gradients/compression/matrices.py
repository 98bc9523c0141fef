"""Matrices that lie in a section's values, and products with factors of low rank, in place.

    matrix     n x m, the section's own memory: a parameter of shape (n, ...), or the whole section
    left       n x r factor;   right_t    r x m, the transpose of the right factor, so that rows are contiguous
    matrix  ~  left right_t

All products read or write the matrix once; the mean is taken off the values in chunks of it that are still cached.
A whole section seldom fills its last row; that shorter row has a product of its own, so that nothing is copied into
padded memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .compressor import Matrix, Section

_CHUNK = 1 << 20  # elements: 4 MiB, as calls on less cost more than memory that is not in the cache


@dataclass(frozen=True)
class MatrixView:
    """A matrix in a section's values.

    start: of its first element.
    tail: elements of a last row that is not full.
    owner: the parameter that its state belongs to.
    name: tells it from others, the same on every rank.
    """

    start: int
    full_rows: int
    columns: int
    tail: int
    owner: torch.nn.Parameter
    name: str

    @property
    def rows(self) -> int:
        """The number of rows, with the one that is not full."""
        return self.full_rows + bool(self.tail)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def stop(self) -> int:
        """The end of its elements in the section."""
        return self.start + self.full_rows * self.columns + self.tail

    def times(self, values: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the matrix times right (m x r) to out (n x r)."""
        full, tail = self._parts(values)
        torch.mm(full, right, out=out[: self.full_rows])
        if self.tail:
            torch.mm(tail, right[: self.tail], out=out[self.full_rows :])

    def transposed_times(self, values: torch.Tensor, left: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the transposed left (n x r) times the matrix to out (r x m)."""
        full, tail = self._parts(values)
        torch.mm(left[: self.full_rows].t(), full, out=out)
        if self.tail:
            out[:, : self.tail].addmm_(left[self.full_rows :].t(), tail)

    def write(self, result: torch.Tensor, left: torch.Tensor, right_t: torch.Tensor, needed: tuple[int, int]) -> None:
        """Makes the rows with needed elements (start, stop in the section) those of left right_t."""
        first, last = self._rows_with(needed)
        full, tail = self._parts(result)
        if first < last:
            torch.mm(left[first:last], right_t, out=full[first:last])
        if self.tail and needed[1] > self.stop - self.tail:
            torch.mm(left[self.full_rows :], right_t[:, : self.tail], out=tail)

    def subtract_product(
        self,
        values: torch.Tensor,
        result: torch.Tensor,
        left: torch.Tensor,
        right_t: torch.Tensor,
        factor: float,
        needed: tuple[int, int],
    ) -> None:
        """Makes the needed rows of the result those of left right_t, and subtracts factor times all rows from values.

        Rows next to the needed ones may be written too.
        """
        first, last = self._rows_with(needed)
        (rows, tail), (means, mean_of_tail) = self._parts(values), self._parts(result)
        size = max(1, _CHUNK // self.columns)
        unneeded = values.new_empty(size, self.columns) if last - first < self.full_rows else means
        for start in range(0, self.full_rows, size):
            stop = min(start + size, self.full_rows)
            is_needed = start < last and stop > first
            out = means[start:stop] if is_needed else unneeded[: stop - start]
            rows[start:stop].sub_(torch.mm(left[start:stop], right_t, out=out), alpha=factor)
        if self.tail:
            torch.mm(left[self.full_rows :], right_t[:, : self.tail], out=mean_of_tail)
            tail.sub_(mean_of_tail, alpha=factor)

    def _rows_with(self, needed: tuple[int, int]) -> tuple[int, int]:
        """(first, last + 1) of the full rows with needed elements."""
        first = max(0, (needed[0] - self.start) // self.columns)
        return first, min(self.full_rows, -(-(needed[1] - self.start) // self.columns))

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Its elements, flat."""
        return values[self.start : self.stop]

    def _parts(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        full = values[self.start : self.stop - self.tail].view(self.full_rows, self.columns)
        return full, values[self.stop - self.tail : self.stop].view(1, self.tail)


def of_parameter(matrix: Matrix) -> MatrixView:
    """The view of a parameter of two dimensions or more: its first one by all others."""
    rows = matrix.shape[0]
    return MatrixView(matrix.start, rows, matrix.shape.numel() // rows, 0, matrix.parameter, matrix.name)


def of_section(section: Section) -> MatrixView:
    """The view of a whole section as a matrix that is as square as can be."""
    elements = section.values.numel()
    full_rows, tail = divmod(elements, square_side(elements))
    first = section.parameters[0]
    return MatrixView(0, full_rows, square_side(elements), tail, first.parameter, first.name)


def square_side(elements: int) -> int:
    """Columns of the smallest square that holds them."""
    return math.isqrt(elements - 1) + 1


def runs_outside(taken: Iterable[tuple[int, int]], elements: int) -> list[tuple[int, int]]:
    """(start, stop) of the elements that are in none of the (start, stop), as few as can be."""
    runs, at = [], 0
    for start, stop in [*sorted(taken), (elements, elements)]:
        if start > at:
            runs.append((at, start))
        at = max(at, stop)
    return runs


def parts_of(values: torch.Tensor, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The runs of values."""
    return [values[start:stop] for start, stop in runs]
