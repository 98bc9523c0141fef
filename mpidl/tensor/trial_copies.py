"""Copies of a block with the same random values, one whole and one cut over tp, and how far they differ (`trial`).

run_whole    the whole copy, forward
run_alone    the cut copy, without the other ranks: only to see whether it runs
compare      the cut copy; then backward through both
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from collectives import Communicator

from ..mesh import placement
from ..module_tensors import swap_in_place, tensors_in
from .styles import Argument
from .tensor_parallel import Dropouts

_SMALL, _SMALL_INPUT = 1 << 26, 1 << 22  # parameters of a block, elements of its input, that it is tried in double
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_INPUT_CHANGE = 1e-6  # by so much an input is changed to see how roundings grow
_MOST_AMPLIFICATION = 100  # without roundings, an output changes by at most so many times the change of the input
_ALLOWED_GROWTH = 30  # a difference may be so many times what the output changes beyond that
_CERTAIN_DIFFERENCE = 0.2  # no rounding makes such a difference
_SMALLEST_GRADIENT = 1e-4  # of the largest gradient: smaller ones, such as of a bias of keys, are roundings alone


class CannotTry(Exception):
    """The whole copy does not run by itself."""


class BlockRoot(nn.Module):
    """Stands for the model around a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the block."""
        return self.block(*args, **kwargs)


class SilentCommunicator:
    """A Communicator's methods for a rank that communicates with no other: what comes from them is zeros."""

    is_debugging = False

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self.node_ranks = comm.rank, comm.size, comm.node_ranks

    def empty(self, size: int, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        """Stands for `Communicator.empty`, and for `shared`."""
        return torch.empty(size, dtype=dtype, device=device)

    shared = empty

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> None:
        """Stands for `Communicator.all_reduce`."""

    def prepare(self, operation: str, x: torch.Tensor) -> Callable[[], None]:
        """Stands for `Communicator.prepare` of an all_reduce."""
        return lambda: None

    def all_gather(self, out: torch.Tensor, part: torch.Tensor, **_: Any) -> None:
        """Stands for `Communicator.all_gather`."""
        out.zero_()

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, **_: Any) -> None:
        """Stands for `Communicator.reduce_scatter`."""
        out.zero_()

    def partitioned_all_reduce(self, arrays: Sequence[torch.Tensor]) -> SilentCommunicator:
        """Stands for `Communicator.partitioned_all_reduce`, and for what that returns."""
        return self

    def hand_in(self, x: torch.Tensor) -> None:
        """Stands for `PartitionedAllReduce.hand_in`."""

    def wait(self) -> None:
        """Stands for `PartitionedAllReduce.wait`."""


