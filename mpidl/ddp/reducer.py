"""Averages gradients in backward passes: from autograd into buckets, and from the buckets' means back to `.grad`.

    the pass begins           agree on what trains, lay the buckets out      `trained_parameters`, `bucket_order`
                              which parameters not to wait for               `unused_parameters`
    a gradient arrives        copy it to its slot in its bucket              here
    a bucket is full          launch it, if all before it are launched       `bucket_means`
    the pass ends             wait for the means                             `bucket_means`
                              agree on what the ranks have reached           `reached_parameters`
                              `.grad` of each reached parameter is its mean  here
                              broadcast rank 0's buffers                     `replicas.broadcast`
                              an error on every rank if one was missed       `reached_parameters`

Who runs what: all runs in the thread of the backward pass, except the reductions (`bucket_means`). Collectives, in
this order on every rank, all on the wrapper's Communicator, except the turns of a `join`, which have their own; outside
of a `join` a forward pass has none, so a rank may run one alone:

    the pass begins     a small all-reduce: what trains; all-reduces of what `no_sync` gave to parameters that were
                        frozen since; where buckets are laid out anew, the allocation of their memory
    bucket by bucket    its all-reduce, launched in order, with `step_in_backward` also one of what was reached;
                        or, where the ranks fill the cores of one node, one reduction of all buckets as the pass ends
                        (`bucket_means`)
    the pass ends       waits for all; an all-reduce: what the pass has reached, so that what is wrong on one rank is
                        an error on all; all-gathers of each sparse gradient (`sparse`); the broadcast of rank 0's
                        buffers; after the first pass that of its order (`bucket_order`). A step in the pass that the
                        engine did not make is an error before the broadcast, a parameter that a rank has missed is one
                        after it

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", sections 3.2 and 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence, Set

import torch

from collectives import Communicator
from collectives.devices import Place

from ..errors import TrainingError
from ..gradients.backward import BackwardWatch, PassPhases, replacement_test
from ..gradients.bucket_queue import BucketQueue
from ..gradients.buckets import GradientBucket
from ..gradients.foreign_steps import ForeignSteps
from ..partial_steps import STEP_NOT_CALLED
from ..replicas.broadcast import broadcast_states
from .backward_steps import BackwardSteps
from .bucket_means import BucketMeans
from .bucket_order import BucketOrder
from .joined_passes import JoinedPasses
from .linear import destinations
from .reached_parameters import ReachedParameters
from .shared_parameters import SharedParameters
from .sparse import mean_of_sparse
from .trained_parameters import TrainedParameters
from .unused_parameters import UnusedParameters


class Reducer:
    """Averages the gradients of a module's parameters.

    names: the parameters to take care of, trained or not, and their names; which of them train may change between
        passes, the same on all ranks.
    watch: must see the module's forward passes, and `unused` their outputs.
    place: where the parameters lie.
    bucket_cap: returns a bucket's bytes; may change between passes, in the same way on every rank.
    find_unused, static_graph: as of DistributedDataParallel.
    as_views: `.grad` becomes a view of the bucket, else keeps its own memory.
    buffers: those to broadcast after each pass.
    group: the user's Communicator, of which `comm` is a duplicate.
    ignored: names of parameters and buffers that may differ between the ranks.
    divisor: of contributions to gradients, as of `mesh.experts`.

    steps: makes steps within the passes; None where passes leave them to the program.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Mapping[torch.nn.Parameter, str],
        comm: Communicator,
        watch: BackwardWatch,
        *,
        place: Place,
        bucket_cap: Callable[[], float],
        find_unused: bool,
        static_graph: bool,
        as_views: bool,
        buffers: Callable[[], list[torch.Tensor]],
        group: Communicator,
        ignored: Container[str],
        divisor: int,
    ) -> None:
        self._names, self._comm, self._watch, self._place = names, comm, watch, place
        self._as_views, self._buffers = as_views, buffers
        self._missed_gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._foreign = ForeignSteps(names, stay_in_place=True)
        self._shared = SharedParameters(names)
        self._synchronise_before_shadow = True  # what the program has set
        self._accumulated_before_shadow: set[torch.Tensor] = set()
        self.steps: BackwardSteps | None = None
        self.join = JoinedPasses()
        self.trained = TrainedParameters(module, names, comm, ignored, static_graph=static_graph, divisor=divisor)
        self.means = BucketMeans(comm, group, place, self.trained, self.join)
        self.queue = BucketQueue(
            [],
            watch,
            take=self._take,
            launch=self.means.launch,
            finish=self._finish,
            missing=self._miss,
            on_gradient_after_launch=self._on_gradient_after_launch,
            place=place,
        )
        self.unused = UnusedParameters(names, self.trained, self.queue, searches_graph=find_unused and not static_graph)
        self.reached = ReachedParameters(
            module,
            names,
            comm,
            watch,
            self.queue,
            self.trained,
            self._foreign,
            self.join,
            find_unused=find_unused,
            static_graph=static_graph,
        )
        watch.is_training_backward = self.unused.is_training_backward
        watch.are_replaced = replacement_test(module, names)
        watch.phases = PassPhases(
            begun=(
                self._refuse_double_backward,
                self._begin_turn,
                self.means.begin_pass,
                self._agree_on_buckets,
                self._begin_steps,
                self.unused.mark,
                self._note_versions,
            ),
            reached=(self.queue.arrive,),
            reduced=(self.queue.launch_rest, self.queue.finish),
            finished=(self._end_without_agreement, self.queue.end),
            abandoned=(self.queue.reset, self._abandon),
            communicates=lambda: self.queue.synchronise,
        )
        self._destinations = destinations(module, names if as_views else (), watch, lambda: self.queue.synchronise)
        self.order = BucketOrder(comm, self.trained, self.queue, self.means, self._destinations, bucket_cap)
        self._start_anew()

    # ---- between passes ---------------------------------------------------------------------------------------

    def before_forward(self, training: bool) -> None:
        """Notes before a synchronised forward pass which parameters train, for the backward pass to agree on.

        Collective only in training mode in a `join` that ends with the first rank.

        training: the module's mode.
        """
        if training:
            self.join.begin_forward()
        if self.trained.note():
            self.queue.listen(self.trained.wanted())

    def set_static_graph(self) -> None:
        """Sets `static_graph` as the constructor would; to be called before the first backward pass."""
        self.trained.set_static_graph()
        self.unused.searches_graph = False
        self.reached.set_static_graph()

    def step_in_backward(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Has passes step with these optimizers from the next one on, or with none. Collective."""
        self._watch.before_forward()  # gives up a pass that an exception has cut short
        if self.steps is not None:
            self.steps.remove()
        self.steps, self.queue.launch = None, self.means.launch
        if optimizers:
            self.steps = BackwardSteps(
                optimizers,
                self._names,
                self._comm,
                self._place,
                self._foreign,
                reduce=self.means.begin,
                complete=self.means.complete,
                is_unreduced=self.reached.is_unreduced,
            )
            self.queue.launch = self._launch_to_step
        self.means.release_arena()
        self.order.lay_out_again(self.steps)

    def _agree_on_buckets(self) -> None:
        """Lays the buckets out anew as a backward pass begins, if other parameters train or a new order was learned.

        Collective, but under `no_sync`. Raises on every rank ModelMismatch where the choice of what trains differs, and
        TrainingError where any has parameters that were replaced, resized or added, or has not closed the step of the
        pass before.
        """
        if not self.queue.synchronise:
            return
        awaits_step_call = self.steps is not None and self.steps.awaits_step_call
        if self.trained.agree(STEP_NOT_CALLED if awaits_step_call else None):
            self._start_anew()
        else:
            self.order.apply_learned_order(self.steps)

    def _start_anew(self) -> None:
        former, sparse = self.trained.parameters, self.trained.sparse
        self.trained.take_up()
        self.reached.start_anew(former, sparse)
        self.order.start_anew(self.steps)

    @property
    def bucket_tensors(self) -> list[torch.Tensor]:
        """The memory of the buckets."""
        if self.steps is not None:
            return self.steps.bucket_tensors
        return [bucket.flat for bucket in self.queue.buckets if bucket.flat is not None]

    def retire(self) -> None:
        """Takes the hooks off the parameters; gradients stay. A pass that an exception has cut short is given up."""
        self.queue.set_buckets([])
        self._foreign.end()
        self._shared.end()
        if self.steps is not None:
            self.steps.remove()
        for destination in self._destinations.values():
            destination.remove()
        self.means.retire()

    # ---- passes of a rank without batches in a join -----------------------------------------------------------

    def begin_shadow_pass(self) -> None:
        """Begins a shadow pass: this rank contributes zeros to a backward pass of the other ranks."""
        self._synchronise_before_shadow = self.queue.synchronise
        self.join.begin_shadow()
        self.queue.synchronise = True  # whatever the program had set as it left the block
        self.means.give_up_window()
        self._agree_on_buckets()
        self._accumulated_before_shadow = set(self.reached.accumulated_under_no_sync)
        self.join.take_gradients(self.trained.parameters, self._accumulated_before_shadow)
        self.queue.launch_rest()

    def end_shadow_pass(self) -> None:
        """Ends the shadow pass: `.grad` is that of before, see `JoinedPasses`."""
        try:
            self.queue.finish()
            self.means.give_up_window()
        finally:
            self._leave_shadow_pass()

    def _leave_shadow_pass(self) -> None:
        self.queue.reset()
        self.queue.synchronise = self._synchronise_before_shadow
        self.reached.accumulated_under_no_sync |= self._accumulated_before_shadow
        self._accumulated_before_shadow = set()
        self.join.end_shadow()

    def leave_join(self) -> None:
        """Ends the block: passes are those of all ranks again."""
        if self.join.is_shadow:  # an exception ends it
            self._leave_shadow_pass()
        self.join.leave()

    # ---- within a pass ----------------------------------------------------------------------------------------

    def _refuse_double_backward(self) -> None:
        if torch.is_grad_enabled():
            raise TrainingError(
                "backward(create_graph=True) through DistributedDataParallel: gradients of gradients cannot pass "
                "through the averaging; train the plain module (`.module`) and average the gradients yourself"
            )

    def _begin_turn(self) -> None:
        if self.queue.synchronise:
            self.join.begin_backward()

    def _begin_steps(self) -> None:
        self.reached.begin()
        if self.steps is not None:
            self.steps.begin(self.queue.synchronise)

    def _note_versions(self) -> None:
        self._foreign.begin(self.trained.parameters)

    def _end_without_agreement(self) -> None:
        if not self.queue.synchronise:
            self._foreign.end_without_agreement()

    def _take(self, bucket: GradientBucket, index: int) -> None:
        """Moves a complete gradient into its place in the bucket, unless it lies there already."""
        parameter, reached = bucket.parameters[index], self.reached
        if not self.queue.synchronise:
            reached.accumulated_under_no_sync.add(parameter)
            return
        gradient = parameter.grad
        if gradient is None:  # as of a function whose backward returns None
            reached.reached_without_gradient.add(parameter)
        elif reached.reached_without_gradient:
            reached.reached_without_gradient.discard(parameter)
        if parameter in self.trained.sparse:
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
            if self._grad_is_view(parameter):
                parameter.grad = view.detach()  # not the view itself, which `.grad.data = ...` would move
        elif not self._grad_is_view(parameter):
            parameter.grad = gradient.clone()

    def _grad_is_view(self, parameter: torch.nn.Parameter) -> bool:
        """Returns whether `.grad` becomes a view of the parameter's slot in its bucket."""
        return self._as_views and not (self._shared.parameters and parameter in self._shared.parameters)

    def _miss(self, bucket: GradientBucket, index: int) -> None:
        """Fills an unreached parameter's place in its bucket with what it has accumulated, or zeros."""
        parameter = bucket.parameters[index]
        if self.means.hook is not None:
            self.means.note_missed(parameter)
        if parameter in self.trained.sparse or self.steps is not None:
            return
        gradient, view = parameter.grad, bucket.views[index]
        if gradient is None:
            view.zero_()
        elif gradient.data_ptr() == view.data_ptr():
            self._missed_gradients[parameter] = view.clone()
        else:
            view.copy_(gradient)

    def _on_gradient_after_launch(self, bucket: GradientBucket, index: int) -> None:
        if self.queue.synchronise and not self.reached.static_graph:
            raise TrainingError(
                f"{self._names[bucket.parameters[index]]}: a gradient arrived twice in one backward pass, the second "
                "time after its bucket had been reduced, as happens to a parameter used in several re-entrant "
                "checkpoints; set static_graph=True, or use torch.utils.checkpoint with use_reentrant=False"
            )

    def _launch_to_step(self, bucket: GradientBucket) -> None:
        """Starts the reduction of a filled bucket on whose parameters the pass steps."""
        assert self.steps is not None
        given = self.reached.note_given(bucket.parameters)
        if bucket.parameters[0] not in self.trained.sparse:  # those follow at the end, in their order
            self.steps.launch(bucket, given)

    def _finish(self) -> None:
        self.join.end_backward()
        self.means.wait()
        if self.steps is not None:
            self.steps.finish()
        reached, missed, awaits_another_backward = self.reached.agree(stepped=self.steps is not None)
        if self.means.hook is not None:
            self.means.end_pass(reached)
        self._show(reached)
        self._missed_gradients = {}
        self.reached.forget_averaged()
        if self.steps is not None:
            self.steps.step([p for p in self.trained.parameters if p in self.trained.sparse and p in reached])
            self.steps.end()
        self.reached.end(awaits_another_backward)
        if not awaits_another_backward:
            broadcast_states(self._comm, self._buffers(), self.join.order_root)
        self.reached.refuse(missed, reached)
        self.reached.learn_counts()
        self.order.learn(self.join.order_root, varies=self.unused.searches_graph)

    def _show(self, reached: Set[torch.nn.Parameter]) -> None:
        """Gives parameters that any rank has reached their means as `.grad`; of the others it stays as it was."""
        for bucket in self.queue.buckets:
            for index, p in enumerate(bucket.parameters):
                if p in self.trained.sparse:
                    mean = mean_of_sparse(self._comm, p, p.grad)
                    if p in reached:
                        p.grad = mean if self.join.mean_correction == 1.0 else mean * self.join.mean_correction
                elif self.steps is not None:
                    continue  # the step has used the mean, or has put it into `.grad`
                elif p not in reached:
                    if p in self._missed_gradients and p.grad is not None:
                        p.grad.copy_(self._missed_gradients[p])
                elif self._grad_is_view(p):
                    view, shown = bucket.views[index], p.grad
                    if shown is None or shown.data_ptr() != view.data_ptr():
                        p.grad = view.detach()
                elif p.grad is None:
                    p.grad = bucket.views[index].clone()
                else:
                    p.grad.copy_(bucket.views[index])

    def _abandon(self) -> None:
        """Ends a pass that an exception has cut short: waits for what was launched on all ranks."""
        self.unused.forget()
        self.means.abandon()
        if self.steps is not None:
            self.steps.abandon()
        self._missed_gradients = {}
        self.reached.abandon()
        self._foreign.end()
