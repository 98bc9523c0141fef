"""Reduces an engine's buckets by a compressor: the communication hook behind `compress=`.

    backward fills a bucket     its gradients are added to what earlier steps have not sent
    phase: inside a node        reduce-scatter in full precision; without nodes, or everywhere: none
    phases of the compressor    with the peers on other nodes, or with all ranks
    phase: inside a node        all-gather of the mean, where every rank needs all of it

All of it runs in the thread of the backward pass (`pipeline`); the operations run in the progress threads of the
Communicators, one for each phase. Making a `CompressedReduction`, its first pass with other buckets and its state
are collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from collectives import ArgumentError, Communicator

from ...comm_hooks import GradBucket, Handle
from ...errors import ConfigurationError, TrainingError
from ...job import communicator_pool
from ...job.objects import all_gather_object
from .compressor import Compressor, Exchange, Matrix, Section, Steps, started
from .layout import SectionLayout, by_pieces, of_replicas, of_whole_parameters
from .pipeline import Pipeline
from .refusals import refuse_momentum
from .remainders import BucketSection, mean_remainders, take_over
from .settings import Compression
from .undo import Window, note

if TYPE_CHECKING:
    from .auto import AutoChoice  # at run time where it is made: few programs need it


class CompressedReduction:
    """A communication hook, called as `hook(None, bucket)`, that reduces by `settings`. Collective.

    world: the ranks whose gradients are averaged. names: of the parameters, for `state_dict`.
    shards, replicas: under hybrid sharding, the ranks with the shards of a bucket, and those with this rank's shard;
        compression is then over the replicas.

    steps: number of reduced passes. compressor: the one in use. where: "between_nodes" or "everywhere". feeds_back:
    whether errors are fed back.

    Raises ConfigurationError on every rank where the nodes do not fit.
    """

    def __init__(
        self,
        settings: Compression,
        world: Communicator,
        names: Mapping[torch.nn.Parameter, str],
        shards: Communicator | None = None,
        replicas: Communicator | None = None,
    ) -> None:
        candidates = {each.compressor().name: each for each in settings.candidates()} if settings.is_auto else {}
        self.compressor = _uncompressed() if settings.is_auto else settings.compressor()
        self.settings, self.steps = settings, 0
        given = settings.start_step
        self._start_step = self.compressor.start_step if given is None else given
        self._names, self._world = dict(names), world
        feedback = settings.error_feedback
        self.feeds_back = self.compressor.feeds_back if feedback is None else feedback
        self._auto: AutoChoice | None = None
        self._candidates: dict[str, CompressedReduction] = {}
        self._lender: CompressedReduction | None = None  # whose Communicators are in use here
        self._inside: Communicator | None = None
        self._is_hybrid = replicas is not None
        exchanging = world
        if replicas is not None:
            if settings.where == "everywhere":
                raise ConfigurationError(
                    "compress: where='everywhere', but with shard_group= gradients are compressed between the groups "
                    "alone; leave where= out"
                )
            self._inside, exchanging, self.where = shards, replicas, "between_nodes"
        elif world.nodes > 1 and settings.where != "everywhere":
            try:
                self._inside, exchanging = world.split_by_node()
                self.where = "between_nodes"
            except ArgumentError as error:
                if settings.where is not None:
                    raise ConfigurationError(
                        f"compress: where={settings.where!r}: {str(error).partition(':')[2].strip()}"
                    ) from None
                self.where = "everywhere"
        else:
            self.where = settings.where or "everywhere"
        is_all_inside = self.where == "between_nodes" and world.nodes == 1 and not self._is_hybrid
        arrays = self.compressor.arrays
        if arrays and is_all_inside:
            raise ConfigurationError(
                f"compress: {self.compressor.name}: got where='between_nodes' on one node, where nothing is compressed "
                f"and its {arrays[0]} would be left out; needs where='everywhere'"
            )
        self.compresses = (exchanging.size > 1 or bool(arrays)) and not is_all_inside and not settings.is_auto
        pooled = [communicator_pool.take(exchanging) for _ in range(self.compressor.phases if self.compresses else 0)]
        self._exchange = Exchange([each.comm for each in pooled])
        self._peers = exchanging.size
        self._scatters: Communicator | None = None
        self._gathers: Communicator | None = None
        if self.compresses and self._inside is not None and self._inside.size > 1:
            inside = [communicator_pool.take(self._inside) for _ in range(2)]
            self._scatters, self._gathers = (each.comm for each in inside)
            pooled += inside
        for each in pooled:
            weakref.finalize(self, each.give_back).atexit = False
        self._pipeline = Pipeline()
        self._sections: dict[tuple[int, ...], BucketSection] = {}
        self._means: dict[torch.nn.Parameter, torch.Tensor] = {}  # remainders that no section has taken over yet
        self._window = Window(settings.undo)
        self._undoable = False  # the passes since the last step
        self._former_means: dict[torch.nn.Parameter, torch.Tensor] = {}  # of the window's begin, on the way likewise
        self._former_steps, self._former_states = 0, _copied(self.compressor)
        self._begins_step = True
        note(self, names)
        if settings.is_auto:
            slow = world.nodes > 1 and exchanging.size > 1 and not is_all_inside
            self._candidates = {
                name: CompressedReduction(each, world, {}, shards, replicas)
                for name, each in (candidates.items() if slow else ())
            }
            agree = communicator_pool.take(world)
            weakref.finalize(self, agree.give_back).atexit = False
            trained = [p for p in names if p.requires_grad]
            from .auto import AutoChoice

            self._auto = AutoChoice(self._candidates if trained else {}, world, trained, shards, replicas, agree.comm)
            if self._auto.chosen is not None and world.rank == 0:
                print(self._auto.told(), flush=True)

    def __call__(self, state: Any, bucket: GradBucket) -> Handle:
        """Starts the reduction of a bucket."""
        if self._auto is not None and self._auto.chosen is None and self._auto.before(bucket):
            self._follow(self._auto)
        if bucket.index() == 0:
            self._begin_window()
        step, begins_step = self.steps, self._begins_step
        if bucket.is_last():
            self.steps += 1
        if not self.compresses or step < self._start_step:
            self._send_means(bucket)
            return bucket.reduce(process_group=self._world)
        section = self._section(bucket)
        flat = bucket.buffer()
        target = flat if section.layout.needs_all and not self._is_hybrid else flat[bucket.needed()]
        return self._pipeline.start(self._steps(bucket, section, step, begins_step), lambda: target)

    def _send_means(self, bucket: GradBucket) -> None:
        """Adds what was not sent, as of a checkpoint, to gradients that are reduced in full precision.

        Also the remainder of a section, as of a trial: what a rank adds to its own gradients is in the sum of all.
        """
        section = self._sections.pop(tuple(map(id, bucket.parameters())), None) if self._sections else None
        if section is not None and section.values is not None:
            for at, start, stop in section.layout.parts():
                bucket.buffer()[start:stop] += section.values[0, at : at + stop - start]
        for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True) if self._means else ():
            mean = self._means.pop(p, None)
            if mean is not None:
                view += mean[0].view(view.shape).to(view.device)
                if self._undoable:
                    self._former_means.setdefault(p, mean)

    @property
    def chosen(self) -> str | None:
        """The method in use; "none" where "auto" chose so, None before it has chosen."""
        return self.compressor.name if self._auto is None else self._auto.chosen

    def forget(self) -> None:
        """Forgets all that was not sent, as after a trial. On every rank."""
        self.drain()
        self._sections, self._means, self._former_means, self.steps = {}, {}, {}, 0
        self.compressor.load({})

    def _follow(self, auto: AutoChoice) -> None:
        """Takes over the reduction that is tried, or lets it go again, between two passes."""
        if auto.chosen is not None:
            if self._world.rank == 0:
                print(auto.told(), flush=True)
            auto.candidates, self._candidates = {}, {}
            if auto.chooses_none:
                self.compressor, self.compresses, self._lender = _uncompressed(), False, None
            return
        assert auto.tried is not None
        other = self._candidates[auto.tried]
        self._lender, self.compressor, self.where = other, other.compressor, other.where
        self.feeds_back, self.compresses = other.feeds_back, other.compresses
        self._inside, self._exchange, self._peers = other._inside, other._exchange, other._peers
        self._scatters, self._gathers = other._scatters, other._gathers
        if not self.feeds_back:
            self._means = {}

    def drain(self) -> None:
        """Completes the reductions under way, as before a checkpoint. Every rank has begun the same ones."""
        self._pipeline.drain()

    # ---- one bucket -----------------------------------------------------------------------------------------------

    def _steps(self, bucket: GradBucket, made: BucketSection, step: int, begins_step: bool) -> Steps:
        flat, layout = bucket.buffer(), made.layout
        works = []
        if self._scatters is not None:
            summed = flat.new_empty(layout.size)
            for (at, start, stop), block in zip(layout.parts(), layout.blocks, strict=True):
                own, counts = summed[at : at + stop - start], block.counts
                works += started(
                    self._scatters.reduce_scatter(own, flat[block.start : block.stop], counts=counts, async_op=True)
                )
            yield works
        else:
            summed = flat
        absorb = partial(
            self.compressor.absorb, begins_step=begins_step, contributions=self._world.size, ranks=self._peers
        )
        values = made.add(summed, self._window.number if self._undoable else None, absorb)
        if values.dtype != torch.float32:
            values = values.float()
        result = self._result(bucket, layout)
        section = Section(
            key=made,
            values=values,
            result=result,
            pieces=layout.pieces,
            parameters=self._whole_parameters(made),
            contributions=self._world.size,
            needs_all=layout.needs_all,
            keeps_remainder=made.values is not None,
            step=step,
            needed=self._needed(bucket),
            arrays=() if made.values is None else [*made.values[1:]],
        )
        yield from self.compressor.reduce(section, self._exchange)
        if self._scatters is None or not layout.gathers:
            if not _same_memory(result, flat):
                target = flat if layout.needs_all and not self._is_hybrid else flat[bucket.needed()]
                target.copy_(result)
            if self._scatters is not None:
                yield []
            return
        mean = result.to(flat.dtype)
        works = []
        assert self._gathers is not None
        for (at, start, stop), block in zip(layout.parts(), layout.blocks, strict=True):
            whole, own = flat[block.start : block.stop], mean[at : at + stop - start]
            works += started(self._gathers.all_gather(whole, own, counts=block.counts, async_op=True))
        yield works

    def _result(self, bucket: GradBucket, layout: SectionLayout) -> torch.Tensor:
        """Memory of fp32 for the mean: the bucket's own where it fits."""
        flat = bucket.buffer()
        if layout.needs_all and (self.compressor.needs_whole or not self._is_hybrid):
            fits, size = self._scatters is None, layout.size
        else:
            fits, size = True, bucket.needed().stop - bucket.needed().start
        if fits and flat.dtype == torch.float32:
            return flat if size == flat.numel() else flat[bucket.needed()]
        return torch.empty(size, dtype=torch.float32, device=flat.device)

    def _needed(self, bucket: GradBucket) -> tuple[int, int] | None:
        """The elements that this rank needs of a section that is the whole bucket; None where it needs all."""
        if self._scatters is not None or not self.compressor.needs_whole:
            return None
        needed = bucket.needed()
        return needed.start, needed.stop

    def _whole_parameters(self, made: BucketSection) -> Sequence[Matrix]:
        if not self.compressor.needs_whole:
            return ()
        ((_, first, last),) = made.layout.parts()
        pairs = zip(made.parameters, made.starts, strict=True)
        return [Matrix(p, start - first, self._names[p]) for p, start in pairs if first <= start < last]

    # ---- sections of buckets ----------------------------------------------------------------------------------------

    def _section(self, bucket: GradBucket) -> BucketSection:
        parameters: list[torch.nn.Parameter] = bucket.parameters()
        key = tuple(map(id, parameters))
        found = self._sections.get(key)
        if found is None or found.layout.elements != bucket.buffer().numel():
            found = self._sections[key] = self._new_section(bucket, parameters)
        return found

    def _new_section(self, bucket: GradBucket, parameters: list[torch.nn.Parameter]) -> BucketSection:
        """Lays out a bucket's section; remainders in other buckets move to it, which is collective."""
        wanted = set(parameters)
        former = [key for key, section in self._sections.items() if not wanted.isdisjoint(section.parameters)]
        if former:
            self.drain()
        moving = [section for section in map(self._sections.pop, former) if section.values is not None]
        if moving:
            kept = [self._undoable and section.window == self._window.number for section in moving]
            # Under `join` a rank may have made no step yet, and keep what others do not.
            anywhere = torch.tensor(kept, dtype=torch.uint8)
            self._world.all_reduce(anywhere, "max")
            for section, is_kept, is_anywhere in zip(moving, kept, anywhere.tolist(), strict=True):
                self._means |= mean_remainders(section, self._world)
                if is_anywhere:
                    values = section.former if is_kept else section.values
                    self._former_means |= mean_remainders(section, self._world, values)
        flat, needed = bucket.buffer(), bucket.needed()
        base, size = flat.data_ptr(), flat.element_size()
        starts = [(view.data_ptr() - base) // size for view in bucket.gradients()]
        made = BucketSection(parameters, starts, self._layout(flat.numel(), needed, starts))
        if self.feeds_back:
            given = 1 + len(self.compressor.arrays), self._world.size, self._peers
            made.values = take_over(made, self._means, *given)
            if not self._former_means.keys().isdisjoint(parameters):
                made.former = take_over(made, self._means | self._former_means, *given)
                made.window = self._window.number
            for p in parameters:
                self._former_means.pop(p, None)
                self._means.pop(p, None)
        return made

    def _layout(self, elements: int, needed: slice, starts: Sequence[int]) -> SectionLayout:
        split = (0, 1) if self._scatters is None else (self._scatters.rank, self._scatters.size)
        if self.compressor.needs_whole:
            return of_whole_parameters(elements, starts, split, self._peers)
        shard = None if needed == slice(0, elements) else needed.stop - needed.start
        if self._is_hybrid and shard is not None:
            return of_replicas(elements, shard, split, self._peers)
        return by_pieces(elements, shard, split, self._peers)

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

    def begin_shadow_pass(self) -> None:
        """Begins a pass of a rank that has no batches left, and so makes no steps, while others do."""
        if self.compressor.momentum:
            self._window.end(stepped=False)

    def announce_skips(self) -> None:
        """Keeps from now on what undoes a step, as some may be skipped. On every rank."""
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
        former values were not kept.
        """
        self.drain()
        self._window.end(stepped=False)
        if not self._undoable:
            return
        chosen = None if parameters is None else set(parameters)
        if chosen is None or all(p in chosen for p in self._names if p.requires_grad):
            chosen, self.steps = None, self._former_steps
        for section in self._sections.values():
            section.undo(self._window.number, chosen)
        back = {p: mean for p, mean in self._former_means.items() if chosen is None or p in chosen}
        self._means |= back
        self._former_means = {p: mean for p, mean in self._former_means.items() if p not in back}
        kept = {p: state for p, state in self.compressor.state().items() if chosen is not None and p not in chosen}
        self.compressor.load(kept | {p: s for p, s in self._former_states.items() if chosen is None or p in chosen})

    def rescale(self, factor: float) -> None:
        """Multiplies remainders and states in the gradients' unit, as the loss scale has changed by `factor`."""
        self.drain()
        for section in self._sections.values():
            if section.values is not None:
                section.values *= factor
                if section.former is not None:
                    section.former *= factor
        for means in (self._means, self._former_means):
            for mean in means.values():
                mean *= factor
        self.compressor.rescale(factor)

    def held_tensors(self) -> list[torch.Tensor]:
        """Remainders, former ones and the compressor's states, as they lie in memory."""
        kept = [t for section in self._sections.values() for t in (section.values, section.former) if t is not None]
        kept += [*self._means.values(), *self._former_means.values()]
        for states in (self.compressor.state(), self._former_states):
            kept += [value for state in states.values() for value in state.values()]
        return kept

    def _begin_window(self) -> None:
        self._begins_step = self._window.begin_pass()
        if self._begins_step:
            self._undoable = self._window.keeps
            self._former_means, self._former_steps = {}, self.steps
            self._former_states = _copied(self.compressor) if self._undoable else {}

    # ---- states ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The steps, each parameter's mean remainder and the compressor's states, by names. Collective.

        The same on every rank, and for any number of ranks. The mean arrays of a compressor are among its states.
        """
        self.drain()
        means = dict(self._means)
        for section in self._sections.values():
            if section.values is not None:
                means |= mean_remainders(section, self._world)
        states = self._states()
        for p, name in self._names.items() if self.compressor.arrays else ():
            if p in means:
                rows = zip(self.compressor.arrays, means[p][1:], strict=True)
                states.setdefault(name, {}).update({array: row.view(p.shape).clone() for array, row in rows})
        return {
            "method": self.compressor.name,
            "steps": self.steps,
            "remainders": {name: means[p][0].view(p.shape).clone() for p, name in self._names.items() if p in means},
            "states": states,
        }

    def _states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The compressor's states by names, also those that only other ranks have. Collective."""
        kept = self.compressor.state()
        own = {name: dict(kept[p]) for p, name in self._names.items() if p in kept}
        having = all_gather_object(self._world, [*own])
        if all(names == having[0] for names in having):
            return own
        first = {name: rank for rank in reversed(range(self._world.size)) for name in having[rank]}
        mine = {name: state for name, state in own.items() if first[name] == self._world.rank}
        every = {name: state for given in all_gather_object(self._world, mine) for name, state in given.items()}
        return {name: every[name] for name in self._names.values() if name in every}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, on all ranks.

        States of another method are left out: its remainders are taken over, as they are gradients.
        Raises ConfigurationError for names or shapes of other parameters.
        """
        self.drain()
        by_name = {name: p for p, name in self._names.items()}
        for kind in ("remainders", "states"):
            unknown = sorted(set(state_dict[kind]) - set(by_name))
            if unknown:
                raise ConfigurationError(f"load_state_dict: {kind}: got {unknown[0]}, which is no parameter")
        is_own = state_dict["method"] == self.compressor.name
        states = {name: dict(kept) for name, kept in state_dict["states"].items()} if is_own else {}
        given = {(name, 0): mean for name, mean in state_dict["remainders"].items()}
        for row, array in enumerate(self.compressor.arrays, start=1):
            given |= {(name, row): kept.pop(array) for name, kept in states.items() if array in kept}
        means: dict[torch.nn.Parameter, torch.Tensor] = {}
        for (name, row), mean in given.items():
            p, kind = by_name[name], ("remainder", *self.compressor.arrays)[row]
            if mean.shape != p.shape:
                raise ConfigurationError(
                    f"load_state_dict: {name}: got a {kind} of shape {tuple(mean.shape)}; needs {tuple(p.shape)}"
                )
            if self.feeds_back:
                rows = means.setdefault(p, torch.zeros(1 + len(self.compressor.arrays), p.numel()))
                rows[row] = mean.detach().reshape(-1)
        self.steps = int(state_dict["steps"])
        self._sections, self._former_means = {}, {}
        self._window.end(stepped=False)
        self._means = means
        self.compressor.load({by_name[name]: kept for name, kept in states.items() if kept})


def _copied(compressor: Compressor) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
    return {p: {key: value.clone() for key, value in state.items()} for p, state in compressor.state().items()}


def _uncompressed() -> Compressor:
    from .auto import Uncompressed

    return Uncompressed()


def _same_memory(result: torch.Tensor, flat: torch.Tensor) -> bool:
    return result.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
