"""`compress="auto"`: measures the reductions, and decides for all ranks whether, where and how to compress.

    construction    on two buckets of up to 8 MiB: seconds of the plain reduction and of each method, and how
                    many of these the backward thread computes itself
    passes 0 to 3   reduce in full precision; seconds of a step, and of its backward pass between first and last bucket
    passes 4 to 7   by the method that should be best; seconds of a step
    pass 8          the choice, for the rest of the job: that method, or none if steps did not become shorter

Passes count from the end of those that `start_step` has reduce in full precision.

A reduction overlaps with backward, so it is predicted to end after

    plain       max(backward, plain)
    a method    max(backward + computed, method)      its arithmetic delays backward; its messages do not

The method that ends first is tried if that saves 3 % of the plain time, and kept if it saves 3 % of measured steps.
bf16 may always be chosen, lossier methods only by name; inside one node none is.

Who runs what: measurements at construction are collective, in the thread of the program. Every rank puts its times
into an all-reduce as it launches the last bucket of passes 3 and 7, before the bucket's own reduction. So when any rank
begins the next pass and waits for it, all have issued it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from collectives import Communicator, Work

from ..grad_bucket import BucketShards, GradBucket, Handle, completed
from .compressor import Compressor, Exchange, Section, Steps, rounded_up

NONE = "none"
PASSES = 4  # in full precision, and as many on trial; the first one of each lays out and warms up, and is not timed
_ELEMENTS = 2 << 20  # of a measured bucket: 8 MiB
_BUCKETS = 2
_REPETITIONS = 3  # the first one warms up
_GAIN = 0.97  # of the plain time; what is measured is uncertain by about that


@dataclass(frozen=True)
class Figure:
    """Seconds of a method for all gradients.

    total: until the last mean is there.
    computed: by this thread.
    """

    method: str
    total: float
    computed: float


def decide(plain: float, backward: float, figures: Sequence[Figure]) -> str:
    """Returns the method to take, or "none". plain, backward: seconds of the plain reduction, and of backward."""
    without = max(backward, plain)
    best = min(figures, key=lambda each: _predicted_end(each, backward), default=None)
    return NONE if best is None or _predicted_end(best, backward) >= _GAIN * without else best.method


def bytes_ratio(
    compressor: Compressor,
    elements: int,
    ranks: int,
    needs_all: bool,
    shapes: Sequence[torch.Size],
    itemsize: int = 4,
) -> float:
    """Bytes that a method sends, divided by those in full precision.

    shapes: of the parameters.
    elements: of all; others as of `sent_bytes`.
    itemsize: bytes of a gradient's element.
    """
    plain = Uncompressed().sent_bytes(elements, ranks, needs_all) * itemsize / 4
    return compressor.sent_bytes(elements, ranks, needs_all, shapes) / plain


def now() -> float:
    """Seconds of a clock that never goes back."""
    return time.perf_counter()


def _predicted_end(figure: Figure, backward: float) -> float:
    return max(backward + figure.computed, figure.total)


class Uncompressed(Compressor):
    """Stands where no method is chosen; sections are never made."""

    phases = 0
    bucket_cap_mb = 25.0  # as without `compress`

    @property
    def name(self) -> str:
        """The name of no method."""
        return NONE

    def reduce(self, section: Section, exchange: Exchange) -> Steps:
        """Raises AssertionError: the engine reduces by itself."""
        raise AssertionError("a bucket without compression has no section")

    def sent_bytes(self, elements: int, ranks: int, needs_all: bool, shapes: Sequence[torch.Size] = ()) -> float:
        """Bytes of fp32."""
        return (8 if needs_all else 4) * elements * (ranks - 1) / ranks


class Candidate(Protocol):
    """A reduction that may be chosen."""

    @property
    def where(self) -> str:
        """The ranks between which it compresses."""

    @property
    def compressor(self) -> Compressor:
        """The compressor that it uses."""

    @property
    def peers(self) -> int:
        """The ranks that exchange."""

    def __call__(self, state: Any, bucket: GradBucket) -> Handle:
        """Starts the reduction of a bucket."""

    def forget(self) -> None:
        """Forgets all that was not sent."""


class AutoChoice:
    """The measurements and the choice. Making one is collective.

    A method whose bytes alone, by its formula, would take 0.97 of the plain time or more cannot be chosen, and is not
    measured. The others are, as copies, sums and the interpreter are in no model of messages.

    candidates: a reduction for each method that may be chosen; none where nothing is to be decided.
    dtype: of the gradients that are reduced; by default that of the parameters.
    shards, replicas: as of `CompressedReduction`; shards is None in DDP.

    chosen: name of the method, "none", or None while it is open.
    tried: the method on trial.
    left_out: names of methods that were not measured, as their bytes alone take too long.
    """

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        world: Communicator,
        parameters: Sequence[torch.nn.Parameter],
        shards: Communicator | None,
        replicas: Communicator | None,
        agree: Communicator,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.candidates, self._world, self._agree = dict(candidates), world, agree
        self.chosen: str | None = None if candidates else NONE
        self.figures: list[Figure] = []
        self.left_out: list[str] = []
        self.plain_seconds = self.backward_seconds = 0.0
        self.tried: str | None = None
        self.step_seconds = {NONE: 0.0}  # by method
        self._passes, self._begun, self._computed = 0, 0.0, 0.0
        self._timed_steps: list[float] = []
        self._timed_backwards: list[float] = []
        self._slowest = torch.zeros(2, dtype=torch.float64)
        self._agreed: Work | None = None
        if candidates:
            self._measure(parameters, shards, replicas, dtype)

    def note_launch(self, bucket: GradBucket) -> bool:
        """Notes the launch of a bucket; returns whether a trial begins or the choice is made just now."""
        changed = False
        if bucket.index() == 0:
            if self._passes > 1:
                self._timed_steps.append(now() - self._begun)
            if self._passes == PASSES:
                changed = True
                self._decide()
            self._begun, self._computed = now(), time.thread_time()
        if bucket.is_last() and self.chosen is None:
            self._passes += 1
            if self._passes > 1:
                self._timed_backwards.append(time.thread_time() - self._computed)
            if self._passes == PASSES:
                self._slowest[0], self._slowest[1] = min(self._timed_backwards), min(self._timed_steps)
                self._agreed = self._agree.all_reduce(self._slowest, "max", async_op=True)
        return changed

    def _decide(self) -> None:
        """Begins the trial, or ends it, by what all ranks have measured."""
        assert self._agreed is not None
        self._agreed.wait()
        backward, step = self._slowest.tolist()
        self._passes, self._timed_steps, self._timed_backwards = 0, [], []
        if self.tried is None:
            self.backward_seconds, self.step_seconds[NONE] = backward, step
            best = decide(self.plain_seconds, backward, self.figures)
            self.chosen, self.tried = (NONE, None) if best == NONE else (None, best)
        else:
            self.step_seconds[self.tried] = step
            self.chosen = self.tried if step < _GAIN * self.step_seconds[NONE] else NONE

    @property
    def chooses_none(self) -> bool:
        """Returns whether the choice is to send in full precision."""
        return self.chosen == NONE

    def summary(self) -> str:
        """The choice in one line."""
        where = f" {self.candidates[self.chosen].where.replace('_', ' ')}" if self.chosen in self.candidates else ""
        said = f"compress: auto chose {self.chosen}{where}"
        if self.figures:
            times = ", ".join(f"{each.method} {each.total:.3g}" for each in self.figures)
            said += f"; seconds to reduce: plain {self.plain_seconds:.3g}, {times}"
            said += f"; backward {self.backward_seconds:.3g}"
            said += f"; too many bytes: {', '.join(self.left_out)}" if self.left_out else ""
            said += f"; a step: {', '.join(f'{name} {seconds:.3g}' for name, seconds in self.step_seconds.items())}"
        return said

    def _measure(
        self,
        parameters: Sequence[torch.nn.Parameter],
        shards: Communicator | None,
        replicas: Communicator | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Times the plain reduction and each method. Collective."""
        total = sum(p.numel() for p in parameters)
        some = _some_of(parameters)
        own = self._world if replicas is None or shards is None else shards
        elements = rounded_up(sum(p.numel() for p in some), 64 * own.size)
        device = some[0].device if not some[0].is_meta else torch.device("cpu")
        dtype = some[0].dtype if dtype is None else dtype
        values = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        flats = [values.clone() for _ in range(_BUCKETS)]
        sizes, used = [p.numel() for p in some], sum(p.numel() for p in some)
        # Each bucket has parameters of its own, of the right shapes and without memory.
        parameters_of = [
            [torch.nn.Parameter(torch.zeros((), device=device, dtype=dtype).expand(p.shape)) for p in some]
            for _ in range(_BUCKETS)
        ]
        scale = total / (_BUCKETS * used)
        size = elements // own.size
        mine = slice(own.rank * size, (own.rank + 1) * size)

        def plain(flat: torch.Tensor) -> Handle:
            if shards is None:
                work = self._world.all_reduce(flat, "avg", async_op=True)
            elif replicas is None:
                work = self._world.reduce_scatter(flat[mine].clone(), flat, "avg", async_op=True)
            else:
                part = flat[mine].clone()
                shards.reduce_scatter(part, flat, "avg")
                work = replicas.all_reduce(part, "avg", async_op=True)
            assert work is not None
            return work

        def buckets() -> list[GradBucket]:
            given = None if shards is None else BucketShards(mine, lambda _: completed())
            for flat in flats:
                flat.copy_(values)
            return [
                GradBucket(0, True, flat, list(flat[:used].split(sizes)), stand_ins, {}, given)
                for flat, stand_ins in zip(flats, parameters_of, strict=True)
            ]

        def timed(start: Callable[[GradBucket], Handle]) -> tuple[float, float]:
            found = []
            for _ in range(_REPETITIONS):
                made = buckets()
                self._world.barrier()
                begun, computed_from = time.perf_counter(), time.thread_time()
                handles = [start(bucket) for bucket in made]
                for handle in handles:
                    handle.wait()
                found.append((time.perf_counter() - begun, time.thread_time() - computed_from))
            slowest = torch.tensor(min(found[1:]), dtype=torch.float64) * scale
            self._world.all_reduce(slowest, "max")
            return float(slowest[0]), float(slowest[1])

        self.plain_seconds, _ = timed(lambda bucket: plain(bucket.buffer()))
        needs_all, shapes = shards is None or replicas is not None, [p.shape for p in parameters]
        for name, reduction in self.candidates.items():
            ratio = bytes_ratio(reduction.compressor, total, reduction.peers, needs_all, shapes, dtype.itemsize)
            if ratio >= _GAIN:
                self.left_out.append(name)
                continue
            self.figures.append(Figure(name, *timed(lambda bucket, reduction=reduction: reduction(None, bucket))))  # type: ignore[misc]
            reduction.forget()


def _some_of(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Parameters for a measured bucket, in the order in which backward comes to them; at least one."""
    found: list[torch.nn.Parameter] = []
    size = 0
    backwards = parameters[::-1]
    small = [p for p in backwards if p.numel() <= _ELEMENTS]
    for p in small or backwards:
        if found and size + p.numel() > _ELEMENTS:
            continue
        found.append(p)
        size += p.numel()
    return found
