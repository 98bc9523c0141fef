"""Computes the disk space that a rank will need, before the model is changed, and makes the file of that size.

A trial step on a parameter of a few elements shows the state that an optimizer keeps.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from collectives import Communicator

from ...errors import ConfigurationError
from ...job.agreement import check_everywhere
from ...job.objects import all_gather_object
from ...optim.elementwise_state import EIGHT_BIT_LEAST, note_whole_size
from ...optimizer_trial import without_parameters
from ..slices import HALVES
from .settings import Offload
from .swap_file import SwapFile

_PADDING = 320  # bytes, at most, of a parameter's part of a region, and of the region's end
Groups = Sequence[Mapping[str, Any]]
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def foresee(make: Make, group: Mapping[str, Any], dtype: torch.dtype, size: int) -> dict[str, torch.dtype]:
    """The tensors of a parameter's size that an optimizer keeps with a group's settings, by name.

    size: of the whole parameter, on which their dtypes may depend.
    """
    p = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    note_whole_size(p, size)
    optimizer = make([{**without_parameters(group), "params": [p]}])
    p.grad = torch.zeros_like(p)
    optimizer.step()
    entry = optimizer.state.get(p, {})
    return {name: v.dtype for name, v in entry.items() if torch.is_tensor(v) and v.shape == p.shape}


def needed(make: Make, groups: Groups, halves: bool, ranks: int, *, on_accelerator: bool) -> int:
    """Bytes of a rank's file.

    groups: the model's parameters.
    halves: they will be of 16 bits.
    on_accelerator: they will lie in its memory, and so have masters.
    """
    total = regions = 0
    for group in groups:
        each: dict[tuple[torch.dtype, bool], list[int]] = {}
        for p in group["params"]:
            half = halves or p.dtype in HALVES
            dtype = torch.float32 if half else p.dtype
            key = (dtype, p.numel() < EIGHT_BIT_LEAST)
            if key not in each:
                each[key] = [kind.itemsize for kind in foresee(make, group, dtype, p.numel()).values()]
            master = dtype.itemsize if half or on_accelerator else 0
            total += p.numel() * (sum(each[key]) + master)
            regions += len(each[key]) + 1
    return -(-total // ranks) + regions * _PADDING


def open_file(comm: Communicator, settings: Offload, nbytes: int) -> SwapFile:
    """This rank's file of `nbytes` bytes. Collective; raises ConfigurationError on every rank."""

    def look() -> tuple[str, int, int]:
        directory = settings.directory()
        try:
            return platform.node(), os.stat(directory).st_dev, shutil.disk_usage(directory).free
        except OSError as error:
            raise ConfigurationError(f"Offload: path {directory}: {error}") from error

    node, device, free = check_everywhere(comm, look)
    everyone = all_gather_object(comm, (node, device, nbytes))
    together = sum(count for *where, count in everyone if where == [node, device])

    def make() -> SwapFile:
        directory = settings.directory()
        if together > free:
            raise ConfigurationError(
                f"Offload: path {directory} has {free / 1e9:.3f} GB free; "
                f"the ranks of this node need {together / 1e9:.3f} GB"
            )
        try:
            return SwapFile(directory, nbytes)
        except OSError as error:
            raise ConfigurationError(f"Offload: path {directory}: no file of {nbytes / 1e9:.3f} GB: {error}") from error

    return check_everywhere(comm, make)
