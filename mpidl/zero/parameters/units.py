"""Cuts a model into units, each of which ZeRO-3 gathers, uses and releases as one: by default repeated blocks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch

from ...compiling import unwrap_compiled
from ...errors import ConfigurationError
from ...gradients.buckets import BucketLayout, layout_of

_MARK = "_mpidl_unit"
_LARGE = 4_000_000  # parameters
_Lists = torch.nn.ModuleList | torch.nn.ModuleDict  # modules without a forward pass
Module = TypeVar("Module", bound=torch.nn.Module)
AnyUnit = TypeVar("AnyUnit")
UnitRule = Callable[[torch.nn.Module], bool] | Iterable[type[torch.nn.Module]] | None


@dataclass(frozen=True)
class Unit:
    """A module and the parameters gathered for it: those inside it that no other unit has."""

    name: str
    module: torch.nn.Module
    parameters: tuple[torch.nn.Parameter, ...]


@dataclass(frozen=True)
class FlatGroup:
    """Parameters of a unit that lie side by side.

    parameters: in the order in which they lie.
    layout: where each lies, and how the group is cut over the ranks.
    dtype: of all of them.
    trains: whether all of them do, else none.
    """

    parameters: tuple[torch.nn.Parameter, ...]
    layout: BucketLayout
    dtype: torch.dtype
    trains: bool

    @property
    def shapes(self) -> list[torch.Size]:
        """The parameters' shapes."""
        return [p.shape for p in self.parameters]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole group, with the padding."""
        return self.layout.padded * self.dtype.itemsize


@dataclass(frozen=True)
class UnitLayout:
    """A unit and the flat groups of its parameters."""

    unit: Unit
    groups: tuple[FlatGroup, ...]


def unit(module: Module) -> Module:
    """Marks a module to be a unit of its own, and returns it."""
    setattr(module, _MARK, True)
    return module


def cut_into_units(model: torch.nn.Module, rule: UnitRule = None) -> list[Unit]:
    """The model's units in the order of its modules; the last one is the model itself, with what is left.

    rule: the modules that are units, besides those marked by `unit`: module classes, or a function of a module. By
    default none where any is marked, else the blocks of the model: each entry of every `torch.nn.ModuleList` or
    `ModuleDict` in which two or more modules, compiled or not, are of one class and have modules inside, and of every
    `Sequential` in which all are. A unit inside a unit belongs to the outer one. A parameter that several units share,
    or a unit and a module outside, belongs to the lowest module with a forward pass that contains them all, which
    becomes a unit around them. Raises ConfigurationError for classes of which the model has no module.
    """
    if rule is not None and not _is_function(rule):
        rule = _classes(rule, "units")
        if not any(isinstance(module, rule) for module in model.modules()):
            raise ConfigurationError(f"units: got {rule!r}; needs classes of modules that the model has")
    within = set(select_modules(model, rule).values())
    owners = {p: _owner(model, within, paths) for p, paths in _paths(model).items()}
    units = []
    for name, module in model.named_modules():
        own = tuple(p for p, owner in owners.items() if owner is module and module is not model)
        if own:
            units.append(Unit(name, module, own))
    return [*units, Unit("", model, tuple(p for p, owner in owners.items() if owner is model))]


def warn_of_large_root_unit(units: Sequence[Unit], stacklevel: int) -> None:
    """RuntimeWarning where most of a large model, embeddings aside, is in its last unit, the model's own."""
    model = units[-1].module
    tables = {p for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in module.parameters()}
    rest = sum(p.numel() for p in units[-1].parameters if p not in tables)
    every = sum(p.numel() for p in model.parameters())
    if every >= _LARGE and 2 * rest > every:
        warnings.warn(
            f"units: {rest / every:.0%} of the {every:,} parameters of {type(model).__name__} are in none, and whole "
            "from the beginning of a pass to its end; name the classes of its blocks by units=",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def lay_out(units: Sequence[Unit], ranks: int, block: int = 1) -> list[UnitLayout]:
    """Lays the units' parameters out in flat groups, each cut over `ranks`; to be done once, when dtypes are final.

    A group has those parameters of a unit that are of one dtype and all train, or all do not.

    block: as of `layout_of`.
    """
    layouts = []
    for unit in units:
        kinds: dict[tuple[torch.dtype, bool], list[torch.nn.Parameter]] = {}
        for p in unit.parameters:
            kinds.setdefault((p.dtype, p.requires_grad), []).append(p)
        groups = (FlatGroup(tuple(own), layout_of(own, ranks, block), *kind) for kind, own in kinds.items())
        layouts.append(UnitLayout(unit, tuple(groups)))
    return layouts


def backward_order(units: Sequence[AnyUnit]) -> list[AnyUnit]:
    """Orders units as their gradients are reduced: from last to first, then the model's own, which is the last one."""
    return [*reversed(units[:-1]), *units[-1:]]


def select_modules(model: torch.nn.Module, rule: UnitRule, argument: str = "units") -> dict[str, torch.nn.Module]:
    """Selects the modules that a rule of `cut_into_units` names; returns the outermost ones, by name.

    argument: what messages call the rule.
    """
    names: dict[str, torch.nn.Module] = {}
    marked = {id(module) for module in model.modules() if getattr(module, _MARK, False)}
    if rule is None and marked:
        wanted = set()
    elif rule is None:
        wanted = {id(block) for group in model.modules() for block in _blocks(group)}
    elif _is_function(rule):
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


def _is_function(rule: object) -> TypeGuard[Callable[[torch.nn.Module], bool]]:
    return callable(rule) and not isinstance(rule, type | torch.nn.Module)


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


def _blocks(group: torch.nn.Module) -> list[torch.nn.Module]:
    """The entries of a list of modules, if two of them are of one class and have modules inside; else none.

    A Sequential, which may be any chain of layers, must have entries of that class alone.
    """
    if not isinstance(group, _Lists | torch.nn.Sequential):
        return []
    entries = list(_entries(group))
    plain = [unwrap_compiled(entry) for entry in entries]
    kinds = Counter(map(type, plain))
    stacked = {type(entry) for entry in plain if any(True for _ in entry.children())}
    chain = isinstance(group, torch.nn.Sequential)
    return entries if any(kinds[kind] > 1 for kind in stacked) and not (chain and len(kinds) > 1) else []


def _entries(group: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules in a list of modules, and those in the lists that a ModuleList holds."""
    for child in group.children():
        if not isinstance(child, _Lists):
            yield child
        elif isinstance(group, torch.nn.ModuleList):
            yield from _entries(child)


def _paths(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[list[torch.nn.Module]]]:
    """The modules from the model down to each parameter, in the model's order, by every path that there is."""
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
    return next(m for m in reversed(common) if not isinstance(m, _Lists))
