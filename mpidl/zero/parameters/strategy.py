"""Parameter strategy: where the parameters live between steps, and what a rank does before one is read or changed.

    strategy                 stage                  a rank keeps             before a parameter is read
    `ReplicatedParameters`   1 and 2                all parameters           wait for its bucket's all-gather
    `NodeSharedParameters`   3, one node's memory   shards (shared)          nothing
    `ShardedParameters`      3 elsewhere            shards                   gather its unit, with the other ranks

The optimizer's parts call a strategy only by the methods of `ParameterStrategy`. In the order of a step:

    construction   the strategy cuts `shards`; publish(), if values were filled into them afterwards; start()
    forward        the strategy's own hooks and tensor subclasses
    backward       by phase (`gradients.backward`), in the thread of the pass:
        begun      with `step_in_backward` step_problem(), wait_for_gathers(), and wait_for_reduction(work) of the
                   agreement
        reached    on_gradient for each parameter; wait_for_reduction(work) of the oldest reduction, where a bucket
                   needs a buffer and none is free
        filled     end_backward()
        reduced    wait_for_reduction(work) of each reduction that is left, and of the agreement; with
                   `step_in_backward` release() and publish(), as the pass steps; then drain()
        abandoned  in place of the phases that are left: end_backward(); wait_for_reduction(work) of each reduction in
                   flight
    step()         step_problem(), then release(), the optimizer's step on `shards`, publish()

All ranks call publish, release, drain, gathered and unfreeze, in the same order, also where a strategy sends no message
in them ("-"). Each rank calls the other methods for itself. The messages of these five:

    method      `ReplicatedParameters`   `NodeSharedParameters`     `ShardedParameters`
    publish     all-gathers, started     a barrier                  gathers, if a `gathered` block is open or n >= 2
    release     -                        -                          rounds
    drain       -                        -                          rounds
    gathered    -                        two barriers if writable   rounds
    unfreeze    an allocation            -                          -

n is `prefetch`. `ReplicatedParameters.release` waits for the all-gathers that its `publish` has started. All-gathers
and rounds run in progress threads, all else in the thread that calls the method. No call deadlocks: what gathers units
takes part in other ranks' rounds while it waits (`sharded`), and the others wait only in calls that all ranks make.

To add one: a class of this protocol in this folder; `construction.build._cut_parameters`, which chooses it; its bytes
in `mpidl.memory.estimate`. CONTRIBUTING.md names the tests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from collectives import Work

from ...errors import ConfigurationError
from ..parameter_shard import ParameterShard
from ..traffic import ZeroTraffic

NamesOf = Callable[[Iterable[torch.nn.Parameter]], list[str]]


class ParameterStrategy(Protocol):
    """The verbs by which the parts of a ZeroOptimizer use its parameters, wherever these live.

    The bodies here are those of a strategy whose parameters are whole at any time, in place, on every rank; the methods
    marked as abstract are each strategy's own.

    shards: list of ParameterShard; this rank's part of all parameters, frozen ones included, in the order in which
        their gradients are reduced. The optimizer's step writes to `shards[i].values`.
    write_effect: str; for errors: what becomes of a value that the program writes in place, outside `gathered`.
    keeps_equal_writes: bool; whether such a write lasts if every rank makes the same and the parameter has no master.
    """

    shards: list[ParameterShard]
    write_effect: ClassVar[str]
    keeps_equal_writes: ClassVar[bool] = False

    # ---- around a step ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts training, once the shards have their first values. Called once, at the end of construction."""
        return

    def step_problem(self) -> str | None:
        """Tells why no gradient can be used and no step taken now on this rank; None if nothing forbids it.

        Called before a step, and at the start of a backward pass that makes steps.
        """
        return None

    @abstractmethod
    def release(self, *, inside_gathered: bool = False) -> None:
        """Returns when this rank reads no parameter that the step changes.

        All ranks call it; it sends messages only with `ShardedParameters`. Called before a step, and before other uses
        of the shards: norms, states, checkpoints. `ShardedParameters` raises TrainingError for its `step_problem`,
        unless inside_gathered.
        """

    @abstractmethod
    def publish(self) -> None:
        """Makes the shards that every rank has changed visible to all ranks. Collective.

        Called after each step, and after the shards were filled or loaded. May return before the values have arrived.
        """

    def wait_for_gathers(self) -> None:
        """Returns when no all-gather that `publish` has started uses the shards' memory. Local.

        Called before the shards are read or changed where `release` is not, as in a backward pass.
        """
        return

    # ---- in a backward pass (`backward.PassPhases`) ------------------------------------------------------------------

    @property
    def on_gradient(self) -> tuple[Callable[[torch.nn.Parameter], None], ...]:
        """Functions to be called when the gradient of a parameter is complete, before it goes to its bucket. Local."""
        return ()

    def end_backward(self) -> None:
        """Notes that this rank's pass reads no weight any more, or that an exception has cut it short. Local."""
        return

    # ---- while other ranks may need this one ------------------------------------------------------------------------

    def wait_for_reduction(self, work: Work, timeout: float | None = None) -> None:
        """Returns when an operation of a backward pass is complete, taking part in gathers that others need first.

        work: a reduction, or an agreement of the ranks.

        timeout: seconds; WorkTimeout when they pass first.
        """
        work.wait(timeout)

    def drain(self) -> None:
        """Returns when no rank waits for this one to gather a unit. Collective.

        Called when all buckets of a backward pass have been reduced, and before operations that all ranks call.
        """
        return

    # ---- whole parameters -------------------------------------------------------------------------------------------

    @abstractmethod
    def gathered(
        self, parameters: Iterable[torch.nn.Parameter] | None = None, writable: bool = True
    ) -> AbstractContextManager[None]:
        """Holds whole parameters inside, of every unit that has any of `parameters` (default: all). Collective.

        writable: as copies of this rank, of which its shard is kept at the end; every rank must make the same changes.
            A block inside another one sees that one's copies.
        """

    def gathered_address(self, parameter: torch.nn.Parameter) -> int | None:
        """The address of a parameter while it is gathered; None if it never moves. For the check of moved memory."""
        return None

    # ---- what there is ----------------------------------------------------------------------------------------------

    @abstractmethod
    def unfreeze(self, parameters: Sequence[torch.nn.Parameter], names_of: NamesOf) -> list[ParameterShard]:
        """Lets parameters train that were frozen; returns their shards. The same call on every rank.

        Raises ConfigurationError where one of them shares a shard with a parameter that stays frozen.
        """

    @property
    @abstractmethod
    def traffic(self) -> ZeroTraffic:
        """Counts of the gathers so far."""

    def stats(self) -> dict[str, Any]:
        """Describes what is gathered now, for `ZeroOptimizer.stats`."""
        return {"whole_units": [], "rounds_under_way": 0}

    @abstractmethod
    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tensors that this rank holds now, under the category "parameters"."""

    def remove(self) -> None:
        """Takes the strategy's hooks off the model."""
        return


def unfreeze_shards(
    shards: Sequence[ParameterShard],
    parameters: Sequence[torch.nn.Parameter],
    names_of: NamesOf,
) -> list[ParameterShard]:
    """Marks stage 3's frozen shards that hold these parameters as training, and returns them.

    ConfigurationError, and no shard is marked, if they hold other parameters too.
    """
    wanted = set(parameters)
    chosen = [shard for shard in shards if wanted & set(shard.parameters)]
    for shard in chosen:
        left = [p for p in shard.parameters if p not in wanted]
        if left:
            raise ConfigurationError(
                f"add_param_group: stage 3 has cut {', '.join(names_of(shard.parameters)[:5])} over the ranks as one "
                f"piece, of which {', '.join(names_of(left)[:5])} would stay frozen; unfreeze them together, make a "
                "module a unit of its own (units=), or use stage 1 or 2"
            )
    for shard in chosen:
        shard.trains = True
    return chosen
