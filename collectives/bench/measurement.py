"""Checks and times all sides of one case, in the forms and with the caches that were asked for.

A repetition, of which there are `iters`: the sides come in an order that is drawn anew, each as

    warm    the call, untimed              barrier    the call, `agg_iters` times
    cold    on to the next arrays          barrier    the call, `agg_iters` times, each on other arrays
    fresh   the call, untimed; the rank    barrier    the call
            reads its result and writes
            its next input

A repetition's time is that of the slowest rank (or what `average` says), by `agg_iters`. Every rank runs the same calls
in the same order, as the draw is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communicator import Communicator
from ..timing import repetitions, sample
from . import reference
from .buffers import WARM, ArraySets, Rotation, Sweep, cold, needs_second, touched_bytes
from .device import BenchDevice
from .operations import Case, bus_bandwidth
from .options import BenchOptions
from .sides import Side, side_of

_GPU_REPETITIONS = 30
KEPT_CALLS = 900  # prepared calls that `Communicator` surely keeps
_FOR_PERCENTILES = 100  # repetitions
PERCENTILES = (95, 99)


@dataclass(frozen=True)
class Row:
    """A side's figures in one form. Times in microseconds, bandwidths in 10^9 bytes a second.

    bytes, count: of the whole array, and what the call is given.
    buffer: "user" or "symmetric" arrays, "-" of a copy.
    cache: "warm", "cold" or "fresh".
    place: "out" or "in".
    time_us: the median repetition.
    p95_us, p99_us, max_us: others.
    wrong: elements that are not what they should be, None where none was looked at.
    ratios: by the side that is compared with, the median of this time by that one's in the same repetition.
    limit_us: what a GPU's memory needs at least.
    """

    op: str
    algorithm: str
    buffer: str
    cache: str
    place: str
    dtype: str
    redop: str
    root: int
    ranks: int
    bytes: int
    count: int
    time_us: float
    p95_us: float
    p99_us: float
    max_us: float
    algbw_gbs: float
    busbw_gbs: float
    wrong: int | None
    ratios: dict[str, float]
    limit_us: float | None = None


@dataclass
class _Form:
    """A side in one form, and its calls, one for each set of arrays."""

    name: str
    buffer: str
    cache: str
    place: str
    sides: list[Side]
    arena: ArraySets
    wrong: int | None = None


class _TimedSteps:
    """Makes the untimed and the timed step of each form; cold ones go through the sets together."""

    def __init__(self, device: BenchDevice, rotation: Rotation, calls: int) -> None:
        self._device, self._rotation, self._calls = device, rotation, calls
        self._sweep = Sweep(rotation.swept * rotation.sets)
        self._turn = 0

    def of(self, form: _Form) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """(ready, call) for `timing.sample`."""
        calls = [side.call for side in form.sides]
        several, first = self._calls, calls[0]
        chosen = [first] * several

        def run() -> None:
            for call in chosen:
                call()

        if self._device.is_gpu:
            ready: Callable[[], Any] = self._device.clock.ready
        elif form.cache == "cold":
            ready = lambda: self._rotate(calls, chosen)  # noqa: E731
        elif form.cache == "fresh":
            program = form.arena.between_calls(form.place)
            ready = lambda: (first(), program())  # noqa: E731
        else:
            ready = first
        return ready, (run if several > 1 or form.cache == "cold" else first)

    def _rotate(self, calls: list[Callable[[], Any]], chosen: list[Callable[[], Any]]) -> None:
        for number in range(self._calls):
            chosen[number] = calls[(self._turn + number) % len(calls)]
        self._turn = (self._turn + self._calls) % len(calls)
        self._sweep.read(self._rotation.swept * self._calls)


def measure(comm: Communicator, device: BenchDevice, options: BenchOptions, case: Case) -> Iterator[Row | str]:
    """Yields the rows of a case, and the names of sides that serve none of it. Collective."""
    rotation = _rotation(options, case, comm.size)
    forms = list(_forms(comm, device, options, case, rotation))
    yield from (name for name in options.sides if name not in {form.name for form in forms})
    if not forms:
        return
    for form in forms:
        if options.check and form.name != "copy":
            form.wrong = _check(comm, device, options.check, case, form)
    for form in forms:
        form.arena.zero()
    for form in forms:
        for side in form.sides:
            side.call()  # prepares it
    steps = _TimedSteps(device, rotation, options.agg_iters)
    count = options.iters or _repetitions(device, options, forms[0].arena.nbytes)
    times = sample(comm, [steps.of(form) for form in forms], count, options.warmup_iters, device.clock)
    _over_ranks(comm, times, options.average)
    times /= options.agg_iters
    for number, form in enumerate(forms):
        yield _row(comm, device, case, form, times[:, number], _ratios(options, forms, times, number))


def _rotation(options: BenchOptions, case: Case, ranks: int) -> Rotation:
    """The rotation of cold calls; of at least as many sets as calls follow each other."""
    if not options.cold:
        return WARM
    most = max(options.agg_iters, KEPT_CALLS // (len(options.sides) * len(options.buffers) * len(options.places)))
    return cold(touched_bytes(case, ranks), options.cache, most)


def _forms(
    comm: Communicator, device: BenchDevice, options: BenchOptions, case: Case, rotation: Rotation
) -> Iterator[_Form]:
    """All sides that serve the case, in every form. Collective."""
    owner = device.groups.get("ipc", comm)
    places = tuple(place for place in options.places if place in case.operation.places)
    for cache in ("cold",) if device.is_gpu else options.caches:
        sets = rotation.sets if options.cold and cache == "cold" else 1
        for buffer in options.buffers:
            arena = ArraySets(owner, case, buffer, sets, device.name, has_second=needs_second(case, places))
            for place in places:
                for name in options.sides:
                    first = side_of(comm, device, case, name, buffer, place, arena.arrays(0, place))
                    if first is None or (name in ("gloo", "nccl") and not _works(comm, first)):
                        continue
                    others = [
                        side_of(comm, device, case, name, buffer, place, arena.arrays(number, place))
                        for number in range(1, sets)
                    ]
                    found = [first, *(side for side in others if side is not None)]
                    yield _Form(name, "-" if name == "copy" else buffer, cache, place, found, arena)


def _works(comm: Communicator, side: Side) -> bool:
    """Returns whether the call works on all ranks: torch.distributed refuses some types, and some CUDA tensors."""
    failed = np.zeros(1)
    try:
        side.call()
    except (RuntimeError, ValueError, TypeError):
        failed[0] = 1
    comm.all_reduce(failed)
    return not failed[0]


def _check(comm: Communicator, device: BenchDevice, count: int, case: Case, form: _Form) -> int:
    """Counts wrong elements of all ranks in so many calls, each on another input."""
    found = np.zeros(1, np.int64)
    arrays, side = form.arena.arrays(0, form.place), form.sides[0]
    for iteration in range(count):
        comm.barrier()  # others may still read the arrays
        form.arena.zero()
        device.synchronize()
        comm.barrier()  # an output may be one array for all
        reference.fill(arrays.x, case, comm.rank, comm.size, iteration)
        device.synchronize()
        side.call()
        device.synchronize()
        found += reference.wrong_elements(side.result, case, form.arena.part, comm.rank, comm.size, iteration)
    comm.all_reduce(found)
    return int(found[0])


def _repetitions(device: BenchDevice, options: BenchOptions, nbytes: int) -> int:
    usual = _GPU_REPETITIONS if device.is_gpu else repetitions(nbytes)
    return max(usual, _FOR_PERCENTILES) if options.percentiles else usual


def _over_ranks(comm: Communicator, times: np.ndarray[Any, Any], average: int) -> None:
    """Replaces each time by rank 0's, or by the mean, the least or the largest of all ranks' (0, 1, 2, 3)."""
    if average == 0:
        comm.broadcast(times, 0)
    else:
        comm.all_reduce(times, {1: "avg", 2: "min", 3: "max"}[average])


def _ratios(options: BenchOptions, forms: list[_Form], times: np.ndarray[Any, Any], number: int) -> dict[str, float]:
    """The time of a form as a multiple of each compared side's: in the same form, cache and repetition.

    Sides of other libraries have user arrays alone, which are compared with symmetric ones too.
    """
    own = forms[number]
    found = {}
    for name in options.compare:
        if name == own.name:
            continue
        for buffer in (own.buffer, "-" if name == "copy" else "user"):
            place = [
                other
                for other, form in enumerate(forms)
                if (form.name, form.buffer, form.cache, form.place) == (name, buffer, own.cache, own.place)
            ]
            if place:
                found[name] = float(np.median(times[:, number] / times[:, place[0]]))
                break
    return found


def _row(
    comm: Communicator,
    device: BenchDevice,
    case: Case,
    form: _Form,
    times: np.ndarray[Any, Any],
    ratios: dict[str, float],
) -> Row:
    nbytes, seconds = form.arena.nbytes, float(np.median(times))
    limit = device.limit(case.operation.name, nbytes, comm.size)
    high, higher = (float(value) * 1e6 for value in np.percentile(times, PERCENTILES, method="inverted_cdf"))
    return Row(
        op=case.operation.name,
        algorithm=form.name,
        buffer=form.buffer,
        cache=form.cache,
        place=form.place,
        dtype=case.dtype,
        redop=case.op,
        root=case.root,
        ranks=comm.size,
        bytes=nbytes,
        count=case.operation.count(form.arena.whole, comm.size),
        time_us=seconds * 1e6,
        p95_us=high,
        p99_us=higher,
        max_us=float(times.max()) * 1e6,
        algbw_gbs=nbytes / seconds / 1e9,
        busbw_gbs=bus_bandwidth(case.operation, nbytes, seconds, comm.size),
        wrong=form.wrong,
        ratios=ratios,
        limit_us=None if limit is None else limit * 1e6,
    )
