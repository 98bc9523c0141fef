"""Checks of DistributedDataParallel's arguments, each with an error that says what was given and what is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from collectives import Communicator

from ..engine_arguments import flag, refuse_lazy
from ..errors import ConfigurationConflict, ConfigurationError
from ..gradients.compression import Compression
from ..gradients.compression.refusals import refuse_complex, refuse_mesh
from ..mesh import Mesh
from ..mesh.experts import refuse_experts, refuse_others
from ..mesh.placement import refuse_other_mesh
from ..trained_by import refuse_trained

BUCKET_CAP_MB = 25.0


def module(given: Any, wrapper: type) -> None:
    """Checks that a module can be wrapped."""
    if not isinstance(given, torch.nn.Module):
        raise ConfigurationError(f"module: got {type(given).__name__}; needs a torch.nn.Module")
    if isinstance(given, wrapper):
        raise ConfigurationError("module: it is wrapped already")
    refuse_trained("module", given)
    refuse_lazy("module", given)


def dimension(value: Any) -> None:
    """Raises ConfigurationError unless `dim` is 0."""
    if value != 0:
        raise ConfigurationError(f"dim: got {value!r}; every rank gets its own batch, so that only 0 is possible")


def synchronised_buffers(broadcast_buffers: Any, forward_sync_buffers: Any) -> tuple[bool, bool]:
    """Returns whether buffers are broadcast as the wrapper is made, and whether they are at the end of each pass."""
    both = flag("broadcast_buffers", True if broadcast_buffers is None else broadcast_buffers)
    if forward_sync_buffers is None:
        return both, both
    return True, flag("forward_sync_buffers", forward_sync_buffers)


def megabytes(value: Any, compression: Compression | None) -> float:
    """Checks `bucket_cap_mb`; returns MiB: for None PyTorch's 25, or the compressor's.

    "auto" begins without a compressor, with 25.
    """
    if value is None:
        return BUCKET_CAP_MB if compression is None or compression.is_auto else compression.compressor().bucket_cap_mb
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"bucket_cap_mb: got {value!r}; needs a size above 0, in MiB")
    return float(value)


def ignored(of: torch.nn.Module, names: Any) -> frozenset[str]:
    """Checks `parameters_to_ignore`; returns the names."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"parameters_to_ignore: got {names!r}; needs a list of names")
    listed = frozenset(names)
    known = {n for n, _ in of.named_parameters(remove_duplicate=False)}
    known |= {n for n, _ in of.named_buffers(remove_duplicate=False)}
    unknown = sorted(map(str, listed - known))
    if unknown:
        raise ConfigurationError(f"parameters_to_ignore: the module has no {', '.join(unknown)}")
    return listed | frozenset(getattr(of, "_ddp_params_and_buffers_to_ignore", ()))


def refuse_parameters(
    names: Mapping[torch.nn.Parameter, str], mesh: Mesh | None, divisor: int, compression: Compression | None
) -> None:
    """Refuses parameters that these settings do not fit.

    names: all parameters with their names, without those in `parameters_to_ignore`.
    divisor: as of `mesh.experts`.
    """
    everything = [(name, p) for p, name in names.items()]
    names = {p: name for p, name in names.items() if p.requires_grad}
    if mesh is not None:
        refuse_other_mesh("DistributedDataParallel", mesh.layout, everything)
        refuse_experts(mesh, divisor, everything)
        refuse_others(divisor, ((name, p) for p, name in names.items()))
        if compression is not None:
            refuse_mesh(compression, mesh)
    if compression is not None:
        refuse_complex(names)
    if not names:
        raise ConfigurationConflict("module: it has no parameter that requires a gradient")


def devices(
    of: torch.nn.Module, device_ids: Any, output_device: Any
) -> tuple[list[int | torch.device] | None, int | torch.device | None]:
    """Checks `device_ids` and `output_device`; returns None, or the one device to which inputs are moved."""
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
