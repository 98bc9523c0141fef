"""Needs of an optimizer's step (`StepNeeds`): declared by its class, or found by trial steps on a few elements.

Optimizers of mpidl declare their needs (`step_needs`), torch's are known by name, and any other class is tried:
`needs_of`, which DDP, ZeRO and tensor parallelism ask. Each refuses in its own words what it cannot do.

A trial makes steps in two ways and compares what they change:

    trial                                                  the same: a step        different
    one parameter, or its elements as two parameters       runs on slices          needs whole parameters
    two parameters in one optimizer, or in one each        uses each gradient for  is refused: it depends on other
                                                           its own parameter       parameters
    two parameters in one step, or one after the other     runs within a backward  runs only after the pass
                                                           pass, for each bucket
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from .partial_steps import PartialSteps

# Torch's classes whose steps are not ones on slices, by name, as not every version of torch has them all.
ON_WHOLES = ("Muon", "Adafactor")  # the former makes matrices orthogonal, the latter keeps sums of rows and columns
ON_WHOLE_MODELS = {"LBFGS": "it works on the whole model's gradient at once"}

DEPENDENT = "depends on the other parameters, or on random numbers"
NOT_SEQUENTIAL = (
    "steps differently on one parameter at a time than on all at once, as an optimizer that counts its steps does"
)
_STEPS = 8  # some change their manner after a few

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepNeeds:
    """The needs of a step besides slices.

    wholes: whole parameters.
    together: all of a rank's at once, in one call.
    block: elements of which slices hold whole ones, counted from the parameter's first, except the last block.
    dependent: the other parameters too: a step on one depends on them, or on random numbers.
    averages: the other ranks, as the step itself averages over them: "gradients", whole on every rank
        (`optim.one_bit`), "weights" (`optim.post_local`), or "factors" of all matrices (`optim.dion`).
    elementwise: values of a group's "rule" with which a step updates each element by itself, and needs slices alone.
    """

    wholes: bool
    together: bool = False
    block: int = 1
    dependent: bool = False
    averages: Literal["", "gradients", "weights", "factors"] = ""
    elementwise: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial(StepNeeds):
    """The needs that trial steps have shown.

    noted: settings of its groups that a step changes.
    failed: it raised something, so that nothing is known of wholes.
    """

    noted: frozenset[str] = frozenset()
    failed: bool = False


def needs_of(
    optimizer_class: type[torch.optim.Optimizer], trial: Callable[[], Trial], by_name: bool = True
) -> StepNeeds:
    """The needs of a class's step: declared, known of torch's, or found by a trial.

    A class that declares any steps on one parameter after another as on all at once, unless `together`, and changes no
    settings of its groups. A class derived from it may do otherwise and is tried, unless it averages.

    trial: makes trial steps; called for a class of which nothing is known.
    by_name: takes a class to need what one of torch's does from which it derives, or whose name it has, if that is more
        than slices. Without it such a class is tried, as it may count its steps.
    """
    declared = _declared(optimizer_class)
    if declared is not None and (declared.averages or "step_needs" in vars(optimizer_class)):
        return declared
    kinds = {base.__name__ for base in optimizer_class.__mro__}
    known = StepNeeds(not kinds.isdisjoint(ON_WHOLES), dependent=not kinds.isdisjoint(ON_WHOLE_MODELS))
    if _is_torchs(optimizer_class) or (by_name and (known.wholes or known.dependent)):
        return known
    return trial()


def averaged_by_step(optimizer: torch.optim.Optimizer) -> str:
    """Tells what the optimizer's step averages over the ranks: `StepNeeds.averages`, as it or its class declares."""
    found = _declared(optimizer)
    return "" if found is None else found.averages


