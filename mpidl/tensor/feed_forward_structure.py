"""Finds feed-forward networks by what is in a module: its linear layers, their sizes, their calls.

A feed-forward network has linear layers from one width to a second, one back, and in between what acts on single
features. What comes between is followed through the source (`flow`), and each operation has to be a known one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import partial

from torch import nn

from .elementwise import MODULES_ON_ELEMENTS, ON_ELEMENTS
from .flow import Flow, called_by, flow_in, follow
from .forward_wrapper import has_own_forward
from .layer_calls import Recognised, flow_into_output, layer_inputs, layer_with_dropped_input, linear_children
from .linear import kind_of, sizes_of
from .regions import FeedForwardParallel
from .source import method_with


def feed_forward(module: nn.Module, taken: Collection[str]) -> Recognised:
    """Recognises a feed-forward network. taken: layers right inside the module that are of something else."""
    inside, output_layer = (getattr(getattr(module, name, None), "dense", None) for name in ("intermediate", "output"))
    there = kind_of(inside) is not None and kind_of(output_layer) is not None
    if there and sizes_of("", inside) == sizes_of("", output_layer)[::-1]:
        flow = flow_into_output(module, ("self.intermediate", "self.intermediate['dense']"), _on_features)
        if not isinstance(module.intermediate, nn.ModuleDict) and not flow.unknown:
            flow = flow_in(module.intermediate, module, _on_features, sources=("self.dense",))  # type: ignore[arg-type]
        if flow.unknown or flow.leaks:
            return f"{flow.unknown or 'intermediate'} may compute on several features"
        return FeedForwardParallel(("intermediate.dense",), "output.dense", inner="intermediate.dense")
    layers = {name: layer for name, layer in linear_children(module).items() if name not in taken}
    for output in reversed(layers):
        features, width = sizes_of(output, layers[output])
        sizes = {name: sizes_of(name, layer) for name, layer in layers.items() if name != output}
        for wide in (features, 2 * features):
            inputs = tuple(name for name, size in sizes.items() if size == (width, wide))
            if len(inputs) == len(sizes) and len(inputs) in ((1, 2) if wide == features else (1,)):
                own = [
                    n for n, p in module.named_parameters(recurse=False) if p.shape[-1:] != (width,) or wide == width
                ]
                if own:  # one of the width may act on what comes out
                    return f"{own[0]} may be of several features"
                return _feed_forward(module, inputs, output, wide // features)
    return None


def _feed_forward(module: nn.Module, inputs: tuple[str, ...], output: str, segments: int) -> Recognised:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        names = [name for name, _ in module.named_children()]
        between = names[names.index(inputs[0]) + 1 : names.index(output)]
        mixing = next((name for name in between if not _module_on_features(getattr(module, name))), None)
        if names.index(output) < names.index(inputs[0]) or len(inputs) > 1:  # where each gets what the last one gives
            return None
        style = FeedForwardParallel(inputs, output, input="input")
        return style if mixing is None and segments == 1 else f"{mixing or inputs[0]} may compute on several features"
    method = method_with(module, *inputs, output)
    if method is None:
        return "its source does not show how it calls its layers"
    calls = [call for call in method.calls if call in {f"self.{name}" for name in (*inputs, output)}]
    reached = method.feeds.get(f"self.{output}", set()) >= {f"self.{name}()" for name in inputs}
    if not reached or len(calls) != len(inputs) + 1:
        return None
    if any(f"self.{a}()" in method.feeds.get(f"self.{b}", ()) for a in inputs for b in inputs if a != b):
        return None  # square layers one after the other
    judge = partial(_on_features, module, halves=segments == 2)
    flow = follow(method, module, [f"self.{name}" for name in inputs], f"self.{output}", judge)
    if flow.unknown:
        return f"{flow.unknown} may compute on several features"
    if flow.leaks:
        return f"its features go elsewhere than into {output}"
    children = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
    more = children > {*inputs, output}
    halves = re.search(r"chunk\(2|\bglu\(", method.text) is not None
    if segments == 2 and (not halves or "::2" in method.text):
        return f"its source does not show how gate and values lie in {inputs[0]}"
    # A region that begins at one of its layers copies the input for that one alone, so each does it for itself.
    each = len(inputs) > 1 and (more or layer_inputs(module, method, inputs)[1])
    dropped = layer_with_dropped_input(method, inputs) if each else ""
    if dropped:
        return f"its source may drop elements of the input of {dropped}"
    inner = calls[0].removeprefix("self.") if more or each else ""  # dropout before the region is not of it
    return FeedForwardParallel(inputs, output, segments=segments, inner=inner, each=each, input=method.arguments[0])


def _on_features(module: nn.Module, node: ast.expr, halves: bool = False, deep: int = 4) -> bool:
    """Tells whether an expression acts on single features. halves: they lie in two, a gate's and what it gates."""
    if isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return ast.unparse(node.slice) in ("0", ":-1")
        return halves and isinstance(node.value, ast.Call) and called_by(module, node.value) == "chunk"
    if not isinstance(node, ast.Call):
        return False
    called = called_by(module, node)
    if isinstance(called, nn.Module):
        return _module_on_features(called, halves, deep)
    if isinstance(called, str):
        if called == "size":
            return [ast.unparse(value) for value in node.args] == ["0"]
        return ON_ELEMENTS.fullmatch(called.rstrip("_")) is not None or (halves and called in ("chunk", "glu"))
    flow = flow_in(called, module, partial(_on_features, halves=halves, deep=deep - 1)) if deep else Flow(leaks=True)
    return not (flow.unknown or flow.leaks)


def _module_on_features(child: nn.Module, halves: bool = False, deep: int = 4) -> bool:
    """Tells whether a module acts on single features: one of torch's that does, or one whose source shows it."""
    if has_own_forward(child) or any(True for _ in child.parameters()):
        return False
    if type(child) is nn.Sequential:
        return all(_module_on_features(inner, halves, deep) for inner in child)
    if type(child).__module__.startswith("torch.nn.modules."):
        return type(child).__name__ in MODULES_ON_ELEMENTS or (halves and isinstance(child, nn.GLU))
    flow = flow_in(child, child, partial(_on_features, halves=halves, deep=deep - 1)) if deep else Flow(leaks=True)
    return not (flow.unknown or flow.leaks)
