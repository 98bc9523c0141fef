"""Averages gradients: from autograd to buckets in symmetric memory to their means over the ranks, during backward.

    arena, one a dtype   [ bucket 0: g9 g8 | bucket 1: g7 g6 g5 | ... ]      a parameter's `.grad` is its place in here
    first pass           buckets by the reverse of `parameters()`
    after it             by the order in which gradients arrived on rank 0, which all ranks take over

Who runs what: all of it runs in the thread of the backward pass, but the reductions. Collectives, in this order on
every rank, all on the wrapper's Communicator; a forward pass has none, so a rank may run one alone:

    the pass begins     a small all-reduce: what trains
    bucket by bucket    its all-reduce, launched strictly in order, in the Communicator's progress thread while backward
                        goes on; where the ranks fill the cores of one node, only at the end of the pass, in the
                        thread that waits there (`collectives.partitioned`)
    the pass ends       waits for all; an all-reduce: what the pass has reached, so that what is wrong on one rank is
                        an error on all; the broadcast of rank 0's buffers

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", sections 3.2 and 4.2.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from collectives import Communicator, PartitionedAllReduce
from collectives.devices import Place
from collectives.diagnostics import listing

from .. import comm_hooks
from ..digest import code
from ..errors import TrainingError, listed
from ..gradients.backward import (
    BackwardWatch,
    PassPhases,
    goes_to,
    is_opaque,
    reaches,
    replacement_test,
    tensors_with_gradient,
)
from ..gradients.bucket_queue import BucketQueue
from ..gradients.buckets import FIRST_BUCKET_MB, MIB, GradientBucket, assign, by_rank
from ..gradients.foreign_steps import ForeignSteps
from ..job.agreement import raise_everywhere
from ..job.objects import broadcast_object
from ..partial_steps import STEP_NOT_CALLED
from ..replicas.broadcast import broadcast_states
from ..replicas.start_check import check_models_agree, check_settings_agree
from .backward_steps import BackwardSteps
from .bucket_memory import BucketMemory
from .joined_passes import JoinedPasses
from .linear import destinations
from .module_changes import ModuleChanges
from .several_backwards import SeveralBackwards
from .shared_parameters import SharedParameters
from .sparse import mean_of_sparse, sparse_parameters

if TYPE_CHECKING:  # at run time with compress= alone: few programs need it
    from ..gradients.compression.hook import CompressedReduction


_Training = tuple[torch.dtype, bool | tuple[int, ...]]  # a parameter's dtype, and its strides if not the usual ones


class _OpaqueGraph:
    """A hook of a forward pass's outputs that does nothing. It lives as long as their graph, which is opaque."""

    def __call__(self, _: torch.Tensor) -> None:
        pass


