"""Parameters that backward passes have reached, on which all ranks agree at the end of a pass.

    rank 0's pass     reaches a, b                          a, b reached: both get the mean
    rank 1's pass     reaches a        -> all-reduce ->     b missed by rank 1: the same error on both, or none

A parameter that any rank has reached gets the mean. One that a rank has missed is an error on every rank, unless
`find_unused_parameters` allows it. Under `static_graph` it is one if gradients came more or less often than in the
first pass.

Several backward passes of one forward pass:

    a, b = wrapped(x)
    a.sum().backward()      averages what it reaches; output b still exists and can still be backpropagated, so its
                            parameters are not yet reported as missed
    b.sum().backward()      averages what it reaches; now every parameter has its gradient

A pass that reaches only some parameters is an error if no output remains through which the other gradients can come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch

from collectives import Communicator
from collectives.diagnostics import listing

from ..errors import TrainingError, listed
from ..gradients.backward import BackwardWatch
from ..gradients.bucket_queue import BucketQueue
from ..gradients.foreign_steps import ForeignSteps
from .joined_passes import JoinedPasses
from .sparse import mean_of_sparse
from .trained_parameters import TrainedParameters


@dataclass
class _SeveralBackwards:
    """Backward passes that have left parameters out so far.

    forwards: the number of forward passes before the first of them, whose outputs may still be differentiated.
    arrived: the parameters whose gradients came in any of them, on this rank.
    """

    forwards: int
    arrived: set[torch.nn.Parameter] = field(default_factory=set)


class ReachedParameters:
    """Notes which parameters this rank gives a gradient, and agrees with the others on which any has given one.

    module, names, watch, find_unused: as of `Reducer`.
    queue: has this pass's arrivals, and gets how many to expect.
    foreign: detects steps in the pass that the engine did not make; the ranks agree on these in the same all-reduce.

    static_graph: as of `Reducer`.
    accumulated_under_no_sync: parameters with gradients of passes under no_sync that no later pass has averaged.
    reached_without_gradient: parameters to which the pass under way came, and gave no gradient.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Mapping[torch.nn.Parameter, str],
        comm: Communicator,
        watch: BackwardWatch,
        queue: BucketQueue,
        trained: TrainedParameters,
        foreign: ForeignSteps,
        join: JoinedPasses,
        *,
        find_unused: bool,
        static_graph: bool,
    ) -> None:
        self._module, self._names, self._comm = module, names, comm
        self._watch, self._queue, self._trained, self._foreign, self._join = watch, queue, trained, foreign, join
        self._find_unused, self.static_graph = find_unused, static_graph
        self.accumulated_under_no_sync: set[torch.Tensor] = set()
        self.reached_without_gradient: set[torch.Tensor] = set()
        self._given: set[torch.nn.Parameter] = set()  # what this rank gave a gradient in a pass that steps
        self._lost: set[torch.nn.Parameter] = set()  # and what had it no more when its bucket was filled
        self._several: _SeveralBackwards | None = None  # on every rank, or on none
        self._counts_known = False  # how often each gradient comes, in `queue.expected`

    # ---- between passes ---------------------------------------------------------------------------------------

    def set_static_graph(self) -> None:
        """Sets `static_graph`."""
        self.static_graph = self._queue.defer_launch_to_end = True

    def is_unreduced(self, parameter: torch.Tensor) -> bool:
        """Returns whether the parameter has a gradient of passes under no_sync that no later pass has averaged."""
        return parameter in self.accumulated_under_no_sync and parameter.grad is not None

    def start_anew(self, former: Sequence[torch.nn.Parameter], sparse: Set[torch.nn.Parameter]) -> None:
        """Takes up what trains now. Collective where parameters were frozen.

        former: what has trained up to now.
        sparse: those of it with sparse gradients.
        """
        trained = set(self._trained.parameters)
        self._average_frozen([p for p in former if p not in trained], sparse)
        if former:
            self.accumulated_under_no_sync |= {p for p in trained.difference(former) if p.grad is not None}
        self._queue.expected = {}
        self._queue.defer_launch_to_end = self.static_graph
        self._counts_known, self._several = False, None

    def _average_frozen(self, frozen: Sequence[torch.nn.Parameter], sparse: Set[torch.nn.Parameter]) -> None:
        """Averages what passes under no_sync gave to parameters that were frozen since; no later pass reduces it."""
        if not frozen:
            return
        given = np.array([self.is_unreduced(p) for p in frozen], np.uint8)
        self._comm.all_reduce(given, "max")
        for p, anywhere in zip(frozen, given, strict=True):
            if anywhere and p in sparse:
                p.grad = mean_of_sparse(self._comm, p, p.grad)
            elif anywhere:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
                self._comm.all_reduce(p.grad, "avg")
            self.accumulated_under_no_sync.discard(p)

    # ---- within a pass ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a pass, in which nothing is given yet."""
        self._given, self._lost = set(), set()

    def note_given(self, parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
        """Tells which of these this rank gives a gradient, and notes it before a step uses the gradient."""
        given = self._gives(parameters)
        for p, is_given in zip(parameters, given, strict=True):
            if is_given:
                self._given.add(p)
                if p.grad is None:
                    self._lost.add(p)
        return given

    def _gives(self, parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
        """Tells which of these passes of this rank gave a gradient since the last one that was averaged."""
        arrivals, accumulated = self._queue.arrivals, self.accumulated_under_no_sync
        without = self.reached_without_gradient
        return [(p in arrivals and p not in without) or (p in accumulated and p.grad is not None) for p in parameters]

    def agree(self, *, stepped: bool) -> tuple[set[torch.nn.Parameter], dict[torch.nn.Parameter, int], bool]:
        """Returns the reached parameters, the missed ones with a rank that missed them, and `awaits_another_backward`.

        A parameter is reached if any rank has reached it. A missed one is an error; under static_graph it is one whose
        gradient came more or less often than in the first pass. `awaits_another_backward` is True where none is missed,
        but some may get their gradient in another backward pass of the same forward pass.
        Collective. Raises TrainingError on every rank if an optimizer stepped in the pass and the engine did not make
        the step.

        stepped: whether the pass itself has made steps.
        """
        parameters, arrivals = self._trained.parameters, self._queue.arrivals
        before = () if self._several is None else self._several.arrived
        status = np.full(2 * len(parameters) + 2, -1, np.int64)
        reached, missed_by = status[:-2].reshape(2, -1)  # by the highest rank that did; -1: by none
        lost = self._lost if stepped else {p for p in arrivals if p.grad is None} - self.reached_without_gradient
        status[-2] = self._foreign.end_and_encode_change(self._comm, lost)
        for number, (p, gives) in enumerate(zip(parameters, self._gives(parameters), strict=True)):
            if gives or p in self._given:
                reached[number] = self._comm.rank
            if self._counts_known:
                fine = arrivals.get(p, 0) == self._queue.expected[p]
            else:
                fine = p in arrivals or p in before or self._find_unused or self.static_graph
            if not fine and not self._join.is_shadow:
                missed_by[number] = self._comm.rank
        if not self.static_graph and (missed_by >= 0).any():
            forwards = self._watch.forwards if self._several is None else self._several.forwards
            if self._watch.has_pending_output(forwards):
                missed_by[:], status[-1] = -1, self._comm.rank
        if self._comm.size > 1:
            self._comm.all_reduce(status, "max")
        self._foreign.refuse(int(status[-2]), self._comm, parameters)
        missed = {p: int(rank) for p, rank in zip(parameters, missed_by, strict=True) if rank >= 0}
        awaits_another_backward = not missed and bool(status[-1] >= 0)
        return {p for p, rank in zip(parameters, reached, strict=True) if rank >= 0}, missed, awaits_another_backward

    def forget_averaged(self) -> None:
        """Forgets the gradients of this pass, and those before it: they are averaged."""
        self.accumulated_under_no_sync, self.reached_without_gradient = set(), set()

    def end(self, awaits_another_backward: bool) -> None:
        """Ends a pass. awaits_another_backward: another one of the same forward pass is to follow."""
        if not awaits_another_backward:
            self._several = None
            return
        self._several = self._several or _SeveralBackwards(self._watch.forwards)
        self._several.arrived.update(self._queue.arrivals)

    def abandon(self) -> None:
        """Forgets what a pass has noted that an exception has cut short."""
        self.reached_without_gradient, self._several = set(), None

    def refuse(self, missed: Mapping[torch.nn.Parameter, int], reached: Set[torch.nn.Parameter]) -> None:
        """Raises TrainingError, on every rank, for parameters that a rank has missed. Both: as of `agree`."""
        if missed or not reached:
            self._refuse_if_taken_out(missed or self._trained.parameters)
        if not missed:
            return
        names = listed([self._names[p] for p in missed])
        where = listing(sorted(set(missed.values())))
        if self.static_graph:
            raise TrainingError(
                f"static_graph=True, but the graph changed: on {where} the gradient of {names} came more or less "
                "often than in the first backward pass"
            )
        if self._comm.size > 1 and reached.isdisjoint(missed):
            where = "all ranks"
        raise TrainingError(
            f"backward on {where} gave no gradient to {names}; if the loss does not depend on them by intention, set "
            "find_unused_parameters=True"
        )

    def _refuse_if_taken_out(self, missed: Iterable[torch.nn.Parameter]) -> None:
        kept = set(self._module.parameters())
        gone = [self._names[p] for p in missed if p not in kept]
        if gone:
            raise TrainingError(
                f"{listed(gone)}: taken out of the module after it was wrapped, or tied to another; wrap the model anew"
            )

    def learn_counts(self) -> None:
        """Learns of a static graph from the first synchronised pass how often each gradient comes."""
        if self.static_graph and not self._counts_known and not self._join.is_shadow:
            self._queue.expected = {p: self._queue.arrivals.get(p, 0) for p in self._trained.parameters}
            self._queue.defer_launch_to_end, self._counts_known = False, True
