"""A bucket's section, as it stays from step to step: its remainder, what undoes it, and where its parameters lie.

The remainder is what compression has not sent, fp32: it is added to the next step's gradients (error feedback).

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent", section 3; Karimireddy et al. 2019, "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from .section_layout import SectionLayout


@dataclass(eq=False)
class BucketSection:
    """A bucket's section, as it stays from step to step.

    parameters: of the bucket, starts: the first element of each in it, forms: its shape and strides there.
    values: the remainder, a row of the section's elements, and a row for each of the compressor's arrays; None without
    error feedback.
    former: the values of before the window `window`, which undo it; in later windows memory for their new values.
    repeats: how often a pass has reduced it again.
    kept: while a pass is under way, the values of before it of parameters that it does not reach, and their places.
    """

    parameters: list[torch.nn.Parameter]
    starts: list[int]
    forms: list[tuple[torch.Size, tuple[int, ...]]]
    layout: SectionLayout
    values: torch.Tensor | None = None
    former: torch.Tensor | None = None
    window: int | None = None
    repeats: int = 0
    kept: list[tuple[torch.nn.Parameter, slice, torch.Tensor]] = field(default_factory=list)

    def add(
        self,
        summed: torch.Tensor,
        window: int | None,
        absorb: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        """Adds a pass's sums to the remainder and returns it; without a remainder returns the sums.

        window: number of the window whose undo takes this pass back; None: no undo.
        absorb: makes of the sums what is added; gets the further arrays too.
        """
        if self.values is None:
            return absorb(summed, ())
        target = self.values
        if window is None:
            self.former = self.window = None
        elif window != self.window:
            target = torch.empty_like(self.values) if self.former is None else self.former
            target[1:] = self.values[1:]
        torch.add(self.values[0], absorb(summed, [*target[1:]]), out=target[0])
        if target is not self.values:
            self.former, self.values, self.window = self.values, target, window
        return target[0]

    def undo(self, window: int, parameters: Collection[torch.Tensor] | None) -> None:
        """Takes the remainders of these parameters, or of all, back to those of before a window."""
        if self.window != window or self.values is None or self.former is None:
            return
        if parameters is None or all(p in parameters for p in self.parameters):
            self.values, self.former, self.window = self.former, self.values, None
            return
        for p, place in self._places():
            if p in parameters:
                self.values[:, place] = self.former[:, place]

    def keep(self, parameters: Collection[torch.Tensor]) -> None:
        """Keeps the values of these parameters, before a pass's sums are added, for `put_back`."""
        if self.values is not None:
            self.kept = [(p, place, self.values[:, place].clone()) for p, place in self._places() if p in parameters]

    def put_back(self, reached: Collection[torch.Tensor]) -> None:
        """Takes the kept values of all parameters but these back."""
        for p, place, values in self.kept:
            if p not in reached and self.values is not None:
                self.values[:, place] = values
        self.kept = []

    def _places(self) -> Iterator[tuple[torch.nn.Parameter, slice]]:
        """Each parameter's place in the section: a slice for each part of a block that has something of it."""
        for p, begin in zip(self.parameters, self.starts, strict=True):
            for at, start, stop in self.layout.parts():
                low, high = max(start, begin), min(stop, begin + p.numel())
                if low < high:
                    yield p, slice(at + low - start, at + high - start)

    def own_parameters(self) -> set[torch.nn.Parameter]:
        """The parameters that begin in this rank's part of the bucket."""
        parts = [(start, stop) for _, start, stop in self.layout.parts()]
        pairs = zip(self.parameters, self.starts, strict=True)
        return {p for p, at in pairs if any(start <= at < stop for start, stop in parts)}

    def first_parameters(self) -> Iterator[tuple[torch.nn.Parameter, int]]:
        """The first parameter that begins in each local rank's part of the bucket, and the elements of that part."""
        for block in self.layout.blocks:
            for rank, elements in enumerate(block.counts):
                start, stop = block.part(rank)
                inside = (p for p, at in zip(self.parameters, self.starts, strict=True) if start <= at < stop)
                for p in islice(inside, 1):
                    yield p, elements

    def views(self, whole: torch.Tensor) -> list[list[torch.Tensor]]:
        """The places of each parameter in rows of the bucket's elements, as views of its shape."""
        places = list(zip(self.starts, self.forms, strict=True))
        return [[row[start:].as_strided(shape, strides) for row in whole] for start, (shape, strides) in places]