class Reducer:
    """Averages the gradients of a module's parameters.

    names: the parameters to take care of, trained or not, and their names; which of them train may change between
    passes, the same on all ranks. place: where they lie. bucket_cap: bytes. as_views: `.grad` becomes a view of the
    bucket, else keeps its own memory. buffers: those to broadcast after each pass. watch: must see the module's
    forward passes. group: the user's Communicator, of which `comm` is a duplicate. ignored: names of parameters and
    buffers that may differ between the ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Mapping[torch.nn.Parameter, str],
        comm: Communicator,
        watch: BackwardWatch,
        *,
        place: Place,
        bucket_cap: float,
        find_unused: bool,
        static_graph: bool,
        as_views: bool,
        buffers: Callable[[], list[torch.Tensor]],
        group: Communicator,
        ignored: Container[str],
    ) -> None:
        self.comm, self._group, self._duplicates = comm, group, {group: comm}
        self._ignored, self._changes = ignored, ModuleChanges(module, names, ignored)
        self._module, self._names = module, names
        self._cap, self._as_views = bucket_cap, as_views
        self._find_unused, self._static_graph = find_unused, static_graph
        self._buffers = buffers
        self.hook: tuple[Any, comm_hooks.Hook] | None = None  # what communicates instead of `_averages`, and its state
        self.pending_order: list[torch.nn.Parameter] | None = None
        self.rebuilt = False
        self.join = JoinedPasses()
        self._place = place
        self._arena = BucketMemory(comm, place.device)
        self._averages: PartitionedAllReduce | None = None  # of the dense buckets; one rank has none
        self._results: deque[tuple[GradientBucket, comm_hooks.Handle]] = deque()
        self._kept: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._accumulated_under_no_sync: set[torch.Tensor] = set()
        self._without: set[torch.Tensor] = set()  # parameters to which the pass under way came, and gave no gradient
        self._several: SeveralBackwards | None = None  # on every rank, or on none
        self._opaque: weakref.WeakSet[_OpaqueGraph] = weakref.WeakSet()  # of graphs that a backward pass may use
        self._unreached: list[torch.nn.Parameter] = []  # by the backward pass under way, as its graph tells
        self._wanted = self._what_trains()  # in the last synchronised forward pass
        self._choice: int | None = None  # by which ranks compare `_wanted`
        self._trains: list[_Training | None] = []  # as the buckets are laid out
        self._trained: list[torch.nn.Parameter] = []
        self._sparse: set[torch.nn.Parameter] = set()
        self._foreign = ForeignSteps(names, stay_in_place=True)
        self._shared = SharedParameters(names)
        self.steps: BackwardSteps | None = None  # within the passes; then buckets lie in its buffers, not in the arena
        self._given: set[torch.nn.Parameter] = set()  # what this rank gave a gradient in a pass that steps
        self._lost: set[torch.nn.Parameter] = set()  # and what had it no more when its bucket was filled
        self.queue = BucketQueue(
            [],
            watch,
            take=self._take,
            launch=self._launch,
            finish=self._finish,
            missing=self._miss,
            on_gradient_after_launch=self._on_gradient_after_launch,
            place=place,
        )
        self.queue.defer_launch_to_end = static_graph
        self._watch = watch
        watch.is_training_backward, watch.are_replaced = self.reached_from, replacement_test(module, names)
        watch.phases = PassPhases(
            begun=(
                self._refuse_double_backward,
                self._begin_turn,
                self._begin_hook,
                self._agree_on_buckets,
                self._begin_steps,
                self._mark_unreached,
                self._note_versions,
            ),
            reached=(self.queue.arrive,),
            reduced=(self.queue.launch_rest, self.queue.finish),
            finished=(self._end_quietly, self.queue.end),
            abandoned=(self.queue.reset, self._abandon),
            communicates=lambda: self.queue.synchronise,
        )
        self._destinations = destinations(module, names if as_views else (), watch, lambda: self.queue.synchronise)
        self._start_anew()

    # ---- between passes ---------------------------------------------------------------------------------------

    def before_forward(self, training: bool) -> None:
        """Notes before a synchronised forward pass which parameters train, for the backward pass to agree on.

        Collective only in training mode in a `join` that ends with the first rank. training: the module's mode.
        """
        if training:
            self.join.begin_forward()
        wanted = self._what_trains()
        if wanted != self._wanted:
            self._wanted, self._choice = wanted, None
        if self._wanted != self._trains:
            self.queue.listen(self._trained_by(self._wanted))

    def set_static_graph(self) -> None:
        """Sets `static_graph` as the constructor would; to be called before the first backward pass."""
        self._static_graph = self.queue.defer_launch_to_end = True
        self._choice = None

    def step_in_backward(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Has passes step with these optimizers from the next one on, or with none. Collective."""
        self._watch.before_forward()  # gives up a pass that an exception has cut short
        if self.steps is not None:
            self.steps.remove()
        self.steps = None
        if optimizers:
            self.steps = BackwardSteps(
                optimizers,
                self._names,
                self.comm,
                self._place,
                self._foreign,
                reduce=self._begin_reduction,
                complete=self._complete,
                is_unreduced=lambda p: p in self._accumulated_under_no_sync and p.grad is not None,
            )
        self._arena = BucketMemory(self.comm, self._place.device)
        self._lay_out([p for bucket in self.queue.buckets for p in bucket.parameters])

    def _agree_on_buckets(self) -> None:
        """Takes up a new order of the buckets, or a new choice of what trains, as a backward pass begins.

        Or other dtypes of it, or another order in memory. Collective, but under `no_sync`. Raises on every rank
        ModelMismatch where the choice differs, and TrainingError where any has parameters that were replaced, resized
        or added, or has not closed the step of the pass before.
        """
        if not self.queue.synchronise:
            return
        if self._choice is None:
            self._choice = code(repr((self._wanted, self._static_graph)))
        problem = self._changes.problem()
        if self.steps is not None and self.steps.is_open:
            problem = STEP_NOT_CALLED
        told = np.array([self._choice, -self._choice, problem is not None])
        self.comm.all_reduce(told, "max")
        if told[2]:
            raise_everywhere(self.comm, problem)
        if told[0] != -told[1]:
            check_models_agree(self.comm, self._module, self._ignored)
            check_settings_agree(self.comm, "DistributedDataParallel", {"static_graph": self._static_graph})
        if self._wanted != self._trains:
            self._start_anew()
        elif self.pending_order is not None:
            order, self.pending_order = self.pending_order, None
            self._lay_out(order)

    def _what_trains(self) -> list[_Training | None]:
        """The dtype of each parameter that is trained, and its order in memory."""
        return [(p.dtype, p.is_contiguous() or p.stride()) if p.requires_grad else None for p in self._names]

    def _trained_by(self, trains: Sequence[_Training | None]) -> list[torch.nn.Parameter]:
        return [p for p, each in zip(self._names, trains, strict=True) if each is not None]

    def _start_anew(self) -> None:
        former = self._trained
        self._trains, self._trained = self._wanted, self._trained_by(self._wanted)
        trained = set(self._trained)
        self._average_left_behind([p for p in former if p not in trained])
        if former:
            self._accumulated_under_no_sync |= {p for p in trained.difference(former) if p.grad is not None}
        self._sparse = sparse_parameters(self._module) & trained
        self.queue.expected = {}
        self.queue.defer_launch_to_end = self._static_graph
        self.rebuilt, self._counts_known, self.pending_order = False, False, None
        self._several = None
        self._lay_out(list(reversed(self._trained)))

    def _average_left_behind(self, frozen: Sequence[torch.nn.Parameter]) -> None:
        """Averages what passes under no_sync gave to parameters that were frozen since; no later pass reduces it."""
        if not frozen:
            return
        given = np.array([p in self._accumulated_under_no_sync and p.grad is not None for p in frozen], np.uint8)
        self.comm.all_reduce(given, "max")
        for p, anywhere in zip(frozen, given, strict=True):
            if anywhere and p in self._sparse:
                p.grad = mean_of_sparse(self.comm, p, p.grad)
            elif anywhere:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
                self.comm.all_reduce(p.grad, "avg")
            self._accumulated_under_no_sync.discard(p)

    def retire(self) -> None:
        """Takes the hooks off the parameters; gradients stay. A pass that an exception has cut short is given up."""
        self.queue.set_buckets([])
        self._results.clear()
        self._foreign.end()
        self._shared.end()
        if self.steps is not None:
            self.steps.remove()
        if self._averages is not None:
            self._averages.abandon()
        for destination in self._destinations.values():
            destination.remove()
        self._averages = None
        self._arena = BucketMemory(self.comm, self._place.device)

    def _lay_out(self, order: Sequence[torch.nn.Parameter]) -> None:
        """Cuts the parameters into buckets in this order; gradients that lie in the old ones move along."""
        dense = assign([p for p in order if p not in self._sparse], self._cap, min(self._cap, FIRST_BUCKET_MB * MIB))
        buckets = [GradientBucket(group) for group in dense] + [GradientBucket([p]) for p in order if p in self._sparse]
        self._dense = len(dense)
        moved = {
            p: p.grad.clone()
            for bucket in self.queue.buckets
            if bucket.flat is not None
            for p, view in zip(bucket.parameters, bucket.views, strict=True)
            if p.grad is not None and p.grad.data_ptr() == view.data_ptr() and p.numel()
        }
        self._averages = None
        if self.steps is not None:
            self.steps.lay_out(buckets[: len(dense)])
        else:
            self._arena.lay_out(buckets[: len(dense)])
        if self.steps is None and self.comm.size > 1 and dense:
            flats = [bucket.flat for bucket in buckets[: len(dense)]]
            self._averages = self.comm.partitioned_all_reduce(flats, "avg", algorithm=by_rank(self.comm, "all_reduce"))
        self.queue.set_buckets(buckets)
        placed = [bucket for bucket in buckets if bucket.flat is not None]
        views = {p: view for bucket in placed for p, view in zip(bucket.parameters, bucket.views, strict=True)}
        for p, destination in self._destinations.items():
            destination.move(views.get(p))
        for p in moved.keys() & views.keys():
            p.grad = views[p].detach().copy_(moved.pop(p))
        for p, gradient in moved.items():  # frozen meanwhile
            p.grad = gradient

    def reached_from(self, nodes: Sequence[Any] | None) -> bool:
        """Within a backward pass that came by these nodes: tells if it goes to the parameters, as `goes_to`."""
        concerned = goes_to(self._names, nodes)
        if concerned and self._looks_for_unused and not self._opaque:
            self._unreached = [p for p in self._trained_by(self._wanted) if not reaches(p)]
        return concerned

    @property
    def _looks_for_unused(self) -> bool:
        return self._find_unused and not self._static_graph and self.queue.synchronise

    def after_forward(self, output: Any) -> None:
        """Watches the output of a forward pass; call it with that."""
        if self._looks_for_unused and torch.is_grad_enabled():
            outputs = list(tensors_with_gradient(output))
            if is_opaque(outputs):
                mark = _OpaqueGraph()
                self._opaque.add(mark)
                for tensor in outputs:
                    tensor.register_hook(mark)

    def _mark_unreached(self) -> None:
        """Marks the parameters that the pass will not reach, so that buckets do not wait for them."""
        unreached, self._unreached = self._unreached, []
        for p in unreached:
            self.queue.mark_missing(p)

    def _begin_turn(self) -> None:
        if self.queue.synchronise:
            self.join.begin_backward()

    def _begin_hook(self) -> None:
        if (compressed := self._compressed()) is not None:
            compressed.begin_pass(self._has_gradients)

    def _compressed(self) -> CompressedReduction | None:
        """The hook of `compress=`, if there is one."""
        if self.hook is None:
            return None
        from ..gradients.compression.hook import CompressedReduction

        return self.hook[1] if isinstance(self.hook[1], CompressedReduction) else None

    def _has_gradients(self) -> bool:
        given = (p.grad for p in self._trained if p.grad is not None)
        return any(g._nnz() > 0 if g.layout != torch.strided else bool(g.any()) for g in given)

    def begin_shadow_pass(self) -> None:
        """Begins a shadow pass: this rank contributes zeros to a backward pass of the other ranks."""
        self.join.begin_shadow()
        if (compressed := self._compressed()) is not None:
            compressed.begin_shadow_pass()
        self._agree_on_buckets()
        self.join.take_gradients(self._trained)
        self.queue.launch_rest()

    def end_shadow_pass(self) -> None:
        """Ends the shadow pass; this rank's gradients are again those of before."""
        try:
            self.queue.finish()
        finally:
            self.queue.reset()
            self.join.end_shadow()

    def leave_join(self) -> None:
        """Ends the block: passes are those of all ranks again."""
        if self.join.is_shadow:  # an exception ends it
            self.queue.reset()
            self.join.end_shadow()
        self.join = JoinedPasses()

    # ---- within a pass ----------------------------------------------------------------------------------------

    def _refuse_double_backward(self) -> None:
        if torch.is_grad_enabled():
            raise TrainingError(
                "backward(create_graph=True) through DistributedDataParallel: gradients of gradients cannot pass "
                "through the averaging; train the plain module (`.module`) and average the gradients yourself"
            )

    def _begin_steps(self) -> None:
        self._given, self._lost = set(), set()
        if self.steps is not None:
            self.steps.begin(self.queue.synchronise)

    def _note_versions(self) -> None:
        self._foreign.begin(self._trained)

    def _end_quietly(self) -> None:
        if not self.queue.synchronise:
            self._foreign.end_quietly()

    def _take(self, bucket: GradientBucket, index: int) -> None:
        """Moves a complete gradient into its place in the bucket, unless it lies there already."""
        parameter = bucket.parameters[index]
        if not self.queue.synchronise:
            self._accumulated_under_no_sync.add(parameter)
            return
        gradient = parameter.grad
        if gradient is None:  # as of a function whose backward returns None
            self._without.add(parameter)
        elif self._without:
            self._without.discard(parameter)
        if parameter in self._sparse:
            return
        if gradient is not None and gradient.layout != torch.strided:
            raise TrainingError(
                f"{self._names[parameter]}: its gradient is sparse, but it belongs to no torch.nn.Embedding made with "
                "sparse=True, so that its place is in a dense bucket"
            )
        if self.steps is not None:
            return  # the bucket has no memory before it is launched
        view = bucket.views[index]
        if gradient is None:
            view.zero_()
            return
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            if self._shows_place(parameter):
                parameter.grad = view.detach()  # not the view itself, which `.grad.data = ...` would move
        elif not self._shows_place(parameter):
            parameter.grad = gradient.clone()

    def _shows_place(self, parameter: torch.nn.Parameter) -> bool:
        """Returns whether `.grad` becomes the parameter's place in its bucket."""
        return self._as_views and not (self._shared.parameters and parameter in self._shared.parameters)

    def _miss(self, bucket: GradientBucket, index: int) -> None:
        """Fills an unreached parameter's place in its bucket with what it has accumulated, or zeros."""
        parameter = bucket.parameters[index]
        if parameter in self._sparse or self.steps is not None:
            return
        gradient, view = parameter.grad, bucket.views[index]
        if gradient is None:
            view.zero_()
        elif gradient.data_ptr() == view.data_ptr():
            self._kept[parameter] = view.clone()
        else:
            view.copy_(gradient)

    def _on_gradient_after_launch(self, bucket: GradientBucket, index: int) -> None:
        if self.queue.synchronise and not self._static_graph:
            raise TrainingError(
                f"{self._names[bucket.parameters[index]]}: a gradient arrived twice in one backward pass, the second "
                "time after its bucket had been reduced, as happens to a parameter used in several re-entrant "
                "checkpoints; set static_graph=True, or use torch.utils.checkpoint with use_reentrant=False"
            )

    def _launch(self, bucket: GradientBucket) -> None:
        given = {p for p in bucket.parameters if self._gives(p)} if self.steps is not None else set()
        self._given |= given
        self._lost |= {p for p in given if p.grad is None}
        if bucket.parameters[0] in self._sparse:
            return  # they follow at the end, in their order
        if self.steps is not None:
            self.steps.launch(bucket, [p in given for p in bucket.parameters])
        elif self.hook is not None:
            self._results.append((bucket, self._begin_reduction(bucket, len(self._results))))
        elif self._averages is not None:
            assert bucket.flat is not None
            self._averages.hand_in(bucket.flat)
            self._results.append((bucket, self._averages))

    @property
    def reduces_at_end(self) -> bool:
        """True if no rank reduces a bucket before its backward pass is over."""
        return self.hook is None and self._averages is not None and self._averages.waits

    def _gives(self, parameter: torch.nn.Parameter) -> bool:
        """Returns whether passes of this rank gave the parameter a gradient since the last one that was averaged."""
        arrived = parameter in self.queue.arrivals and parameter not in self._without
        return arrived or (parameter in self._accumulated_under_no_sync and parameter.grad is not None)

    def _begin_reduction(self, bucket: GradientBucket, number: int) -> comm_hooks.Handle:
        """Starts the reduction by the user's hook, or else by an operation of the bucket's own."""
        assert bucket.flat is not None
        if self.hook is not None:
            bucket.clear_padding()  # in which a hook may have written in the step before
        state, hook = self.hook or (self._group, comm_hooks.allreduce)
        last = number == self._dense - 1
        seen = comm_hooks.GradBucket(number, last, bucket.flat, bucket.views, bucket.parameters, self._duplicates)
        return comm_hooks.begin((state, hook), seen)

    def _complete(self, bucket: GradientBucket, handle: comm_hooks.Handle) -> None:
        """Waits until the bucket holds the mean."""
        assert bucket.flat is not None
        values = comm_hooks.result_of(handle)
        if values is not None and values.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(values)
        if self.join.mean_correction != 1.0:
            bucket.flat.mul_(self.join.mean_correction)

    def _finish(self) -> None:
        self.join.end_backward()
        while self._results:
            self._complete(*self._results[0])
            self._results.popleft()  # not before: what is under way is waited for, whatever happens
        if self.steps is not None:
            self.steps.finish()
        reached, wrong, waits = self._agreed()
        for bucket in self.queue.buckets:
            for index, p in enumerate(bucket.parameters):
                if p in self._sparse:
                    mean = mean_of_sparse(self.comm, p, p.grad)
                    if p in reached:
                        p.grad = mean if self.join.mean_correction == 1.0 else mean * self.join.mean_correction
                elif self.steps is not None:
                    continue  # it has what it is to have
                elif p not in reached:
                    if p in self._kept and p.grad is not None:
                        p.grad.copy_(self._kept[p])
                elif self._shows_place(p):
                    view, shown = bucket.views[index], p.grad
                    if shown is None or shown.data_ptr() != view.data_ptr():
                        p.grad = view.detach()
                elif p.grad is None:
                    p.grad = bucket.views[index].clone()
                else:
                    p.grad.copy_(bucket.views[index])
        self._kept, self._accumulated_under_no_sync, self._without = {}, set(), set()
        if self.steps is not None:
            self.steps.step([p for p in self._trained if p in self._sparse and p in reached])
            self.steps.end()
        if waits:
            self._several = self._several or SeveralBackwards(self._watch.forwards)
            self._several.arrived.update(self.queue.arrivals)
        else:
            self._several = None
            broadcast_states(self.comm, self._buffers(), self.join.order_root)
        if wrong or not reached:
            self._refuse_if_taken_out(wrong or self._trained)
        if wrong:
            self._complain(wrong, reached)
        self._learn()

    def _abandon(self) -> None:
        """Ends a pass that an exception cut short: waits for what was launched on all ranks."""
        self._unreached = []
        while self._results:
            with suppress(Exception):  # the pass has ended with one that tells more
                self._results[0][1].wait()
            self._results.popleft()
        if self.steps is not None:
            self.steps.abandon()
        self._kept, self._without, self._several = {}, set(), None
        self._foreign.end()

    def _agreed(self) -> tuple[set[torch.nn.Parameter], dict[torch.nn.Parameter, int], bool]:
        """The parameters to which any rank's pass gave a gradient, and those that a rank must not have missed, with it.

        Under static_graph the latter are those whose gradient came more or less often than in the first pass. Last,
        True where none is missed but some may get their gradient in another backward pass of the same forward pass.
        """
        parameters, arrivals = self._trained, self.queue.arrivals
        before = () if self._several is None else self._several.arrived
        status = np.full(2 * len(parameters) + 2, -1, np.int64)
        reached, missed_by = status[:-2].reshape(2, -1)  # by the highest rank that did; -1: by none
        lost = {p for p in arrivals if p.grad is None and p not in self._without} if self.steps is None else self._lost
        status[-2] = self._foreign.found(self.comm, lost)
        for number, p in enumerate(parameters):
            if self._gives(p) or p in self._given:
                reached[number] = self.comm.rank
            if self._counts_known:
                fine = arrivals.get(p, 0) == self.queue.expected[p]
            else:
                fine = p in arrivals or p in before or self._find_unused or self._static_graph
            if not fine and not self.join.is_shadow:
                missed_by[number] = self.comm.rank
        if not self._static_graph and (missed_by >= 0).any():
            forwards = self._watch.forwards if self._several is None else self._several.forwards
            if self._watch.may_come_again(forwards):
                missed_by[:], status[-1] = -1, self.comm.rank
        if self.comm.size > 1:
            self.comm.all_reduce(status, "max")
        self._foreign.refuse(int(status[-2]), self.comm, parameters)
        wrong = {p: int(rank) for p, rank in zip(parameters, missed_by, strict=True) if rank >= 0}
        waits = not wrong and bool(status[-1] >= 0)
        return {p for p, rank in zip(parameters, reached, strict=True) if rank >= 0}, wrong, waits

    def _refuse_if_taken_out(self, missed: Iterable[torch.nn.Parameter]) -> None:
        kept = set(self._module.parameters())
        gone = [self._names[p] for p in missed if p not in kept]
        if gone:
            raise TrainingError(
                f"{listed(gone)}: taken out of the module after it was wrapped, or tied to another; wrap the model anew"
            )

    def _complain(self, wrong: Mapping[torch.nn.Parameter, int], reached: Set[torch.nn.Parameter]) -> None:
        names = listed([self._names[p] for p in wrong])
        where = listing(sorted(set(wrong.values())))
        if self._static_graph:
            raise TrainingError(
                f"static_graph=True, but the graph changed: on {where} the gradient of {names} came more or less "
                "often than in the first backward pass"
            )
        if self.comm.size > 1 and reached.isdisjoint(wrong):
            where = "all ranks"
        raise TrainingError(
            f"backward on {where} gave no gradient to {names}; if the loss does not depend on them by intention, set "
            "find_unused_parameters=True"
        )

    def _learn(self) -> None:
        """Learns from the first synchronised pass the order of gradients, and for a static graph their number."""
        if self._static_graph and not self._counts_known and not self.join.is_shadow:
            self.queue.expected = {p: self.queue.arrivals.get(p, 0) for p in self._trained}
            self.queue.defer_launch_to_end, self._counts_known = False, True
        if self.rebuilt:
            return
        self.rebuilt = True
        if self._find_unused and not self._static_graph:
            return
        numbers = {p: number for number, p in enumerate(self._trained)}
        order = broadcast_object(self.comm, [numbers[p] for p in self.queue.arrivals], self.join.order_root)  # type: ignore[index]
        arrived = [self._trained[number] for number in order]
        first = set(arrived)
        self.pending_order = arrived + [p for p in reversed(self._trained) if p not in first]