@dataclass
class _Result:
    """Result of a copy: its module, the arguments whose gradients are compared, and its outputs."""

    module: nn.Module
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors that get a gradient: those of the copy, not what the program refers to besides."""
        return [*self.inputs, *(p for p in self.module.parameters() if p.requires_grad)]


class BlockCopies:
    """Copies of a block in one dtype, and one mode, with the same values.

    template: a copy of the block without values.
    input: the name of the argument in whose place random numbers come.
    real: the block itself, for its buffers.
    args, kwargs: of its call.
    gradients: whether to compare them.

    mismatch: how the cut copy differs from the whole one; "" if it does not.
    """

    def __init__(
        self,
        template: nn.Module,
        input: str,
        real: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        *,
        training: bool,
        gradients: bool,
    ) -> None:
        self._template, self._real, self._args, self._kwargs = template, real, args, kwargs
        self._dtype, self._device, self.training, self._gradients = dtype, device, training, gradients
        self._argument = Argument(real, input)
        self._factor = 1.0  # of the input
        self._random_states_before = random.getstate(), np.random.get_state()
        self._undo: list[Callable[[], None]] = []
        self._has_input = True
        self._whole: _Result
        self.mismatch = ""

    def run_whole(self) -> None:
        """Runs the whole copy. Raises whatever that does, or CannotTry."""
        before = self._states()
        self._whole = self._run(self._copy())
        if not all(map(torch.equal, before, self._states())):
            raise CannotTry("it draws random numbers")
        if not self._whole.outputs:
            raise CannotTry("it returns no tensor")
        if any(t.isnan().any() for t in self._whole.outputs):
            raise CannotTry("its output is not a number")

    def _states(self) -> list[torch.Tensor]:
        """States of torch's random numbers."""
        of_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *of_gpu]

    def run_alone(self, cut: Callable[[nn.Module], nn.Module]) -> None:
        """Runs a cut copy, forward and backward. Raises whatever that does."""
        parts = self._run(cut(self._copy()))
        _backward([t for t in parts.outputs if t.requires_grad], parts.leaves)

    def compare(self, cut: Callable[[nn.Module], nn.Module]) -> None:
        """Runs a cut copy, and compares it with the whole one. Raises whatever it does. Collective over tp."""
        whole, parts = self._whole, self._run(cut(self._copy()))
        both = [
            (a, b)
            for a, b in zip(parts.outputs, whole.outputs, strict=False)
            if a.shape == b.shape and a.requires_grad and b.requires_grad
        ]
        _backward([a for a, _ in both], parts.leaves)
        _backward([b for _, b in both], whole.leaves)
        self.mismatch = self._compare_outputs(whole, parts) or self._compare_gradients(whole, parts)

    def _copy(self) -> nn.Module:
        """Makes a copy with values, the same at each call."""
        block = copy.deepcopy(self._template)
        for number, (name, p) in enumerate(block.named_parameters()):
            values = _values(name, p, 997 * number, self._dtype).to(self._device)
            swap_in_place(p, nn.Parameter(values, p.requires_grad and values.is_floating_point()))
        own = dict(self._real.named_buffers())
        for name, b in block.named_buffers():
            if own[name].is_meta:
                raise CannotTry(f"{name} has no values yet")
            values = own[name].detach().clone()
            swap_in_place(b, values.to(self._dtype) if values.is_floating_point() else values)
        self._undo.append(Dropouts(block).end())
        return block.train(self.training)

    def _run(self, module: nn.Module) -> _Result:
        x = self._argument.of(self._args, dict(self._kwargs))
        memo: dict[int, Any] = {}
        inputs: list[torch.Tensor] = []
        for t in tensors_in((self._args, self._kwargs)):
            converted = t.detach().to(self._dtype) if t.is_floating_point() else t.detach()
            memo[id(t)] = converted.clone()
            if t is not x and t.requires_grad and t.is_floating_point():
                inputs.append(converted.clone().requires_grad_())
                memo[id(t)] = inputs[-1].clone()  # no leaf, into which the program might not write
        self._has_input = torch.is_tensor(x) and x.is_floating_point()
        if self._has_input:
            made_up = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            inputs.insert(0, made_up.to(self._device, self._dtype).requires_grad_())
            memo[id(x)] = inputs[0] * self._factor
        args, kwargs = copy.deepcopy((tuple(self._args), dict(self._kwargs)), memo)
        random.setstate(self._random_states_before[0])
        np.random.set_state(self._random_states_before[1])
        with torch.set_grad_enabled(self._gradients):
            output = module(*args, **kwargs)
        return _Result(module, inputs, [t for t in tensors_in(output) if t.is_floating_point()])

    def _compare_outputs(self, whole: _Result, parts: _Result) -> str:
        """Compares outputs of one shape. Others, such as keys of this rank's heads, are what a rank has of its own."""
        pairs = list(zip(parts.outputs, whole.outputs, strict=False))
        shape = whole.inputs[0].shape if whole.inputs else whole.outputs[0].shape
        same = [(a, b) for a, b in pairs if a.shape == b.shape]
        if not same or any(b.shape == shape != a.shape for a, b in pairs):
            return "its output has another shape"
        return self._describe_if_too_large("its output", max(_difference(a, b) for a, b in same))

    def _compare_gradients(self, whole: _Result, parts: _Result) -> str:
        for number, (a, b) in enumerate(zip(parts.inputs, whole.inputs, strict=True)):
            what = f"the gradient of {'another argument' if number or not self._has_input else 'its input'}"
            mismatch = self._describe_if_too_large(what, _gradient_difference(a.grad, b.grad, 0.0))
            if mismatch:
                return mismatch
        expected = dict(whole.module.named_parameters())
        largest = max((float(p.grad.abs().max()) for p in expected.values() if p.grad is not None), default=0.0)
        for name, p in parts.module.get_submodule("block").named_parameters():
            gradient, cut = expected[name].grad, placement(p).cut
            of_rank = gradient if gradient is None or cut is None else cut.of(gradient)
            mismatch = self._describe_if_too_large(
                f"the gradient of {name}", _gradient_difference(p.grad, of_rank, _SMALLEST_GRADIENT * largest)
            )
            if mismatch:
                return mismatch
        return ""

    def close(self) -> None:
        """Undoes what copies have changed outside of them."""
        while self._undo:
            self._undo.pop()()
        random.setstate(self._random_states_before[0])
        np.random.set_state(self._random_states_before[1])

    def _describe_if_too_large(self, what: str, difference: float) -> str:
        if difference <= _TOLERANCES[self._dtype] or difference <= _ALLOWED_GROWTH * self._sensitivity(difference):
            return ""
        return f"{what} differs by {difference:.1g} of its largest element"

    def _sensitivity(self, difference: float) -> float:
        """Measures how much a slight change of the input changes the output: blocks may amplify rounding errors."""
        if difference > _CERTAIN_DIFFERENCE:
            return 0.0
        before = self._run(self._copy())
        self._factor = 1 + _INPUT_CHANGE
        changed = self._run(self._copy())
        self._factor = 1.0
        return max(0.0, _difference(changed.outputs[0], before.outputs[0]) - _MOST_AMPLIFICATION * _INPUT_CHANGE)


