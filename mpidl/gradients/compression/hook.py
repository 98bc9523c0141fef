"""Reduces an engine's buckets by a compressor: the communication hook behind `compress=`.

    backward fills a bucket     its gradients are added to what earlier steps have not sent
    phase: inside a node        reduce-scatter in full precision; without nodes, or everywhere: none
    phases of the compressor    with the peers on other nodes, or with all ranks
    phase: inside a node        all-gather of the mean, where every rank needs all of it

All of it runs in the thread of the backward pass (`pipeline`); the operations run in the progress threads of the
Communicators, one for each phase. Making a `CompressedReduction`, its first pass with other buckets and its state
are collective. Every rank launches the same buckets in the same order, and each phase has a Communicator of its own, so
nothing can deadlock (`pipeline`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from collectives import Communicator

from ...errors import ConfigurationError, TrainingError
from ...job import communicator_pool
from ...job.agreement import check_everywhere
from ..grad_bucket import GradBucket, Handle
from .bucket_reduction import BucketReduction
from .compressor import Compressor
from .pipeline import Pipeline
from .ranks import Ranks, ReductionMethod
from .refusals import refuse_momentum, refuse_scaled
from .remainders import Made, MeanPart, part_of
from .sections import Means, Sections
from .settings import Compression
from .states import load_by_name, state_by_name
from .undo import Window, note

if TYPE_CHECKING:
    from .auto import AutoChoice  # at run time where it is made: few programs need it


class CompressedReduction:
    """A communication hook, called as `hook(None, bucket)`, that reduces by `settings`. Collective.

    world: the ranks whose gradients are averaged.
    names: of the parameters, for `state_dict`.
    shards, replicas: under hybrid sharding, the ranks with the shards of a bucket, and those with this rank's shard;
        compression is then over the replicas.
    dtype: of the gradients that are reduced, for "auto"; by default that of the parameters.

    steps: number of reduced passes.
    buckets: gives all buckets, in no memory, where these stay the same from pass to pass; an engine may set it.
    choice: the measurements and the choice of "auto"; None without.

    Raises ConfigurationError on every rank where the nodes do not fit.
    """

    def __init__(
        self,
        settings: Compression,
        world: Communicator,
        names: Mapping[torch.nn.Parameter, str],
        shards: Communicator | None = None,
        replicas: Communicator | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.settings, self.steps = settings, 0
        self.buckets: Callable[[], Iterable[GradBucket]] | None = None
        self._names, self._world = dict(names), world
        compressor = _uncompressed() if settings.is_auto else settings.compressor()
        check_everywhere(world, lambda: _refuse_shared(compressor))
        feedback = settings.error_feedback
        feeds_back = compressor.feeds_back if feedback is None else feedback
        self._own = ReductionMethod(compressor, Ranks(settings, compressor, world, shards, replicas), feeds_back)
        self._method = self._own  # "auto" changes it
        self._start_step = _first_step(settings, compressor)
        self._pipeline, self._window = Pipeline(), Window(settings.undo)
        self._sections = Sections(self._method, world, self._window, self._pipeline.drain)
        self._former_steps, self._former_states = 0, _copied(compressor)  # of the start of the window
        self._begins_step = True
        self._missed: set[torch.nn.Parameter] = set()  # parameters that this rank's pass does not reach, in DDP
        self.choice: AutoChoice | None = None
        self._candidates: dict[str, CompressedReduction] = {}
        note(self, names)
        if settings.is_auto:
            self._measure(shards, replicas, dtype)

    def claim_compressor(self) -> None:
        """Notes that an engine reduces by this, so that no other one takes its compressor."""
        _SERVING.add(self)

    def _measure(self, shards: Communicator | None, replicas: Communicator | None, dtype: torch.dtype | None) -> None:
        """Makes and measures the methods from which "auto" chooses. Collective."""
        trained = [p for p in self._names if p.requires_grad]
        if trained and self._method.ranks.is_over_network:
            for each in self.settings.candidates():
                made = CompressedReduction(each, self._world, {}, shards, replicas)
                self._candidates[made.compressor.name] = made
        agree = communicator_pool.take(self._world)
        weakref.finalize(self, agree.give_back).atexit = False
        from .auto import AutoChoice

        self.choice = AutoChoice(self._candidates, self._world, trained, shards, replicas, agree.comm, dtype)
        if self.choice.chosen is not None and self._world.rank == 0:
            print(self.choice.summary(), flush=True)

    def __call__(self, state: Any, bucket: GradBucket) -> Handle:
        """Starts the reduction of a bucket."""
        if bucket.is_repeated():  # `steps` has counted its pass
            step, begins_step = self.steps - 1, False
        else:
            step, begins_step = self._note_launch(bucket)
        if not self._method.ranks.compresses or step < self._start_step:
            self._sections.send_in_full(bucket, self._missed)
            return bucket.reduce(process_group=self._world)
        section = self._sections.of(bucket)
        section.repeats += bucket.is_repeated()
        if self._missed:
            section.keep(self._missed)
        reduction = BucketReduction(
            bucket,
            section,
            self._method,
            self._world.size,
            self._names,
            step,
            begins_step,
            self._window.number if self._sections.undoable else None,
        )
        return self._pipeline.start(reduction.steps(), reduction.target)

    def _note_launch(self, bucket: GradBucket) -> tuple[int, bool]:
        """Returns the passes before this one, and whether it begins a step."""
        choice = self.choice if self.steps >= self._start_step else None  # it would measure full precision
        if choice is not None and choice.chosen is None and choice.note_launch(bucket):
            self._follow(choice)
        if bucket.index() == 0:
            self._begin_window()
        step = self.steps
        if bucket.is_last():
            self.steps += 1
        return step, self._begins_step

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        return self._method.compressor

    @property
    def where(self) -> str:
        """The ranks between which it compresses: "between_nodes" or "everywhere"."""
        return self._method.ranks.where

    @property
    def peers(self) -> int:
        """The number of ranks that exchange a section."""
        return self._method.ranks.peers

    def own_parts(self) -> list[list[tuple[int, int]]]:
        """The parts of each bucket that this rank compresses, as (start, stop), of the buckets that have come."""
        return self._sections.own_parts()

    @property
    def feeds_back(self) -> bool:
        """Returns whether what is not sent is added to the gradients of the next step."""
        return self._method.feeds_back

    @property
    def chosen(self) -> str | None:
        """The method in use; "none" where "auto" chose so, None before it has chosen."""
        return self.compressor.name if self.choice is None else self.choice.chosen

    @property
    def computing_seconds(self) -> float:
        """Seconds that the backward pass's thread has computed for compressed reductions so far, without its waits."""
        return self._pipeline.computing_seconds

    @property
    def chooses_none(self) -> bool:
        """Returns whether "auto" has chosen to send in full precision, which an engine does without this hook."""
        return self.choice is not None and self.choice.chooses_none

    def forget(self) -> None:
        """Forgets all that was not sent, as after a trial. On every rank."""
        self.drain()
        self._sections.replace({})
        self.steps = 0
        self.compressor.load({})

    def _follow(self, auto: AutoChoice) -> None:
        """Takes over the method that is tried, or gives it up again, between two passes."""
        if auto.chosen is not None:
            if self._world.rank == 0:
                print(auto.summary(), flush=True)
            auto.candidates, self._candidates = {}, {}
            if auto.chooses_none:
                self._use(self._own)
            return
        assert auto.tried is not None
        self._use(self._candidates[auto.tried]._method)
        if not self._method.feeds_back:
            self._sections.drop_waiting()

    def _use(self, method: ReductionMethod) -> None:
        self._method = self._sections.method = method
        self._former_states = {}  # of the compressor before, as in a step of several passes

    def drain(self) -> None:
        """Completes the reductions under way, as before a checkpoint. Every rank has begun the same ones."""
        self._pipeline.drain()

    # ---- steps that are skipped -------------------------------------------------------------------------------------

    def begin_pass(self, has_gradients: Callable[[], bool]) -> None:
        """Begins a backward pass. has_gradients: whether those of the passes before are still there.

        With `undo=True` passes whose gradients are gone, and were not stepped on, are undone.

        Raises TrainingError, with momentum of the compressor, where the pass would reduce those of the passes before
        again: these have theirs already.
        """
        momentum = self.compressor.momentum
        if not (self.settings.undo or momentum) or not self._window.is_open:
            return
        if has_gradients():
            if momentum:
                raise TrainingError(
                    f"compress: {self.compressor.name}: a second pass would reduce the gradients of the first again, "
                    "which have momentum already; needs no_sync() in all passes of a step but the last"
                )
        elif self.settings.undo:
            self.undo()
        else:
            self._window.end(stepped=False)  # the step was made by hand, or given up

    def note_missed(self, parameter: torch.nn.Parameter) -> None:
        """Notes, before its bucket is launched, that this rank's pass does not reach a parameter."""
        self._missed.add(parameter)

    def end_pass(self, reached: Collection[torch.Tensor]) -> None:
        """Ends a pass whose buckets are reduced. reached: the parameters to which any rank gave a gradient.

        The gradients of others stay as they were, without the mean: what was sent for them is not sent.
        """
        if self._missed:
            self._sections.put_back(reached)
            self._missed.clear()

    def forget_gradients(self) -> None:
        """Notes that the program forgets the gradients; those that no step was made on are given up."""
        if self.compressor.momentum:
            self._window.end(stepped=False)

    def give_up_window(self) -> None:
        """Notes that no step follows on this rank: it has no batches left, and takes part in the others' passes."""
        self._window.end(stepped=False)

    @property
    def undoes_by_itself(self) -> bool:
        """Returns whether `begin_pass` undoes a pass whose gradients are gone without a step."""
        return bool(self.settings.undo) and not self.chooses_none

    def announce_skips(self, scaled: bool = False) -> None:
        """Keeps the values before each step from now on, as steps may be skipped. On every rank.

        scaled: gradients are of a loss times a scale. Raises ConfigurationError where this cannot be.
        """
        if scaled:
            refuse_scaled(self.compressor)
        self._window.announce()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer that does what the compressor does."""
        refuse_momentum(self.compressor, optimizer)

    def stepped(self) -> None:
        """Notes that the optimizer has stepped on the gradients, so that they are not undone."""
        self._window.end(stepped=True)

    def undo(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Takes the passes since the last step back, for these parameters, or for all. On every rank.

        Remainders, the compressor's states and the number of steps are then those of before. Nothing happens where
        former values were not kept, and with all parameters where there was no pass.
        """
        if parameters is None and not self._window.is_open:
            return  # for some, another optimizer's step may have ended the window
        self.drain()
        self._window.end(stepped=False)
        if not self._sections.undoable:
            return
        chosen = None if parameters is None else set(parameters)
        if chosen is None or all(p in chosen for p in self._names if p.requires_grad):
            chosen, self.steps = None, self._former_steps
        self._sections.undo(chosen)
        kept = {p: state for p, state in self.compressor.state().items() if chosen is not None and p not in chosen}
        self.compressor.load(kept | {p: s for p, s in self._former_states.items() if chosen is None or p in chosen})

    def rescale(self, factor: float) -> None:
        """Multiplies remainders and states in the gradients' unit, as the loss scale has changed by `factor`."""
        self.drain()
        self._sections.rescale(factor)
        self.compressor.rescale(factor)

    def held_tensors(self) -> list[torch.Tensor]:
        """Remainders, former ones and the compressor's states, as they lie in memory."""
        kept = self._sections.held_tensors()
        for states in (self.compressor.state(), self._former_states):
            kept += [value for state in states.values() for value in state.values()]
        return kept

    def message_buffers(self) -> list[torch.Tensor]:
        """Memory for what is sent and received, which the next reductions use again; that in use is not counted."""
        return self.compressor.pool.held_tensors()

    def _begin_window(self) -> None:
        self._begins_step = self._window.begin_pass()
        if self._begins_step:
            self._sections.begin_window()
            self._former_steps = self.steps
            self._former_states = _copied(self.compressor) if self._sections.undoable else {}

    # ---- states ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The steps, each parameter's mean remainder and the compressor's states, by names (`states`). Collective.

        The same on every rank, and for any number of ranks. "in_step" tells if there were passes since the last step.
        """
        self.drain()
        return self._state(self._sections.means())

    def state_without_means(self) -> dict[str, Any]:
        """Makes what `state_dict` gives, without remainders and the compressor's arrays. Collective."""
        self.drain()
        return self._state({})

    def _state(self, means: Means) -> dict[str, Any]:
        found = state_by_name(self.compressor, means, self.steps, self._names, self._world)
        return {**found, "in_step": self._window.is_open}

    def of_means(self, make: Callable[[torch.nn.Parameter, Sequence[torch.Tensor]], Made]) -> dict[str, Made]:
        """Returns by name what is made of each parameter's mean remainder and arrays, bucket by bucket. Collective.

        make: gets the parameter and tensors of its shape, of which it must keep none: they lie in a bucket's memory.
        """
        self.drain()
        return {self._names[p]: each for p, each in self._sections.of_means(make).items() if p in self._names}

    def mean_part(self, shape: Sequence[int]) -> MeanPart:
        """This rank's part of the means of a parameter of this shape, as `load_state_dict` takes it in an `OwnPart`."""
        return part_of(shape, self._world.rank, self._world.size)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave. Collective.

        Raises ConfigurationError for names or shapes of other parameters.
        """
        self.set_state(state_dict)
        self.place_remainders()

    def set_state(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, of which the remainders wait for `place_remainders`. On all ranks.

        Raises ConfigurationError for names or shapes of other parameters.
        """
        self.drain()
        means = load_by_name(state_dict, self.compressor, self._names, self._method.feeds_back)
        self.steps = int(state_dict["steps"])
        self._window.end(stepped=False)
        self._sections.replace(means)
        if state_dict.get("in_step"):  # what is undone from here on are the passes that follow
            self._begin_window()

    def place_remainders(self) -> None:
        """Gives the buckets the remainders that wait, where the next pass compresses the same ones. Collective.

        Else these wait for the next pass: with DDP, in passes in full precision, before "auto" has chosen.
        """
        compresses = self._method.ranks.compresses and self.steps >= self._start_step
        if self.buckets is not None and compresses and self._sections.has_waiting:
            self._sections.lay_out(self.buckets())


_SERVING: weakref.WeakSet[CompressedReduction] = weakref.WeakSet()


def _refuse_shared(compressor: Compressor) -> None:
    """Raises ConfigurationError for a compressor that keeps the states of another engine."""
    if _serves(compressor):
        gc.collect()  # the program may have dropped that engine
    if _serves(compressor):
        raise ConfigurationError(
            f"compress: got a Compressor, {compressor.name}, that serves another engine already, whose states it "
            "keeps; needs a Compressor of its own, or a name"
        )


def _serves(compressor: Compressor) -> bool:
    return any(each.compressor is compressor for each in _SERVING)


def _copied(compressor: Compressor) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
    return {p: {key: value.clone() for key, value in state.items()} for p, state in compressor.state().items()}


def _first_step(settings: Compression, compressor: Compressor) -> int:
    """The passes in full precision that come first. With "auto" those that it times follow, and count too."""
    if settings.start_step is not None:
        return settings.start_step
    if not settings.is_auto:
        return compressor.start_step
    from .auto import PASSES

    return max(0, *(each.compressor().start_step - PASSES for each in settings.candidates()))


def _uncompressed() -> Compressor:
    from .auto import Uncompressed

    return Uncompressed()
