"""Styles, by which a plan cuts a module's parameters and changes what it computes: of single layers, and of sequences.

    {"transformer.h.*.attn": AttentionParallel(fused="c_attn", output="c_proj", heads="heads"),
     "transformer.h.*.mlp":  FeedForwardParallel(inputs=("c_fc",), output="c_proj"),
     "transformer.wte": VocabParallel(), "lm_head": VocabParallel()}

`regions` has the styles of attentions and feed-forward networks.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..compiling import uncompiled
from ..errors import ConfigurationError
from .forward_wrapper import has_own_forward, run_around
from .functions import call_in_backward, copy_to_region, cut_sequence, join_sequence
from .linear import begin_regions, make_column_parallel, make_row_parallel, sizes_of
from .local_elements import LocalFeatures, LocalPart
from .sizes import run_of, segment_runs
from .tensor_parallel import Dropouts, TensorParallel
from .vocabulary import make_vocabulary


class Style(Protocol):
    """Change of a module by a plan. sequential: whether it is for sequence parallelism alone."""

    sequential: bool

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Changes the module in place. name: in the model, for messages. Collective over tp."""


@dataclass(frozen=True)
class ColumnParallel:
    """A linear layer of which each rank computes some output features. segments: equal parts of a fused weight.

    The layer begins a region by itself: its input is the same on all ranks of tp.
    """

    segments: int = 1
    sequential = False

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Cuts the layer."""
        out = sizes_of(name, module)[1]
        if out % self.segments:
            raise ConfigurationError(f"plan: {name}: has {out} output features; needs {self.segments} equal segments")
        runs = segment_runs([out // self.segments] * self.segments, tp.ranks, tp.rank)
        make_column_parallel(module, tp, runs, copies_input=True)
        begin_regions(module, tp, LocalFeatures(name, tuple(runs), out))


@dataclass(frozen=True)
class RowParallel:
    """A linear layer of which each rank has some input features; it ends a region: its output is the same on all."""

    sequential = False

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Cuts the layer."""
        make_row_parallel(module, tp, [run_of(sizes_of(name, module)[0], tp.ranks, tp.rank)])


@dataclass(frozen=True)
class VocabParallel:
    """An embedding, or an output layer, of which each rank has some rows of the vocabulary."""

    sequential = False

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Cuts the layer."""
        make_vocabulary(name, module, tp)


@dataclass(frozen=True)
class SequenceBegins:
    """The first block: from here on each rank computes a piece of the sequences. input: the name of its argument.

    Sequences lie along dimension 1.
    """

    input: str = "hidden_states"
    sequential = True

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Registers a hook before the forward pass of the block."""
        begins = _BeginsPieces(tp, Argument(module, self.input), tp.model() or module)
        tp.keep(module.register_forward_pre_hook(begins, with_kwargs=True))


class _BeginsPieces:
    """The hook before the first block. model: its dropout is looked at, that of later blocks too.

    The hook of a copied model looks at the copy, and that of a block which is copied by itself at the block.
    """

    def __init__(self, tp: TensorParallel, argument: Argument, model: nn.Module | None) -> None:
        self._tp, self._argument = tp, argument
        self._model = None if model is None else weakref.ref(model)
        self._dropouts: Dropouts | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _BeginsPieces:
        model = None if self._model is None else memo.get(id(self._model()))
        return _BeginsPieces(self._tp, self._argument, model)

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        x = self._argument.of(args, kwargs)
        if not block.training:
            self._tp.whole_pass()
            return None
        self._tp.begin_pieces(x.shape[1])
        if self._draws(block):
            self._tp.begin_stream(x.device)
        return self._argument.replaced(args, kwargs, cut_sequence(x, self._tp.group))

    @uncompiled
    def _draws(self, block: nn.Module) -> bool:
        if self._dropouts is None:  # a copy has no blocks yet as its hooks are made
            model = None if self._model is None else self._model()
            self._dropouts = Dropouts(model or block)
        return bool(self._dropouts)


@dataclass(frozen=True)
class SequenceParallel:
    """A norm, or another module with parameters, that computes on pieces: its gradients are summed over tp.

    Of a block that has parameters of its own: not those of layers in it that are cut, or have a style of their own.
    """

    sequential = True

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Registers the module's gradients, to be summed over tp."""
        tp.sum_gradients(module, if_in_pieces=True)


@dataclass(frozen=True)
class SequenceEnds:
    """The last norm or block: its output is of whole sequences again."""

    sequential = True

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Registers a hook after the forward pass of the module."""

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            first, length = output[0] if isinstance(output, tuple) else output, tp.length
            tp.end_pieces()
            if length is not None:
                first = join_sequence(first, tp.group, length)
            if first.requires_grad:
                first = call_in_backward(first, partial(tp.in_backward, length))
            return (first, *output[1:]) if isinstance(output, tuple) else first

        tp.keep(module.register_forward_hook(after))


class Argument:
    """An argument of a module's forward pass, by its name, wherever it stands in a call."""

    def __init__(self, module: nn.Module, name: str) -> None:
        names = list(inspect.signature(module.forward).parameters)
        if name not in names:
            name = names[0]
        self._name, self._place = name, names.index(name)

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the argument; None if it is not given."""
        return args[self._place] if len(args) > self._place else kwargs.get(self._name)

    def replaced(self, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the arguments with another value for this one."""
        if len(args) > self._place:
            return (*args[: self._place], value, *args[self._place + 1 :]), kwargs
        return tuple(args), {**kwargs, self._name: value}


class Region:
    """Runs around the forward pass of a module that begins a region and ends it with a row-parallel layer.

    input: the argument that comes in pieces under sequence parallelism.
    memory: one that is always whole, such as what a decoder attends to.
    copies: whether the region's own layers do not begin it by themselves.
    part: what this rank computes of it.

    Raises ConfigurationError for a module whose forward pass is not its class's.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        tp: TensorParallel,
        input: str,
        memory: str | None,
        *,
        copies: bool,
        part: LocalPart,
    ) -> None:
        if has_own_forward(module):
            raise ConfigurationError(
                f"plan: {name}: has a forward pass of its own in the {type(module).__name__} itself, which would hide "
                "the cut; needs its class's"
            )
        self._tp, self._copies, self._part = tp, copies, part
        tp.regions.append(name)
        self.dropouts = Dropouts(module)
        self._input = Argument(module, input)
        named = memory is not None and memory in inspect.signature(module.forward).parameters
        self._memory = Argument(module, memory) if named and memory is not None else None
        run_around(module, tp, "Region", self)

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Begins the region, runs the module, and ends the region."""
        tp, x = self._tp, self._input.of(args, kwargs)
        if self._copies:
            args, kwargs = self._input.replaced(args, kwargs, tp.enter_region(x))
            memory = None if self._memory is None else self._memory.of(args, kwargs)
            if self._memory is not None and torch.is_tensor(memory):
                args, kwargs = self._memory.replaced(args, kwargs, copy_to_region(memory, tp.group))
            tp.local_part = self._part
            if module.training and self.dropouts and not tp.has_pieces(x):
                tp.begin_stream(x.device, of_region=True)
        try:
            return forward(*args, **kwargs)
        finally:
            tp.end_region()  # the row-parallel layer has done so, unless the pass has failed before
