"""The styles of regions: an attention cut by heads, a feed-forward network cut by features.

          ┌ rank 0: heads 0..4 ┐                             ┌ rank 0: features 0..f/2 ┐
    x ─ f ┤                    ├ g ─ y              x ─ f ── ┤                         ├ g ─ y
          └ rank 1: heads 4..7 ┘                             └ rank 1: features f/2..f ┘

f and g are those of `functions`. In between nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ConfigurationError
from .linear import begin_regions, cut_parameter, kind_of, make_column_parallel, make_row_parallel, sizes_of
from .local_elements import LocalFeatures, LocalHeads, LocalPart
from .lora import adapters, base_of
from .sizes import Heads, cut_heads, run_of, segment_runs, to_elements
from .styles import Region
from .tensor_parallel import Dropouts, TensorParallel


@dataclass(frozen=True)
class AttentionParallel:
    """An attention of which each rank computes some heads.

    query, key, value: names of the linear layers in the module; or fused: of one with all three in a row, or with those
        of each head in a row (interleaved).
    whole_input: whether the module asks for the shape of its input, which is then gathered before it, and not in the
        fused layer.
    output: of the layer that joins the heads.
    heads, key_heads: their numbers, or the attributes that have them, of the module, or of its config as "config.NAME";
        key_heads where several query heads share a key/value head.
    scaled, scaled_keys: attributes that grow with the number of query heads, or of key/value heads, such as these
        numbers.
    groups: the attribute with the number of query heads a key/value head.
    inside: modules that compute on single heads, such as norms of queries.
    bias_of_heads: an embedding [any, heads] of biases.
    inner: the module in this one that computes the heads, where the output layer is outside of it, or the layer that
        begins the region.
    each: whether each of the first layers begins the region, where what they get is not the input, or the input goes
        elsewhere besides.
    input, memory: arguments of its forward pass, see Region.
    """

    output: str
    heads: str | int
    query: str = ""
    key: str = ""
    value: str = ""
    fused: str = ""
    interleaved: bool = False
    whole_input: bool = False
    key_heads: str | int = ""
    scaled: tuple[str, ...] = ()
    scaled_keys: tuple[str, ...] = ()
    groups: str = ""
    inside: tuple[str, ...] = ()
    bias_of_heads: str = ""
    inner: str = ""
    each: bool = False
    input: str = "hidden_states"
    memory: str | None = None
    sequential = False

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Cuts the layers."""
        if self.each and self.memory is not None and tp.sequence_parallel:
            raise ConfigurationError(
                f"plan: {name}: has each=True and memory={self.memory!r} with sequences in pieces, where a layer "
                "cannot tell whole memory from a piece; needs each=False, or no sequence_parallel"
            )
        query = number(name, module, self.heads)
        key = number(name, module, self.key_heads) if self.key_heads else query
        heads = cut_heads(f"plan: {name}", query, key, tp.ranks, tp.rank)
        widths = self._cut_fused(name, module, tp, heads) if self.fused else self._cut_single(name, module, tp, heads)
        output = child(name, module, self.output)
        width = _width(f"{name}.{self.output}", sizes_of(f"{name}.{self.output}", output)[0], query)
        make_row_parallel(output, tp, [to_elements(heads.query_run, width)])
        self._change_attributes(name, module, tp, heads)
        part = LocalHeads(name, heads.query_run, heads.total_query_heads, (width, *widths))
        copies = not self.each and (not self.fused or self.whole_input)
        layers = (self.fused,) if self.fused else (self.query, self.key, self.value)
        _begin_region(name, module, self, self.memory, tp, layers=() if copies else layers, part=part)

    def _cut_fused(self, name: str, module: nn.Module, tp: TensorParallel, heads: Heads) -> list[int]:
        """Returns the width of a head, and of all that a head has in the weight."""
        layer = child(name, module, self.fused)
        if heads.total_key_heads < tp.ranks:  # some rank shares a head: this one need not
            raise ConfigurationError(
                f"plan: {name}.{self.fused}: has {heads.total_key_heads} key/value heads for {tp.ranks} ranks of tp in "
                "one weight with the queries; needs at least one for each rank"
            )
        all_heads = (heads.total_query_heads, heads.total_key_heads, heads.total_key_heads)
        width = _width(f"{name}.{self.fused}", sizes_of(f"{name}.{self.fused}", layer)[1], sum(all_heads))
        if self.interleaved:
            if heads.total_key_heads != heads.total_query_heads:
                raise ConfigurationError(f"plan: {name}.{self.fused}: interleaved heads need one key/value head each")
            make_column_parallel(
                layer, tp, [to_elements(heads.query_run, 3 * width)], copies_input=not self.whole_input
            )
            return [width, 3 * width]
        starts = (0, heads.total_query_heads * width, (heads.total_query_heads + heads.total_key_heads) * width)
        runs = [
            to_elements(run, width, start)
            for run, start in zip((heads.query_run, heads.key_run, heads.key_run), starts, strict=True)
        ]
        make_column_parallel(layer, tp, runs, copies_input=not self.whole_input)
        return [width]

    def _cut_single(self, name: str, module: nn.Module, tp: TensorParallel, heads: Heads) -> list[int]:
        """Returns the widths of a head's queries, keys and values."""
        widths = []
        for layer_name, run, count in (
            (self.query, heads.query_run, heads.total_query_heads),
            (self.key, heads.key_run, heads.total_key_heads),
            (self.value, heads.key_run, heads.total_key_heads),
        ):
            layer = child(name, module, layer_name)
            width = _width(f"{name}.{layer_name}", sizes_of(f"{name}.{layer_name}", layer)[1], count)
            widths.append(width)
            shared = layer_name != self.query and heads.total_key_heads < tp.ranks
            first = not shared or heads.sharers[0] == tp.rank
            make_column_parallel(layer, tp, [to_elements(run, width)], copies_input=self.each, counted=first)
            if shared:
                for part in (base_of(layer), *(b for _, b in adapters(layer))):
                    tp.sum_gradients(part, heads, if_in_pieces=False)
        return widths

    def _change_attributes(self, name: str, module: nn.Module, tp: TensorParallel, heads: Heads) -> None:
        for attributes, whole, here in (
            (self.scaled, heads.total_query_heads, heads.num_query_heads),
            (self.scaled_keys, heads.total_key_heads, heads.num_key_heads),
        ):
            for attribute in attributes:
                _set_number(module, attribute, number(name, module, attribute) // whole * here, tp)
        if self.groups:
            _set_number(module, self.groups, heads.num_query_heads // heads.num_key_heads, tp)
        for inner in self.inside:
            found = _if_there(module, inner)
            if found is not None:
                tp.sum_gradients(found, if_in_pieces=False)
        biases: Any = _if_there(module, self.bias_of_heads) if self.bias_of_heads else None
        if biases is not None:
            cut_parameter(biases.weight, 1, [heads.query_run], tp)
            tp.set(biases, "embedding_dim", heads.num_query_heads)


@dataclass(frozen=True)
class FeedForwardParallel:
    """A feed-forward network of which each rank computes some features.

    inputs: names of the linear layers that compute features: one, or a gate and the values that it gates.
    segments: of a single one that has both in a row, 2.
    output: of the layer that joins the features.
    inner: the module in this one that computes the features, where the output layer is outside of it, or the layer that
        begins the region.
    each: see AttentionParallel.
    input: the argument of its forward pass.
    """

    inputs: tuple[str, ...]
    output: str
    segments: int = 1
    inner: str = ""
    each: bool = False
    input: str = "hidden_states"
    sequential = False

    def apply(self, name: str, module: nn.Module, tp: TensorParallel) -> None:
        """Cuts the layers."""
        output = child(name, module, self.output)
        features = sizes_of(f"{name}.{self.output}", output)[0]
        alone = self.each or len(self.inputs) == 1
        for layer_name in self.inputs:
            layer = child(name, module, layer_name)
            size = sizes_of(f"{name}.{layer_name}", layer)[1]
            if size != features * self.segments:
                raise ConfigurationError(
                    f"plan: {name}.{layer_name}: has {size} output features; needs {self.segments} times the "
                    f"{features} input features of {self.output}"
                )
            runs = segment_runs([features] * self.segments, tp.ranks, tp.rank)
            make_column_parallel(layer, tp, runs, copies_input=alone)
        make_row_parallel(output, tp, [run_of(features, tp.ranks, tp.rank)])
        part = LocalFeatures(
            name, segment_runs([features] * self.segments, tp.ranks, tp.rank), features * self.segments
        )
        _begin_region(name, module, self, None, tp, layers=self.inputs if alone else (), part=part)


def _begin_region(
    name: str,
    module: nn.Module,
    style: AttentionParallel | FeedForwardParallel,
    memory: str | None,
    tp: TensorParallel,
    *,
    layers: tuple[str, ...],
    part: LocalPart,
) -> None:
    """Lets a style's inner module be the region; where that is a layer, it goes on to the row-parallel one.

    layers: names of those that copy the region's input each by itself, behind which it begins; what comes before, such
        as a dropout of the input, is the same on all ranks. None where the region copies it.
    """
    inner = submodule(name, module, style.inner)
    if style.inner and kind_of(inner) is not None and layers:
        around = submodule(name, module, style.inner.rpartition(".")[0])
        begin_regions(inner, tp, part, Dropouts(around))
        return
    region = Region(joined(name, style.inner), inner, tp, style.input, memory, copies=not layers, part=part)
    for layer in layers:
        begin_regions(child(name, module, layer), tp, part, region.dropouts)


def joined(name: str, inner: str) -> str:
    """Joins the names of a module and of one in it."""
    return f"{name}.{inner}" if name and inner else name or inner


def submodule(name: str, module: nn.Module, inner: str) -> nn.Module:
    """Returns a module inside another, or that one itself. Raises ConfigurationError if there is none of this name."""
    try:
        return module.get_submodule(inner)
    except AttributeError:
        raise ConfigurationError(f"plan: {name}: has no module {inner!r}") from None


def child(name: str, module: nn.Module, child_name: str) -> nn.Module:
    """Returns a linear layer inside a module. Raises ConfigurationError if there is none of this name."""
    found = submodule(name, module, child_name)
    if kind_of(found) is None:
        sizes_of(f"plan: {name}.{child_name}", found)
    return found


def number(name: str, module: nn.Module, attribute: str | int) -> int:
    """Returns a number, or an attribute, of the module or as "config.NAME" of its config.

    Raises ConfigurationError if there is none.
    """
    found: Any = module
    if isinstance(attribute, int):
        return attribute
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, int):
        raise ConfigurationError(f"plan: {name}: has no attribute {attribute!r} with a number of heads")
    return found


class _OwnConfig:
    """A config that other modules share, of which one has some numbers of its own."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._config, name)


def _set_number(module: nn.Module, attribute: str, value: int, tp: TensorParallel) -> None:
    path, _, last = attribute.rpartition(".")
    owner: Any = module
    for part in path.split(".") if path else []:
        parent, owner = owner, getattr(owner, part)
        if isinstance(parent, nn.Module) and not isinstance(owner, nn.Module):
            owner = _OwnConfig(owner)
            tp.set(parent, part, owner)
    if isinstance(owner, _OwnConfig):
        setattr(owner, last, value)
    else:
        tp.set(owner, last, value)


def _if_there(module: nn.Module, name: str) -> nn.Module | None:
    """Returns a module inside another; None where some models of a family lack it."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _width(name: str, size: int, heads: int) -> int:
    """Returns the width of a head."""
    if size % heads:
        raise ConfigurationError(f"plan: {name}: has {size} features; needs a multiple of {heads} heads")
    return size // heads
