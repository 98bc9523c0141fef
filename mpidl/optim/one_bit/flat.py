"""Buckets: parameters side by side, and a flat fp32 array for each state of theirs.

parameters     p9 | p8 | p7 ...            of the model, where they lie
"exp_avg"     [ m9 | m8 | m7 ... | 0 ]     a view of each parameter's shape; the state of the parameter
chunks        [ rank 0 | rank 1 | ...]     the owners of an exchange: the shards of ZeRO
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...gradients.buckets import BucketLayout


@dataclass(frozen=True)
class ParameterSpan:
    """The part of a parameter in a range of an array.

    number: of the parameter.
    start, stop: of its elements.
    of_array: its elements there.
    """

    number: int
    start: int
    stop: int
    of_array: slice


class FlatBucket:
    """Some parameters, and arrays of their states.

    parameters: of the optimizer.
    layout: where each lies in an array, and the chunks.
    keys: of the states.
    arrays: by key, fp32, `layout.padded` elements.
    views: by key, each parameter's elements, of its shape.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: BucketLayout, keys: Sequence[str]) -> None:
        self.parameters, self.layout = list(parameters), layout
        self.device = self.parameters[0].device
        self.arrays: dict[str, torch.Tensor] = {}
        self.views: dict[str, list[torch.Tensor]] = {}
        self._spans: dict[tuple[int, int], list[ParameterSpan]] = {}
        for key in keys:
            self.array(key)

    def array(self, key: str) -> torch.Tensor:
        """The array of a state, of zeros where it is new."""
        if key not in self.arrays:
            self.arrays[key] = torch.zeros(self.layout.padded, dtype=torch.float32, device=self.device)
            self.views[key] = self.views_of(self.arrays[key])
        return self.arrays[key]

    def drop(self, key: str) -> None:
        """Forgets a state."""
        self.arrays.pop(key, None)
        self.views.pop(key, None)

    def views_of(self, array: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's elements in an array, as a view of its shape."""
        return self.layout.views(array, [p.shape for p in self.parameters])

    def spans(self, start: int, stop: int) -> list[ParameterSpan]:
        """The parts of the parameters in a range of an array."""
        if (start, stop) not in self._spans:
            self._spans[start, stop] = found = []
            for number, (offset, size) in enumerate(zip(self.layout.offsets, self.layout.sizes, strict=True)):
                low, high = max(start, offset), min(stop, offset + size)
                if low < high:
                    found.append(ParameterSpan(number, low - offset, high - offset, slice(low, high)))
        return self._spans[start, stop]

    def gradients(self) -> list[torch.Tensor | None]:
        """Each parameter's gradient in fp32; None where it has none, or does not train."""
        return [p.grad.float() if p.requires_grad and p.grad is not None else None for p in self.parameters]

    def trained(self) -> list[int]:
        """The numbers of the parameters that train."""
        return [n for n, p in enumerate(self.parameters) if p.requires_grad]

    def zero_elements(self, array: torch.Tensor, left_out: Sequence[bool]) -> torch.Tensor:
        """The numbers of the elements that are zero, those between the parameters among them: int64.

        left_out: of each parameter, whether all of its elements are among them too.
        """
        flags = array == 0
        for view, flag in zip(self.views_of(flags), left_out, strict=True):
            if flag:
                view.fill_(True)
        return flags.nonzero().flatten()

    def groups_of_parameters(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The group of each parameter."""
        found = {p: group for group in groups for p in group["params"]}
        return [found[p] for p in self.parameters]
