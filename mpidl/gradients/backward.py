"""Detects when a backward pass through a model begins and ends, and runs an engine's functions in its phases.

autograd has no event for either. The pass begins when the gradient of the model's output arrives (or, for losses
that do not come from the output, the first gradient of a parameter), and a callback queued then runs when the whole
pass is over. Passes nested in it, as re-entrant activation checkpoints start them, belong to it.

`PassPhases` has functions for each phase, in the order in which they run:

    phase      when                           DDP                            ZeRO
    begun      the pass begins                agree on what trains           (agree)
    reached    a parameter's gradient is      fill its bucket, launch the    release its unit, fill its bucket, launch
               complete                       bucket if it is full           the bucket if it is full
    filled     autograd has run                                              release units that no gradient released
    reduced    after `filled`                 launch the other buckets,      launch the other buckets, wait for all
                                              wait for all, agree, show      that are not complete, agree, drain
                                              .grad, broadcast buffers,
                                              raise for missed parameters
    finished   after `reduced`                                               show .grad
    abandoned  an exception has cut the       wait for what is in flight     the same, release units
               pass short

ZeRO agrees as a pass begins only with `step_in_backward`, and broadcasts buffers in `step()`. In `reached` it waits for
its oldest reduction where a bucket needs a buffer and none is free; all other waits for reductions are in `reduced`.

On CPUs all phases run in the thread that calls `backward()`, on a GPU in autograd's own thread for it, one at a time.
Collectives are in `begun`, in launches, which are in the order of the buckets on every rank, and in `reduced`: so all
ranks make the same ones in the same order. Rounds of ZeRO-3, which ranks start in different orders, have a Communicator
of their own (`zero.parameters.sharded`).

If a backward pass goes through several engines, ranks may begin their passes in different orders, as long as the
engines send nothing in `begun`. DDP sends there: all ranks begin the passes of several DDPs in the same order, or they
wait for each other. The phases after the last gradient run engine by engine, in the order in which the engines were
made, which is the same on every rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..module_tensors import tensors_with_gradient


def inside_backward() -> bool:
    """Returns whether the caller runs within a backward pass, as the recomputation of an activation checkpoint does."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_transform() -> bool:
    """Returns whether the caller runs within torch.func's grad, vmap and others, whose gradients are no parameter's."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def reaches(parameter: torch.Tensor) -> bool:
    """Tells if the backward pass under way adds to the parameter's gradient, as far as the graph shows.

    See `is_opaque`.
    """
    return parameter.requires_grad and will_run(_accumulator(parameter))


def is_opaque(tensors: Iterable[torch.Tensor]) -> bool:
    """Tells if the graph behind these tensors has an autograd.Function written in Python.

    Its backward may start passes of its own, as re-entrant activation checkpoints do, to parameters not in this graph.
    """
    nodes = _graph_from(tensor.grad_fn for tensor in tensors)
    functions = (node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction))
    return not all(getattr(node._forward_cls, "starts_no_pass", False) for node in functions)  # type: ignore[attr-defined]


def reaches_any(parameters: Iterable[torch.nn.Parameter], nodes: Iterable[Any] | None) -> bool:
    """Tells if the backward pass under way reaches any of the parameters, by these nodes of the graph.

    False for torch.autograd.grad to inputs or activations. Other ranks wait also for a pass that reaches no parameter
    on this rank, so that only a pass that leaves nodes out counts as one to inputs or activations.

    nodes: None for a forward pass with other tensors in place of all parameters, where no rank reaches any.
    """
    if any(reaches(p) for p in parameters):
        return True
    return nodes is not None and all(will_run(node) for node in _graph_from(nodes))


def replacement_test(model: torch.nn.Module, parameters: Container[torch.Tensor]) -> Callable[[], bool]:
    """A function that tells if other tensors are in place of all `parameters` of the model that train.

    `torch.func.functional_call` puts them there for one forward pass. Costs one look in a dictionary where none is.
    """
    places = [
        (module._parameters, name, p)
        for module in model.modules()
        if isinstance(module._parameters, dict)  # not of a scripted one, in which nothing is replaced
        for name, p in module._parameters.items()
        if p is not None and p in parameters
    ]
    return lambda: bool(places) and not any(own.get(name) is p and p.requires_grad for own, name, p in places)


def _graph_from(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields these nodes of autograd's graph and all that follow them, each once."""
    seen: set[Any] = {None}
    pending = list(nodes)
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            yield current
            pending += [following for following, _ in current.next_functions]


