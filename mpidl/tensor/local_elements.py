"""Elements of a whole tensor that a rank of tp computes within a region, by the tensor's shape; for dropout by index.

    heads      [batch, heads, q, k], and [..., heads * width]        runs of heads
    features   [..., features]                                       runs of features, in each segment of a fused layer

`sizes` has the runs; here is which dimension of a tensor they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import TrainingError
from ..mesh import Cut
from .sizes import Run, to_elements


@dataclass(frozen=True)
class LocalPart:
    """The part of a region that a rank computes. name: of the region, for messages."""

    name: str

    def cut(self, shape: Sequence[int], dim: int | None = None) -> Cut:
        """Returns the elements of a whole tensor that one of this shape has. dim: that of heads, if it is known.

        Raises TrainingError for a shape that such a region does not have.
        """
        raise NotImplementedError

    def _cut_along(self, shape: Sequence[int], dim: int, size: int, runs: Sequence[Run]) -> Cut:
        dim %= len(shape)
        return Cut.along((*shape[:dim], size, *shape[dim + 1 :]), dim, runs)

    def _refuse(self, shape: Sequence[int], needs: str) -> TrainingError:
        return TrainingError(f"dropout='by_index': {self.name}: got a tensor of shape {tuple(shape)}; needs {needs}")


@dataclass(frozen=True)
class LocalHeads(LocalPart):
    """Heads of an attention.

    heads: those of this rank, of `all_heads`.
    widths: of a head's queries, keys and values.
    """

    heads: Run
    all_heads: int
    widths: tuple[int, ...]

    def cut(self, shape: Sequence[int], dim: int | None = None) -> Cut:
        """Finds heads in dimension 1 of four, or in `dim`; else in the last one, in a row."""
        here = self.heads[1] - self.heads[0]
        if dim is None and len(shape) == 4:
            dim = 1
        if dim is not None and shape[dim] == here:
            return self._cut_along(shape, dim, self.all_heads, [self.heads])
        width = shape[-1] // here
        if dim is None and width in self.widths and shape[-1] % here == 0:
            return self._cut_along(shape, -1, self.all_heads * width, [to_elements(self.heads, width)])
        raise self._refuse(shape, f"[batch, {here} heads, q, k], or {here} heads in a row last")


@dataclass(frozen=True)
class LocalFeatures(LocalPart):
    """Features of a feed-forward network or of a single layer. runs: those of this rank, of `size`."""

    runs: tuple[Run, ...]
    size: int

    def cut(self, shape: Sequence[int], dim: int | None = None) -> Cut:
        """Finds features in the last dimension: all segments of them, or one."""
        for runs, size in ((self.runs, self.size), (self.runs[:1], self.size // len(self.runs))):
            if shape[-1] == sum(stop - start for start, stop in runs):
                return self._cut_along(shape, -1, size, runs)
        here = sum(stop - start for start, stop in self.runs)
        raise self._refuse(shape, f"{here} features last")
