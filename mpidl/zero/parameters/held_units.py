"""Units that this rank holds: each is gathered before a use, the next ones ahead of it, and released after it.

    used            `unshard_and_prefetch`: returns when the unit is whole; the next `prefetch` units are asked for
    not used now    `reshard_if_unused`: the unit is released here. It stays whole if it is one of the next, and on the
                    node as long as any rank holds it
    read elsewhere  `before_read`: an operator outside the unit's module; gathered, or refused by name

Who runs what: the thread of the program or of backward. It starts rounds (`gather_rounds`), each of which says what
this rank holds, and waits for them in their order until the unit that it needs is whole (`round_waits`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from collectives.diagnostics import label

from ...errors import TrainingError
from ...gradients.backward import BackwardWatch, inside_backward
from .forecast import Forecast
from .forward_passes import ForwardPasses
from .gather_rounds import GatherRound, GatherRounds, Purpose
from .gathered_unit import GatheredUnit, UnitState
from .round_waits import RoundWaits

_ALONE = "; what a rank runs alone belongs inside `with optimizer.gathered(writable=False):`, which every rank enters"


class HeldUnits:
    """Gathers the units of a model as they are used, and releases them.

    units: all of them, by their numbers; the last one is the model's own.
    rounds: in which the units are gathered.
    waits: for these rounds.
    prefetch: number of units that may be gathered ahead of the one that computes.
    watch: of the model's backward passes.
    forwards: the forward passes of the model, or of parts that hold units.
    names: of the parameters.

    for_next_pass: list of GatherRound; those that `prefetch_next_pass` has started, to be emptied when they are over.
    """

    def __init__(
        self,
        units: Sequence[GatheredUnit],
        rounds: GatherRounds,
        waits: RoundWaits,
        prefetch: int,
        watch: BackwardWatch,
        forwards: ForwardPasses,
        names: Mapping[torch.nn.Parameter, str],
    ) -> None:
        self._units, self._root = units, units[-1]
        self._rounds, self._waits = rounds, waits
        self._watch, self._forwards, self._names = watch, forwards, names
        self._forecast, self._count_ahead = Forecast(self._root.number), prefetch
        self._window: set[int] = set()  # numbers of the units that are to be whole for the uses that come next
        self._prefetches: set[GatheredUnit] = set()  # of them, those that are asked for and not held
        self.for_next_pass: list[GatherRound] = []  # as many on every rank
        self._unit_of = {p: unit for unit in units for flat in unit.flats for p in flat.shard.parameters}

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def start(self, wanted: int | None, purpose: Purpose) -> GatherRound:
        """Starts a round with what this rank holds. wanted: the number of a unit, or None."""
        return self._rounds.start(wanted, self._held_numbers(), purpose, self._pinned_numbers())

    def _held_numbers(self) -> set[int]:
        """Numbers of the units that must stay whole for this rank."""
        return {unit.number for unit in self._units if unit.is_held} | {unit.number for unit in self._prefetches}

    def _pinned_numbers(self) -> list[int]:
        """Numbers of the units that this rank needs in full precision."""
        return [unit.number for unit in self._units if unit.pin_count]

    # ---- before a use -----------------------------------------------------------------------------------------------

    def unshard_and_prefetch(self, unit: GatheredUnit, watched: bool = False) -> None:
        """Returns when the unit is whole and held, and has started the gathers of the units expected next.

        watched: for a use outside its module.
        """
        self.unshard(unit, watched)
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
                started = self.start(number, Purpose.AHEAD)
                self._prefetches.add(unit)
                return started
        return None

    def prefetch_next_pass(self) -> None:
        """Starts as many rounds on every rank, whatever it expects: those of the own unit and of a window.

        It starts none where a pass gathers at most one unit ahead.
        """
        if self._count_ahead < 2:
            return
        ahead: list[int | None] = [*self._forecast.ahead(self._count_ahead, next_pass=True)]
        self._window = {number for number in ahead if number is not None}
        for number in ahead + [None] * (self._count_ahead + 1 - len(ahead)):
            started = self._prefetch(number) or self.start(None, Purpose.AHEAD)
            self.for_next_pass.append(started)

    def unshard(self, unit: GatheredUnit, watched: bool = False) -> None:
        """Returns when the unit is whole and held. Raises TrainingError where others wait for this rank elsewhere.

        watched: for a use outside its module.
        """
        if unit.is_held and unit.is_as_wanted:
            return
        with label("mpidl::gather", unit.name):
            reason = f"needs {unit.name or 'the weights of the model itself'}, which all ranks gather together"
            is_requested = unit in self._prefetches
            self._rounds.traffic.ahead += is_requested
            self._prefetches.discard(unit)
            # Asked again where some rank's engine is gone, and gathers nothing, or a `gathered` block begins or has
            # ended meanwhile. A round may end between the two looks: `stays_whole` is the later one, so that none
            # is started for a unit that is there.
            oldest = self._rounds.oldest
            while not self._rounds.stays_whole(unit.number, unit.wants_exact):
                if not is_requested or oldest is None:
                    started, is_requested = self.start(unit.number, Purpose.NEEDED), True
                    oldest = oldest or started
                self._waits.until_over(oldest, reason, _ALONE)
                oldest = self._rounds.oldest
            self._rounds.wait_for_ended()
            try:
                unit.hold(watched)
            except BaseException:
                unit.release(self.before_read)
                raise

    def before_read(self, parameter: torch.nn.Parameter, function: str) -> Callable[[], None]:
        """Unshards a parameter that an operator is about to read outside its unit's forward pass.

        Returns a function that unshards it again for the operator's backward pass; inside a `gathered` block, which
        keeps it whole, one that does nothing. Raises TrainingError outside of passes and of the loss that follows one:
        the other ranks may not come to gather it then.
        """
        unit = self._unit_of[parameter]
        if unit.pin_count and unit.is_held:
            return lambda: None
        changes = function.endswith("_") and not function.endswith("__")
        trained = self._forwards.trained_since_step
        computes = trained and torch.is_grad_enabled() and not changes and function != "data"
        if not (computes or self._forwards.any_runs() or inside_backward()):
            raise TrainingError(
                f"{self._names[parameter]}: {function} of a parameter that is sharded over the ranks; call it inside "
                "`with optimizer.gathered(...):`, on every rank"
            )
        where = weakref.ref(self)

        def unshard() -> None:
            alive = where()
            if alive is not None:
                alive.unshard_and_prefetch(unit, watched=True)
                unit.hold_to_end()

        unshard()
        return unshard

    # ---- after a use ------------------------------------------------------------------------------------------------

    def reshard_if_backward_done(self, unit: GatheredUnit) -> None:
        """Releases the unit if its backward pass is over; the model's own is held to the end of the pass."""
        if unit.backward_done and unit is not self._root:
            self.reshard_if_unused(unit)

    def reshard_if_unused(self, unit: GatheredUnit) -> None:
        """Releases the unit, unless it is held to the end of the pass, or by a `gathered` block."""
        if unit.state is UnitState.HELD and not unit.pin_count:
            unit.release(self.before_read)
            # Every message since it was gathered has said that it is held. After a `gathered` block others gather it
            # anew.
            if unit.number in self._window and unit.is_as_wanted:
                self._prefetches.add(unit)

    def end_pass(self) -> None:
        """Releases all units on this rank, also those that were held to the end of the pass."""
        self._prefetches.clear()
        self._window.clear()
        for unit in self._units:
            unit.end_pass()
            self.reshard_if_unused(unit)
