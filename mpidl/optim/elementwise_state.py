"""Finds an optimizer's elementwise states: those with an element for each of the parameter's, which are cut as it is.

ZeRO cuts them over the ranks, checkpoints save them by ranges of elements, and estimates of memory count them so; every
other state is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})  # that torch's optimizers keep, one for a whole parameter

EIGHT_BIT_LEAST = 4096  # elements from which on a parameter's moments are in 8 bits (`adam8bit`)

_REPLICATED = "_mpidl_replicated"  # attribute of a tensor
_WHOLE_SIZE = "_mpidl_whole_size"


def elementwise(states: Iterable[tuple[Sequence[int], Mapping[str, Any]]]) -> set[str]:
    """Lists the names of elementwise states. states: each parameter's shape and its states.

    For a parameter without dimensions a number, such as the count of steps, looks like a state of its one element. The
    other parameters decide; if all are without dimensions, the names of torch's own numbers.
    """
    found: dict[str, bool] = {}
    unsure: set[str] = set()
    for shape, entry in states:
        for key, value in entry.items():
            if not shape:
                unsure.add(key)
            elif torch.is_tensor(value):
                found[key] = found.get(key, False) or tuple(value.shape) == tuple(shape)
    return {key for key, cut in found.items() if cut} | (unsure - found.keys() - _NUMBERS)


def note_whole_size(part: torch.Tensor, size: int) -> None:
    """Notes on a parameter's slice how many elements the whole has, on which an optimizer's choices may depend."""
    setattr(part, _WHOLE_SIZE, size)


def whole_size(p: torch.Tensor) -> int:
    """Elements of a parameter, of a slice those of the whole one."""
    return int(getattr(p, _WHOLE_SIZE, p.numel()))


def saved_state(optimizer: torch.optim.Optimizer) -> MutableMapping[Any, Any]:
    """The state by parameter as it is saved and loaded, which an optimizer may keep in another form."""
    found: MutableMapping[Any, Any] = getattr(optimizer, "saved_state", optimizer.state)
    return found


def restore_wide(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Gives an optimizer these states of a state_dict in fp32 or wider, after torch has loaded it.

    Torch's `load_state_dict` rounds states to the dtype of 16-bit parameters.
    """
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, number in zip(group["params"], saved["params"], strict=True):
            wide = torch.promote_types(p.dtype, torch.float32)
            for key, value in state_dict["state"].get(number, {}).items():
                if key in keys and torch.is_tensor(value):
                    optimizer.state[p][key] = value.detach().to(p.device, wide, copy=True)


def mark_replicated(value: Any) -> Any:
    """Marks a state as whole on every rank, as a tensor may have the shape of a slice by accident. Returns it."""
    if torch.is_tensor(value):
        setattr(value, _REPLICATED, True)
    return value


def state_tensors(entries: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Lists the tensors of parameters' states, without numbers such as the count of steps."""
    return [v for entry in entries for v in entry.values() if torch.is_tensor(v) and v.dim() > 0]


def is_slice(value: Any, of: torch.Tensor) -> bool:
    """Returns True for a state that is cut as the slice `of`, or, if that is whole, is elementwise."""
    return torch.is_tensor(value) and value.shape == of.shape and not hasattr(value, _REPLICATED)
