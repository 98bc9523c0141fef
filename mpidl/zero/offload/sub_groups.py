"""Sub-groups: parts of slices that are read, stepped on and written together, by an inner optimizer of their own.

    slices       |  wte                     | bias | qkv          | ...
    chunks       |  0       |  1       |  2 |   3  |  4     |  5  | ...
    sub-groups   [    0     ][    1    ][     2     ][  3  ][ ...         each at most a third of the buffer

An optimizer that updates every element by itself does not notice that a parameter is cut, if the kernels of the CPU
have whole vectors on both sides of a cut. What needs norms of whole parameters is given whole slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...optim.elementwise_state import note_whole_size, whole_size
from ...partial_steps import bring_back
from .offloaded_slice import Gradient, OffloadedSlice
from .storage import Extent, Storage, arrange, merged

_VECTORS = 256  # elements: a multiple of what any vector register holds, and of the blocks of 8-bit states
MASTER = ""


@dataclass(eq=False)
class SliceRange:
    """Elements start .. stop of a slice, in parameter group `group`.

    states: the dtypes of the tensors of its size that the optimizer keeps, as far as known.
    present: those that are in the storage now.
    keys: of the whole state, in order.
    """

    part: OffloadedSlice
    group: int
    start: int
    stop: int
    states: dict[str, torch.dtype]
    present: set[str] = field(default_factory=set)
    keys: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameter = torch.nn.Parameter(self.values, requires_grad=self.part.values.requires_grad)
        note_whole_size(self.parameter, whole_size(self.part.values))

    @property
    def values(self) -> torch.Tensor:
        """The chunk's part of the slice's values, in the storage or in memory."""
        return self.part.values.detach()[self.start : self.stop]

    @property
    def bytes_each(self) -> int:
        """Bytes in the storage for each element."""
        master = self.part.values.dtype.itemsize if self.part.in_file else 0
        return master + sum(dtype.itemsize for dtype in self.states.values())


def sub_groups_of(wholes: Sequence[SliceRange], budget: float, sizes: Sequence[int] | None) -> list[list[SliceRange]]:
    """Chunks of at most `budget` bytes together, in order.

    wholes: whole slices.
    sizes: if they must stay whole, the elements by which each counts, the same on every rank.
    """
    groups: list[list[SliceRange]] = [[]]
    left_bytes = budget
    for number, whole in enumerate(wholes):
        each = whole.bytes_each
        if sizes is not None:
            if each * sizes[number] > left_bytes and groups[-1]:
                groups.append([])
                left_bytes = budget
            groups[-1].append(whole)
            left_bytes -= each * sizes[number]
            continue
        start = 0
        while True:
            left = whole.stop - start
            fits = left if each * left <= left_bytes else int(left_bytes // each) // _VECTORS * _VECTORS
            if left and not fits and groups[-1]:
                groups.append([])
                left_bytes = budget
                continue
            count = min(left, max(fits, _VECTORS))
            groups[-1].append(SliceRange(whole.part, whole.group, start, start + count, dict(whole.states)))
            left_bytes -= each * count
            start += count
            if start >= whole.stop:
                break
    return [chunks for chunks in groups if chunks]


class SubGroup:
    """Chunks and their inner optimizer. storage: where states and masters lie; None: they stay in memory.

    make: the inner optimizer from parameter groups.
    settings: of every parameter group.
    """

    def __init__(
        self,
        chunks: Sequence[SliceRange],
        storage: Storage | None,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        self.chunks, self._storage = list(chunks), storage
        members: dict[int, list[torch.nn.Parameter]] = {}
        for chunk in chunks:
            members.setdefault(chunk.group, []).append(chunk.parameter)
        self._numbers = sorted(members)
        self.inner = make([{**settings[number], "params": members[number]} for number in self._numbers])
        self._live: list[SliceRange] = []
        self._gradients: Mapping[OffloadedSlice, Gradient] = {}
        self._places: list[tuple[SliceRange, str, Extent, int]] = []
        self.nbytes = 0
        self.prepare(
            settings, {chunk.part: Gradient(chunk.part.values) for chunk in chunks}
        )  # makes sure of room in the storage
        for chunk in chunks:  # some optimizers have state before any step
            self.store_state(chunk)

    def prepare(self, settings: Sequence[Mapping[str, Any]], gradients: Mapping[OffloadedSlice, Gradient]) -> bool:
        """Takes settings and gradients for the next step; returns whether any chunk has a gradient."""
        self._gradients = gradients
        for number, group in zip(self._numbers, self.inner.param_groups, strict=True):
            group.update(settings[number])
        self._live = [chunk for chunk in self.chunks if chunk.part in gradients]
        self._places, self.nbytes = [], 0
        if self._storage is not None:
            found = []
            for chunk in self._live:
                named = {MASTER: chunk.part.values.dtype} if chunk.part.in_file else {}
                for name, dtype in {**named, **chunk.states}.items():
                    extent = self._storage.extent(chunk.part, name, dtype, chunk.start, chunk.stop)
                    found.append((chunk, name, extent))
            found.sort(key=lambda entry: entry[2])
            positions, self.nbytes = arrange([extent for _, _, extent in found])
            self._places = [(*entry, position) for entry, position in zip(found, positions, strict=True)]
        return bool(self._live)

    def read(self, buffer: torch.Tensor) -> None:
        """Reads masters and states into the buffer."""
        if self._storage is not None:
            self._storage.read(merged(self._present_extents(), to_write=False), buffer)

    def write(self, buffer: torch.Tensor) -> None:
        """Writes masters and states from the buffer."""
        if self._storage is not None:
            self._storage.write(merged(self._present_extents(), to_write=True), buffer)

    def _present_extents(self) -> list[tuple[Extent, int]]:
        return [(e, position) for chunk, name, e, position in self._places if name == MASTER or name in chunk.present]

    @torch.no_grad()
    def step(self, buffer: torch.Tensor) -> None:
        """Runs the inner optimizer's step on the buffer or on memory. Only computes, so it may run in a thread."""
        views: dict[SliceRange, dict[str, torch.Tensor]] = {chunk: {} for chunk in self._live}
        for chunk, name, extent, position in self._places:
            dtype = chunk.part.values.dtype if name == MASTER else chunk.states[name]
            views[chunk][name] = buffer[position : position + extent.nbytes].view(dtype)
        for chunk in self._live:
            own, parameter = views[chunk], chunk.parameter
            if MASTER in own:
                parameter.data = own[MASTER]
            if self._storage is not None and chunk.keys:
                kept = self.inner.state[parameter]
                self.inner.state[parameter] = {k: own[k] if k in chunk.present else kept[k] for k in chunk.keys}
            parameter.grad = self._gradients[chunk.part].range(chunk.start, chunk.stop).to(parameter.dtype)
        self.inner.step()
        self._gradients = {}
        for chunk in self._live:
            chunk.parameter.grad = None
            bring_back(chunk.parameter, views[chunk].get(MASTER, chunk.values))
            chunk.part.deliver(chunk.start, chunk.stop, chunk.parameter.detach())
            self.store_state(chunk, views[chunk])

    def store_state(self, chunk: SliceRange, places: Mapping[str, torch.Tensor] | None = None) -> None:
        """Takes state tensors of the chunk's size out of memory: to their places in the buffer, or to the storage."""
        if self._storage is None:
            return
        entry = self.inner.state.get(chunk.parameter, {})
        large = {k: v for k, v in entry.items() if torch.is_tensor(v) and v.shape == (chunk.stop - chunk.start,)}
        for name, value in large.items():
            place = (places or {}).get(name)
            if place is None or place.dtype != value.dtype:  # not foreseen, or not in a step
                chunk.states[name] = value.dtype
                place = self._storage.tensor(chunk.part, name, value.dtype)[chunk.start : chunk.stop]
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        chunk.present, chunk.keys = set(large), list(entry)
        if entry:
            self.inner.state[chunk.parameter] = {k: v for k, v in entry.items() if k not in large}
        if chunk.part.in_file:
            chunk.parameter.data = torch.empty(0, dtype=chunk.parameter.dtype)
