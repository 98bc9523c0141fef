"""Adapters of low rank (LoRA) around a cut linear layer, as peft makes them: base_layer, lora_A, lora_B.

    column-parallel   x --+-- W0 --+--> y0      A is whole on every rank, and its gradient the sum of the ranks';
                          A -- B0 -'            B is cut as the base is
    row-parallel      x0 -+-- W0 --+-- g --> y  A is cut as the base is, and its products are summed over the ranks,
                          A0 - g - B -----'     only r columns wide (r: the adapter's rank); B is whole

Source of the idea: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def base_of(layer: Any) -> Any:
    """Returns the layer inside adapters, or the layer itself where there are none."""
    return layer.base_layer if is_adapted(layer) else layer


def is_adapted(layer: Any) -> bool:
    """Tells if a module is a layer with adapters of low rank."""
    return isinstance(getattr(layer, "base_layer", None), nn.Module) and all(
        isinstance(getattr(layer, name, None), nn.ModuleDict) for name in ("lora_A", "lora_B")
    )


def adapters(layer: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yields the pairs A, B of each adapter; none for a layer without."""
    for name in layer.lora_A if is_adapted(layer) else ():
        yield layer.lora_A[name], layer.lora_B[name]


def variant_of(layer: Any) -> str | None:
    """Returns the name of what an adapter does besides, as DoRA with norms of whole weights; None for plain ones."""
    if not is_adapted(layer):
        return None
    for name in ("lora_variant", "lora_magnitude_vector"):
        found = getattr(layer, name, None)
        if found is not None and len(found):
            kind = type(next(iter(found.values()))).__name__
            return f"{name} {kind}"
    return None