def will_run(node: Any, *, if_captured: bool = False) -> bool:
    """Tells if the backward pass under way runs this node of autograd's graph.

    if_captured: the answer for a leaf whose gradient torch.autograd.grad returns instead of adding it to `.grad`.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # such a leaf
        return if_captured


def _accumulator(parameter: torch.Tensor) -> Any:
    """The node of autograd's graph that adds to the parameter's gradient."""
    # expand_as would call the class of ZeRO-3's parameters, which gathers them.
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        node: Any = parameter.expand_as(parameter).grad_fn
    return node.next_functions[0][0]


@dataclass(frozen=True)
class PassPhases:
    """The functions that an engine runs in each phase of a backward pass, in the order in which they are given.

    begun: once, when the pass begins, before any gradient of a parameter is complete.
    reached: of a parameter, each time when autograd has completed its gradient in this pass.
    filled: once, when autograd has computed all gradients of this rank, so that the pass reads no weight any more.
    reduced: after that, if `communicates()`; they return when all buckets are reduced, on every rank.
    finished: after that, also where nothing was communicated; gradients are then what the program reads.
    abandoned: in place of the phases that are left, when an exception has cut the pass short. It is noticed when the
        model is next called or the next pass begins, and at once if `begun` or what follows `reached` has raised it.
    """

    begun: tuple[Callable[[], None], ...] = ()
    reached: tuple[Callable[[torch.nn.Parameter], None], ...] = ()
    filled: tuple[Callable[[], None], ...] = ()
    reduced: tuple[Callable[[], None], ...] = ()
    finished: tuple[Callable[[], None], ...] = ()
    abandoned: tuple[Callable[[], None], ...] = ()
    communicates: Callable[[], bool] = lambda: True

    def begin(self) -> None:
        """Runs the first phase."""
        for call in self.begun:
            call()

    def end(self) -> None:
        """Runs the phases after the last gradient."""
        for call in self.filled:
            call()
        if self.communicates():
            for call in self.reduced:
                call()
        for call in self.finished:
            call()


_watches: weakref.WeakValueDictionary[int, BackwardWatch] = weakref.WeakValueDictionary()  # in the order of making
_numbers = itertools.count()


class _LastCallback:
    """The callback that autograd runs at a pass's end. It lives as long as the pass, even if that fails.

    The first one of a backward pass ends the passes of all engines in it.
    """

    def __init__(self, watch: BackwardWatch) -> None:
        self._watch, self._graph_task = watch, torch._C._current_graph_task_id()

    def __call__(self) -> None:
        passes = [last for watch in list(_watches.values()) if (last := watch._pass()) is not None]
        together = [last for last in passes if last._graph_task == self._graph_task]
        try:
            for last in together:
                last._end()
        except BaseException:
            for last in together:  # not left to the exception's traceback, which keeps them
                last._watch._pass = lambda: None
            raise

    def _end(self) -> None:
        watch = self._watch
        if watch._pass() is not self or not watch.active:
            return  # it was abandoned in a pass nested in another, which goes on, or has ended
        watch.active = False
        with watch._abandoned_if_cut_short():
            watch.phases.end()


class _OutputHook:
    """Begins a pass when the gradient of an output arrives. number: of the forward pass, from 1 on."""

    __slots__ = ("__weakref__", "_following", "_replaced", "_watch", "number")

    def __init__(self, watch: BackwardWatch, node: Any, replaced: bool) -> None:
        self._following = [after for after, _ in node.next_functions]  # not the node itself, which keeps this hook
        self._watch = weakref.ref(watch)  # nor the watch, so that a graph which is kept does not keep it
        self._replaced, self.number = replaced, watch.forwards

    def __call__(self, _: torch.Tensor) -> None:
        watch = self._watch()
        if watch is None:
            return
        if not watch.active or watch._interrupted:
            # Parameters that are replaced for good are an error, which the pass finds.
            nodes = None if self._replaced and not watch.are_replaced() else self._following
            if not watch.is_training_backward(nodes):
                return
            watch.begin()
        watch._waiting.discard(self)


class BackwardWatch:
    """Runs `phases` in every backward pass through a model.

    `before_forward` and `after_forward` must be called around every forward pass; `attach` sees to it. `BucketQueue`,
    whose hooks are on the parameters, calls `begin` and the phase `reached` for each.

    active: whether a pass is under way.
    number: of the pass, or of the last; from 1 on.
    phases: may be set, also by one of `begun`, which then runs the new ones itself.
    is_training_backward: called with the nodes of autograd's graph that follow an output when its gradient arrives;
        returns True if this backward pass goes to the model's parameters. The nodes are None where other tensors were
        in place of the parameters in the forward pass alone.
    are_replaced: see `replacement_test`.
    forwards: number of forward passes with gradients.
    """

    def __init__(self) -> None:
        self.active, self.number = False, 0
        self._is_abandoning = False  # also where an interrupt has stopped it
        self.is_training_backward: Callable[[list[Any] | None], bool] = lambda _: True
        self.are_replaced: Callable[[], bool] = lambda: False
        self._pass: Callable[[], Any] = lambda: None
        self.phases = PassPhases()
        self._handles: list[Any] = []
        self.forwards = 0
        self._waiting: weakref.WeakSet[_OutputHook] = weakref.WeakSet()  # as long as autograd's graph keeps them
        _watches[next(_numbers)] = self

    def attach(self, model: torch.nn.Module) -> None:
        """Watches the forward passes of `model` by hooks of its own."""
        self._handles = [
            model.register_forward_pre_hook(lambda *_: self.before_forward()),
            model.register_forward_hook(lambda _, __, output: self.after_forward(output)),
        ]

    def before_forward(self) -> None:
        """Clears away a pass that was abandoned."""
        if self._interrupted or (self.active and not inside_backward()):
            self._abandon()

    def after_forward(self, output: Any) -> None:
        """Watches the gradients of the outputs: the first that arrives begins a pass."""
        if torch.is_grad_enabled() and not self.active and not inside_transform():
            replaced = self.are_replaced()
            self.forwards += 1
            for tensor in tensors_with_gradient(output):
                if tensor.grad_fn is not None:  # parameters that are outputs have hooks of their own
                    hook = _OutputHook(self, tensor.grad_fn, replaced)
                    self._waiting.add(hook)
                    tensor.register_hook(hook)

    def has_pending_output(self, until: int) -> bool:
        """Tells if one of the first `until` forward passes has an output that lives, and no backward pass yet."""
        return any(hook.number <= until for hook in self._waiting)

    def begin(self) -> None:
        """Begins a pass; called from within it. Only the first call of a pass does anything."""
        if self._interrupted:
            self._abandon()
        if not self.active:
            self.active = True
            self.number += 1
            last = _LastCallback(self)
            self._pass = weakref.ref(last)
            torch.autograd.Variable._execution_engine.queue_callback(last)  # type: ignore[attr-defined]
            with self._abandoned_if_cut_short():  # not left to `last`, which the exception's traceback keeps
                self.phases.begin()

    @property
    def is_running(self) -> bool:
        """Tells if a pass is under way that no exception has ended."""
        return self.active and not self._interrupted

    @property
    def other_engine_may_run(self) -> bool:
        """Tells if another engine is in this backward pass, or may come into it.

        An engine may run later if one of its outputs is alive and has had no backward pass yet.
        """
        others = (watch for watch in list(_watches.values()) if watch is not self)
        return any(other.is_running or other._waiting for other in others)

    @property
    def _interrupted(self) -> bool:
        """Returns whether an exception has ended the pass that was under way, of which something is left."""
        return self._is_abandoning or (self.active and self._pass() is None)

    @contextmanager
    def _abandoned_if_cut_short(self) -> Iterator[None]:
        """Abandons the pass if a phase raises, or is interrupted."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first one tells more
                self._abandon()
            raise

    def _abandon(self) -> None:
        """Gives up what is left of the pass. An interrupt leaves that to the next one."""
        self.active, self._pass = False, lambda: None
        self._is_abandoning = True
        try:
            for call in self.phases.abandoned:
                call()
        except Exception:
            self._is_abandoning = False
            raise
        self._is_abandoning = False

    def remove(self) -> None:
        """Takes the hooks off the model; passes through graphs that are left run nothing."""
        self.phases = PassPhases()
        for handle in self._handles:
            handle.remove()
