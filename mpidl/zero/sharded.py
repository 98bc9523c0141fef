"""Stage 3 over several nodes: a rank holds a shard of every parameter; a unit is whole while somebody computes with it.

    unit i      forward:   gathered -> compute -> let go          i + 1 is gathered meanwhile
                backward:  gathered -> compute -> let go          i - 1 is gathered meanwhile
    model's own             gathered ------------------> let go   the embedding and the output layer: until the end

A node gathers a unit once, into memory that its ranks share. What to gather ahead is what came next the last time. The
ranks agree on every gathering (`gathering`), so that each may run units of its own choice; a parameter that somebody
uses while its unit is let go has it gathered (`released`). Every rank is through with what was gathered before any
shard changes.
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

from .. import lanes
from ..backward import BackwardWatch, inside_backward, inside_transform, tensors_in, tensors_with_gradient
from ..compiling import uncompiled
from ..errors import TrainingError
from .gathered_unit import Call, GatheredUnit, UnitState
from .gathering import Forecast, Purpose, Round, Rounds, leave
from .shards import ParameterShard
from .strategy import NamesOf, ParameterStrategy, thawed
from .traffic import Traffic
from .units import UnitLayout, backward_order

_PATIENCE, _IMPATIENCE = 0.1, 0.002  # seconds: before the first round for others alone, and between further ones
_APART = 10.0  # seconds for reductions that all ranks have started
_LOOK, _LOOKS = 0.5, 4  # seconds between looks at those that are waited for; how many must find the same


class ShardedParameters(ParameterStrategy):
    """Gathers the units of a model as it runs, and lets them go.

    layouts: from `units.lay_out`; the last one is the model's own. comm: the ranks that have shards. world: the user's
    Communicator, in which others may wait for a rank that gathers. place: where the parameters lie. names: of the
    parameters. share_in_node: gather once for all ranks of a node, in the host's memory. reshard_after_forward: let
    units go between their forward and their backward pass.
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
        world: Communicator | None = None,
        share_in_node: bool = True,
        reshard_after_forward: bool = True,
    ) -> None:
        self._watch = watch
        self._reshards = reshard_after_forward
        names = {p: name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        lane = lanes.take(comm)
        weakref.finalize(self, lane.give_back).atexit = False
        self._world = world or comm
        self._comm = comm = lane.comm  # whose memory the pages must be, to be gathered into as what they are
        lane.settle_by(partial(leave, comm, len(layouts)))
        rooms = [GatheredUnit.room(layout) for layout in layouts]
        pages = comm.pages(sum(rooms), shared=share_in_node, device=place.device)
        self._units = [
            GatheredUnit(number, layout, comm, pages, sum(rooms[:number])) for number, layout in enumerate(layouts)
        ]
        self._root = self._units[-1]
        self._rounds = Rounds(comm, self._units, place.device)
        self._forecast = Forecast()
        self._coming: dict[GatheredUnit, Round] = {}
        self._running: list[int] = []  # modules whose forward pass is under way: the model, or parts that hold units
        self._training = False  # whether there was a forward pass with gradients since the last step
        self._leaves: list[torch.utils.hooks.RemovableHandle] = []
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
        for part in self._parts(model, modules):
            self._handles += [
                part.register_forward_pre_hook(self._before_part),
                part.register_forward_hook(self._after_part, always_call=True),
            ]

    @property
    def traffic(self) -> Traffic:
        """What was gathered so far."""
        return self._rounds.traffic

    def add(self, parameters: Sequence[torch.nn.Parameter], names_of: NamesOf) -> list[ParameterShard]:
        """Lets frozen shards train; errors as of `thawed`."""
        return thawed(self.shards, parameters, names_of)

    def start(self) -> None:
        """Releases all units: from here on the parameters are whole only while they are gathered."""
        for unit in self._units:
            unit.release(self._touched)

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

    def _parts(self, model: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """What may be called without the model, as encoders are: it holds units, or parameters of the model's own."""
        units = set(modules)
        own = {p for flat in self._root.flats for p in flat.shard.parameters}
        parts = [m for m in model.modules() if any(child in units for child in m.modules() if child is not m)]
        parts += [m for m in model.modules() if any(p in own for p in m.parameters(recurse=False))]
        return [part for part in dict.fromkeys(parts) if part not in units]

    def _clear_away(self) -> None:
        """Before what may be the first forward pass of a part: what an exception in a backward pass has left."""
        if not self._running:
            self._watch.before_forward()

    @uncompiled
    def _before_part(self, part: torch.nn.Module, *_: Any) -> None:
        self._clear_away()
        self._running.append(id(part))
        self._training |= torch.is_grad_enabled()

    @uncompiled
    def _after_part(self, part: torch.nn.Module, *_: Any) -> None:
        self._has_run(part)
        if not (self._running or torch.is_grad_enabled() or self._watch.active or inside_backward()):
            self.end_backward()

    def _has_run(self, part: torch.nn.Module) -> None:
        """A forward pass is over, even if an exception of an earlier hook has kept it from being seen to begin."""
        if id(part) in self._running:
            while self._running.pop() != id(part):
                pass  # cut short by what is no Exception, after which no hook is called

    def _before_forward(self, unit: GatheredUnit) -> Callable[..., None]:
        @torch.compiler.disable
        def hook(module: torch.nn.Module, *_: Any) -> None:
            self._clear_away()
            if unit is self._root:
                self._running.append(id(module))
                self._training |= torch.is_grad_enabled()
            self._use(unit)

        return hook

    def _after_forward(self, unit: GatheredUnit) -> Callable[..., None]:
        where = weakref.ref(self)

        def use() -> None:
            alive = where()
            if alive is not None:
                alive._use(unit)

        def ended() -> None:
            alive = where()
            if alive is not None:
                alive._release_if_done(unit)

        @torch.compiler.disable
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            training = torch.is_grad_enabled()
            if unit is self._root:
                self._has_run(module)
            if training:
                call = Call(unit, use, ended)
                for tensor in tensors_with_gradient((args, kwargs)) if unit.frozen else ():
                    call.watch_input(tensor)
                for tensor in tensors_with_gradient(output):
                    call.watch_output(tensor)
                self._leaves += call.leaves
            # Tensors inside a transform have no memory.
            if not inside_transform() and any(unit.shares(tensor) for tensor in tensors_in(output)):
                unit.hold_to_end()
            if self._watch.active or inside_backward():
                return
            if unit is self._root and not training:
                self.end_backward()
            elif unit is not self._root and (self._reshards or not training):
                self._release(unit)

        return hook

    def _after_part_of(self, unit: GatheredUnit) -> Callable[..., None]:
        """Gradients may come to a unit by other ways than its outputs: attributes, other modules' hooks, containers.

        Nor do they come by an output that is a view, once somebody has written into it.
        """
        where, which = weakref.ref(self), weakref.ref(unit)

        def gradient_arrives(_: torch.Tensor) -> None:
            alive, of = where(), which()
            if alive is not None and of is not None and not of.is_held:
                alive._use(of)
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
            self._release_if_done(unit)

    def _check_held(self, unit: GatheredUnit, parameter: torch.nn.Parameter) -> None:
        """What led to the parameter's gradient has read the unit's weights."""
        if not unit.is_held:
            whose = unit.name or "the model"
            raise TrainingError(
                f"{self._names[parameter]}: its gradient comes from a result of {whose} that neither it "
                "nor a module in it has returned, so that nobody has gathered its weights for it; return the result, "
                "compute it in a module of its own, or set reshard_after_forward=False"
            )

    def _touched(self, parameter: torch.nn.Parameter, function: str) -> Callable[[], None]:
        """A parameter is about to be used outside its unit's forward pass; in a pass, or the loss that follows it.

        At any other time the other ranks may not come to gather it.
        """
        unit = self._unit_of[parameter]
        changes = function.endswith("_") and not function.endswith("__")
        computes = self._training and torch.is_grad_enabled() and not changes and function != "data"
        if not (computes or self._running or inside_backward()):
            raise TrainingError(
                f"{self._names[parameter]}: {function} of a parameter that is sharded over the ranks; call it inside "
                "`with optimizer.gathered(...):`, on every rank"
            )
        where = weakref.ref(self)

        def again() -> None:
            alive = where()
            if alive is not None:
                alive._use(unit, watched=True)
                unit.hold_to_end()

        again()
        return again

    # ---- who needs what, when ---------------------------------------------------------------------------------------

    def _mine(self) -> set[int]:
        """What must stay whole for this rank."""
        return {unit.number for unit in self._units if unit.is_held} | {unit.number for unit in self._coming}

    def _use(self, unit: GatheredUnit, watched: bool = False) -> None:
        """Returns when the unit is whole and held, and has gathered what is expected next."""
        self._hold(unit, watched)
        number = self._forecast.after(unit.number, self._watch.active or inside_backward())
        if number is not None and not self._units[number].is_held and self._units[number] not in self._coming:
            self._coming.clear()  # what was expected in vain is not asked for any longer
            self._coming[self._units[number]] = self._rounds.start(number, self._mine() | {number}, Purpose.AHEAD)

    def _hold(self, unit: GatheredUnit, watched: bool = False) -> None:
        if unit.is_held:
            return
        with label("mpidl::gather", unit.name):
            coming = self._coming.pop(unit, None)
            self.traffic.ahead += coming is not None
            last = coming or self._rounds.start(unit.number, self._mine(), Purpose.NEEDED)
            self._wait_for_others(unit, last)
            while not last.served:  # a rank is at its end
                last = self._rounds.start(unit.number, self._mine(), Purpose.NEEDED)
                self._wait_for_others(unit, last)
            unit.hold(watched)

    def _wait_for_others(self, unit: GatheredUnit, last: Round) -> None:
        """Returns when the round is over. Raises TrainingError where others wait for this rank in another operation.

        The round stays under way; they will come to it when they next gather something.
        """
        before: dict[int, str] = {}
        looks = 0
        while True:
            try:
                last.wait(_LOOK)
                return
            except WorkTimeout:
                waiting = deadlocked(self._comm, self._world)
            looks, before = looks + 1 if waiting == before else 1, waiting
            if waiting and looks == _LOOKS:
                others = "; ".join(f"rank {rank} is in {operation}" for rank, operation in waiting.items())
                raise TrainingError(
                    f"rank {self._world.rank} needs {unit.name or 'the weights of the model itself'}, which all ranks "
                    f"gather together, but {others}, to which this rank has not come; what a rank runs alone belongs "
                    "inside `with optimizer.gathered(writable=False):`, which every rank enters"
                )

    def _release_if_done(self, unit: GatheredUnit) -> None:
        if unit.backward_done and unit is not self._root:
            self._release(unit)

    def _release(self, unit: GatheredUnit) -> None:
        if unit.state is UnitState.HELD and not unit.pin_count:
            unit.release(self._touched)

    def end_backward(self) -> None:
        """Releases all units on this rank, also those that were held to the end of the pass."""
        self._coming.clear()
        for handle in self._leaves:
            handle.remove()
        self._leaves.clear()
        for unit in self._units:
            unit.end_pass()
            self._release(unit)

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
        self._training = False
        self.drain()

    def drain(self) -> None:
        """Returns when every round has been joined by all ranks. Collective; errors as of `release`.

        So no rank waits in one while the others are in operations of their program.
        """
        alone_since: float | None = None
        while not (last := self._rounds.done(self._mine())).everyone_done:
            alone_since = (alone_since or monotonic()) if last.reducing else None
            if alone_since is not None and monotonic() - alone_since > _APART:
                raise TrainingError(
                    f"{listing(last.reducing)} cannot go on with a backward pass in which this rank takes no part: an "
                    "exception has cut this rank's pass and was caught, or it made fewer passes than others"
                )

    def wait_for_reduction(self, work: Work) -> None:
        """Waits for a reduction, to which another rank may come only once this one has taken part in its gathering.

        The round for others is not waited for, as they may come to none before they need this rank elsewhere.
        """
        patience = _PATIENCE
        while True:
            try:
                work.wait(patience)
                return
            except WorkTimeout:
                patience = _IMPATIENCE
                if self._rounds.are_over:  # else others can take part in one of this rank's
                    self._rounds.start(None, self._mine(), Purpose.REDUCES)

    def publish(self) -> None:
        """Gathers anew the units that `gathered` blocks keep whole; all others are gathered at their next use."""
        pinned = [unit for unit in self._units if unit.pin_count]
        if pinned:
            self._rounds.refresh([unit.number for unit in pinned])
            for unit in pinned:
                unit.follow()

    # ---- whole parameters -------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, parameters: Iterable[torch.nn.Parameter] | None = None, writable: bool = True) -> Iterator[None]:
        """Whole parameters inside, of every unit that holds any of `parameters` (default: all). Collective.

        writable: as copies of this rank's own, of which its shard is kept; every rank must make the same changes.
            Inside, the ranks need not run alike. A block inside another has that one's copies.
        """
        wanted = None if parameters is None else set(parameters)
        chosen = [u for u in self._units if wanted is None or any(wanted & set(f.shard.parameters) for f in u.flats)]
        for unit in chosen:
            self._hold(unit)
            unit.pin_count += 1
        for unit in chosen if writable else ():
            unit.copy()
        try:
            yield
        finally:
            if writable:
                for unit in chosen:
                    unit.keep_changes()
                self._rounds.refresh([unit.number for unit in chosen])
            for unit in chosen:
                unit.pin_count -= 1
                self._release(unit)

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The shards, and the units that this rank holds whole now; the latter are the node's, where it shares them."""
        shards = [shard.values for shard in self.shards]
        return {"parameters": shards + [flat.whole for unit in self._units if unit.is_held for flat in unit.flats]}

    def _refuse_state_dict(self, *_: Any) -> None:
        if not all(unit.is_held for unit in self._units):
            raise TrainingError(
                "model.state_dict(): the parameters are sharded over the ranks; call optimizer.model_state_dict() on "
                "every rank, or use model.state_dict() inside `with optimizer.gathered():`"
            )
