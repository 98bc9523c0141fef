"""Checks of ZeroOptimizer's arguments, each with an error that says what was given and what is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...ddp.sparse import sparse_parameters
from ...ddp.wrapper import DistributedDataParallel
from ...engine_arguments import refuse_lazy
from ...errors import ConfigurationError
from ...gradients.compression import OwnedCompressor
from ...gradients.compression.settings import parameter_compressor
from ...mesh import Mesh
from ...mesh.experts import refuse_experts, refuse_others
from ...mesh.placement import refuse_offload, refuse_other_mesh, refuse_parts_without_mesh, refuse_unknown_cut
from ...optim.trust_ratio import TrustRatioOptimizer
from ...optimizer_trial import comparable
from ...trained_by import refuse_trained
from ..stepping.optimizer_class import refuse_class

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None


def check(model: Any, optimizer_class: Any, stage: Any, bucket_cap_mb: Any, prefetch: Any) -> None:
    """Refuses what cannot work whatever the model holds."""
    if not isinstance(model, torch.nn.Module):
        optimizer = optimizer_class.__name__ if isinstance(optimizer_class, type) else "AdamW"
        raise ConfigurationError(
            f"model: got {type(model).__name__}; needs a torch.nn.Module: "
            f"ZeroOptimizer(model, torch.optim.{optimizer}, stage=3, ...), with params= for groups of its parameters"
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigurationError(
                f"model: {name or 'it'} is a DistributedDataParallel, which reduces the same gradients; give "
                "ZeroOptimizer the plain model, that is in no DistributedDataParallel"
            )
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigurationError(
                f"model: {name or 'it'} is a scripted or traced module with parameters, whose use no hook can see; "
                "needs the plain module; scripted ones without parameters may be inside"
            )
    refuse_trained("model", model)
    refuse_lazy("model", model)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        if optimizer_class is None:
            raise ConfigurationError(
                "optimizer_class: got none; needs a torch.optim class: "
                "ZeroOptimizer(model, torch.optim.AdamW, stage=3, ...)"
            )
        given = _instance_of(optimizer_class, torch.optim.Optimizer)
        raise ConfigurationError(f"optimizer_class: got {given}; needs a torch.optim class, not an instance of one")
    refuse_class(optimizer_class)
    if stage is None:
        raise ConfigurationError(
            "stage: got none; needs 1 to cut the optimizer's state over the ranks, 2 to cut gradients too, or 3 to cut "
            f"parameters too: ZeroOptimizer(model, {optimizer_class.__name__}, stage=3, ...)"
        )
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (1, 2, 3):
        raise ConfigurationError(f"stage: got {stage!r}; needs 1, 2 or 3")
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, int | float) or not bucket_cap_mb > 0:
        raise ConfigurationError(f"bucket_cap_mb: got {bucket_cap_mb!r}; needs a size above 0, in MiB")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ConfigurationError(f"prefetch: got {prefetch!r}; needs how many units, 0 or more")


def compressor_of_parameters(model: torch.nn.Module, stage: int, method: str | None) -> OwnedCompressor | None:
    """The compressor by which stage 3 gathers parameters; None for full precision. Refuses what cannot be rounded."""
    if method is None:
        return None
    made = parameter_compressor(method)
    if stage != 3:
        raise ConfigurationError(
            f"compress_parameters: got {method!r} with stage={stage}, in which every rank keeps its parameters whole; "
            "needs stage=3, or None"
        )
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            raise ConfigurationError(
                f"compress_parameters: {name} is {p.dtype}; needs floating-point parameters, or None"
            )
    return made


def refuse_placements(model: torch.nn.Module, mesh: Mesh | None, divisor: int) -> None:
    """Refuses parameters, trained or frozen, that the engine may not make the same on its ranks.

    divisor: of contributions to gradients, as `gradient_group` gives it.
    """
    if mesh is not None:
        refuse_other_mesh("ZeroOptimizer", mesh.layout, model.named_parameters())
        refuse_experts(mesh, divisor, model.named_parameters())


def refuse_trained_placements(
    named: Sequence[tuple[str, torch.Tensor]],
    optimizer_class: type,
    mesh: Mesh | None,
    offloads: bool,
    wholes: bool,
    divisor: int,
) -> None:
    """Refuses parameters that are cut over a mesh where that cannot be trained.

    named: those that train.
    offloads: state lies elsewhere.
    wholes: a step needs whole ones.
    divisor: of contributions to gradients, as `gradient_group` gives it.
    """
    if mesh is None:
        refuse_parts_without_mesh("ZeroOptimizer", named)
        return
    refuse_others(divisor, named)
    if wholes:
        refuse_unknown_cut(optimizer_class.__name__, named)
    if offloads and issubclass(optimizer_class, TrustRatioOptimizer):
        refuse_offload(optimizer_class.__name__, named)


def _instance_of(given: Any, base: type) -> str:
    """An instance by its class alone, as it may print itself at any length."""
    return f"an instance of {type(given).__name__}" if isinstance(given, base) else repr(given)


def checked_groups(model: torch.nn.Module, params: Params) -> list[dict[str, Any]]:
    """The parameter groups, checked against the model."""
    names = {p: name for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ConfigurationError("model: it has no parameter that requires a gradient")
    sparse = [names[p] for p in sparse_parameters(model) if p.requires_grad]
    if sparse:
        raise ConfigurationError(
            f"model: {sparse[0]} belongs to an embedding with sparse=True; ZeRO's buckets are dense: set sparse=False"
        )
    if params is None:
        return [{"params": trained}]
    groups = _groups(params)
    seen: set[torch.nn.Parameter] = set()
    for group in groups:
        group["params"] = [p for p in group["params"] if p not in names or p.requires_grad]
        for p in group["params"]:
            if p not in names:
                raise ConfigurationError(f"params: a tensor of shape {tuple(p.shape)} is no parameter of the model")
            if p in seen:
                raise ConfigurationError(f"params: {names[p]} is given twice")
            seen.add(p)
    left = [names[p] for p in trained if p not in seen]
    if left:
        raise ConfigurationError(f"params: leaves out {', '.join(left[:5])}, which trains; add or freeze it")
    return groups


def _groups(params: Any) -> list[dict[str, Any]]:
    """Groups from what torch's optimizers take: parameters, which are one group, or dictionaries."""
    entries = _in_order(params, "params", "parameters, or dictionaries of them with settings of their own")
    if any(isinstance(entry, Mapping) for entry in entries):
        listed = [parameters_of(group, f"params: group {number}") for number, group in enumerate(entries)]
        return [{**group, "params": parameters} for group, parameters in zip(entries, listed, strict=True)]
    return [{"params": parameters_of({"params": entries}, "params")}] if entries else []


