"""Parameters that a backward pass will not reach, by its graph, for which buckets then need not wait.

    find_unused_parameters      looks as the pass begins, and marks in the queue what the graph does not lead to
    torch.autograd.Function     a graph that has one is not looked at: its backward may start a pass to any parameter,
                                as that of a re-entrant activation checkpoint does
    static_graph                the graph is not looked at: the first pass has counted

If it is not looked at, these buckets are launched as the pass ends. What was reached in the end is in
`reached_parameters`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..gradients.backward import is_opaque, reaches, reaches_any
from ..gradients.bucket_queue import BucketQueue
from ..module_tensors import tensors_with_gradient
from .trained_parameters import TrainedParameters


class _OpaqueGraph:
    """A hook of a forward pass's outputs that does nothing. It lives as long as their graph, which is opaque."""

    def __call__(self, _: torch.Tensor) -> None:
        pass


class UnusedParameters:
    """Marks the parameters that a pass will not reach as missing in `queue`.

    names: as of `Reducer`.

    searches_graph: bool, may be set; whether the graphs of passes that communicate are searched.
    """

    def __init__(
        self,
        names: Mapping[torch.nn.Parameter, str],
        trained: TrainedParameters,
        queue: BucketQueue,
        *,
        searches_graph: bool,
    ) -> None:
        self._names, self._trained, self._queue, self.searches_graph = names, trained, queue, searches_graph
        self._opaque: weakref.WeakSet[_OpaqueGraph] = weakref.WeakSet()  # of graphs that a backward pass may use
        self._unreached: list[torch.nn.Parameter] = []  # by the backward pass under way, as its graph tells

    def after_forward(self, output: Any) -> None:
        """Watches the output of a forward pass; call it with that."""
        if self.searches_graph and self._queue.synchronise and torch.is_grad_enabled():
            outputs = list(tensors_with_gradient(output))
            if is_opaque(outputs):
                mark = _OpaqueGraph()
                self._opaque.add(mark)
                for tensor in outputs:
                    tensor.register_hook(mark)

    def is_training_backward(self, nodes: Sequence[Any] | None) -> bool:
        """Tells if the backward pass under way goes to the parameters; if so, notes those that it will not reach."""
        concerned = reaches_any(self._names, nodes)
        if concerned and self.searches_graph and self._queue.synchronise and not self._opaque:
            self._unreached = [p for p in self._trained.wanted() if not reaches(p)]
        return concerned

    def mark(self) -> None:
        """Marks what the pass will not reach, once its buckets are laid out."""
        unreached, self._unreached = self._unreached, []
        for p in unreached:
            self._queue.mark_missing(p)

    def forget(self) -> None:
        """Forgets what a pass will not reach that was cut short."""
        self._unreached = []
