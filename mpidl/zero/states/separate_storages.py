"""Gives each tensor of `model.state_dict()` a storage of its own where parameters are views of one flat memory.

    flat memory      [ p0 | p1 | p2 | ... ]      one storage, of which the parameters are views
    state_dict       { p0 }{ p1 }{ p2 }          the same memory, nothing is copied

Programs that save weights take tensors of one storage for tied ones and leave all but one out, or write the whole
storage.
"""

from __future__ import annotations

from typing import Any

import torch


def with_own_storages(_: torch.nn.Module, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
    """A hook of `register_state_dict_post_hook`. Tied tensors stay one, and with keep_vars parameters what they are."""
    made: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
    for name, tensor in state_dict.items():
        if name.startswith(prefix) and isinstance(tensor, torch.Tensor) and _is_part(tensor):
            key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
            if key not in made:
                made[key] = torch.from_dlpack(tensor)
            state_dict[name] = made[key]


def _is_part(tensor: torch.Tensor) -> bool:
    """Tells if a tensor of values takes a part of its storage."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return 0 < tensor.nbytes < tensor.untyped_storage().nbytes()
