"""Cuts a model into units: what ZeRO-3 gathers, uses and releases at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import ConfigurationError

_MARK = "_mpidl_unit"
Module = TypeVar("Module", bound=torch.nn.Module)
UnitRule = Callable[[torch.nn.Module], bool] | Iterable[type[torch.nn.Module]] | None


@dataclass(frozen=True)
class Unit:
    """A module and the parameters gathered for it: those inside it that no other unit has."""

    name: str
    module: torch.nn.Module
    parameters: tuple[torch.nn.Parameter, ...]


def unit(module: Module) -> Module:
    """Marks a module to be a unit of its own, and returns it."""
    setattr(module, _MARK, True)
    return module


def cut(model: torch.nn.Module, rule: UnitRule = None) -> list[Unit]:
    """The model's units in the order of its modules; the last one is the model itself, with what is left.

    rule: which modules are units, beside those marked by `unit`: module classes, or a function of a module. By default
    none where any is marked, else each entry of every `torch.nn.ModuleList` or `Sequential` of two or more modules of
    one class (the blocks of a transformer). A unit inside a unit belongs to the outer one. A parameter that several
    units share, or a unit and a module outside, belongs to the lowest module with a forward pass that contains them
    all, which becomes a unit around them.
    """
    within = set(chosen(model, rule).values())
    owners = {p: _owner(model, within, paths) for p, paths in _paths(model).items()}
    units = []
    for name, module in model.named_modules():
        own = tuple(p for p, owner in owners.items() if owner is module and module is not model)
        if own:
            units.append(Unit(name, module, own))
    return [*units, Unit("", model, tuple(p for p, owner in owners.items() if owner is model))]


def flat_groups(units: Sequence[Unit]) -> list[list[torch.nn.Parameter]]:
    """The parameters that lie side by side, in the order in which their gradients are reduced.

    Those of a unit that have one dtype and all train, or all do not; units from last to first, then the model's own.
    """
    groups: list[list[torch.nn.Parameter]] = []
    for unit in [*reversed(units[:-1]), units[-1]]:
        kinds: dict[tuple[torch.dtype, bool], list[torch.nn.Parameter]] = {}
        for p in unit.parameters:
            kinds.setdefault((p.dtype, p.requires_grad), []).append(p)
        groups += kinds.values()
    return groups


def chosen(model: torch.nn.Module, rule: UnitRule, argument: str = "units") -> dict[str, torch.nn.Module]:
    """The modules that a rule of `cut` names, by name, the outermost ones. argument: what messages call the rule."""
    names: dict[str, torch.nn.Module] = {}
    marked = {id(module) for module in model.modules() if getattr(module, _MARK, False)}
    if rule is None and marked:
        wanted = set()
    elif rule is None:
        wanted = {id(child) for group in model.modules() if _repeats(group) for child in group.children()}
    elif callable(rule) and not isinstance(rule, type | torch.nn.Module):
        wanted = {id(module) for module in model.modules() if rule(module)}
    else:
        classes = _classes(rule, argument)
        wanted = {id(module) for module in model.modules() if isinstance(module, classes)}
    wanted |= marked
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if id(module) in wanted and module is not model and not inside:
            names[name] = module
    return names


def _classes(rule: Any, argument: str) -> tuple[type[torch.nn.Module], ...]:
    if isinstance(rule, torch.nn.Module):
        given = f"a module, of class {type(rule).__name__}"
    else:
        given = repr(rule)
        several = isinstance(rule, Iterable) and not isinstance(rule, type)
        classes = tuple(rule) if several else (rule,)
        if all(isinstance(c, type) and issubclass(c, torch.nn.Module) for c in classes):
            return classes
    raise ConfigurationError(f"{argument}: got {given}; needs module classes, or a function of a module")


def _repeats(group: torch.nn.Module) -> bool:
    """Whether a module is a list of modules that are all of one class and have children: a stack of blocks."""
    children = list(group.children())
    return (
        isinstance(group, torch.nn.ModuleList | torch.nn.Sequential)
        and len(children) > 1
        and len({type(child) for child in children}) == 1
        and any(True for child in children for _ in child.children())
    )


def _paths(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[list[torch.nn.Module]]]:
    """For each parameter, in the model's order, the modules from the model down to it, by every way there is."""
    modules = dict(model.named_modules(remove_duplicate=False))
    paths: dict[torch.nn.Parameter, list[list[torch.nn.Module]]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        paths.setdefault(p, []).append([modules[".".join(parts[:depth])] for depth in range(len(parts))])
    return paths


def _owner(
    model: torch.nn.Module, chosen: set[torch.nn.Module], paths: Sequence[Sequence[torch.nn.Module]]
) -> torch.nn.Module:
    """The module whose unit a parameter belongs to."""
    first, *others = paths
    common = [module for module in first if all(module in path for path in others)]
    for module in common:
        if module in chosen:
            return module
    if not any(module in chosen for path in paths for module in path):
        return model
    return next(m for m in reversed(common) if not isinstance(m, torch.nn.ModuleList | torch.nn.ModuleDict))
