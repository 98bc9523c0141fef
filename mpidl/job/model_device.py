"""Finds the device of a model: all parameters and buffers in the host's memory, or all on one GPU.

A `Place` (`collectives.devices`) is the object by which engines allocate, copy and synchronise there.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from collectives import ArgumentError
from collectives.devices import Place, place_at

from ..errors import ConfigurationError


def place_of_model(what: str, model: torch.nn.Module, ignored: Container[str] = (), device: Any = None) -> Place:
    """The Place of a model's parameters and buffers, except those of ignored names.

    what: the argument that the model is.
    device: where those on the meta device are to be; by default with the others, or in the host's memory.

    Raises ConfigurationError for several devices, and for a GPU that cannot be used here.
    """
    named = [(name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if name not in ignored]
    first: dict[torch.device, str] = {}
    for name, tensor in named:
        if not tensor.is_meta:
            first.setdefault(tensor.device, name)
    if len(first) > 1:
        listed = ", ".join(f"{name} on {where}" for where, name in first.items())
        raise ConfigurationError(f"{what}: has {listed}; needs all parameters and buffers on one device")
    found = next(iter(first), torch.device("cpu"))
    try:
        place = place_at(found if device is None else device)
    except ArgumentError as error:
        raise ConfigurationError(f"{what}: {str(error).partition(': ')[2]}") from None
    if first and place.device != found:
        raise ConfigurationError(f"device: got {device!r}, but {first[found]} of the {what} is on {found}")
    return place
