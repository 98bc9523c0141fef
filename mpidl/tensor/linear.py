"""Linear layers of which each rank of tp holds some features: column-parallel, then row-parallel.

            column-parallel: features of `out`              row-parallel: features of `in`
    x ----> A0 ----> y0  (rank 0)   ...any function of      y0 ----> B0 ----> z0
    x ----> A1 ----> y1  (rank 1)   single features...      y1 ----> B1 ----> z1      z = z0 + z1 + bias

A layer keeps its class, or becomes one of a class derived from it, and keeps its parameters, which become this rank's
parts in place: what else refers to them, such as an optimizer or a tied layer, refers to the parts.
Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..compiling import uncompiled
from ..errors import ConfigurationError
from ..mesh import Cut, Mesh, place, placement
from .assigned import keep_placements
from .communication import TensorGroup
from .forward_wrapper import has_own_forward, run_around
from .functions import CutProduct, column_product, cut_features, join_features, row_product
from .local_elements import LocalFeatures, LocalPart
from .lora import adapters, base_of, is_adapted, variant_of
from .saving import refuse_to_save_parts
from .sizes import Run, run_of
from .tensor_parallel import Dropouts, TensorParallel

# Modules that compute x @ weight + bias: whether their weight is [out, in], and their attributes of sizes, out and in.
_KINDS: dict[str, tuple[bool, str, str]] = {
    "torch.nn.modules.linear.Linear": (True, "out_features", "in_features"),
    "transformers.pytorch_utils.Conv1D": (False, "nf", "nx"),
    "mpidl.models.gpt2.Projection": (False, "", ""),
}


def kind_of(layer: Any) -> tuple[bool, str, str] | None:
    """Returns the entry of a linear layer in _KINDS, also of a derived class; None for any other object.

    A class with a forward pass of its own, as of quantized layers, is another object, and so is a layer that has one in
    the instance, or whose weight is computed, as by a parametrization. Adapters are looked through.
    """
    outer, layer = layer, base_of(layer)
    found = _entry_of(layer)
    if found is None or has_own_forward(outer) or has_own_forward(layer):
        return None
    cls, entry = found
    if any(getattr(layer, name, None) is not layer._parameters.get(name) for name in ("weight", "bias")):
        return None
    own = type(layer).forward is not getattr(cls, "forward", None) and not hasattr(layer, "_tensor_parallel")
    return None if own else entry


def _entry_of(layer: Any) -> tuple[type, tuple[bool, str, str]] | None:
    """Returns the class of a layer that _KINDS names, and its entry there."""
    for cls in type(layer).__mro__:
        found = _KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
        if found is not None:
            return cls, found
    return None


def sizes_of(name: str, layer: Any) -> tuple[int, int]:
    """Returns the sizes (in, out) of a whole linear layer. Raises ConfigurationError for another module."""
    kind = kind_of(layer)
    if kind is None:
        raise ConfigurationError(
            f"{name}: is a {type(layer).__name__}; needs a linear layer (torch.nn.Linear, Conv1D of transformers) "
            "with a weight of its own and its class's forward pass"
        )
    variant = variant_of(layer)
    if variant is not None:
        raise ConfigurationError(f"{name}: has adapters with {variant}; needs plain LoRA: A, B and a number")
    layer = base_of(layer)
    cut = placement(layer.weight).cut  # of a layer tied to one that was cut before
    rows, columns = layer.weight.shape if cut is None else cut.shape
    return (columns, rows) if kind[0] else (rows, columns)


def cut_parameter(p: torch.Tensor, dim: int, runs: Iterable[Run], tp: TensorParallel, *, counted: bool = True) -> None:
    """Replaces the values of a parameter by this rank's runs of a dimension, in place, and declares its placement.

    A parameter that was cut before stays as it is, as one of tied layers does. One that was cut in another way is noted
    in `tp.refused`: the ways may agree on some ranks.
    """
    known = placement(p).cut
    cut = Cut.along(p.shape if known is None else known.shape, dim, runs)
    if known is None:
        p.data = cut.of(p.data)
        place(p, "tp", counted=counted, cut=cut)
    elif known != cut:
        tp.refused.append(
            f"plan: a parameter of shape {cut.shape}, which tied layers have, would be cut in two ways; needs one"
        )


def make_column_parallel(
    layer: Any,
    tp: TensorParallel,
    runs: Iterable[Run],
    *,
    copies_input: bool,
    counted: bool = True,
) -> None:
    """Keeps this rank's features of `out`, and lets the layer compute them.

    copies_input: the layer is the first of a region by itself: its input is whole, or a piece of the sequences; else
    the input is that of a region which has begun.
    """
    runs = tuple(runs)
    if is_adapted(layer):
        _make_adapted_column(layer, tp, runs, copies_input=copies_input, counted=counted)
        return
    out_in, out_name, _ = _entry_of_cut_layer(layer)
    cut_parameter(layer.weight, 0 if out_in else 1, runs, tp, counted=counted)
    if layer.bias is not None:
        cut_parameter(layer.bias, 0, runs, tp, counted=counted)
    if out_name:
        tp.set(layer, out_name, sum(stop - start for start, stop in runs))
    if copies_input:
        _mix_in(layer, _ColumnParallel, tp)
    elif tp.sequence_parallel:
        _mix_in(layer, _InRegion, tp)


def make_row_parallel(layer: Any, tp: TensorParallel, runs: Iterable[Run], *, ends_region: bool = True) -> None:
    """Keeps this rank's features of `in`, and lets the layer sum its products over the ranks.

    ends_region: the layer is the last of a region.
    """
    runs = tuple(runs)
    if is_adapted(layer):
        _make_adapted_row(layer, tp, runs)
        return
    out_in, _, in_name = _entry_of_cut_layer(layer)
    cut_parameter(layer.weight, 1 if out_in else 0, runs, tp)
    if in_name:
        tp.set(layer, in_name, sum(stop - start for start, stop in runs))
    layer._ends_region = ends_region
    tp.changes.append(lambda: delattr(layer, "_ends_region"))
    _mix_in(layer, _RowParallel, tp)


def begin_regions(layer: nn.Module, tp: TensorParallel, part: LocalPart, dropouts: Dropouts | None = None) -> None:
    """Lets a column-parallel layer begin a region by itself, with random numbers of the rank's own until it ends.

    part: what this rank computes of the region.
    dropouts: of the region, which a row-parallel layer ends; None where neither is known.
    """
    tp.keep(layer.register_forward_hook(_BeginRegionHook(tp, part, dropouts)))


class _BeginRegionHook:
    """A forward hook, for `begin_regions`. A region that maybe no row-parallel layer ends is ended in backward."""

    def __init__(self, tp: TensorParallel, part: LocalPart, dropouts: Dropouts | None) -> None:
        self._tp, self._part, self._dropouts = tp, part, dropouts

    def __call__(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        if layer.training:
            self._begin(output)

    @uncompiled
    def _begin(self, output: torch.Tensor) -> None:
        self._tp.local_part = self._part
        if self._tp.region_length is None and (self._dropouts is None or self._dropouts):
            self._tp.begin_stream(output.device, of_region=True)
        if self._dropouts is None and output.requires_grad:
            output.register_hook(self._end)

    def _end(self, gradient: torch.Tensor) -> None:
        self._tp.end_region()


def _make_adapted_column(
    layer: Any, tp: TensorParallel, runs: tuple[Run, ...], *, copies_input: bool, counted: bool
) -> None:
    make_column_parallel(layer.base_layer, tp, runs, copies_input=False, counted=counted)
    for a, b in adapters(layer):
        if tp.sequence_parallel:
            _mix_in(a, _InRegion, tp)
        tp.sum_gradients(a, if_in_pieces=False)
        make_column_parallel(b, tp, runs, copies_input=False, counted=counted)
    _set_if_there(layer, "out_features", sum(stop - start for start, stop in runs), tp)

    def around(layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if copies_input:
            args = tp.enter_region(args[0]), *args[1:]
        part, tp.local_part = tp.local_part, None  # an adapter drops elements of its input, which is whole
        try:
            return forward(*args, **kwargs)
        finally:
            tp.local_part = part

    run_around(layer, tp, "AdaptedColumn", around)


def _make_adapted_row(layer: Any, tp: TensorParallel, runs: tuple[Run, ...]) -> None:
    make_row_parallel(layer.base_layer, tp, runs, ends_region=False)
    for a, b in adapters(layer):
        make_row_parallel(a, tp, runs, ends_region=False)
        tp.sum_gradients(b, if_in_pieces=True)
    _set_if_there(layer, "in_features", sum(stop - start for start, stop in runs), tp)
    tp.keep(layer.register_forward_pre_hook(_BeginStreamHook(tp, Dropouts(layer))))
    tp.keep(layer.register_forward_hook(lambda *_: tp.end_region(), always_call=True))


class _BeginStreamHook:
    """A forward pre-hook of a row-parallel layer with adapters, which drop elements. A copy's is of its own dropout."""

    def __init__(self, tp: TensorParallel, dropouts: Dropouts) -> None:
        self._tp, self._dropouts = tp, dropouts

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if layer.training and self._dropouts and self._tp.region_length is None:
            self._tp.begin_stream(args[0].device, of_region=True)


