"""A tensor as a rank holds it: elements of a cut of the whole tensor, and the shares that it writes or checks.

whole tensor        [ .................................. ]
cut of the part     [ ...........      ..........        ]      over tp and ep; all, if the model is not cut
held                       start ########### stop              of the flattened cut; all, if the rank shares nothing
written                            ########                     no other rank writes these
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..mesh.placement import Cut
from . import cuts


@dataclass(frozen=True)
class Share:
    """Elements start..stop of a flattened cut, which a rank writes or checks."""

    cut: Cut
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor of the model, or what this rank holds of it.

    cut: of the whole tensor, what this rank's part of the model has; all, if the model is not cut.
    values: elements start..stop of the flattened cut, or the cut in its own shape.
    writes: what this rank writes of it.
    own: if the ranks' values differ, so that each rank writes its own.
    key: under which the optimizer keeps its state; None for a buffer.
    per_rank: the ranks' values differ.
    shared: every rank holds all of the cut, and writes a part.
    """

    name: str
    cut: Cut
    values: torch.Tensor
    start: int
    stop: int
    writes: list[Share]
    own: list[Share]
    key: torch.Tensor | None = None
    parameter: torch.nn.Parameter | None = None
    per_rank: bool = False
    shared: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.cut.shape

    def elements(self, share: Share, values: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a share, flat, out of this tensor's or others in the same places."""
        if share.cut == self.cut:
            if share.stop - share.start == values.numel():
                return values
            return values.detach().reshape(-1)[share.start - self.start : share.stop - self.start]
        found = [cuts.places(at, n) for at, _, n in cuts.common_runs(self.cut, share.cut, self.start, self.stop)]
        first = next(int(to[0]) for _, to, _ in cuts.common_runs(self.cut, share.cut, self.start, self.stop) if len(to))
        wanted = torch.from_numpy(np.concatenate(found)[share.start - first : share.stop - first] - self.start)
        return values.detach().reshape(-1)[wanted.to(values.device)]


def inside(shares: Iterable[Share], cut: Cut, start: int, stop: int) -> Iterator[Share]:
    """Yields what elements start..stop of a flattened cut have of each share."""
    for share in shares:
        low, high = start, stop
        if share.cut != cut:
            found = [
                (int(at[0]), int(at[-1] + n[-1]))
                for _, at, n in cuts.common_runs(cut, share.cut, start, stop)
                if len(at)
            ]
            low, high = (found[0][0], found[-1][1]) if found else (0, 0)
        low, high = max(low, share.start), min(high, share.stop)
        if low < high:
            yield Share(share.cut, low, high)