def dtypes_of(block: nn.Module, elements: int) -> list[torch.dtype]:
    """Returns the dtypes in which to try a block, the best one first. elements: of its input."""
    small = sum(p.numel() for p in block.parameters()) <= _SMALL and elements <= _SMALL_INPUT
    own = {p.dtype for p in block.parameters()} & {torch.bfloat16, torch.float16}
    return [*([torch.float64] if small else []), torch.float32, *sorted(own, key=str)]


def _backward(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Runs backward from outputs, with random gradients, to these leaves alone."""
    if not outputs:
        return
    numbers = torch.Generator().manual_seed(3)
    given = [torch.randn(t.shape, generator=numbers, dtype=torch.float64).to(t) for t in outputs]
    try:
        torch.autograd.backward(outputs, given, retain_graph=True, inputs=list(leaves))
    except RuntimeError as error:
        if "checkpoint" not in f"{error}":  # a re-entrant one goes to all leaves or none
            raise
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(outputs, given)


def _values(name: str, p: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers by which no parameter is without effect. number: of the parameter, which begins at another one."""
    if not p.is_floating_point():
        return torch.zeros(p.shape, dtype=p.dtype)
    base = _base()
    count = -(-(p.numel() + number) // base.numel())
    noise = base.repeat(count)[number : number + p.numel()].view(p.shape)
    if p.dim() > 1:
        noise = noise / math.sqrt(p.shape[-1])
    elif "bias" in name.rpartition(".")[2]:
        noise = 0.3 * noise
    else:
        noise = 1 + 0.3 * noise
    return noise.to(dtype)


@cache
def _base() -> torch.Tensor:
    """Random numbers that are repeated: as many as a prime, so that no two rows of a matrix are the same."""
    return torch.randn(100_003, generator=torch.Generator().manual_seed(11), dtype=torch.float32)


def _difference(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Returns the largest difference, of the largest element that is expected. least: of that, at least."""
    if not found.numel():
        return 0.0
    found, expected = found.detach(), expected.detach()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return math.inf
    found, expected = (torch.where(t.isfinite(), t, 0) for t in (found, expected))  # -inf of a mask
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), least, 1e-30)


def _gradient_difference(found: torch.Tensor | None, expected: torch.Tensor | None, least: float) -> float:
    """Returns `_difference` for gradients, where None is zeros. least: of the largest element, at least."""
    if found is None or expected is None:
        given = found if expected is None else expected
        return 0.0 if given is None or float(given.abs().max()) <= least else math.inf
    if found.shape != expected.shape:
        return math.inf
    return _difference(found, expected, least)