def _set_if_there(layer: Any, name: str, value: int, tp: TensorParallel) -> None:
    if name in vars(layer):
        tp.set(layer, name, value)


def _entry_of_cut_layer(layer: Any) -> tuple[bool, str, str]:
    """Returns the entry of a linear layer, also of one that the program has changed since it was cut."""
    found = _entry_of(base_of(layer))
    assert found is not None  # `sizes_of` was asked before
    return found[1]


class _ColumnParallel(nn.Module):
    """Mixed into the class of a linear layer that begins a region by itself."""

    _tensor_parallel: TensorParallel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., this rank's features of out]; of pieces of sequences, [batch, length, ...]."""
        tp = self._tensor_parallel
        x, weight, bias = _autocast(input, self.weight, self.bias)
        return column_product(x, weight, bias, CutProduct(tp.group, _entry_of_cut_layer(self)[0], tp.begin_region(x)))


class _InRegion(nn.Module):
    """Mixed into the class of a column-parallel linear layer in a region whose input may be gathered from pieces."""

    _tensor_parallel: TensorParallel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[batch, length, in] -> [batch, length, this rank's features of out]."""
        gathered = self._tensor_parallel.gathered
        if gathered is None or input is not gathered.x:
            return super().forward(input)  # type: ignore[no-any-return, misc]
        x, weight, bias = _autocast(input, self.weight, self.bias)
        return gathered.product(x, weight, bias, out_in=_entry_of_cut_layer(self)[0])


class _RowParallel(nn.Module):
    """Mixed into the class of a linear layer that ends a region."""

    _tensor_parallel: TensorParallel
    _ends_region: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., this rank's features of in] -> [..., out]; in pieces of sequences, if they are in pieces."""
        tp = self._tensor_parallel
        x, weight, bias = _autocast(input, self.weight, self.bias)
        if self._ends_region:
            tp.end_region()
        out_in, length = _entry_of_cut_layer(self)[0], tp.region_length
        return row_product(x, weight, bias, CutProduct(tp.group, out_in, length), tp.kept_sums)


def _autocast(x: torch.Tensor, *parameters: Any) -> tuple[Any, ...]:
    """Converts what a linear layer multiplies as torch.autocast does."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, *parameters
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(None if t is None else t.to(dtype) for t in (x, *parameters))


def _mix_in(layer: Any, mixin: type[nn.Module], tp: TensorParallel) -> None:
    layer._tensor_parallel = tp
    tp.changes.append(lambda: delattr(layer, "_tensor_parallel"))
    tp.set(layer, "__class__", _derived(type(layer), mixin))


def _derived(cls: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """Derives a class from a layer's, with the forward pass of the mixin; one of each pair."""
    if (cls, mixin) not in _DERIVED:
        name = f"{mixin.__name__.lstrip('_')}{cls.__name__}"
        _DERIVED[cls, mixin] = type(name, (mixin, cls), {"__module__": cls.__module__})
    return _DERIVED[cls, mixin]


_DERIVED: dict[tuple[type, type], type] = {}


class _GatherOutput:
    """A forward hook of a column-parallel layer, whose output is to be whole. size: of all features."""

    def __init__(self, group: TensorGroup, size: int) -> None:
        self._group, self._size = group, size

    def __call__(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return join_features(output, self._group, self._size)


class _CutInput:
    """A forward pre-hook of a row-parallel layer, whose input is whole."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def __call__(self, layer: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        return cut_features(args[0], self._group)


class ColumnParallelLinear(nn.Linear):
    """A linear layer of which each rank of tp computes some output features.

    in_features, out_features: of the whole layer; bias, device, dtype as in torch.nn.Linear.
    mesh: has the ranks of tp. All ranks begin with the whole layer's values, which are equal where their random
        generators are.

    gather_output: every rank gets the whole output.

    [..., in_features] -> [..., this rank's of out_features]. The input is the same on all ranks of tp, and its gradient
    is summed over them. In training mode random numbers, as of dropout, are the rank's own from here to a
    RowParallelLinear; where none follows, to the backward pass. Behind a whole output they are the same on all.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: Mesh,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        tp = TensorParallel.of_layers(mesh)
        run = run_of(out_features, tp.ranks, tp.rank)
        make_column_parallel(self, tp, [run], copies_input=True)
        if gather_output:
            self.register_forward_hook(_GatherOutput(tp.group, out_features))
        else:
            begin_regions(self, tp, LocalFeatures("ColumnParallelLinear", (run,), out_features))
        refuse_to_save_parts(self, tp)
        keep_placements(self, tp)


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank of tp has some input features; its output is the same on all.

    Arguments as those of ColumnParallelLinear.

    input_is_parallel: whether the input has this rank's features; else it has all, the same on every rank.

    [..., this rank's of in_features] -> [..., out_features]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: Mesh,
        input_is_parallel: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        tp = TensorParallel.of_layers(mesh)
        make_row_parallel(self, tp, [run_of(in_features, tp.ranks, tp.rank)])
        if not input_is_parallel:
            self.register_forward_pre_hook(_CutInput(tp.group))
        refuse_to_save_parts(self, tp)
        keep_placements(self, tp)
