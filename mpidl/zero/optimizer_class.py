"""What can be said of an optimizer's class before anything is changed: is it refused, and does it step on slices?

    AdamW, SGD, ...     a step on a parameter is one on its parts: each rank steps on its slices
    Muon, Adafactor     it needs whole parameters: `whole_steps`
    LBFGS               it depends on several parameters at once: refused

Of classes that are not torch's nothing is known: they are tried out on a few elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigurationError
from ..optim.trust import TrustRatioOptimizer
from ..partial_steps import PartialSteps

_REFUSED = {
    "LBFGS": "it works on the whole model's gradient at once",
    "SparseAdam": "it takes sparse gradients, and buckets are dense",
}
_ON_WHOLES = ("Muon", "Adafactor")  # the former makes matrices orthogonal, the latter keeps sums of rows and columns
_TRIED_STEPS = 8  # some change their manner after a few


def refuse_class(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """ConfigurationError for one that cannot be sharded, and is known."""
    for base in optimizer_class.__mro__:
        if base.__name__ in _REFUSED:
            named = optimizer_class.__name__ + ("" if base is optimizer_class else f", a kind of {base.__name__},")
            raise ConfigurationError(f"optimizer_class: {named} cannot be sharded: {_REFUSED[base.__name__]}")


def prototype(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of that class with those groups' settings, on single elements of as many dimensions.

    It refuses wrong settings, and parameters, by the class's own errors, before the model is changed.
    """
    given = [_on_single_elements(group) for group in groups]
    sizes = [len(group["params"]) for group in given]
    made = optimizer_class(given, **settings)
    if [len(group["params"]) for group in made.param_groups] != sizes:
        raise ConfigurationError(
            f"optimizer_class: {optimizer_class.__name__} makes {len(made.param_groups)} groups of the {len(sizes)} "
            "that it is given; needs a class that keeps them: make its groups yourself, by params="
        )
    for group in made.param_groups:
        _refuse_differentiable(group)
    return made


@dataclass(frozen=True)
class Needs:
    """What a step needs beside slices. wholes: whole parameters. together: all of a rank's at once, in one call."""

    wholes: bool
    together: bool = False


def needs(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    offloaded: bool,
    step_in_backward: bool = False,
) -> Needs:
    """No wholes, if a step on a parameter is one on its parts.

    Raises ConfigurationError if it depends on other parameters too. offloaded: refuses what needs whole parameters, and
    what notes anything in its groups, as there are several of it then. step_in_backward: refuses these too, and what
    else does not step on one parameter after another.
    """
    name = optimizer_class.__name__
    if step_in_backward:
        if offloaded:
            raise ConfigurationError(
                "step_in_backward: what is offloaded is stepped in an order of its own, after the pass"
            )
        if issubclass(optimizer_class, TrustRatioOptimizer):
            raise ConfigurationError(
                f"step_in_backward: {name} needs norms over all ranks' slices, for which a backward pass cannot wait"
            )
    if any(base.__name__ in _ON_WHOLES for base in optimizer_class.__mro__):
        found, noted = Needs(wholes=True), set[str]()
    elif optimizer_class.__module__.partition(".")[0] in ("torch", __name__.partition(".")[0]):
        return Needs(wholes=False)
    else:
        on_wholes, noted = _tried(optimizer_class, groups, settings, step_in_backward)
        found = Needs(on_wholes, together=True)  # it may note more than a state of each parameter
    if found.wholes and offloaded:
        raise ConfigurationError(
            f"offload: a step of {name} needs whole parameters, and what is offloaded are shards: needs offload=None"
        )
    if found.wholes and step_in_backward:
        raise ConfigurationError(
            f"step_in_backward: a step of {name} needs whole parameters, which are brought together after the pass"
        )
    if noted and step_in_backward:
        raise ConfigurationError(
            f"step_in_backward: {name} changes {', '.join(sorted(noted))} of its groups in a step, and a backward pass "
            "makes one for each bucket"
        )
    if noted and offloaded:
        raise ConfigurationError(
            f"offload: {name} changes {', '.join(sorted(noted))} of its groups in a step, and there would be several "
            "of it: needs offload=None"
        )
    return found


