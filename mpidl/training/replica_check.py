"""Compares what is replicated over the ranks, by checksums: parameters, states, groups.

    parameters, states, groups ->  8 bytes a tensor  ->  8 bytes a rank  ->  compared; only if these differ the
                                                                            checksums of all tensors are, to name one

Replicas that have come to differ, by a faulty memory, a step that one rank skipped, or a random draw that should have
been the same, go on training without any error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from collectives import Communicator

from ..ddp import DistributedDataParallel
from ..ddp.plain_model import plain_model
from ..digest import digest
from ..errors import ConfigurationError, ModelMismatch
from ..mesh.groups import data_group
from ..replicas.checksums import checksum, difference
from ..trained_by import trainer_of_model
from ..zero import ZeroOptimizer

What = torch.nn.Module | torch.optim.Optimizer | Mapping[str, Any]


def check_replicas(
    *what: What, process_group: Communicator | None = None, buffers: bool = False, gather: bool = False
) -> None:
    """Raises ModelMismatch on every rank, naming the first that differs and on which ranks, unless all hold the same.

    Collective.

    what:
        a module, plain or DistributedDataParallel: its parameters. At stage 3 of ZeRO none is replicated.
        an optimizer: a torch one's states and groups; a ZeroOptimizer's groups, as its states are shards.
        a mapping of names to tensors, arrays, numbers or nests of them that should be equal: shared results, a loss.

    buffers: also the modules' buffers. DDP makes them equal after each backward pass, ZeRO in each step.
    gather: also what stage 3 gathers, node by node: takes the memory of the whole model on each node.
    process_group: the ranks that compare; else those of the first DDP or ZeroOptimizer, else the world.
    """
    if not what:
        raise ConfigurationError("check_replicas: got nothing to compare; needs a module, an optimizer or a mapping")
    comm = process_group or _group_of(what)
    with contextlib.ExitStack() as stack:
        sums: dict[str, bytes] = {}
        for number, thing in enumerate(what):
            if isinstance(thing, torch.nn.Module):
                wrapper, plain = plain_model(thing)
                ignored = frozenset() if wrapper is None else wrapper.parameters_to_ignore
                sums |= _of_module(plain, ignored, buffers, _zero_of(plain, what), gather, stack)
            elif isinstance(thing, torch.optim.Optimizer):
                names: dict[torch.Tensor, str] = {
                    p: n
                    for m in what
                    if isinstance(m, torch.nn.Module)
                    for n, p in plain_model(m)[1].named_parameters()
                }
                sums |= _of_optimizer(thing, names)
            elif isinstance(thing, Mapping):
                for name, value in thing.items():
                    sums |= _sums_of(str(name), value)
            else:
                raise ConfigurationError(
                    f"check_replicas: argument {number + 1} is a {type(thing).__name__}; needs a module, an optimizer "
                    "or a mapping of names to tensors"
                )
    found = difference(comm, sums)
    if found is not None:
        raise ModelMismatch(f"the ranks' replicas differ: {found}")


def _group_of(what: tuple[What, ...]) -> Communicator:
    for thing in what:
        engine = plain_model(thing)[0] if isinstance(thing, torch.nn.Module) else thing
        if isinstance(engine, DistributedDataParallel | ZeroOptimizer):
            return engine.process_group
    return data_group("check_replicas", None, needed="process_group=, as mesh.along('dp', 'cp')")


def _zero_of(model: torch.nn.Module, what: tuple[What, ...]) -> ZeroOptimizer | None:
    """The ZeroOptimizer among the arguments that trains the model."""
    if trainer_of_model(model) is None:
        return None
    own = set(model.parameters())
    for thing in what:
        if isinstance(thing, ZeroOptimizer) and any(p in own for group in thing.param_groups for p in group["params"]):
            return thing
    raise ConfigurationError("check_replicas: a ZeroOptimizer trains this model; pass it to check_replicas too")


def _of_module(
    model: torch.nn.Module,
    ignored: Collection[str],
    buffers: bool,
    zero: ZeroOptimizer | None,
    gather: bool,
    stack: contextlib.ExitStack,
) -> dict[str, bytes]:
    sums: dict[str, bytes] = {}
    if zero is not None and zero.stage == 3 and gather:
        stack.enter_context(zero.gathered(writable=False))
    if zero is None or zero.stage < 3 or gather:
        sums = {f"parameter {name}": checksum(p) for name, p in model.named_parameters() if name not in ignored}
    if buffers:
        sums |= {f"buffer {name}": checksum(b) for name, b in model.named_buffers() if name not in ignored}
    return sums


def _of_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, bytes]:
    sums: dict[str, bytes] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                sums |= _sums_of(f"group {number}'s {key}", value)
    if isinstance(optimizer, ZeroOptimizer):
        return sums
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    for place, p in enumerate(ordered):
        name = names.get(p, f"parameter {place}")
        for key, value in optimizer.state.get(p, {}).items():
            sums |= _sums_of(f"state {key} of {name}", value)
    return sums


def _sums_of(name: str, value: Any) -> dict[str, bytes]:
    """The checksums of a value and, if it is a nest, of all that is in it."""
    if isinstance(value, Mapping):
        parts = {f"{name}.{key}": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{name}[{number}]": part for number, part in enumerate(value)}
    else:
        return {name: _sum_of(value)}
    sums = {name: digest(f"{type(value).__name__} of {len(value)}")}
    for inner, part in parts.items():
        sums |= _sums_of(inner, part)
    return sums


def _sum_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        return checksum(value if value.layout == torch.strided else value.to_dense())
    if isinstance(value, np.ndarray):
        return digest(f"{value.shape} {value.tolist()!r}")
    if isinstance(value, set | frozenset):
        return digest(repr(sorted(map(repr, value))))
    return digest(repr(value))
