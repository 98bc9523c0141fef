"""Finds the parameter whose gradient is infinite or NaN, and the rank where it became so.

    rank 0    fine      fine       fine                     backward, before anything is reduced
    rank 1    fine      Inf: h.2   NaN: h.1 and below       -> ("h.2", 1), ("h.1", 1), ...
    the mean  fine      Inf        NaN                      every rank sees it, but not the rank it came from

After the reduction only the parameter can be found, not the rank. A `NonfiniteWatch` looks at each rank's own gradients
as autograd gives them, in their order: the first one that is not finite is closest to the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from collectives import Communicator

from ..job.objects import all_gather_object
from ..job.runtime import default_communicator
from .scalars import values_of

Found = list[tuple[str, int]]


def are_finite(gradients: Iterable[torch.Tensor]) -> list[bool]:
    """Returns for each gradient whether all its elements are finite; of a sparse one those that are stored."""
    stored = [g._values() if g.layout == torch.sparse_coo else g for g in gradients]
    return values_of([values.isfinite().all() for values in stored])


def is_finite(gradient: torch.Tensor) -> bool:
    """Returns whether all elements of a gradient are finite."""
    return are_finite([gradient])[0]


class NonfiniteWatch:
    """Looks at every gradient as autograd makes it, before any averaging. Reads all gradients once more: not for free.

    parameters: a model, or pairs of a name and a parameter. Works for plain models, DDP and ZeroOptimizer. Parameters
        that are frozen now are not watched later.

    found: the parameters whose gradients on this rank were not finite since `clear`, in the order of their arrival.
    """

    def __init__(self, parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self.found: list[str] = []
        named = parameters.named_parameters() if isinstance(parameters, torch.nn.Module) else parameters
        self._handles = [p.register_hook(_record(name, self.found)) for name, p in named if p.requires_grad]

    def find(self, process_group: Communicator | None = None) -> Found | None:
        """Lists (parameter, rank) of what all ranks found, or None; every rank's first one comes first. Collective."""
        return of_all_ranks(default_communicator(process_group), self.found)

    def clear(self) -> None:
        """Forgets what was found."""
        self.found.clear()

    def remove(self) -> None:
        """Stops looking."""
        for handle in self._handles:
            handle.remove()


def _record(name: str, found: list[str]) -> Callable[[torch.Tensor], None]:
    def hook(gradient: torch.Tensor) -> None:
        if name not in found and not is_finite(gradient):
            found.append(name)

    return hook


def of_all_ranks(comm: Communicator, nonfinite: list[str]) -> Found | None:
    """Lists (parameter, rank) of what each rank has found, first ones first; None if none has. Collective."""
    everyone = all_gather_object(comm, nonfinite)
    placed = [(place, rank, name) for rank, names in enumerate(everyone) for place, name in enumerate(names)]
    return [(name, rank) for _, rank, name in sorted(placed)] or None


def describe(found: Sequence[tuple[str, int | None]]) -> str:
    """Names the first parameter, and its rank if that is known, and counts the others. found: one or more."""
    name, rank = found[0]
    others = len({name for name, _ in found}) - 1
    where = "" if rank is None else f" on rank {rank}"
    return f"the gradient of {name}{where} is not finite" + (f", and of {others} after it" if others else "")
