"""Storage of activation checkpoints from forward to backward: memory, disk, or slices over the ranks.

    forward     x, replicated     [ 0 | 1 | 2 | 3 ]      rank 2 keeps     [ 2 ] -> arena, host memory or disk
    backward    [ 2 ] -> all_gather -> x -> the block runs again

    group       ranks that hold the same activations, as those of a model-parallel group do: each keeps its part alone
    offload     the parts go to disk, or from an accelerator to the host's memory, instead of into the arena

The gather writes straight into what backward needs, and offloading passes through two buffers of constant size: there
is no buffer that grows with the model or with its depth. Gathers are not started ahead: which checkpoints are still
alive depends on each rank's garbage collector, so the ranks could gather different ones. Reading from disk is local,
and is started ahead. Source: Rajbhandari et al. 2020 (ZeRO), section 6.1: partitioned activation checkpointing.

Who runs what: the thread of the forward pass compares the inputs over the group, autograd's thread gathers, and the
file's thread reads and writes. All ranks of the group run the same checkpoints, so autograd asks for the same tensors
in the same order, and the gathers match.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from collectives import Communicator, even_counts

from ..digest import code
from ..errors import ConfigurationError, TrainingError
from ..job.agreement import check_everywhere
from ..job.objects import all_gather_object
from ..replicas.checksums import checksum
from ..replicas.start_check import check_settings_agree
from .arena import Arena, ArenaSlot
from .disk import ActivationFile, DiskSlot

_COMPARED = 16  # checkpoints whose values the ranks compare; afterwards only shapes
_SMALLEST = 1024
_BUFFER_MB = 8.0


class CheckpointStore:
    """Takes the inputs of checkpoints into one piece of memory, cut over a group, or elsewhere.

    group: a Communicator over ranks whose activations are the same. Each rank keeps 1 / ranks of a checkpoint, and
        they gather it before they run the block again; so they must run the same checkpoints, forward and backward.
    offload: a directory, in which a file without a name holds the checkpoints; or "cpu", for activations on an
        accelerator.
    smallest: bytes below which a tensor stays where it is.
    buffer_mb: MiB of each of the two buffers through which checkpoints go to disk.

    What is taken: tensors through which gradients flow. Others (masks, positions) and parameters stay as they are,
    since the model holds them anyway. A tensor that several checkpoints have is kept once.

    Shapes are compared over the group at every checkpoint, and values at the first 16 (with MPIDL_DEBUG=1 at all).

    With a group, collective over it. Raises ConfigurationError, or ModelMismatch if the ranks' settings differ.
    """

    def __init__(
        self,
        group: Communicator | None = None,
        offload: str | Path | None = None,
        *,
        smallest: int = _SMALLEST,
        buffer_mb: float = _BUFFER_MB,
    ) -> None:
        if group is not None and not isinstance(group, Communicator):
            raise ConfigurationError(f"group: got {group!r}; needs a collectives.Communicator")

        def make() -> ActivationFile | None:
            _check(offload, smallest, buffer_mb)
            return ActivationFile(Path(offload), int(buffer_mb * 2**20)) if offload not in (None, "cpu") else None  # type: ignore[arg-type]

        self._file = make() if group is None else check_everywhere(group, make)
        if group is not None:
            kind = offload if offload in (None, "cpu") else "disk"
            check_settings_agree(group, "CheckpointStore", {"smallest": smallest, "offload": kind})
        self._group = group if group is not None and group.size > 1 else None
        self._to_host = offload == "cpu"
        self._smallest = smallest
        self._arenas: dict[torch.device, Arena] = {}
        self._seen: Any = WeakTensorKeyDictionary()
        self._latest: Callable[[], _Call | None] = lambda: None
        self._compared = 0
        self._debugging = self._group is not None and self._group.is_debugging

    # ---- what is held -----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of checkpoints in memory now, this rank's parts, each in whole cache lines."""
        return sum(arena.used for arena in self._arenas.values())

    @property
    def peak(self) -> int:
        """The most bytes of checkpoints in memory at a time so far."""
        return sum(arena.peak for arena in self._arenas.values())

    @property
    def reserved(self) -> int:
        """Bytes of the memory that is kept for checkpoints from step to step."""
        return sum(arena.reserved for arena in self._arenas.values())

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of checkpoints in the file now."""
        return 0 if self._file is None else self._file.used

    @property
    def file_bytes(self) -> int:
        """Size of the file, which is that of the most checkpoints at a time."""
        return 0 if self._file is None else self._file.file_bytes

    # ---- a checkpoint -----------------------------------------------------------------------------------------

    @contextmanager
    def keeping(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Keeps what autograd saves of these tensors inside the block in this store. Collective over the group."""
        chosen = [t for t in tensors if self._takes(t)]
        if self._group is not None:
            self._agree(chosen)
        if not chosen:
            context: Any = nullcontext()
        else:
            call = _Call(self._latest)
            self._latest = weakref.ref(call)
            context = torch.autograd.graph.saved_tensors_hooks(lambda t: self._pack(t, call), _unpack)
        with context:
            yield

    def _takes(self, t: torch.Tensor) -> bool:
        is_stored = (
            type(t) is torch.Tensor
            and t.requires_grad
            and t.layout is torch.strided
            and t.numel() * t.element_size() >= self._smallest
            and not isinstance(t._base, torch.nn.Parameter)
        )
        if is_stored and self._to_host and t.device.type == "cpu":
            raise ConfigurationError(
                "offload: got 'cpu' for activations that are in the CPU's memory, where there is nothing to gain; "
                "needs a directory, to offload them to disk, or None"
            )
        return is_stored

    def _pack(self, t: torch.Tensor, call: _Call) -> _Record | torch.Tensor:
        if not self._takes(t):
            return t
        version, known = self._seen.get(t, (None, lambda: None))
        record = known()
        if record is None or version != t._version:
            record = _Record(t.detach(), self._group, self._put, call)
            self._seen[t] = (t._version, weakref.ref(record))
        return record

    def _put(self, part: torch.Tensor) -> ArenaSlot | DiskSlot:
        if self._file is not None:
            return self._file.put(part)
        device = torch.device("cpu") if self._to_host else part.device
        if device not in self._arenas:
            self._arenas[device] = Arena(device, pinned=self._to_host)
        return self._arenas[device].put(part)

    def _agree(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises TrainingError on every rank of the group unless all have the same tensors."""
        assert self._group is not None
        described = [f"{list(t.shape)} {t.dtype}, strides {list(t.stride())}" for t in tensors]
        values = 0
        if self._debugging or self._compared < _COMPARED:
            self._compared += 1
            values = code(repr([checksum(_flat(t.detach())[0]) for t in tensors]))
        everyone = np.empty((self._group.size, 2), np.int64)
        self._group.all_gather(everyone, np.array([code("; ".join(described)), values]))
        if (everyone == everyone[0]).all():
            return
        texts = all_gather_object(self._group, "; ".join(described) or "none")
        for rank, text in enumerate(texts):
            if (everyone[rank] != everyone[0]).any():
                how = f"rank 0 has {texts[0]}, rank {rank} has {text}"
                if text == texts[0]:
                    how = f"the values on ranks 0 and {rank} are not the same, in {text}"
                raise TrainingError(
                    f"checkpoint: the inputs differ over the group: {how}; they can be cut over ranks that hold the "
                    "same activations, as a model-parallel group's do, and not over data-parallel ranks"
                )


class _Call:
    """One call of a checkpoint. records: its tensors, in the order in which backward asks for them."""

    def __init__(self, before: Callable[[], _Call | None]) -> None:
        self.records: list[Callable[[], _Record | None]] = []
        self._before = before

    def load_before(self) -> None:
        """Begins to load what backward needs next: the tensors of the call before this one."""
        call = self._before()
        for where in [] if call is None else call.records:
            record = where()
            if record is not None:
                record.slot.load_ahead()


class _Record:
    """The record that autograd holds in place of a tensor."""

    def __init__(
        self,
        tensor: torch.Tensor,
        group: Communicator | None,
        put: Callable[[torch.Tensor], ArenaSlot | DiskSlot],
        call: _Call,
    ) -> None:
        flat, self._strides = _flat(tensor)
        self._shape, self._device = tensor.shape, tensor.device
        self._elements, self._group = flat.numel(), group
        if group is not None:
            counts = even_counts(flat.numel(), group.size)
            start = sum(counts[: group.rank])
            flat = flat[start : start + counts[group.rank]]
        self.slot = put(flat)
        self._call = call
        call.records.append(weakref.ref(self))

    def tensor(self) -> torch.Tensor:
        """The tensor, in memory of its own. Collective over the group."""
        flat = self._whole(self.slot.fetch())
        if self._call.records[-1]() is self:
            self._call.load_before()
        return flat.as_strided(self._shape, self._strides)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            if part.device != self._device:
                return part.to(self._device, non_blocking=True)
            return part if self.slot.fetches_copies else part.clone()
        part = part.to(self._device, non_blocking=True)
        whole = torch.empty(self._elements, dtype=part.dtype, device=self._device)
        self._group.all_gather(whole, part)
        return whole


def _unpack(kept: _Record | torch.Tensor) -> torch.Tensor:
    return kept.tensor() if isinstance(kept, _Record) else kept


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The elements, [n], in the order in which they lie in memory, and the strides by which to see them in shape.

    Where memory has gaps or is used several times (sliced, expanded) the elements are copied.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()


def _check(offload: Any, smallest: Any, buffer_mb: Any) -> None:
    """Raises ConfigurationError."""
    if offload is not None and not isinstance(offload, str | Path):
        raise ConfigurationError(f"offload: got {offload!r}; needs a directory, 'cpu' or None")
    if isinstance(smallest, bool) or not isinstance(smallest, int) or smallest < 1:
        raise ConfigurationError(f"smallest: got {smallest!r}; needs a number of bytes of at least 1")
    if isinstance(buffer_mb, bool) or not isinstance(buffer_mb, int | float) or not 2**-20 <= buffer_mb < 2**20:
        raise ConfigurationError(f"buffer_mb: got {buffer_mb!r}; needs a size from 2^-20 to below 2^20, in MiB")
