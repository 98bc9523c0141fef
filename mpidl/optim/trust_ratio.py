"""Base of LARS and LAMB, which scale each parameter's update by the ratio of the two norms.

    norms of all weights and updates, in one call -> a trust ratio a parameter -> weights -= lr * ratio * update

The one call, `squared_norms`, is all that sees whole parameters; the rest is elementwise and runs on parts of them as
it is. An engine that holds slices replaces the call by one that adds up the squares over its ranks. Where parameters
are cut over tp, the ranks of tp add up theirs, and each element of the whole parameter counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives import Communicator

from ..errors import ConfigurationError
from ..mesh import Mesh, Placement, placement
from ..mesh.groups import checked_mesh
from ..setting_checks import require, require_not_negative


def squared_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Computes the sum of squares of each tensor's elements: float64 [len(tensors)], on the CPU."""
    norms = []
    for tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(tensor, dtype=wide).double())
    on_one_device = [norm.to(norms[0].device) for norm in norms]
    return torch.stack(on_one_device).cpu().square_() if norms else torch.zeros(0, dtype=torch.float64)


def squared_norms_over(
    comm: Communicator,
    mesh: Mesh | None,
    placements: Mapping[torch.Tensor, Placement],
    slices: Sequence[torch.Tensor],
    of: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Computes the sums of squares of tensors of which every rank holds a slice. Collective.

    of: the slices' parameters, by which `placements` has them.
    mesh: over whose tp the parameters may be cut.
    """
    total = squared_norms(slices)
    comm.all_reduce(total)
    return summed_over_tp(total, [placements.get(p, Placement()) for p in of], mesh)


def summed_over_tp(squares: torch.Tensor, placements: Sequence[Placement], mesh: Mesh | None) -> torch.Tensor:
    """Adds up the sums of squares of the parts of parameters that are cut over tp. Collective over tp then.

    A part that other ranks of tp hold too, as of a shared key/value head, counts on one of them.
    """
    cut = [n for n, placed in enumerate(placements) if "tp" in placed.axes]
    if cut and mesh is not None and mesh.size("tp") > 1:
        counted = torch.tensor([placements[n].counted for n in cut], dtype=squares.dtype)
        parts = squares[cut] * counted
        mesh["tp"].all_reduce(parts)
        squares[cut] = parts
    return squares


class TrustRatioOptimizer(torch.optim.Optimizer):
    """Base of LARS and LAMB: checks of their settings, a step's closure, and the norms.

    mesh: whose ranks of tp have parts of the parameters; None where all parameters are whole.
    squared_norms: replaces what sums up squares, where an engine has slices of the parameters. Takes tensors and the
        parameters that they are of, and returns their sums of squares as float64 on the CPU; called once a step with
        the same number of tensors on every rank, of which some may be empty.
    """

    mesh: Mesh | None = None
    squared_norms: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor] | None = None

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], mesh: Mesh | None = None) -> None:
        self.mesh = checked_mesh(type(self).__name__, None, mesh)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after a check of its settings; settings that it lacks are the optimizer's."""
        settings = {**self.defaults, **param_group}
        require_not_negative(settings, "lr", "weight_decay")
        require("trust", settings["trust"], isinstance(settings["trust"], bool), "True or False")
        self._check(settings)
        super().add_param_group(param_group)
        self._refuse_parts(self.param_groups[-1]["params"])

    def _refuse_parts(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raises ConfigurationError for parts of parameters whose other ranks are not known."""
        if self.mesh is None and any("tp" in placement(p).axes for p in parameters):
            raise ConfigurationError(
                f"{type(self).__name__}: got parameters that are cut over tp, and needs the norms of whole ones: needs "
                "mesh="
            )

    def _check(self, settings: dict[str, Any]) -> None:
        """Raises ConfigurationError for settings that the method cannot work with."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient; returns the result of `closure`, called with gradients on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        """Updates the parameters by their gradients."""
        raise NotImplementedError

    def _gradients(self, group: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the group's parameters with gradients, and these, negated under `maximize`."""
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        if any(gradient.is_sparse for gradient in gradients):
            raise ConfigurationError(f"{type(self).__name__}: got a sparse gradient; needs dense ones")
        return parameters, list(torch._foreach_neg(gradients)) if group["maximize"] and gradients else gradients

    def _norms_of_pairs(
        self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
    ) -> list[tuple[float, float]]:
        """Computes the norms of two lists of equally many tensors, pair by pair."""
        if not first:
            return []
        squares = self._squared_norms([*first, *second], [*first, *first]).tolist()
        norms = [math.sqrt(square) for square in squares]
        return list(zip(norms[: len(first)], norms[len(first) :], strict=True))

    def _squared_norms(self, tensors: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.squared_norms is not None:
            return self.squared_norms(tensors, of)
        self._refuse_parts(of)  # a copy of the optimizer has no mesh
        return summed_over_tp(squared_norms(tensors), [placement(p) for p in of], self.mesh)
