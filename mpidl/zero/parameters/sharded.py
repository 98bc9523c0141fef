"""Stage 3 over several nodes or GPUs: a rank holds a shard of every parameter, and units are whole while they compute.

    unit i      forward:   unshard -> compute -> reshard          unit i + 1 is prefetched meanwhile
                backward:  unshard -> compute -> reshard          unit i - 1 is prefetched meanwhile
    model's own             unshard ------------------> reshard   the embedding and the output layer: until the end

With `prefetch=n` the next n units are gathered ahead, in the order of the last pass; one of them that is resharded
meanwhile stays whole. A node gathers a unit once, into memory that its ranks share. A parameter that is read while its
unit is resharded has the unit gathered first (`released_parameter`).

Who runs what: hooks (`unit_hooks`) and the verbs of the strategy run in the thread of the program or of backward;
gathers are rounds (`gather_rounds`), in the progress thread of a Communicator that has no other use. A round ends when
all ranks have started it. So a rank that waits for anything else must start rounds meanwhile, or others wait for it for
ever:

    in a forward or backward pass   it starts rounds for its own units (`held_units`)
    for a reduction of gradients,   `wait_for_reduction` starts a round whenever its own are over
    an agreement in a pass
    at the end of a pass that       `drain` starts rounds until one in which every rank says that it is done
    communicates, in `release`
    in a collective of the program  it starts none: a rank that waits for it in a round raises an error that names the
                                    collective (`round_waits`)

A rank drains at least twice in a step: at the end of the pass, as the program's own collectives follow; and in
`release` before gradients are clipped or unscaled and before the step, as passes without backward may have started
rounds since, and no unit may be whole when shards change.
`publish` after the step gathers the units of open `gathered` blocks anew. With n >= 2 it also starts rounds for the
next pass, as many on every rank; with n = 1 it does not, so that no unit takes memory between a step and the next pass.
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
from collectives.diagnostics import listing

from ...errors import TrainingError
from ...gradients.backward import BackwardWatch
from ...gradients.compression import OwnedCompressor
from ...job import communicator_pool
from ..parameter_shard import ParameterShard
from ..traffic import ZeroTraffic
from .forward_passes import ForwardPasses
from .gather_rounds import GatherRounds, Purpose, join_rounds_until_all_leave
from .gathered_unit import GatheredUnit
from .held_units import HeldUnits
from .private_copy import close_copies, open_copies
from .round_waits import RoundWaits
from .strategy import NamesOf, ParameterStrategy, unfreeze_shards
from .unit_hooks import UnitHooks
from .units import UnitLayout, backward_order

FIRST_POLL_S, _POLL_S = 0.1, 0.002  # a wait for a reduction, before its first and its further rounds for other ranks
_REDUCTION_STALL_S = 10.0  # until a rank that waits for a reduction, while this one drains, counts as stuck


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
        worlds = list(dict.fromkeys(worlds)) or [comm]
        pooled = communicator_pool.take(comm)
        weakref.finalize(self, pooled.give_back).atexit = False
        comm = pooled.comm  # whose memory the pages must be, to be gathered into as what they are
        pooled.set_drain(partial(join_rounds_until_all_leave, comm, len(layouts)))
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
        self._rounds = GatherRounds(comm, self._units, place.device, compressor is not None)
        self._waits = RoundWaits(comm, worlds)
        self._forwards = ForwardPasses()
        names = {p: name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        self._held = HeldUnits(self._units, self._rounds, self._waits, prefetch, watch, self._forwards, names)
        self._flat_of = {p: flat for unit in self._units for flat in unit.flats for p in flat.shard.parameters}
        self.shards = [flat.shard for unit in backward_order(self._units) for flat in unit.flats]
        self._handle = model.register_state_dict_pre_hook(self._refuse_state_dict)
        self._hooks = UnitHooks(
            [layout.unit.module for layout in layouts],
            self._units,
            self._held,
            watch,
            self._forwards,
            names,
            reshard_after_forward,
            self.end_backward,
        )

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
            unit.release(self._held.before_read)

    def gathered_address(self, parameter: torch.nn.Parameter) -> int:
        """The address of a parameter while it is whole; on a GPU since it was gathered last."""
        return self._flat_of[parameter].places()[parameter]

    # ---- in a backward pass -----------------------------------------------------------------------------------------

    @property
    def on_gradient(self) -> tuple[Callable[[torch.nn.Parameter], None], ...]:
        """Releases a unit when its parameters' gradients are complete."""
        return (self._hooks.gradient_arrived,)

    def end_backward(self) -> None:
        """Releases all units on this rank, also those that were held to the end of the pass."""
        self._hooks.end_pass()
        self._held.end_pass()

    # ---- while other ranks may need this one ------------------------------------------------------------------------

    def wait_for_reduction(self, work: Work, timeout: float | None = None) -> None:
        """Waits for a reduction or an agreement, to which another rank may come only after a round with this one.

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
                    self._held.start(None, Purpose.REDUCES)

    def drain(self) -> None:
        """Returns when every round has been joined by all ranks. Collective; errors as of `release`.

        So no rank waits in one while the others are in operations of their program. Where they wait there for this
        rank, which an exception has taken out of a `gathered` block, it raises TrainingError.
        """
        stuck_since: float | None = None
        while True:
            started = self._held.start(None, Purpose.DONE)
            self._waits.until_over(started, "waits until every rank has ended its pass or its `gathered` block")
            if started.everyone_done:
                return
            waiting = started.waits_for_reduction
            stuck_since = (stuck_since or monotonic()) if waiting else None
            if stuck_since is not None and monotonic() - stuck_since > _REDUCTION_STALL_S:
                raise TrainingError(
                    f"{listing(waiting)} cannot go on with a backward pass in which this rank takes no part: "
                    "an exception has cut this rank's pass and was caught, or it made fewer passes than others"
                )

    # ---- around a step ----------------------------------------------------------------------------------------------

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
        self._forwards.trained_since_step = False
        self.drain()
        self._held.for_next_pass.clear()

    def publish(self) -> None:
        """Gathers anew the units that `gathered` blocks keep whole, and starts to gather the next pass's first ones."""
        pinned = [unit for unit in self._units if unit.pin_count]
        if pinned:
            self._refresh(pinned)
            for flat in (flat for unit in pinned for flat in unit.flats):
                flat.follow()
        self._held.prefetch_next_pass()

    def wait_for_gathers(self) -> None:
        """Returns when the gathers are complete that `publish` has started. Local."""
        for started in self._held.for_next_pass:
            started.wait()
        self._held.for_next_pass.clear()

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
                self._held.unshard(unit)
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
                self._held.reshard_if_unused(unit)

    def _refresh(self, units: Sequence[GatheredUnit]) -> None:
        """Gathers units anew, whose shards have changed. Collective; errors as of `drain`."""
        started = self._rounds.refresh([unit.number for unit in units])
        self._waits.until_over(started, "gathers anew what a `gathered` block has changed")

    def remove(self) -> None:
        """Takes the hooks off the model."""
        self._handle.remove()
        self._hooks.remove()

    def stats(self) -> dict[str, Any]:
        """Describes the units that are whole here, by their names, and the rounds under way."""
        whole = [unit.name for unit in self._units if unit.is_held]
        return {"whole_units": whole, "rounds_under_way": self._rounds.count_under_way()}

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The shards, units that this rank holds whole now, and messages; the node's are those that it shares."""
        shards = [shard.values for shard in self.shards]
        found = {"parameters": shards + [flat.whole for unit in self._units if unit.is_held for flat in unit.flats]}
        return found if self._compressed is None else {**found, "compression": [self._compressed.messages]}

    def _refuse_state_dict(self, *_: Any) -> None:
        if not all(unit.is_held and unit.exact for unit in self._units):
            raise TrainingError(
                "model.state_dict(): the parameters are sharded over the ranks; call optimizer.model_state_dict() on "
                "every rank, or use model.state_dict() inside `with optimizer.gathered():`"
            )
