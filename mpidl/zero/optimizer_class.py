"""What can be said of an optimizer's class before anything is changed: is it refused, and does it step on slices?

    AdamW, SGD, ...     a step on a parameter is one on its parts: each rank steps on its slices
    Muon, Adafactor     it needs whole parameters: `whole_steps`
    LBFGS               it depends on several parameters at once: refused

Of classes that are not torch's nothing is known: they are tried out on a few elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigurationError

_REFUSED = {
    "LBFGS": "it works on the whole model's gradient at once",
    "SparseAdam": "it takes sparse gradients, and buckets are dense",
}
_ON_WHOLES = ("Muon", "Adafactor")  # the former makes matrices orthogonal, the latter keeps sums of rows and columns


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
    made = optimizer_class([_on_single_elements(group) for group in groups], **settings)
    for group in made.param_groups:
        _refuse_differentiable(group)
    return made


def steps_on_wholes(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    offloaded: bool,
) -> bool:
    """Whether a step needs whole parameters: False if one on a parameter is one on its parts.

    Raises ConfigurationError if it depends on other parameters too. offloaded: refuses what needs whole parameters, and
    what notes anything in its groups, as there are several of it then.
    """
    name = optimizer_class.__name__
    if any(base.__name__ in _ON_WHOLES for base in optimizer_class.__mro__):
        on_wholes, noted = True, set[str]()
    elif optimizer_class.__module__.partition(".")[0] in ("torch", __name__.partition(".")[0]):
        return False
    else:
        on_wholes, noted = _tried(optimizer_class, groups, settings)
    if on_wholes and offloaded:
        raise ConfigurationError(
            f"offload: a step of {name} needs whole parameters, and what is offloaded are shards: needs offload=None"
        )
    if noted and offloaded:
        raise ConfigurationError(
            f"offload: {name} changes {', '.join(sorted(noted))} of its groups in a step, and there would be several "
            "of it: needs offload=None"
        )
    return on_wholes


def _tried(
    optimizer_class: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> tuple[bool, set[str]]:
    """As of `steps_on_wholes`, of a class of which nothing is known; and which settings a step changes in groups."""
    noted: set[str] = set()
    on_wholes = False

    def run(group: Mapping[str, Any], *starts: torch.Tensor) -> torch.Tensor:
        """The values after two steps on parameters that begin with these."""
        nonlocal on_wholes
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        made = optimizer_class([{**group, "params": parameters}], **settings)
        before = dict(made.param_groups[0])
        for gradient in (lambda x: x * x - x, lambda x: 0.25 - 0.5 * x**3):  # in directions that do not cancel
            for p, start in zip(parameters, starts, strict=True):
                p.grad = gradient(start)
            try:
                made.step()
            except Exception:  # what it needs besides is for the real step to say
                on_wholes = True
        noted.update(n for n, value in comparable(made.param_groups[0]).items() if before.get(n) != value)
        return torch.cat([p.detach().flatten() for p in parameters])

    for group in groups:
        for dimensions in sorted({p.dim() for p in group["params"]}):
            shape = [*[1] * (dimensions - 2), 4, 3][-dimensions:] if dimensions else []
            first = torch.linspace(-1.0, 2.0, math.prod(shape)).view(shape)
            second = torch.linspace(0.5, -2.0, math.prod(shape)).view(shape)
            alone = run(group, first)
            if dimensions:
                rows = max(dimensions - 2, 0)
                on_wholes |= not _close(alone, run(group, *first.split((1, shape[rows] - 1), rows)))
            if not _close(run(group, first, second), torch.cat([alone, run(group, second)])):
                raise ConfigurationError(
                    f"optimizer_class: {optimizer_class.__name__} cannot be sharded: a step on a parameter depends on "
                    "the others beside it"
                )
    return on_wholes, noted


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


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


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's settings that look alike on all ranks when they are alike."""
    numbers = {n: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for n, v in settings.items()}
    return {
        n: v for n, v in numbers.items() if n != "params" and isinstance(v, bool | int | float | str | tuple | list)
    }
