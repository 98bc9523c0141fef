"""Steps within the backward pass: a bucket's shard is updated when it has been reduced, and its gradient is forgotten.

    backward    unit 3 | unit 2          | unit 1          | unit 0          |
    reduced            | 3               | 2               | 1               | 0
    stepped                              | 3, as its buffer is needed again  | ... all that is left at the end
    gathered                                                                        the new parameters, as by any step

So gradients need the memory of a few buffers. `step()` afterwards only ends the pass's step. What needs all gradients
at once or may refuse the step is not possible: a norm of all, loss scaling, several reduced passes for one step.

Who runs what: the thread of the backward pass runs all of it, and begins its collectives in the order of the buckets,
as every rank does. Where ranks share weights in a node's memory, a rank steps on a bucket only after all ranks have
computed the gradients of all its parameters: after that no rank's pass reads these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...partial_steps import STEP_NOT_CALLED, PartialSteps
from ..parameter_shard import ParameterShard
from ..parameters.strategy import ParameterStrategy
from ..parameters.weight_guard import WeightGuard
from ..slices import Slice


class BackwardShardSteps:
    """A `Stepper` of `ShardReducer`.

    partial: steps on some slices at a time.
    shards: by the buckets' numbers; more may come.
    agree: called at the start of a pass, raises TrainingError on every rank where one of them cannot step.
    """

    def __init__(
        self,
        partial: PartialSteps,
        parameters: ParameterStrategy,
        shards: Sequence[ParameterShard],
        slices: Mapping[torch.nn.Parameter, Slice],
        guard: WeightGuard,
        agree: Callable[[], None],
        reached: Callable[[int], Sequence[bool]],
    ) -> None:
        self._partial = partial
        self._parameters, self._shards, self._slices, self._guard = parameters, shards, slices, guard
        self._agree, self._reached = agree, reached
        self._counted: set[torch.nn.Parameter] = set()
        self._stepped: list[torch.nn.Parameter] = []
        self._is_open = False  # whether a pass has stepped since the last call of `optimizer.step()`
        self._foreign_problem: str | None = None

    def begin(self) -> None:
        """Begins a pass that steps."""
        self._counted, self._stepped = set(), []
        self._agree()

    def launched(self, number: int) -> None:
        """Notes that this rank's pass needs the bucket's parameters no more."""
        flags = zip(self._shards[number].parameters, self._reached(number), strict=True)
        mine = [p for p, reached in flags if reached]
        self._counted.update(mine)
        self._guard.stepped(mine)

    @torch.no_grad()
    def step(self, number: int, gradient: torch.Tensor, reached: Sequence[bool]) -> None:
        """Steps on this rank's slices of a bucket's parameters."""
        chosen = [p for p, flag in zip(self._shards[number].parameters, reached, strict=True) if flag]
        self._is_open |= bool(chosen)
        parts = [self._slices[p] for p in chosen]
        for part in parts:
            part.attach(gradient)
        self._partial.step([part.values for part in parts])
        for part in parts:
            part.write_back()
            part.values.grad = None
        self._stepped += chosen

    @torch.no_grad()
    def end(self) -> None:
        """Publishes the new parameters to every rank, once all have been stepped. Collective."""
        self._parameters.release()
        self._guard.stepped([p for p in self._stepped if p not in self._counted])
        self._parameters.publish()

    def close(self, foreign_problem: str | None) -> None:
        """Notes a call of `optimizer.step()`.

        foreign_problem: why a gradient of this rank is refused: the program has set it.

        `step` agrees on nothing, so that the next pass raises the error.
        """
        self._is_open, self._foreign_problem = False, foreign_problem

    def open_problem(self) -> str | None:
        """Explains why a pass cannot begin: the program has not called `optimizer.step()` after the last one."""
        return STEP_NOT_CALLED if self._is_open else None

    def take_foreign_problem(self) -> str | None:
        """Returns what `close` was given, once."""
        problem, self._foreign_problem = self._foreign_problem, None
        return problem