def exchanges_gradients(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Tells if steps of a class, or of one derived from it, average gradients themselves: a OneBitOptimizer's."""
    found = _declared(optimizer_class)
    return found is not None and found.averages == "gradients"


def _declared(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> StepNeeds | None:
    """The `step_needs` of an optimizer or a class, declared by itself or by one that it derives from."""
    found = getattr(optimizer, "step_needs", None)
    return found if isinstance(found, StepNeeds) else None


def _is_torchs(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Tells if a class is one of torch.optim, all of which are known, and not one derived from it."""
    return f"{optimizer_class.__module__}.".startswith("torch.optim.")


def reason_of_changed_settings(noted: Iterable[str]) -> str:
    """Says why it cannot step in the backward pass."""
    return f"changes {', '.join(sorted(noted))} of its groups in a step, and a backward pass makes one for each bucket"


def try_steps(make: MakeOptimizer, groups: Sequence[Mapping[str, Any]]) -> Trial:
    """Makes optimizers of groups with these groups' settings, and steps with them.

    In double precision, as a rate may be small. What changes nothing is taken to need wholes.
    """
    noted: set[str] = set()
    wholes = dependent = together = failed = False

    def run(group: Mapping[str, Any], *starts: torch.Tensor, one_by_one: bool = False) -> torch.Tensor:
        """Returns what some steps change in parameters that begin with these values."""
        nonlocal failed, together, wholes
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        try:
            made = make([{**group, "params": parameters}])
            before = dict(made.param_groups[0])
            for step in range(_STEPS):
                for p, start in zip(parameters, starts, strict=True):
                    p.grad = torch.sin((step + 1.0) * start + step)
                if one_by_one:
                    for p in parameters:
                        PartialSteps(made).step([p])
                else:
                    made.step()
            noted.update(n for n, value in comparable(made.param_groups[0]).items() if before.get(n) != value)
            states = [(p, value) for p in parameters for value in made.state.get(p, {}).values()]
            wholes |= any(torch.is_tensor(v) and v.dim() > 0 and v.shape != p.shape for p, v in states)
        except Exception:  # what it needs besides is for the real step to say
            failed |= not one_by_one
            together |= one_by_one
        pairs = zip(parameters, starts, strict=True)
        return torch.cat([(p.detach() - start).flatten() for p, start in pairs])

    with torch.random.fork_rng(devices=[]):
        for group in _merge_equal_groups(groups):
            for dimensions in sorted({p.dim() for p in group["params"]}):
                shape = [*[1] * (dimensions - 2), 4, 3][-dimensions:] if dimensions else []
                count = math.prod(shape)
                first = torch.linspace(-1.0, 2.0, count, dtype=torch.float64).view(shape)
                second = torch.linspace(0.5, -2.0, count, dtype=torch.float64).view(shape)
                alone = run(group, first)
                parts = first.flatten().split((1, count - 1)) if dimensions else [first.flatten()]  # as slices are
                wholes |= not (_equal(alone, run(group, *parts)) and alone.any())
                both = run(group, first, second)
                dependent |= not _equal(both, torch.cat([alone, run(group, second)]))
                together |= not _equal(both, run(group, first, second, one_by_one=True))
    return Trial(wholes and not failed, together, dependent=dependent, noted=frozenset(noted), failed=failed)


def try_steps_of(optimizer: torch.optim.Optimizer) -> Trial:
    """Steps with optimizers like this one, which itself stays as it is."""
    return try_steps(partial(_copy_without_steps, optimizer), optimizer.param_groups)


def _copy_without_steps(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of other groups that has made no step, with copies of all else that the given one holds."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "step")}
    hooks = {
        name: type(value)() for name, value in own.items() if name.startswith("_optimizer_") and name.endswith("_hooks")
    }
    held = {name: value for name, value in own.items() if name not in hooks}
    made.__dict__.update(copy.deepcopy(held), **hooks, state=defaultdict(dict), param_groups=groups)
    return made


def _merge_equal_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merges groups with equal settings, as there may be one group for each parameter."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        settings = without_parameters(group)
        found.setdefault(repr(settings), {**settings, "params": []})["params"].extend(group["params"])
    return [*found.values()]


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compares two results up to rounding, also of what is computed in single precision in between."""
    return bool((first - second).abs().max() <= 1e-6 * first.abs().max())


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an optimizer that can be compared between ranks: numbers, texts and lists."""
    numbers = {n: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for n, v in settings.items()}
    return {
        n: v for n, v in numbers.items() if n != "params" and isinstance(v, bool | int | float | str | tuple | list)
    }
