"""State of every slice as a mapping, as `torch.optim.Optimizer.state` is, also of slices that lie in a storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ...optim.elementwise_state import saved_state
from .offloaded_slice import OffloadedSlice
from .storage import Storage
from .sub_groups import SliceRange, SubGroup


class StateMapping(MutableMapping[torch.Tensor, dict[str, Any]]):
    """Mapping from `OffloadedSlice.values` to its state. Tensors of the storage are read when they are used.

    wait_for_update: called first, so that no thread changes the state meanwhile.
    """

    def __init__(self, storage: Storage | None, wait_for_update: Callable[[], None]) -> None:
        self._storage, self._wait_for_update = storage, wait_for_update
        self._of: dict[torch.Tensor, tuple[OffloadedSlice, list[tuple[SubGroup, SliceRange]]]] = {}

    def add(self, group: SubGroup) -> None:
        """Adds a sub-group's chunks."""
        for chunk in group.chunks:
            self._of.setdefault(chunk.part.values, (chunk.part, []))[1].append((group, chunk))

    def __getitem__(self, values: torch.Tensor) -> dict[str, Any]:
        self._wait_for_update()
        part, homes = self._of[values]
        if hasattr(homes[0][0].inner, "saved_state"):
            return _joined([_in_fp32(part, group, chunk, self._storage) for group, chunk in homes])
        group, first = homes[0]
        entry = group.inner.state.get(first.parameter, {})
        if self._storage is None:
            if not entry:
                raise KeyError("no state yet")
            return entry
        if not first.keys:
            raise KeyError("no state yet")
        self._storage.forget()  # of the entries that were read before this one
        large = {name: self._storage.tensor(part, name, first.states[name]) for name in first.present}
        return {name: large[name] if name in large else entry[name] for name in first.keys}

    def allocate(self, values: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a state of a slice's size, to be written before it is set: in the storage, if there is one."""
        if self._storage is None or hasattr(self._of[values][1][0][0].inner, "saved_state"):
            return torch.empty(values.shape, dtype=dtype)  # of the latter, to be encoded when it is set
        return self._storage.tensor(self._of[values][0], name, dtype)

    def __setitem__(self, values: torch.Tensor, entry: Mapping[str, Any]) -> None:
        self._wait_for_update()
        for group, chunk in self._of[values][1]:
            own = {}
            for name, value in entry.items():
                if torch.is_tensor(value) and value.shape == values.shape:
                    own[name] = value[chunk.start : chunk.stop] if self._storage is not None else value
                else:
                    own[name] = value.clone() if torch.is_tensor(value) else value
            saved_state(group.inner)[chunk.parameter] = own
            group.store_state(chunk)

    def __delitem__(self, values: torch.Tensor) -> None:
        for group, chunk in self._of[values][1]:
            group.inner.state.pop(chunk.parameter, None)
            chunk.present, chunk.keys = set(), []

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (values for values in self._of if self.get(values) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _in_fp32(part: OffloadedSlice, group: SubGroup, chunk: SliceRange, storage: Storage | None) -> dict[str, Any]:
    """The state of a chunk as it is saved, of an optimizer that keeps another form."""
    entry = group.inner.state.get(chunk.parameter, {})
    if not entry and not chunk.keys:
        raise KeyError("no state yet")
    if storage is not None:
        storage.forget()
        own = slice(chunk.start, chunk.stop)
        large = {name: storage.tensor(part, name, chunk.states[name])[own] for name in chunk.present}
        entry = {
            name: large[name] if name in large else entry[name] for name in chunk.keys
        }  # in one order on all ranks
    inner: Any = group.inner
    made: dict[str, Any] = inner.to_fp32(entry)
    return made


def _joined(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a slice from those of its chunks."""
    first = entries[0]
    if len(entries) == 1:
        return first
    return {
        name: torch.cat([entry[name] for entry in entries]) if torch.is_tensor(value) and value.dim() else value
        for name, value in first.items()
    }