def _tried(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    one_by_one: bool,
) -> tuple[bool, set[str]]:
    """Whether a step of a class of which nothing is known needs wholes, and which settings it changes in its groups.

    In double precision, as a rate may be small. What fails, or changes nothing, is taken to need wholes. one_by_one:
    refuse what does not do the same on one parameter after another as on all at once.
    """
    noted: set[str] = set()
    on_wholes = failed = False

    def run(group: Mapping[str, Any], *starts: torch.Tensor, one_by_one: bool = False) -> torch.Tensor:
        """What some steps change in parameters that begin with these."""
        nonlocal failed, on_wholes
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        try:
            made = optimizer_class([{**group, "params": parameters}], **settings)
            before = dict(made.param_groups[0])
            for step in range(_TRIED_STEPS):
                for p, start in zip(parameters, starts, strict=True):
                    p.grad = torch.sin((step + 1.0) * start + step)
                if one_by_one:
                    for p in parameters:
                        PartialSteps(made).step([p])
                else:
                    made.step()
            noted.update(n for n, value in comparable(made.param_groups[0]).items() if before.get(n) != value)
            states = [(p, value) for p in parameters for value in made.state.get(p, {}).values()]
            on_wholes |= any(torch.is_tensor(v) and v.dim() > 0 and v.shape != p.shape for p, v in states)
        except Exception:  # what it needs besides is for the real step to say
            failed = True
        pairs = zip(parameters, starts, strict=True)
        return torch.cat([(p.detach() - start).flatten() for p, start in pairs])

    with torch.random.fork_rng(devices=[]):
        for group in _unlike(groups):
            for dimensions in sorted({p.dim() for p in group["params"]}):
                shape = [*[1] * (dimensions - 2), 4, 3][-dimensions:] if dimensions else []
                count = math.prod(shape)
                first = torch.linspace(-1.0, 2.0, count, dtype=torch.float64).view(shape)
                second = torch.linspace(0.5, -2.0, count, dtype=torch.float64).view(shape)
                alone = run(group, first)
                parts = first.flatten().split((1, count - 1)) if dimensions else [first.flatten()]  # as slices are
                on_wholes |= not (_alike(alone, run(group, *parts)) and alone.any())
                if not _alike(run(group, first, second), torch.cat([alone, run(group, second)])):
                    raise ConfigurationError(
                        f"optimizer_class: {optimizer_class.__name__} cannot be sharded: a step on a parameter depends "
                        "on the others beside it, or on random numbers"
                    )
                if one_by_one and not _alike(run(group, first, second), run(group, first, second, one_by_one=True)):
                    raise ConfigurationError(
                        f"step_in_backward: {optimizer_class.__name__} makes other steps on one parameter after "
                        "another than on all at once, as what counts its steps does"
                    )
    return on_wholes or failed, noted


def _unlike(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups, those with equal settings as one, as there may be one for each parameter."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        settings = without_parameters(group)
        found.setdefault(repr(settings), {**settings, "params": []})["params"].extend(group["params"])
    return [*found.values()]


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """But for rounding, also of what is computed in single precision in between."""
    return bool((first - second).abs().max() <= 1e-6 * first.abs().max())


def try_group(made: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Adds a group to a prototype, which refuses wrong settings likewise."""
    _refuse_differentiable(group)
    made.add_param_group(_on_single_elements(group))


def _on_single_elements(group: Mapping[str, Any]) -> dict[str, Any]:
    dimensions = sorted({p.dim() for p in group["params"]})
    return {**group, "params": [torch.nn.Parameter(torch.zeros((1,) * number)) for number in dimensions]}


def _refuse_differentiable(group: Mapping[str, Any]) -> None:
    if group.get("differentiable"):
        raise ConfigurationError("differentiable: got True; autograd does not follow a step on shards: needs False")


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def frozen(group: Mapping[str, Any]) -> dict[str, Any]:
    """Its settings, of which tensors are copies, as an optimizer or a scheduler may change them in place."""
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in without_parameters(group).items()}


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's settings that look alike on all ranks when they are alike."""
    numbers = {n: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for n, v in settings.items()}
    return {
        n: v for n, v in numbers.items() if n != "params" and isinstance(v, bool | int | float | str | tuple | list)
    }