def parameters_of(group: Any, argument: str) -> list[Any]:
    """The parameters of a group as a list, of (name, parameter) too. argument: what messages call the group."""
    if not isinstance(group, Mapping):
        raise ConfigurationError(f"{argument}: got {type(group).__name__}; needs a dictionary with 'params'")
    if "params" not in group:
        raise ConfigurationError(f"{argument}: has no 'params', only {', '.join(map(repr, group)) or 'nothing'}")
    given = group["params"]
    listed = [given] if isinstance(given, torch.Tensor) else _in_order(given, argument, "parameters in order")
    listed = [p[1] if isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) else p for p in listed]
    for p in listed:
        if not isinstance(p, torch.Tensor):
            raise ConfigurationError(
                f"{argument}: holds something of type {type(p).__name__}; needs parameters of the model"
            )
    return listed


def _in_order(given: Any, argument: str, needed: str) -> list[Any]:
    """A list of what has an order, which a set has not: each rank would have another."""
    if isinstance(given, set | frozenset | str | Mapping | torch.Tensor) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{argument}: got {type(given).__name__}; needs a list of {needed}")
    return list(given)


def groups_to_compare(model: torch.nn.Module, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that the ranks compare of parameter groups: which parameters are in which, and their settings."""
    names = {p: name for name, p in model.named_parameters()}
    parts: dict[str, Any] = {"groups": len(groups)}
    for number, group in enumerate(groups):
        parts[f"parameters of group {number}"] = [names[p] for p in group["params"]]
        parts[f"settings of group {number}"] = comparable(group)
    return parts
