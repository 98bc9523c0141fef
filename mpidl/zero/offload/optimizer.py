"""Optimizer of offloaded slices inside ZeroOptimizer: steps at once, or in a thread while the next pass runs.

    step t      at once     | step t |  forward, backward  | step t + 1 |
    step t      delayed              |  step t in a thread |  its values are seen; step t + 1 is begun

The thread of a delayed update, `mpidl-offload-update`, computes; two others read and write files (`triple_buffering`).
The thread of the program runs all collectives, in its order: it waits for the update, and the ranks agree that all of
theirs have succeeded, before any value is seen.
Source of the delay: Ren et al. 2021, "ZeRO-Offload", section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from collectives.devices import HOST, Place

from ...errors import ConfigurationError, TrainingError
from ...gradients.buckets import MIB, Piece
from ...job.agreement import check_everywhere, first_problem, is_anywhere
from ...optim.elementwise_state import EIGHT_BIT_LEAST, state_tensors
from ...optim.trust_ratio import TrustRatioOptimizer, squared_norms_over
from ...optimizer_trial import without_parameters
from ...replicas.start_check import check_settings_agree
from ..parameter_shard import ParameterShard
from ..shard_group import ShardGroup
from ..stepping.inner import InnerOptimizer
from ..stepping.optimizer_class import frozen
from .disk_space import Groups, Make, foresee, needed, open_file
from .offloaded_slice import Gradient, OffloadedSlice
from .settings import Offload
from .state_mapping import StateMapping
from .storage import Storage
from .sub_groups import MASTER, SliceRange, SubGroup, sub_groups_of
from .triple_buffering import BUFFERS, TripleBuffering


class OffloadedOptimizer(InnerOptimizer):
    """Steps on OffloadedSlices. Constructed before the model is changed; then `slice`, then `add_param_groups`.

    optimizer_class, kwargs: of the inner optimizers, one for each sub-group.
    groups: the model's parameters, to foresee the state.
    halves: they will be of 16 bits.
    place: where they lie.

    Collective. Raises ConfigurationError on every rank where the file cannot be made.
    param_groups: settings, which a step gives to all inner optimizers.
    state: by `OffloadedSlice.values`.
    """

    def __init__(
        self,
        over: ShardGroup,
        settings: Offload,
        optimizer_class: type[torch.optim.Optimizer],
        kwargs: Mapping[str, Any],
        groups: Groups,
        halves: bool,
        place: Place = HOST,
    ) -> None:
        self._over, self._comm, self._settings = over, over.world, settings
        self._make_inner: Make = lambda groups: optimizer_class(groups, **kwargs)
        compared = {"to": settings.to, "delayed_update": settings.delayed_update, "delay_from": settings.delay_from}
        self._stays_whole = issubclass(optimizer_class, TrustRatioOptimizer)
        compared["buffer_mb"] = settings.buffer_mb if self._stays_whole else None
        check_settings_agree(self._comm, "offload", compared)
        if self._stays_whole and settings.delayed_update:
            raise ConfigurationError(
                "Offload: delayed_update with LARS or LAMB: their norms are sums over the ranks, and the thread of a "
                "delayed update must not communicate; needs an optimizer that updates every element by itself"
            )
        self._foreseen: dict[tuple[int, torch.dtype, bool], dict[str, torch.dtype]] = {}
        self._storage: Storage | None = None
        if settings.to == "disk":
            on_accelerator = place.device.type != "cpu"
            nbytes = needed(self._make_inner, groups, halves, over.size, on_accelerator=on_accelerator)
            self._storage = open_file(self._comm, settings, nbytes)
        self._buffering = TripleBuffering()
        self._to_host, self._to_device = place.copies(), place.copies()
        self._updater = ThreadPoolExecutor(1, "mpidl-offload-update") if settings.delayed_update else None
        self._update: Future[None] | None = None
        self._held_back: dict[OffloadedSlice, Gradient] = {}
        self._has_unpublished = False
        self._steps = 0
        self._failed = ""
        self._no_room: OSError | None = None
        self._slices: dict[torch.Tensor, OffloadedSlice] = {}
        self._groups: list[SubGroup] = []
        self.param_groups: list[dict[str, Any]] = []
        self.state = StateMapping(self._storage, self._wait_for_update)

    # ---- what there is to step on -----------------------------------------------------------------------------

    def slice(self, shard: ParameterShard, number: int, piece: Piece) -> OffloadedSlice:
        """Makes an OffloadedSlice, which takes the place of a Slice."""
        index = sum(part.number == number for part in self._slices.values())
        delayed = self._settings.delayed_update
        make = partial(
            OffloadedSlice,
            shard,
            number,
            piece,
            index,
            to_host=self._to_host,
            to_device=self._to_device,
            delayed=delayed,
        )
        try:
            part = make(make_master=None if self._storage is None else self._make_master)
        except OSError as error:
            self._no_room = error  # raised on all ranks when they add the slice's group
            part = make()
        self._slices[part.values] = part
        return part

    def _make_master(self, part: OffloadedSlice, dtype: torch.dtype) -> torch.Tensor:
        assert self._storage is not None
        return self._storage.tensor(part, MASTER, dtype)

    def add_param_groups(self, groups: Groups) -> None:
        """Adds groups of slices' values, on which `step` steps from now on. Collective."""
        first = len(self.param_groups)
        wholes = []
        for number, group in enumerate(groups, first):
            self.param_groups.append(dict(group))
            for values in group["params"]:
                part = self._slices[values]
                wholes.append(SliceRange(part, number, 0, part.size, self._states(number, values)))
        order = {part: number for number, part in enumerate(self._slices.values())}  # that of the shards, on every rank
        wholes.sort(key=lambda chunk: order[chunk.part])
        parts, budget = [wholes], self._settings.buffer_mb * MIB / BUFFERS
        sizes = [chunk.part.largest for chunk in wholes]
        if self._storage is not None:
            parts = sub_groups_of(wholes, budget, sizes if self._stays_whole else None)
        elif any(chunk.part.on_accelerator for chunk in wholes):  # so that one is stepped on while others are copied
            parts = sub_groups_of(wholes, budget, sizes)
        check_everywhere(self._comm, lambda: self._make(parts))

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Adds one group. Collective."""
        self.add_param_groups([group])

    def _make(self, parts: Iterable[list[SliceRange]]) -> None:
        settings = [without_parameters(group) for group in self.param_groups]
        try:
            if self._no_room is not None:
                raise self._no_room
            for chunks in parts:
                group = SubGroup(chunks, self._storage, self._configured, settings)
                self._groups.append(group)
                self.state.add(group)
        except OSError as error:
            raise ConfigurationError(f"Offload: no room for the state of these parameters: {error}") from error
        if self._storage is not None:
            self._storage.forget()

    def _configured(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        inner = self._make_inner(groups)
        if isinstance(inner, TrustRatioOptimizer):
            shards = self._over.shard_comm
            inner.squared_norms = lambda tensors, of: squared_norms_over(shards, None, {}, tensors, of)
        return inner

    def _states(self, number: int, values: torch.Tensor) -> dict[str, torch.dtype]:
        """The tensors that the optimizer keeps for a parameter of a group, found out on one of a few elements."""
        size = self._slices[values].shard.layout.sizes[self._slices[values].index]
        key = (number, values.dtype, size < EIGHT_BIT_LEAST)
        if key not in self._foreseen:
            self._foreseen[key] = foresee(self._make_inner, self.param_groups[number], values.dtype, size)
        return dict(self._foreseen[key])

    # ---- a step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Takes the slices' gradients and makes a step, or begins one and shows the values of the last. Collective."""
        self.finish()
        delayed = self._updater is not None and self._steps >= self._settings.delay_from
        self._steps += 1
        found = [part for part in self._slices.values() if part.gradient is not None]
        self._held_back = {part: part.fetch(copied=delayed) for part in found}
        self._to_host.join()  # before the next passes' gradients
        settings = [frozen(group) for group in self.param_groups]
        if delayed:
            assert self._updater is not None
            self._update = self._updater.submit(self._run, settings)
            return
        error: Exception | None = None
        try:
            self._run(settings)
        except Exception as raised:
            if self._failed:  # the ranks know already
                raise
            error = raised
        self._agree(error)
        self._publish()

    def _run(self, settings: Groups) -> None:
        """Steps on all sub-groups, in any thread."""
        groups = [group for group in self._groups if group.prepare(settings, self._held_back)]
        # Norms are sums over the ranks, so that none may begin a step for which another one lacks the state.
        self._buffering.run(groups, self._agree if self._stays_whole else lambda _: None)

    @property
    def pending(self) -> bool:
        """True if `finish` has something to do: an update whose values are not published, or one that has failed."""
        return self._update is not None or self._has_unpublished or bool(self._failed)

    def finish(self) -> None:
        """Waits for the update that is under way, and shows its values in this rank's shards. Collective.

        TrainingError on every rank if it, or one before it, has failed on any.
        """
        known = self._has_unpublished  # since `complete`, so that ranks may still use what the update changes
        self.complete()
        if self._has_unpublished:
            if known:
                self._agree(None)
            self._publish()

    def complete(self) -> None:
        """Waits for the update under way, and leaves its values unpublished. Collective; errors as of `finish`."""
        if self._failed:
            raise TrainingError(self._failed)
        if self._update is not None:
            error = self._update.exception()
            self._update = None
            self._agree(error if isinstance(error, Exception) else None)
            self._has_unpublished = True

    # ---- what a checkpoint keeps, after `complete` ------------------------------------------------------------

    @property
    def delays(self) -> bool:
        """Returns whether updates may be delayed."""
        return self._updater is not None

    @property
    def steps(self) -> int:
        """The number of steps that were begun, of which the first are not delayed."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count

    def unpublished(self) -> Sequence[OffloadedSlice]:
        """Slices whose parameters do not have their newest values yet."""
        return list(self._held_back) if self._has_unpublished else []

    def hold_back(self, parts: Iterable[OffloadedSlice]) -> None:
        """Makes these slices, whose values were written anew, wait for `publish`, and no others."""
        self._held_back = {part: Gradient(torch.empty(0)) for part in parts}
        self._has_unpublished = bool(self._held_back)
        for part in self._held_back:
            part.hold_back()
            self.forget()

    def forget(self) -> None:
        """Drops from this process's memory the pages of what tensors read or wrote of the storage, which keeps it."""
        if self._storage is not None:
            self._storage.forget()

    def _wait_for_update(self) -> None:
        """Waits until no thread changes the state."""
        if self._update is not None:
            wait([self._update])

    def _publish(self) -> None:
        for part in self._held_back:
            part.publish()
        self._to_device.finish()  # of steps that were not delayed too, before what is copied is changed
        self._held_back, self._has_unpublished = {}, False

    def _agree(self, error: Exception | None) -> None:
        """Raises TrainingError on every rank if any has an error, now and in every later step."""
        if not is_anywhere(self._comm, error is not None):
            return
        rank, text = first_problem(self._comm, None if error is None else f"{type(error).__name__}: {error}")
        self._failed = (
            f"the step on offloaded state failed on rank {rank}: {text}; the state is spoilt: load the last checkpoint "
            "into a new optimizer"
        )
        raise TrainingError(self._failed) from error

    # ---- memory -----------------------------------------------------------------------------------------------

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Tensors in the model's own memory: buffers, values that wait to be published, state that is not offloaded."""
        inside = [tensor for part, tensor in self._in_memory() if not part.on_accelerator]
        gradients = [gradient.values for part, gradient in self._held_back.items() if not part.on_accelerator]
        return {"optimizer": [*self._buffering.buffers, *inside], "gradients": gradients}

    def offloaded_bytes(self) -> int:
        """Bytes of state and masters in the storage, or in CPU memory where the model is on another device."""
        total = sum(t.numel() * t.element_size() for part, t in self._in_memory() if part.on_accelerator)
        for group in self._groups if self._storage is not None else []:
            for chunk in group.chunks:
                each = sum(chunk.states[name].itemsize for name in chunk.present)
                each += chunk.part.values.dtype.itemsize if chunk.part.in_file else 0
                total += (chunk.stop - chunk.start) * each
        return total

    def _in_memory(self) -> Iterator[tuple[OffloadedSlice, torch.Tensor]]:
        self._wait_for_update()
        for part in self._slices.values():
            if part.staged is not None:
                yield part, part.staged
            if part.is_master and not part.in_file:
                yield part, part.values.detach()
        for group in self._groups:
            for chunk in group.chunks:
                entry = group.inner.state.get(chunk.parameter, {})
                yield from ((chunk.part, tensor) for tensor in state_tensors([entry]))
