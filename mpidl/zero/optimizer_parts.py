"""Parts of a ZeroOptimizer, a field for each, which `construction.build` makes and the optimizer's methods use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from collectives import Communicator
from collectives.devices import Place

from ..gradients.backward import BackwardWatch
from ..mesh import Mesh
from ..optimizer_trial import StepNeeds
from .gradients.grad_attribute import GradAttributes
from .gradients.reduced_gradients import ReducedGradients
from .gradients.shard_reducer import ShardReducer
from .parameter_shard import ParameterShard
from .parameters.gathered_block import GatheredBlocks
from .parameters.strategy import ParameterStrategy
from .parameters.weight_guard import WeightGuard
from .shard_group import ShardGroup
from .slices import Slice
from .states.whole_states import StateNames
from .stepping.backward_steps import BackwardShardSteps
from .stepping.inner import InnerOptimizer

if TYPE_CHECKING:  # at run time with compress=, offload= or tp alone: few programs need them
    from ..gradients.compression.hook import CompressedReduction
    from .gradients.same_gradients import SameGradients
    from .offload import OffloadedOptimizer


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a ZeroOptimizer.

    shard_group: the ranks: all of them, those that have shards, those with this rank's shard.
    tp: the ranks that hold the other parts of these parameters; None if alone.
    with_tp: the ranks of `shard_group` and all ranks of tp of each; they step together or not at all.
    mesh: the axes over which the norm of the whole model is taken; None: those of `shard_group`.
    divisor: of contributions to gradients, as `mesh.experts` gives it.
    model: the plain model, trained in place.
    place: where its parameters lie.
    names: of the model's state_dict.
    param_groups: list of dicts; the parameter groups as given, with the model's parameters.
    prototype: optimizer of the inner class on single elements; refuses wrong groups before anything is changed.
    find_needs: function of groups; what a step on them needs besides slices.
    trained: list of the parameters that train; grows by add_param_group.
    watch: begins and ends backward passes.
    parameters: where the parameters live.
    shards: list of ParameterShard; this rank's shards that train, by the numbers of the gradients' buckets.
    slices: dict of parameter to Slice; this rank's part of each that trains.
    shard_reducer: reduces gradients to shards in backward passes.
    reduced_gradients: the gradients between passes.
    grad_attributes: shows them as `.grad`.
    same_gradients: compares them over tp before a step; None without tp.
    inner: steps on the slices' values.
    offloaded: the same, where state is offloaded; else None.
    guard: refuses weights that were changed from outside.
    gathered_blocks: the `gathered` blocks.
    backward_steps: makes the steps in the backward pass, with step_in_backward; else None.
    compressed: reduces the gradients, with `compress=`; else None.
    hooks: list of handles on the model, to be removed.
    dtypes: of parameters before `precision`.
    """

    shard_group: ShardGroup
    tp: Communicator | None
    with_tp: Communicator
    mesh: Mesh | None
    divisor: int
    model: torch.nn.Module
    place: Place
    names: StateNames
    param_groups: list[dict[str, Any]]
    prototype: torch.optim.Optimizer
    find_needs: Callable[[Iterable[Mapping[str, Any]]], StepNeeds]
    trained: list[torch.nn.Parameter]
    watch: BackwardWatch
    parameters: ParameterStrategy
    shards: list[ParameterShard]
    slices: dict[torch.nn.Parameter, Slice]
    shard_reducer: ShardReducer
    reduced_gradients: ReducedGradients
    grad_attributes: GradAttributes
    same_gradients: SameGradients | None
    inner: InnerOptimizer
    offloaded: OffloadedOptimizer | None
    guard: WeightGuard
    gathered_blocks: GatheredBlocks
    backward_steps: BackwardShardSteps | None
    compressed: CompressedReduction | None
    hooks: list[Any]
    dtypes: dict[torch.nn.Parameter, torch.dtype]

    @property
    def comm(self) -> Communicator:
        """All ranks."""
        return self.shard_group.world

    def names_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[str]:
        """Names of parameters in the plain model; the first of a tied one's."""
        names = {p: name for name, p in reversed(self.names.parameters.items())}
        return [names[p] for p in parameters]
