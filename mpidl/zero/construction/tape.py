"""Tape: the recorded operations that give a model its values, played back for one tensor at a time.

    empty -> s0   uniform_(s0)   empty -> s1   uniform_(s1)   normal_(s0)   s0[0].zero_()
                                                              '---- the cone of s0 -----'

The cone of a storage is its dependency closure: the operations that its final values depend on, without those that a
later operation overwrites whole. Random operations draw from one stream of numbers, so all of them run, in their order;
of those in no cone only the numbers drawn matter. A cone runs when its last random operation is reached; before each of
its earlier random operations the generator gets the state with which that one began. So a random operation runs about
once, and memory holds one cone's tensors, and the generator's state before each random operation, 5 KB.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...digest import digest
from ...replicas.checksums import checksum

Start = torch.Tensor | int | None


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor of the recorded construction.

    storage: its number.
    offset: in elements.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> RecordedTensor:
        """The view of a tensor with strides, in the storage of this number."""
        return cls(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in memory that holds the storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass
class RecordedOperation:
    """One call of a torch operator.

    args, kwargs: as it was called, with RecordedTensors in place of recorded tensors.
    outputs: tensors in storage that it made.
    reads, writes: storages; what it makes counts as written.
    overwrites: those that it overwrites completely without reading them.
    default_dtype: torch's at that time.
    random: it draws from a generator, which continues after random operation `start` (its number on the tape), or
        begins with the state `start`.
    """

    function: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[RecordedTensor, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    overwrites: frozenset[int] = frozenset()
    default_dtype: torch.dtype = torch.float32
    random: bool = False
    start: Start = None


class _Memory(dict[int, torch.UntypedStorage]):
    """Storages by number. One that nothing was written to holds anything, as it would after torch.empty."""

    def __init__(self, bytes_of: Sequence[int]) -> None:
        self._bytes_of = bytes_of

    def __missing__(self, number: int) -> torch.UntypedStorage:
        self[number] = torch.UntypedStorage(self._bytes_of[number])
        return self[number]


class Tape:
    """Operations in the order of the construction. bytes_of: the size of each storage.

    first: the default generator's state before, end: the number of the last operation that drew from it, None if there
        is none or if it was seeded anew after it.
    reads_random_values: the construction depends on values that are random.
    """

    def __init__(self) -> None:
        self.operations: list[RecordedOperation] = []
        self.bytes_of: list[int] = []
        self.first: torch.Tensor | None = None
        self.end: int | None = None
        self.after_end: torch.Tensor | None = None
        self.reads_random_values = False
        self._writers: dict[int, list[int]] = {}
        self.forget()

    def add(self, operation: RecordedOperation) -> int:
        """Appends it; returns its number."""
        number = len(self.operations)
        self.operations.append(operation)
        for storage in operation.writes:
            self._writers.setdefault(storage, []).append(number)
        return number

    def digest(self) -> str:
        """Returns a text that is equal for equal constructions.

        Where random numbers start counts only if one was read.
        """
        lines = []
        for operation in self.operations:
            start = operation.start
            seed = checksum(start) if isinstance(start, torch.Tensor) and self.reads_random_values else b""
            written = tree_map(
                lambda leaf: checksum(leaf) if torch.is_tensor(leaf) else leaf, (operation.args, operation.kwargs)
            )
            lines.append(repr((str(operation.function), written, isinstance(start, torch.Tensor), seed)))
        return digest("\n".join(lines)).hex()

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

    def value(self, view: RecordedTensor) -> torch.Tensor:
        """A tensor's value at the end of the tape. If random numbers went into it, all drawn until then are drawn."""
        cone = self.cone([view.storage])
        with torch.random.fork_rng(devices=[]):
            if self._last_random(cone) is not None:
                self.reads_random_values = True
                self._draw({}, lambda *_: None)
            return view.over(self._run(cone, view.storage)[view.storage])

    def play(
        self, storages: Iterable[int], deliver: Callable[[int, torch.UntypedStorage], None], all_ranks: Iterable[int]
    ) -> None:
        """Hands each of the storages over, filled, and keeps none of them; moves no generator.

        all_ranks: what any rank wants. If it is random, then `after_end` is set to the state in which the default
        generator would be after the construction, where `end` says so.
        """
        due: dict[int, dict[int, list[int]]] = {}
        with torch.random.fork_rng(devices=[]):
            for storage in dict.fromkeys(storages):
                cone = self.cone([storage])
                last = self._last_random(cone)
                if last is None:
                    deliver(storage, self._run(cone, storage)[storage])
                else:
                    due.setdefault(last, {})[storage] = cone
            if any(self._last_random(self.cone([storage])) is not None for storage in dict.fromkeys(all_ranks)):
                self._draw(due, deliver)
                self.after_end = None if self.end is None else self._after[self.end]
        self.forget()

    def forget(self) -> None:
        """Gives up the generator's states before and after each random operation that was run."""
        self._before: dict[int, torch.Tensor] = {}
        self._after: dict[int, torch.Tensor] = {}
        self._drawn = 0

    def _last_random(self, cone: Iterable[int]) -> int | None:
        return max((number for number in cone if self.operations[number].random), default=None)

    def _draw(
        self, due: Mapping[int, Mapping[int, list[int]]], deliver: Callable[[int, torch.UntypedStorage], None]
    ) -> None:
        """Runs all random operations from where it ended before.

        due: by random operation, storages and their cones, of which it is the last one; they run in its place.
        """
        for number in range(self._drawn, len(self.operations)):
            operation = self.operations[number]
            if operation.random:
                start = operation.start
                self._before[number] = start if isinstance(start, torch.Tensor) else self._after[start]  # type: ignore[index]
                for storage, cone in due.get(number, {}).items():
                    deliver(storage, self._run(cone, storage)[storage])
                if number not in due:
                    self._run([*self.cone(operation.reads, number), number])
                self._after[number] = torch.get_rng_state()
        self._drawn = len(self.operations)

    @torch.no_grad()
    def _run(self, numbers: list[int], kept: int | None = None) -> _Memory:
        """Runs operations in memory that is freed after its last use, but for that of `kept`."""
        memory = _Memory(self.bytes_of)
        used = {number: self.operations[number].reads | self.operations[number].writes for number in numbers}
        last = {storage: number for number in numbers for storage in used[number]}
        default_dtype = torch.get_default_dtype()
        try:
            for number in numbers:
                self._call(number, memory)
                for storage in used[number]:
                    if last[storage] == number and storage != kept:
                        memory.pop(storage, None)
        finally:
            torch.set_default_dtype(default_dtype)
        return memory

    def _call(self, number: int, memory: _Memory) -> None:
        operation = self.operations[number]
        args, kwargs = tree_map(
            lambda leaf: leaf.over(memory[leaf.storage]) if isinstance(leaf, RecordedTensor) else leaf,
            (operation.args, operation.kwargs),
        )
        if operation.random:
            torch.set_rng_state(self._before[number])
        torch.set_default_dtype(operation.default_dtype)
        made = operation.function(*args, **kwargs)
        # An operation either makes all that it returns, or nothing.
        for view, tensor in zip(operation.outputs, tree_leaves(made), strict=False):
            same_bytes = tensor.untyped_storage().nbytes() == self.bytes_of[view.storage]
            if same_bytes and RecordedTensor.of(tensor, view.storage) == view:
                memory[view.storage] = tensor.untyped_storage()
            else:
                view.over(memory[view.storage]).copy_(tensor)
