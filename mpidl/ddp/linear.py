"""Computes the weight gradients of linear layers in their slots in the buckets, without a copy.

    else      x, dy -> dW in new memory -> autograd makes that `.grad` -> copied to its slot in the bucket
    here      x, dy -> dW in its slot in the bucket -> autograd makes that `.grad`

For that a layer computes by an autograd function of this file: the same products as by torch's own, with the same bits,
as a slot in a bucket is aligned to a cache line, like new memory. Where a gradient cannot be written to its slot
(something is in `.grad` already, a hook of the user's is to see it, the pass is not one that is averaged, ...) it is
computed in new memory as usual.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container
from types import MethodType
from typing import Any

import torch
from torch.autograd import forward_ad

from ..gradients.backward import BackwardWatch, inside_transform, will_run

# Modules that compute x @ weight + bias, and whether their weight is [out, in], instead of [in, out].
_OUT_IN = {
    "torch.nn.modules.linear.Linear": True,
    "transformers.pytorch_utils.Conv1D": False,
    "mpidl.models.gpt2.Projection": False,
}
_LINEAR = torch._C._nn.linear  # `torch.nn.functional.linear`, unless it was patched
SMALLEST_WEIGHT = 1 << 20  # bytes of a weight: to copy fewer takes no longer than to call Python for it


class Destination:
    """The destination of the gradient of a layer's weight.

    slot: in a bucket, as a view of the weight's shape; None while there is none.
    watch: of the model's passes.
    synchronised: whether the pass under way is averaged.
    """

    def __init__(
        self, layer: torch.nn.Module, weight: torch.nn.Parameter, watch: BackwardWatch, synchronised: Callable[[], bool]
    ) -> None:
        self.slot: torch.Tensor | None = None
        self._weight, self._watch, self._synchronised = weight, watch, synchronised
        self._last = 0  # the pass in which the slot was last taken
        self._layer = layer
        self._forward = LinearForward(layer, weight, self)
        layer.__dict__.update(forward=self._forward, __getstate__=self._forward.state_of_layer)

    def move(self, slot: torch.Tensor | None) -> None:
        """Sets the slot of the weight's gradient; None: it is in no bucket."""
        self.slot = slot

    def take(self, accumulator: Any) -> torch.Tensor | None:
        """Returns the slot as a tensor that autograd can keep; None where it cannot be written to.

        accumulator: the node of autograd's graph that adds to the weight's gradient, in the pass under way.
        """
        if (
            self.slot is None
            or self._weight.grad is not None
            or self._weight._backward_hooks
            or not self._watch.active
            or self._watch.number == self._last  # the present gradient may still be read by the graph
            or not self._synchronised()
            or not will_run(accumulator)
        ):
            return None
        self._last = self._watch.number
        return self.slot.detach()

    def remove(self) -> None:
        """Lets the layer compute as before."""
        self.move(None)
        if self._layer.__dict__.get("forward") is self._forward:
            del self._layer.forward, self._layer.__getstate__


class LinearForward:
    """The forward pass of a layer. A copy of the layer, of either depth, has its class's own again.

    destination: kept alive neither by it nor by a graph.
    """

    _before = None  # hides no forward pass of the layer's own; `tensor.forward_wrapper.has_own_forward` reads it

    def __init__(self, layer: torch.nn.Module, weight: torch.Tensor, destination: Destination) -> None:
        self._layer, self._weight, self._destination = layer, weight, weakref.ref(destination)
        self._class, self._of_class = type(layer), type(layer).forward
        self.__wrapped__ = MethodType(self._of_class, layer)  # whose signature it has
        self._out_in = _OUT_IN[_name_of(layer)]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if len(args) != 1 or kwargs or not self._can_replace(args[0]):
            result: torch.Tensor = type(self._layer).forward(self._layer, *args, **kwargs)
            return result
        x = args[0]
        flat = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        y: torch.Tensor = _Linear.apply(
            flat, self._weight, self._layer._parameters["bias"], self._out_in, self._destination
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def _can_replace(self, x: Any) -> bool:
        """Returns whether this file's products are what the layer computes, in a pass that may reach its weight."""
        layer = self._layer
        parameters = layer._parameters
        return (
            type(layer) is self._class  # no parametrisation, ...
            and self._class.forward is self._of_class
            and parameters.get("weight") is self._weight  # as it was wrapped, not pruned, nor in functional_call
            and "bias" in parameters
            and type(parameters["bias"]) in (torch.nn.Parameter, type(None))
            and self._weight.requires_grad
            and torch.is_grad_enabled()
            and type(x) is torch.Tensor
            and x.layout is torch.strided
            and not x.is_nested
            and x.dim() >= 2
            and x.is_contiguous()
            and torch.nn.functional.linear is _LINEAR
            and not torch._C._len_torch_function_stack()
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and not inside_transform()
            and forward_ad._current_level < 0
        )

    def state_of_layer(self) -> dict[str, Any]:
        """The state of a copy of the layer, or of a pickled one."""
        own = {"forward": self, "__getstate__": self.state_of_layer}
        return {name: value for name, value in self._layer.__dict__.items() if name not in own or value != own[name]}


class _Linear(torch.autograd.Function):
    starts_no_pass = True  # see `is_opaque`

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_in: bool,
        destination: weakref.ref[Destination],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.out_in, ctx.destination = out_in, destination
        matrix = weight.t() if out_in else weight
        return x.mm(matrix) if bias is None else torch.addmm(bias, x, matrix)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        following = [node for node, _ in ctx.next_functions]  # of x, the weight and, if there is one, the bias
        needs_x, needs_weight, needs_bias, *_ = (
            *(node is not None and will_run(node, if_captured=True) for node in following),
            False,
        )
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = gradient.mm(weight if ctx.out_in else weight.t())
        if needs_weight:
            left, right = (gradient.t(), x) if ctx.out_in else (x.t(), gradient)
            destination = None if torch.is_grad_enabled() else ctx.destination()
            slot = None if destination is None else destination.take(following[1])
            grad_weight = left.mm(right) if slot is None else torch.mm(left, right, out=slot)
        if needs_bias:
            grad_bias = gradient.sum(0)
        return grad_x, grad_weight, grad_bias, None, None


def _name_of(layer: torch.nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def destinations(
    module: torch.nn.Module,
    parameters: Container[torch.nn.Parameter],
    watch: BackwardWatch,
    synchronised: Callable[[], bool],
) -> dict[torch.nn.Parameter, Destination]:
    """The destinations of those parameters that are weights of linear layers in the host's memory, by weight."""
    found: dict[torch.nn.Parameter, Destination] = {}
    for layer in module.modules():
        weight = layer._parameters.get("weight") if _name_of(layer) in _OUT_IN else None  # scripted ones have no `get`
        if (
            weight is not None
            and weight in parameters
            and weight not in found
            and type(weight) is torch.nn.Parameter
            and weight.device.type == "cpu"
            and weight.is_floating_point()
            and weight.nbytes >= SMALLEST_WEIGHT
            and _computes_as_its_class(layer)
        ):
            found[weight] = Destination(layer, weight, watch, synchronised)
    return found


def _computes_as_its_class(layer: torch.nn.Module) -> bool:
    """Returns whether the forward pass of the layer, and of its class, is torch's own."""
    own, of_class = layer.__dict__.get("forward"), type(layer).forward
    written_there = getattr(of_class, "__globals__", None) is vars(sys.modules[type(layer).__module__])
    return written_there and (
        own is None or isinstance(own, LinearForward) or getattr(own, "__func__", None) is of_class
    )
