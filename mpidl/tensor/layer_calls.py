"""Reads from a module's source how it calls its linear layers: what they get, and where their results go.

`attention_structure` and `feed_forward_structure` use these readings. Both return `Recognised`: a style; a reason, as
text, for a module that looks like one and cannot be cut; or None.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn

from .flow import Flow, Judge, flow_in, follow
from .linear import kind_of
from .regions import AttentionParallel, FeedForwardParallel
from .source import SourceMethod, methods_of

Recognised = AttentionParallel | FeedForwardParallel | str | None


def linear_children(module: nn.Module) -> dict[str, Any]:
    """Returns the linear layers right inside a module, by name."""
    return {name: child for name, child in module.named_children() if kind_of(child) is not None}


def layer_inputs(module: nn.Module, method: SourceMethod, layers: Collection[str]) -> tuple[str | None, bool]:
    """Tells what a region's layers get: the argument besides the first one, and whether each layer has to begin it.

    Each does where the layers' input is not the module's own, or goes elsewhere besides, as in a residual, and where
    they run again on their own result.
    """
    first = method.arguments[0] if method.arguments else ""
    fed = [method.direct.get(f"self.{layer}", {""}) for layer in layers]
    others = set().union(*fed) - {first}
    absent = [call for call in method.direct if re.fullmatch(r"self\.\w+", call) and not hasattr(module, call[5:])]
    reads = sum(first in names for names in (*fed, *(method.direct[call] for call in absent)))
    again = method.repeats([f"self.{layer}" for layer in layers])
    if method.name != "forward" or again or "" in others or len(others) > 1 or method.uses.get(first, 0) != reads:
        return None, True
    return (others.pop() if others else None), False


def layer_with_dropped_input(method: SourceMethod, layers: Collection[str]) -> str:
    """Returns a layer, other than the first that runs, whose input may be dropped in part; "" if there is none.

    By then each rank's random numbers are its own, and the input's gradient is summed in the layer, behind the dropout.
    """
    later = sorted(layers, key=lambda layer: method.calls.index(f"self.{layer}"))[1:]
    given = {layer: method.feeds.get(f"self.{layer}", set()) for layer in later}
    return next((layer for layer, names in given.items() if any("drop" in name.lower() for name in names)), "")


def flow_into_output(module: nn.Module, sources: Collection[str], judge: Judge) -> Flow:
    """Follows what `sources` return, modules inside of a module, up to `output.dense`."""
    callers = [method for method in methods_of(module) if "self.output" in method.calls]
    method = next((method for method in callers if any(name in method.calls for name in sources)), None)
    if method is not None:
        flow = follow(method, module, sources, "self.output", partial(judge, module))
    else:  # a dictionary of modules is run by the one around it
        flow = Flow(unknown="" if isinstance(module, nn.ModuleDict) else "what its source does not show")
    within = flow_in(module.output, module, judge, end="self.dense")  # type: ignore[arg-type]
    return Flow(flow.leaks or within.leaks, flow.unknown or within.unknown)
