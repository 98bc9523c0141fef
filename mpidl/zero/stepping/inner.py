"""Inner optimizer: the interface by which a ZeroOptimizer steps on a rank's slices of parameters, gradients and state.

`SliceSteps`           a torch optimizer whose step treats every element by itself, on the slices' values
`WholeSteps`           one that needs whole parameters: each parameter has one rank that gets it whole for the step
`ReplicatedSteps`      one that exchanges by itself what it needs, and updates all parameters on every rank
`OffloadedOptimizer`   one for each sub-group of slices, whose state is offloaded
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from ...optim.elementwise_state import saved_state, state_tensors
from ...partial_steps import PartialSteps
from ..slices import Slice


class InnerOptimizer(Protocol):
    """The verbs by which a ZeroOptimizer uses its inner optimizer.

    param_groups: list of dicts; settings, and the slices' values, in the order of the outer groups. A step uses the
        settings, and may note something in them.
    state: mapping of a slice's values to a dict; the state of its parameter, cut like that, after `cut_state`.
    optimizer: torch.optim.Optimizer of the inner class, on what this rank steps on; None where there are several.
    needs_wholes: bool; whether a step may be one on whole parameters.
    updates_wholes: bool; whether a step updates whole parameters on every rank, by whole gradients.
    """

    param_groups: list[dict[str, Any]]
    state: MutableMapping[Any, Any]
    optimizer: torch.optim.Optimizer | None = None
    needs_wholes: ClassVar[bool] = False
    updates_wholes: ClassVar[bool] = False

    @abstractmethod
    def step(self) -> Any:
        """Steps on the slices to which a gradient is attached. Every rank calls it."""

    @abstractmethod
    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds a group of slices' values. Every rank calls it."""

    def cut_state(self) -> None:
        """Brings all state into `state`, to be saved or loaded. Collective."""
        return

    def foreign_state(self) -> list[Any]:
        """Keys of state that belongs to no parameter, which cannot be saved."""
        return []

    def take_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes over loaded settings that the next backward pass needs; a step is given them all. groups: the outer."""
        return

    def refuse_foreign_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ConfigurationError for a whole state by which this optimizer cannot go on."""
        return

    def refuse_local_weights(self) -> None:
        """Raises TrainingError where each rank has weights of its own, so that there are none of the model."""
        return

    def refuse_local_gradients(self) -> None:
        """Raises TrainingError where each rank has gradients of its own, so that there are none of the model."""
        return

    @abstractmethod
    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tensors of state and masters, and of gradients if it holds any, in the memory where the model computes."""


class SliceSteps(InnerOptimizer):
    """A torch optimizer on slices. slices: of all parameters, also of those that are added later."""

    optimizer: torch.optim.Optimizer

    def __init__(self, optimizer: torch.optim.Optimizer, slices: Mapping[torch.nn.Parameter, Slice]) -> None:
        self.optimizer, self._slices = optimizer, slices
        self.param_groups, self.state = optimizer.param_groups, saved_state(optimizer)

    def step(self) -> Any:
        """Steps on the slices."""
        return self.optimizer.step()

    def partial(self) -> PartialSteps:
        """Steps on some slices at a time, for steps in backward."""
        return PartialSteps(self.optimizer)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds a group of slices' values. Local."""
        self.optimizer.add_param_group(group)

    def foreign_state(self) -> list[Any]:
        """Keys of state that are no slice's values."""
        return [key for key in self.state if not torch.is_tensor(key)]

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """State of the slices' sizes, and masters."""
        return {"optimizer": state_tensors(self.optimizer.state.values()) + masters(self._slices)}


def masters(slices: Mapping[torch.nn.Parameter, Slice]) -> list[torch.Tensor]:
    """The slices' fp32 masters."""
    return [part.values.detach() for part in slices.values() if part.is_master]
