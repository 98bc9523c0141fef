"""A forward pass through a unit, followed into its backward pass by hooks on its outputs and inputs.

    the gradient of an output arrives       its backward pass begins: the unit is gathered
    those of all its inputs have arrived    its backward pass has ended: the unit may be released. Inputs are watched
                                            where the unit has frozen parameters; else their gradients tell it

Where an output is another unit's input, one hook calls both. The graph keeps the hooks, and they keep no engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from .gathered_unit import GatheredUnit

_CONSUMERS = "_mpidl_consumers"  # of a tensor that is a unit's output: what to call when its gradient is there


class UnitCall:
    """Follows the backward pass of one forward pass through a unit, from its outputs to its inputs.

    use: called when its backward pass begins.
    ended: when it has given the gradients of all its inputs.
    leaves: hooks of inputs that outlive the graph, to be removed at the end of the pass.
    """

    def __init__(self, unit: GatheredUnit, use: Callable[[], None], ended: Callable[[], None]) -> None:
        self._unit, self._inputs = weakref.ref(unit), 0
        self.leaves: list[torch.utils.hooks.RemovableHandle] = []
        self._use, self._ended = use, ended

    def watch_input(self, tensor: torch.Tensor) -> None:
        """Ends the call's backward pass with the gradients of its inputs, the last that the unit computes."""
        self._inputs += 1
        consumers = getattr(tensor, _CONSUMERS, None)
        if consumers is not None:
            consumers.append(self._input_gradient)
            return

        def hook(_: torch.Tensor) -> None:
            if leaf:
                handle.remove()
            self._input_gradient()

        # A leaf may be there in every step, as a trained prompt is. Where its gradient comes again through the same
        # graph, no hook tells, and the unit is held to the end of the pass.
        leaf = tensor.grad_fn is None
        handle = tensor.register_hook(hook)
        if leaf:
            self.leaves.append(handle)

    def watch_output(self, tensor: torch.Tensor) -> None:
        """Begins the call's backward pass with the gradient of an output, and ends that of units whose input it is.

        A parameter that is an output needs none: it is released with its unit, and watched.
        """
        if tensor.grad_fn is None:
            return
        consumers: list[Callable[[], None]] = []
        setattr(tensor, _CONSUMERS, consumers)

        def hook(_: torch.Tensor) -> None:
            for consumer in consumers:
                consumer()
            self._output_gradient()

        tensor.register_hook(hook)

    def _output_gradient(self) -> None:
        unit = self._unit()
        if unit is not None:
            self._use()
            unit.open_calls.setdefault(id(self), self._inputs)

    def _input_gradient(self) -> None:
        unit = self._unit()
        if unit is not None and id(self) in unit.open_calls:
            unit.open_calls[id(self)] -= 1
            if unit.open_calls[id(self)] == 0:
                del unit.open_calls[id(self)]
                self._ended()
