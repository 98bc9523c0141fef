"""A tape: the operations that give a model its values, to be played back one tensor at a time.

    empty -> s0   uniform_(s0)   empty -> s1   uniform_(s1)   normal_(s0)   s0[0].zero_()
                                                              '---- the cone of s0 -----'

The cone of a storage are the operations that its final values depend on: what a later operation overwrites whole does
not count. Random operations draw from one stream of numbers, so all of them run, in their order; of those in no cone
only the numbers drawn matter. A cone runs as soon as its last random operation is reached, with the generator put back
to where each of the others began. So everything random runs about once, and one cone's tensors are held at a time.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

Start = torch.Tensor | int | None


@dataclass(frozen=True)
class View:
    """A tensor of the recorded construction. storage: its number; offset: in elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Operation:
    """One call of a torch operator.

    args, kwargs: as it was called, with Views in place of tensors. outputs: tensors in storage that it made.
    reads, writes: storages; what it makes counts as written. overwrites: those of them that it writes whole, unread.
    default_dtype: torch's at that time. random: it draws from a generator, which continues after random operation
    `start` (its number on the tape), or begins with the state `start`. constant: a value, instead of a call.
    """

    function: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[View, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    overwrites: frozenset[int] = frozenset()
    default_dtype: torch.dtype = torch.float32
    random: bool = False
    start: Start = None
    constant: torch.Tensor | None = None


class Tape:
    """Operations in the order of the construction. bytes_of: the size of each storage.

    first: the default generator's state before, end: the number of the last operation that drew from it, None if
    there is none or if it was seeded anew after it. looked_at: the construction depends on values that are random.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.bytes_of: list[int] = []
        self.first: torch.Tensor | None = None
        self.end: int | None = None
        self.after_end: torch.Tensor | None = None
        self.looked_at = False
        self._writers: dict[int, list[int]] = {}
        self._drawn = 0
        self._before: dict[int, torch.Tensor] = {}
        self._after: dict[int, torch.Tensor] = {}

    def add(self, operation: Operation) -> int:
        """Appends it; returns its number."""
        number = len(self.operations)
        self.operations.append(operation)
        for storage in operation.writes:
            self._writers.setdefault(storage, []).append(number)
        return number

    def digest(self) -> str:
        """Equal for equal constructions; where the random numbers start only counts if a random value was looked at."""
        digest = hashlib.sha256()
        for operation in self.operations:
            digest.update(repr((str(operation.function), operation.args, operation.kwargs)).encode())
            start = operation.start
            digest.update(str(isinstance(start, torch.Tensor)).encode())
            if isinstance(start, torch.Tensor) and self.looked_at:
                digest.update(start.numpy().tobytes())
            if operation.constant is not None:
                digest.update(operation.constant.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def cone(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """The operations on which the storages' contents depend, in order; before: as of before that operation."""
        end = len(self.operations) if before is None else before
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        left = [(storage, end) for storage in storages]
        while left:
            storage, limit = left.pop()
            writers = self._writers.get(storage, [])
            index = bisect_left(writers, limit)
            while index > 0 and (storage, index) not in seen:
                seen.add((storage, index))
                number = writers[index - 1]
                operation = self.operations[number]
                found.add(number)
                left += [(read, number) for read in operation.reads if read != storage]
                if storage in operation.overwrites:
                    break
                index -= 1
        return sorted(found)

    def randoms(self, cone: Iterable[int]) -> list[int]:
        """Those of a cone's operations that are random."""
        return [number for number in cone if self.operations[number].random]

    def value(self, view: View) -> torch.Tensor:
        """A tensor's value at the end of the tape. If random numbers went into it, all drawn until then are drawn."""
        cone = self.cone([view.storage])
        if self.randoms(cone):
            self.looked_at = True
            with _generator_kept():
                for number in self.randoms(range(self._drawn, len(self.operations))):
                    start = self.operations[number].start
                    self._before[number] = start if isinstance(start, torch.Tensor) else self._after[start]  # type: ignore[index]
                    inputs = self.cone(self.operations[number].reads, number)
                    _Player(self, set(), self._before).play([*inputs, number])
                    self._after[number] = torch.get_rng_state()
                self._drawn = len(self.operations)
                return _Player(self, {view.storage}, self._before).play(cone).tensor(view)
        return _Player(self, {view.storage}).play(cone).tensor(view)

    def forget(self) -> None:
        """Gives up what `value` remembers."""
        self._before, self._after = {}, {}

    def play(
        self, storages: Iterable[int], deliver: Callable[[int, torch.UntypedStorage], None], all_ranks: Iterable[int]
    ) -> None:
        """Hands each of the storages over, filled, and keeps none of them; moves no generator.

        all_ranks: what any rank wants. If it is random, then `after_end` is set to the state in which the default
        generator would be after the construction, where `end` says so.
        """
        cones = {storage: self.cone([storage]) for storage in dict.fromkeys(storages)}
        due: dict[int, list[int]] = {}
        for storage, cone in cones.items():
            randoms = self.randoms(cone)
            if randoms:
                due.setdefault(randoms[-1], []).append(storage)
            else:
                deliver(storage, _Player(self, {storage}).play(cone).storage(storage))
        if not any(self.randoms(self.cone([storage])) for storage in dict.fromkeys(all_ranks)):
            return
        with _generator_kept():
            self._play_random(cones, due, deliver)

    def _play_random(
        self,
        cones: dict[int, list[int]],
        due: dict[int, list[int]],
        deliver: Callable[[int, torch.UntypedStorage], None],
    ) -> None:
        order = self.randoms(range(len(self.operations)))
        inputs = {number: self.cone(self.operations[number].reads, number) for number in order}
        until = {number: number for number in order}  # how long the state before an operation is needed
        for number in order:
            for cone in [inputs[number], *(cones[storage] for storage in due.get(number, []))]:
                until.update({other: max(until[other], number) for other in self.randoms(cone)})
        follower = {self.operations[number].start: number for number in order if self._continues(number)}
        before: dict[int, torch.Tensor] = {}
        after: dict[int, torch.Tensor] = {}
        for number in order:
            start = self.operations[number].start
            before[number] = start if isinstance(start, torch.Tensor) else after[start]  # type: ignore[index]
            for storage in due.get(number, []):
                deliver(storage, _Player(self, {storage}, before).play(cones[storage]).storage(storage))
            if number not in due:
                _Player(self, set(), before).play([*inputs[number], number])
            after[number] = torch.get_rng_state()
            before = {other: state for other, state in before.items() if until[other] > number}
            after = {o: state for o, state in after.items() if follower.get(o, 0) > number or o in (number, self.end)}
        if self.end is not None:
            self.after_end = after[self.end]

    def _continues(self, number: int) -> bool:
        return isinstance(self.operations[number].start, int)


class _Player:
    """Runs operations, in memory that is freed after its last use but for the storages in `kept`.

    before: the generator's state before each random operation.
    """

    def __init__(self, tape: Tape, kept: set[int], before: dict[int, torch.Tensor] | None = None) -> None:
        self._tape, self._kept, self._before = tape, kept, before or {}
        self._memory: dict[int, torch.UntypedStorage] = {}

    @torch.no_grad()
    def play(self, numbers: Iterable[int]) -> _Player:
        last: dict[int, int] = {}
        numbers = list(numbers)
        for number in numbers:
            operation = self._tape.operations[number]
            last.update(dict.fromkeys(operation.reads | operation.writes, number))
        for number in numbers:
            operation = self._tape.operations[number]
            self._run(number, operation)
            for storage in operation.reads | operation.writes:
                if last[storage] == number and storage not in self._kept:
                    self._memory.pop(storage, None)
        return self

    def storage(self, number: int) -> torch.UntypedStorage:
        """A storage; one that nothing was written to holds anything, as it would after torch.empty."""
        if number not in self._memory:
            self._memory[number] = torch.UntypedStorage(self._tape.bytes_of[number])
        return self._memory[number]

    def tensor(self, view: View) -> torch.Tensor:
        """A tensor over its storage."""
        return torch.empty(0, dtype=view.dtype).set_(self.storage(view.storage), view.offset, view.shape, view.stride)

    def _run(self, number: int, operation: Operation) -> None:
        if operation.constant is not None:
            made: Any = operation.constant.clone()
        else:
            args, kwargs = tree_map(
                lambda leaf: self.tensor(leaf) if isinstance(leaf, View) else leaf, (operation.args, operation.kwargs)
            )
            if operation.random:
                torch.set_rng_state(self._before[number])
            with _default_dtype(operation.default_dtype):
                made = operation.function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(made) if torch.is_tensor(leaf)]
        # An operation either makes all that it returns, or nothing.
        for view, tensor in zip(operation.outputs, tensors, strict=False):
            fits = (
                tensor.stride() == view.stride
                and tensor.untyped_storage().nbytes() == self._tape.bytes_of[view.storage]
            )
            if fits and tensor.dtype == view.dtype and tensor.storage_offset() == view.offset:
                self._memory[view.storage] = tensor.untyped_storage()
            else:
                self.tensor(view).copy_(tensor)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    now = torch.get_default_dtype()
    if now == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(now)


@contextmanager
def _generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
