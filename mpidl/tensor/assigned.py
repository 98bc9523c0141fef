"""Keeps the placements of cut parameters that `load_state_dict(assign=True)` replaces."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..mesh import place, placement
from ..mesh.placement import Placement
from .tensor_parallel import TensorParallel


def keep_placements(model: nn.Module, tp: TensorParallel) -> None:
    """Declares the placement of each cut parameter again after a load_state_dict, until the model is whole again."""
    for module in model.modules():
        cut = {name: placement(p) for name, p in module._parameters.items() if p is not None}
        cut = {name: where for name, where in cut.items() if where.cut is not None}
        if cut:
            tp.keep(module.register_load_state_dict_post_hook(_Places(cut)))


class _Places:
    """The hook of a module. places: by the names of its cut parameters."""

    def __init__(self, places: dict[str, Placement]) -> None:
        self._places = places

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        for name, where in self._places.items():
            p = module._parameters.get(name)
            if p is not None and placement(p) != where:
                place(p, *where.axes, counted=where.counted, cut=where.cut)
