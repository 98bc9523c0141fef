"""Checks of DistributedDataParallel's arguments, each with an error that says what was given and what is needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from collectives import Communicator

from ..engine_arguments import refuse_lazy
from ..errors import ConfigurationError
from ..gradients.compression import Compression
from ..trained_by import refuse_trained

BUCKET_CAP_MB = 25.0


def module(given: Any, wrapper: type) -> torch.nn.Module:
    """A module that can be wrapped."""
    if not isinstance(given, torch.nn.Module):
        raise ConfigurationError(f"module: got {type(given).__name__}; needs a torch.nn.Module")
    if isinstance(given, wrapper):
        raise ConfigurationError("module: it is wrapped already")
    refuse_trained("module", given)
    refuse_lazy("module", given)
    return given


def megabytes(value: Any, compression: Compression | None, is_over_network: bool) -> float:
    """A size in MiB; None is PyTorch's 25, with compression the compressor's. "auto" chooses none on one node."""
    if value is None and compression is not None and (is_over_network or not compression.is_auto):
        return min(each.compressor().bucket_cap_mb for each in compression.candidates())
    if value is None:
        return BUCKET_CAP_MB
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"bucket_cap_mb: got {value!r}; needs a size above 0, in MiB")
    return float(value)


def ignored(of: torch.nn.Module, names: Any) -> frozenset[str]:
    """Names of parameters and buffers of the module."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"parameters_to_ignore: got {names!r}; needs a list of names")
    listed = frozenset(names)
    known = {n for n, _ in of.named_parameters(remove_duplicate=False)}
    known |= {n for n, _ in of.named_buffers(remove_duplicate=False)}
    unknown = sorted(map(str, listed - known))
    if unknown:
        raise ConfigurationError(f"parameters_to_ignore: the module has no {', '.join(unknown)}")
    return listed | frozenset(getattr(of, "_ddp_params_and_buffers_to_ignore", ()))


def devices(
    of: torch.nn.Module, device_ids: Any, output_device: Any
) -> tuple[list[int | torch.device] | None, int | torch.device | None]:
    """`device_ids` and `output_device` as torch keeps them: None, or the one device to which inputs are moved."""
    if isinstance(device_ids, Communicator):
        raise ConfigurationError("device_ids: got a Communicator; it goes by its name, process_group=")
    if (device_ids is None or device_ids == []) and output_device is None:
        return None, None
    places = {p.device for p in of.parameters()}
    try:
        given = [*(device_ids or ()), *([] if output_device is None else [output_device])]
        wanted = {torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in given}
    except (TypeError, RuntimeError):
        given, wanted = [], set()
    if len(wanted) != 1 or wanted != places:
        found = ", ".join(sorted(map(str, places)))
        raise ConfigurationError(
            f"device_ids: got {device_ids!r}, output_device: {output_device!r}; needs None, or the one device of the "
            f"module, which lies on {found}"
        )
    device = wanted.pop()
    own = device if device.index is None else device.index
    return [own], own
