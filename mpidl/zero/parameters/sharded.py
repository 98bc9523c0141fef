"""Stage 3 over several nodes: a rank holds a shard of every parameter, and units are whole while they compute.

    unit i      forward:   unshard -> compute -> reshard          unit i + 1 is prefetched meanwhile
                backward:  unshard -> compute -> reshard          unit i - 1 is prefetched meanwhile
    model's own             unshard ------------------> reshard   the embedding and the output layer: until the end

With `prefetch=n` the next n units are gathered ahead, in the order of the last pass; one of them that is resharded
meanwhile stays whole. A node gathers a unit once, into memory that its ranks share. A parameter that is read while its
unit is resharded has the unit gathered first (`released_parameter`).

Who runs what: hooks and the verbs of the strategy run in the thread of the program or of backward; gathers are rounds
(`gather_rounds`), in the progress thread of a Communicator that has no other use. A round ends when all ranks have
started it. So a rank that waits for anything else must start rounds meanwhile, or others wait for it for ever:

    in a forward or backward pass   it starts rounds for its own units
    for a reduction                 `wait_for_reduction` starts a round whenever its own are over
    at the end of a pass, a step    `drain` starts rounds until one in which every rank says that it is done
    in a collective of the program  it starts none: who waits in a round raises an error that names the collective

`release` drains before a step, so that no unit is whole when shards change. `publish` after it gathers the units of
open `gathered` blocks anew, and with n >= 2 starts rounds for the next pass, as many on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, ClassVar

import torch

from collectives import Communicator, Work, WorkTimeout
from collectives.devices import HOST, Place
from collectives.diagnostics import deadlocked, label, listing

from ...compiling import uncompiled
from ...errors import TrainingError
from ...gradients.backward import BackwardWatch, inside_backward, inside_transform, tensors_in, tensors_with_gradient
from ...gradients.compression import OwnedCompressor
from ...job import communicator_pool
from ..parameter_shard import ParameterShard
from ..traffic import ZeroTraffic
from .forward_passes import ForwardPasses
from .gather_rounds import Forecast, GatherRound, GatherRounds, Purpose, leave
from .gathered_unit import Call, GatheredUnit, UnitState
from .private_copy import close_copies, open_copies
from .strategy import NamesOf, ParameterStrategy, unfreeze_shards
from .units import UnitLayout, backward_order

FIRST_POLL_S, _POLL_S = 0.1, 0.002  # a wait for a reduction, before its first and its further rounds for other ranks
_REDUCTION_STALL_S = 10.0  # until a rank that waits for a reduction, while all others drain, counts as stuck
_ALONE = "; what a rank runs alone belongs inside `with optimizer.gathered(writable=False):`, which every rank enters"
_DEADLOCK_POLL_S, _DEADLOCK_POLLS = 0.5, 4  # between looks at what the others wait in; how many must find the same


class ShardedParameters(ParameterStrategy):
    """Unshards the units of a model as it runs, and reshards them. Construction is collective.

    model: the hooks are on it and its modules.
    layouts: list of UnitLayout, from `units.lay_out`; the last one is the model's own.
    comm: the ranks that have shards.
    watch: of the model's backward passes.
    place: where the parameters lie.
    worlds: the user's Communicators, in which others may wait for a rank that gathers; by default comm.
    share_in_node: gather once for all ranks of a node, in the host's memory.
    reshard_after_forward: reshard units between their forward and their backward pass.
    prefetch: number of units that may be gathered ahead of the one that computes.
    compressor: of the shards that are gathered (`compressed_gather`); by default they are in full precision.
    """

    write_effect: ClassVar = "the change went into a copy that is given up, and not into the shards"

    def __init__(
        self,
        model: torch.nn.Module,
        layouts: Sequence[UnitLayout],
        comm: Communicator,
        watch: BackwardWatch,
        place: Place = HOST,
        *,
        worlds: Sequence[Communicator] = (),
        share_in_node: bool = True,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        compressor: OwnedCompressor | None = None,
    ) -> None:
        self._watch = watch
        self._reshards = reshard_after_forward
        names = {p: name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        pooled = communicator_pool.take(comm)
        weakref.finalize(self, pooled.give_back).atexit = False
        self._worlds = list(dict.fromkeys(worlds)) or [comm]
        self._comm = comm = pooled.comm  # whose memory the pages must be, to be gathered into as what they are
        pooled.set_drain(partial(leave, comm, len(layouts)))
        sizes = [GatheredUnit.page_bytes(layout) for layout in layouts]
        pages = comm.pages(sum(sizes), shared=share_in_node, device=place.device)
        self._compressed = None
        if compressor is not None:
            from .compressed_gather import CompressedGather  # which few programs need

            largest = max(group.layout.shard_size for layout in layouts for group in layout.groups)
            self._compressed = CompressedGather(compressor, comm, largest, pages.shared, place.device)
        self._units = [
            GatheredUnit(number, layout, comm, pages, sum(sizes[:number]), self._compressed)
            for number, layout in enumerate(layouts)
        ]
        self._root = self._units[-1]
        self._rounds = GatherRounds(comm, self._units, place.device, compressor is not None)
        self._forecast, self._count_ahead = Forecast(self._root.number), prefetch
        self._window: set[int] = set()  # numbers of the units that are to be whole for the uses that come next
        self._prefetches: set[GatheredUnit] = set()  # of them, those that are asked for and not held
        self._for_next_pass: list[GatherRound] = []  # started by `publish`, as many on every rank
        self._forwards = ForwardPasses()  # of the model, or parts that hold units
        self._trained_since_step = False  # whether there was a forward pass with gradients since the last step
        self._leaf_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._unit_of = {p: unit for unit in self._units for flat in unit.flats for p in flat.shard.parameters}
        # Trained from the beginning; a unit does not wait for the gradients of what is unfrozen later.
        self._awaited = {p: unit for p, unit in self._unit_of.items() if p.requires_grad}
        self._flat_of = {p: flat for unit in self._units for flat in unit.flats for p in flat.shard.parameters}
        self._names = names
        self.shards = [flat.shard for unit in backward_order(self._units) for flat in unit.flats]
        self._handles = [model.register_state_dict_pre_hook(self._refuse_state_dict)]
        modules = [layout.unit.module for layout in layouts]
        for unit, module in zip(self._units, modules, strict=True):
            self._hook(unit, module)
        for part in self._modules_called_alone(model, modules):
            self._handles += [
                part.register_forward_pre_hook(self._before_part),
                part.register_forward_hook(self._after_part, always_call=True),
            ]

    @property
    def traffic(self) -> ZeroTraffic:
        """Counts of the gathers so far."""
        return self._rounds.traffic

    def unfreeze(self, parameters: Sequence[torch.nn.Parameter], names_of: NamesOf) -> list[ParameterShard]:
        """Lets frozen shards train; errors as of `unfreeze_shards`."""
        return unfreeze_shards(self.shards, parameters, names_of)

    def start(self) -> None:
        """Releases all units: from here on the parameters are whole only while they are gathered."""
        for unit in self._units:
            unit.release(self._before_read)

    def gathered_address(self, parameter: torch.nn.Parameter) -> int:
        """The address of a parameter while it is whole; on a GPU since it was gathered last."""
        return self._flat_of[parameter].places()[parameter]

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def _hook(self, unit: GatheredUnit, module: torch.nn.Module) -> None:
        # The model's own unit is gathered after the watch has cleared away what an exception left.
        first = unit is not self._root
        self._handles += [
            module.register_forward_pre_hook(self._before_forward(unit), prepend=first, with_kwargs=True),
            module.register_forward_hook(self._after_forward(unit), always_call=True, with_kwargs=True),
        ]
        own = {p for flat in unit.flats for p in flat.shard.parameters}
        for part in module.modules() if first else ():
            if part is not module and any(p in own for p in part.parameters(recurse=False)):
                self._handles.append(part.register_forward_hook(self._after_part_of(unit)))

    def _modules_called_alone(
        self, model: torch.nn.Module, modules: Sequence[torch.nn.Module]
    ) -> list[torch.nn.Module]:
        """Modules that may be called without the model, as encoders are: with units, or the model's own weights."""
        units = set(modules)
        own = {p for flat in self._root.flats for p in flat.shard.parameters}
        parts = [m for m in model.modules() if any(child in units for child in m.modules() if child is not m)]
        parts += [m for m in model.modules() if any(p in own for p in m.parameters(recurse=False))]
        return [part for part in dict.fromkeys(parts) if part not in units]

    def _abandon_interrupted_pass(self) -> None:
        """Abandons a backward pass that an exception has cut short, where a forward pass may begin."""
        if not self._forwards.any_runs():
            self._watch.before_forward()

    @uncompiled
    def _before_part(self, part: torch.nn.Module, *_: Any) -> None:
        self._abandon_interrupted_pass()
        self._forwards.begin(part)
        self._trained_since_step |= torch.is_grad_enabled()

    @uncompiled
    def _after_part(self, part: torch.nn.Module, *_: Any) -> None:
        self._forwards.end(part)
        if not (self._forwards.any_runs() or torch.is_grad_enabled() or self._watch.active or inside_backward()):
            self.end_backward()

    def _before_forward(self, unit: GatheredUnit) -> Callable[..., None]:
        @torch.compiler.disable
        def hook(module: torch.nn.Module, *_: Any) -> None:
            self._abandon_interrupted_pass()
            if unit is self._root:
                self._forwards.begin(module)
                self._trained_since_step |= torch.is_grad_enabled()
            self._unshard_and_prefetch(unit)

        return hook

    def _after_forward(self, unit: GatheredUnit) -> Callable[..., None]:
        where = weakref.ref(self)

        def use() -> None:
            alive = where()
            if alive is not None:
                alive._unshard_and_prefetch(unit)

        def ended() -> None:
            alive = where()
            if alive is not None:
                alive._reshard_if_backward_done(unit)

        @torch.compiler.disable
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            training = torch.is_grad_enabled()
            if unit is self._root:
                self._forwards.end(module)
            if training:
                call = Call(unit, use, ended)
                for tensor in tensors_with_gradient((args, kwargs)) if unit.frozen else ():
                    call.watch_input(tensor)
                for tensor in tensors_with_gradient(output):
                    call.watch_output(tensor)
                self._leaf_hooks += call.leaves
            # Tensors inside a transform have no memory.
            if not inside_transform() and any(unit.shares(tensor) for tensor in tensors_in(output)):
                unit.hold_to_end()
            if self._watch.active or inside_backward():
                return
            if unit is self._root and not training:
                self.end_backward()
            elif unit is not self._root and (self._reshards or not training):
                self._reshard_if_unused(unit)

        return hook

    def _after_part_of(self, unit: GatheredUnit) -> Callable[..., None]:
        """Makes a hook that unshards the unit where a gradient comes to a module in it by another way than its outputs.

        As by attributes, other modules' hooks and containers, or an output that is a view and was written into.
        """
        where, which = weakref.ref(self), weakref.ref(unit)

        def gradient_arrives(_: torch.Tensor) -> None:
            alive, of = where(), which()
            if alive is not None and of is not None and not of.is_held:
                alive._unshard_and_prefetch(of)
                if of.frozen:  # nothing tells when the pass has read its frozen weights for the last time
                    of.hold_to_end()

        def hook(part: torch.nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled parts are one step of backward
                for tensor in tensors_with_gradient(output):
                    if tensor.grad_fn is not None:
                        tensor.register_hook(gradient_arrives)

        return hook

    @property
    def on_gradient(self) -> tuple[Callable[[torch.nn.Parameter], None], ...]:
        """Releases a unit when its parameters' gradients are complete."""
        return (self._gradient_arrived,)

    def _gradient_arrived(self, parameter: torch.nn.Parameter) -> None:
        unit = self._awaited.get(parameter)
        if unit is not None:
            self._check_held(unit, parameter)
            unit.arrived.add(parameter)
            self._reshard_if_backward_done(unit)

    def _check_held(self, unit: GatheredUnit, parameter: torch.nn.Parameter) -> None:
        """Raises TrainingError if a gradient was computed while the unit's weights were not there."""
        if not unit.is_held:
            whose = unit.name or "the model"
            raise TrainingError(
                f"{self._names[parameter]}: its gradient comes from a result of {whose} that neither it "
                "nor a module in it has returned, so that its weights were not gathered for it; return the result, "
                "compute it in a module of its own, or set reshard_after_forward=False"
            )

    def _before_read(self, parameter: torch.nn.Parameter, function: str) -> Callable[[], None]:
        """Unshards a parameter that an operator is about to read outside its unit's forward pass.

        Returns what unshards it once more for the operator's backward pass; inside a `gathered` block, which keeps it
        whole, nothing. Raises TrainingError outside of passes and of the loss that follows one: the other ranks may not
        come to gather it then.
        """
        unit = self._unit_of[parameter]
        if unit.pin_count and unit.is_held:
            return lambda: None
        changes = function.endswith("_") and not function.endswith("__")
        computes = self._trained_since_step and torch.is_grad_enabled() and not changes and function != "data"
        if not (computes or self._forwards.any_runs() or inside_backward()):
            raise TrainingError(
                f"{self._names[parameter]}: {function} of a parameter that is sharded over the ranks; call it inside "
                "`with optimizer.gathered(...):`, on every rank"
            )
        where = weakref.ref(self)

        def unshard() -> None:
            alive = where()
            if alive is not None:
                alive._unshard_and_prefetch(unit, watched=True)
                unit.hold_to_end()

        unshard()
        return unshard

    # ---- unshard and reshard -----------------------------------------------------------------------------------------

    def _start(self, wanted: int | None, purpose: Purpose) -> GatherRound:
        """Starts a round with what this rank holds. wanted: the number of a unit, or None."""
        return self._rounds.start(wanted, self._held_numbers(), purpose, self._pinned_numbers())

    def _held_numbers(self) -> set[int]:
        """Numbers of the units that must stay whole for this rank."""
        return {unit.number for unit in self._units if unit.is_held} | {unit.number for unit in self._prefetches}

    def _pinned_numbers(self) -> list[int]:
        """Numbers of the units that this rank needs in full precision."""
        return [unit.number for unit in self._units if unit.pin_count]

    def _unshard_and_prefetch(self, unit: GatheredUnit, watched: bool = False) -> None:
        """Returns when the unit is whole and held, and has started the gathers of the units expected next."""
        self._unshard(unit, watched)
        self._forecast.note(unit.number, self._watch.active or inside_backward())
        ahead = self._forecast.ahead(self._count_ahead)
        self._window = set(ahead)
        for other in [other for other in self._prefetches if other.number not in self._window]:
            self._prefetches.discard(other)  # it was not used, and is not asked for any longer
        for number in ahead:
            self._prefetch(number)

    def _prefetch(self, number: int | None) -> GatherRound | None:
        """Starts a round to gather a unit ahead of its use, unless it is there or asked for. None: of no unit."""
        if number is not None:
            unit = self._units[number]
            if not unit.is_held and unit not in self._prefetches:
                started = self._start(number, Purpose.AHEAD)
                self._prefetches.add(unit)
                return started
        return None

    def _unshard(self, unit: GatheredUnit, watched: bool = False) -> None:
        if unit.is_held and unit.is_as_wanted:
            return
        with label("mpidl::gather", unit.name):
            does = f"needs {unit.name or 'the weights of the model itself'}, which all ranks gather together"
            asked = unit in self._prefetches
            self.traffic.ahead += asked
            self._prefetches.discard(unit)
            # Asked again where some rank's engine is gone, and gathers nothing, or a `gathered` block begins or has
            # ended meanwhile. A round may end between the two looks: `keeps` is the later one, so that none is started
            # for a unit that is there.
            oldest = self._rounds.oldest
            while not self._rounds.keeps(unit.number, unit.wants_exact):
                if not asked or oldest is None:
                    started, asked = self._start(unit.number, Purpose.NEEDED), True
                    oldest = oldest or started
                self._wait_for_others(oldest, does, _ALONE)
                oldest = self._rounds.oldest
            self._rounds.wait_for_ended()
            try:
                unit.hold(watched)
            except BaseException:
                unit.release(self._before_read)
                raise

    def _wait_for_others(self, started: GatherRound, does: str, advice: str = "") -> None:
        """Returns when the round is over. Raises TrainingError where others wait for this rank in another operation.

        The round stays in flight; they join it when they next gather something. does: why this rank waits. advice: ends
        the error's message.
        """
        before: dict[int, str] = {}
        polls = 0
        while True:
            try:
                started.wait(_DEADLOCK_POLL_S)
                return
            except WorkTimeout:
                found = ((world, deadlocked(self._comm, world)) for world in self._worlds)
                among, waiting = next((one for one in found if one[1]), (self._comm, {}))
            polls, before = polls + 1 if waiting == before else 1, waiting
            if waiting and polls == _DEADLOCK_POLLS:
                others = "; ".join(f"rank {other} is in {operation}" for other, operation in waiting.items())
                raise TrainingError(f"rank {among.rank} {does}, but {others}, to which this rank has not come{advice}")

    def _reshard_if_backward_done(self, unit: GatheredUnit) -> None:
        if unit.backward_done and unit is not self._root:
            self._reshard_if_unused(unit)

    def _reshard_if_unused(self, unit: GatheredUnit) -> None:
        if unit.state is UnitState.HELD and not unit.pin_count:
            unit.release(self._before_read)
            # Every message since it was gathered has said that it is held. After a `gathered` block others gather it
            # anew.
            if unit.number in self._window and unit.is_as_wanted:
                self._prefetches.add(unit)

    def end_backward(self) -> None:
        """Releases all units on this rank, also those that were held to the end of the pass."""
        self._prefetches.clear()
        self._window.clear()
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        for unit in self._units:
            unit.end_pass()
            self._reshard_if_unused(unit)

    def step_problem(self) -> str | None:
        """Tells which unit a `gathered` block keeps whole."""
        pinned = [unit.name or "the model" for unit in self._units if unit.pin_count]
        return f"inside `with optimizer.gathered(...):` of {pinned[0]} no gradient can be used" if pinned else None

    def release(self, *, inside_gathered: bool = False) -> None:
        """Releases all units, and returns when every rank has done so and their memory is freed. Collective.

        Raises TrainingError where others are in a pass that needs this rank, which has ended its own.
        inside_gathered: units that a `gathered` block holds stay whole, in place of an error.
        """
        problem = None if inside_gathered else self.step_problem()
        if problem is not None:
            raise TrainingError(problem)
        self.end_backward()
        self._trained_since_step = False
        self.drain()
        self._for_next_pass.clear()

    def drain(self) -> None:
        """Returns when every round has been joined by all ranks. Collective; errors as of `release`.

        So no rank waits in one while the others are in operations of their program. Where they wait there for this
        rank, which an exception has taken out of a `gathered` block, it raises TrainingError.
        """
        stuck_since: float | None = None
        while True:
            started = self._start(None, Purpose.DONE)
            self._wait_for_others(started, "waits until every rank has ended its pass or its `gathered` block")
            if started.everyone_done:
                return
            stuck_since = (stuck_since or monotonic()) if started.reducing else None
            if stuck_since is not None and monotonic() - stuck_since > _REDUCTION_STALL_S:
                raise TrainingError(
                    f"{listing(started.reducing)} cannot go on with a backward pass in which this rank takes no part: "
                    "an exception has cut this rank's pass and was caught, or it made fewer passes than others"
                )

    def wait_for_reduction(self, work: Work, timeout: float | None = None) -> None:
        """Waits for a reduction, to which another rank may come only once this one has taken part in its gathering.

        The round for others is not waited for, as they may come to none before they need this rank elsewhere.

        timeout: seconds; WorkTimeout when they pass first. Half of them are left for rounds.
        """
        poll = FIRST_POLL_S if timeout is None else min(FIRST_POLL_S, timeout / 2)
        end = None if timeout is None else monotonic() + timeout
        while True:
            try:
                work.wait(poll)
                return
            except WorkTimeout:
                if end is not None and monotonic() >= end:
                    raise
                poll = _POLL_S
                if self._rounds.are_over:  # else others can take part in one of this rank's
                    self._start(None, Purpose.REDUCES)

    def publish(self) -> None:
        """Gathers anew the units that `gathered` blocks keep whole, and starts to gather the next pass's first ones."""
        pinned = [unit for unit in self._units if unit.pin_count]
        if pinned:
            self._refresh(pinned)
            for flat in (flat for unit in pinned for flat in unit.flats):
                flat.follow()
        if self._count_ahead > 1:
            self._prefetch_next_pass()

    def _prefetch_next_pass(self) -> None:
        """Starts as many rounds on every rank, whatever it expects: those of the own unit and of a window."""
        ahead: list[int | None] = [*self._forecast.ahead(self._count_ahead, next_pass=True)]
        self._window = {number for number in ahead if number is not None}
        for number in ahead + [None] * (self._count_ahead + 1 - len(ahead)):
            started = self._prefetch(number) or self._start(None, Purpose.AHEAD)
            self._for_next_pass.append(started)

    def wait_for_gathers(self) -> None:
        """Returns when the gathers are complete that `publish` has started. Local."""
        for started in self._for_next_pass:
            started.wait()
        self._for_next_pass.clear()

    # ---- whole parameters -------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, parameters: Iterable[torch.nn.Parameter] | None = None, writable: bool = True) -> Iterator[None]:
        """Whole parameters inside, of every unit that holds any of `parameters` (default: all). Collective.

        They are in full precision, whatever is gathered for passes.

        writable: as copies of this rank's own, of which its shard is kept; every rank must make the same changes.
            Inside, the ranks need not run the same. A block inside another has that one's copies.
        """
        wanted = None if parameters is None else set(parameters)
        chosen = [u for u in self._units if wanted is None or any(wanted & set(f.shard.parameters) for f in u.flats)]
        flats = [flat for unit in chosen for flat in unit.flats] if writable else []
        pinned: list[GatheredUnit] = []
        try:
            for unit in chosen:
                unit.pin_count += 1
                pinned.append(unit)
                self._unshard(unit)
            open_copies(flats)
            try:
                yield
            finally:
                if writable:
                    try:
                        close_copies(flats)
                    finally:
                        self._refresh(chosen)
        finally:  # also when an exception keeps the block from beginning
            for unit in pinned:
                unit.pin_count -= 1
            for unit in pinned:
                self._reshard_if_unused(unit)

    def _refresh(self, units: Sequence[GatheredUnit]) -> None:
        """Gathers units anew, whose shards have changed. Collective; errors as of `drain`."""
        started = self._rounds.refresh([unit.number for unit in units])
        self._wait_for_others(started, "gathers anew what a `gathered` block has changed")

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The shards, units that this rank holds whole now, and messages; the node's are those that it shares."""
        shards = [shard.values for shard in self.shards]
        found = {"parameters": shards + [flat.whole for unit in self._units if unit.is_held for flat in unit.flats]}
        return found if self._compressed is None else {**found, "compression": [self._compressed.place]}

    def _refuse_state_dict(self, *_: Any) -> None:
        if not all(unit.is_held and unit.exact for unit in self._units):
            raise TrainingError(
                "model.state_dict(): the parameters are sharded over the ranks; call optimizer.model_state_dict() on "
                "every rank, or use model.state_dict() inside `with optimizer.gathered():`"
            )
