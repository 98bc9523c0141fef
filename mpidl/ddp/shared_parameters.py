"""Finds parameters that another wrapper averages as well, as of two modules that share a layer.

    a = DistributedDataParallel(A(layer))       backward gives the layer's weight one gradient g
    b = DistributedDataParallel(B(layer))       a takes g, b takes g: each averages it over the ranks

`.grad` of such a parameter keeps memory of its own: in the bucket of one wrapper the reduction would overwrite what the
other one is yet to take.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

_living: weakref.WeakSet[SharedParameters] = weakref.WeakSet()


class SharedParameters:
    """The parameters of a wrapper that another one averages as well. own: those of the wrapper.

    parameters: the shared ones, from when the second wrapper is made until all but one are gone.
    """

    def __init__(self, own: Iterable[torch.nn.Parameter]) -> None:
        self._own = frozenset(own)
        self.parameters: set[torch.nn.Parameter] = set()
        _living.add(self)
        _compare()

    def end(self) -> None:
        """Forgets the wrapper's parameters."""
        _living.discard(self)
        _compare()


def _compare() -> None:
    living = list(_living)
    for one in living:
        one.parameters = {p for other in living if other is not one for p in one._own & other._own}
