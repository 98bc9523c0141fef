"""The remainder of a section: what compression has not sent, added to the next step's gradients (error feedback).

On a rank it is the memory of the section's values, fp32. Summed over all ranks, and divided by the number of
contributions, remainders are what the mean of the gradients still lacks. That mean can move: into other
buckets, as DDP cuts them anew after its first pass, and through a checkpoint to any number of ranks.

    mean remainder of a parameter  =  sum over the ranks of their elements of it / contributions, in rows of its shape
    taken over by a section        =  mean remainder * contributions / peers, on each of the peers

The further arrays of a compressor (`Compressor.arrays`) are rows behind the remainder, and go the same way.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent", section 3; Karimireddy et al. 2019, "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from collectives import Communicator

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

        window: to be undone; None: never.
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
        """Where each parameter lies in the section: a slice for each part of a block that has something of it."""
        for p, begin in zip(self.parameters, self.starts, strict=True):
            for at, start, stop in self.layout.parts():
                low, high = max(start, begin), min(stop, begin + p.numel())
                if low < high:
                    yield p, slice(at + low - start, at + high - start)

    def views(self, whole: torch.Tensor) -> list[list[torch.Tensor]]:
        """The places of each parameter in rows of the bucket's elements, as views of its shape."""
        places = list(zip(self.starts, self.forms, strict=True))
        return [[row[start:].as_strided(shape, strides) for row in whole] for start, (shape, strides) in places]


def mean_remainders(
    section: BucketSection, comm: Communicator, values: torch.Tensor | None = None
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The mean remainder of each parameter of a section, a row, and its arrays. Collective over all ranks of `comm`.

    values: the section's own by default.
    """
    values = section.values if values is None else values
    assert values is not None
    whole = values.new_zeros(len(values), section.layout.elements)
    for at, start, stop in section.layout.parts():
        whole[:, start:stop] = values[:, at : at + stop - start]
    comm.all_reduce(whole)
    whole /= comm.size
    pairs = zip(section.parameters, section.views(whole), strict=True)
    return {p: torch.stack([view.reshape(-1) for view in views]) for p, views in pairs}


def take_over(
    section: BucketSection, means: Mapping[torch.nn.Parameter, torch.Tensor], rows: int, contributions: int, peers: int
) -> torch.Tensor:
    """Makes a section's values, so many rows, of those of its parameters' means; zero for those without."""
    found: Sequence[torch.nn.Parameter] = [p for p in section.parameters if p in means]
    device = section.parameters[0].device
    values = torch.zeros(rows, section.layout.size, device=device)
    if found:
        whole = torch.zeros(rows, section.layout.elements, device=device)
        for p, views in zip(section.parameters, section.views(whole), strict=True):
            for view, mean in zip(views, means[p], strict=True) if p in means else ():
                view.copy_(mean.view(view.shape)).mul_(contributions / peers)
        for at, start, stop in section.layout.parts():
            values[:, at : at + stop - start] = whole[:, start:stop]
    return values
