"""What the ranks of a group set up for their GPUs, at the first operation there, and the way operations take."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..buffers import Buffer, address, unowned
from ..coalesced import PACKED_BYTES, Item, Packed
from ..errors import ArgumentError
from ..reduction import Reduction
from . import driver
from .device import Device, Event
from .staged import Staged

if TYPE_CHECKING:
    from ..dispatch import Dispatch

Array = np.ndarray[Any, Any]


class GpuGroup:
    """One group's GPUs, as seen by one of its ranks. dispatch: its operations on host memory. Collective."""

    def __init__(self, dispatch: Dispatch, index: int) -> None:
        self._device, self._rank = driver.open_device(index), dispatch.rank
        self._stream = self._device.stream()  # for what is none of a way's own
        self._staged = Staged(dispatch, self._device)
        self._held: deque[tuple[Event, Any]] = deque()
        self._packing: Array | None = None

    def run(self, operation: str, algorithm: str, arguments: tuple[Any, ...], begin: Event) -> Event:
        """Carries an operation out after an event; gives that of its end. Collective.

        arguments: as `Dispatch` has them.
        """
        self._let_go()
        return self._staged.run(operation, algorithm, arguments, begin)

    def run_batches(self, batches: Sequence[tuple[Any, ...]], begin: Event) -> Event:
        """The same for lists of arrays; each: as the arguments of `Dispatch.batch`. Collective."""
        self._let_go()
        for given in batches:
            begin = self._batch(begin, *given)
        return begin

    def _batch(
        self,
        begin: Event,
        operation: str,
        algorithm: str,
        items: Sequence[Item],
        root: int,
        op: Reduction | None,
        written: bool,
    ) -> Event:
        """One batch, packed on the GPU if it has several arrays."""

        def run(whole: Buffer, own: Buffer | None, counts: Sequence[int], begin: Event) -> Event:
            given = {
                "all_reduce": (whole, op),
                "reduce": (whole, root, op),
                "broadcast": (whole, root),
                "reduce_scatter": (own, whole, op, counts),
                "all_gather": (whole, own, counts),
            }[operation]
            return self._staged.run(operation, algorithm, given, begin)

        if len(items) == 1:
            return run(items[0].whole, items[0].own, items[0].counts, begin)
        packed = Packed(items, self._packing_memory(), self._rank if len(items[0].counts) > 1 else 0, self._copy)
        self._stream.wait(begin)
        if operation == "all_gather":
            packed.pack_own()
        else:
            packed.pack()
        self._stream.wait(run(packed.whole, packed.own, packed.counts, self._stream.record()))
        if operation == "reduce_scatter":
            packed.unpack_own()
        elif written:
            packed.unpack()
        return self._stream.record()

    def hold(self, end: Event, arrays: Any) -> None:
        """Keeps arrays alive until an event, and a little longer."""
        self._held.append((end, arrays))

    def check(self, operation: str, index: int) -> None:
        """Raises ArgumentError for an array on another GPU."""
        if index != self._device.index:
            raise ArgumentError(
                f"{operation}: got an array on GPU {index}; needs one on GPU {self._device.index}, which this "
                "communicator works with since its first operation on a GPU"
            )

    def close(self) -> None:
        """Waits for what is under way here, and gives back what the driver has given."""
        for end, _ in self._held:
            end.wait()
        self._held.clear()
        self._staged.close()
        self._packing = None

    def _let_go(self) -> None:
        while self._held and self._held[0][0].is_done():
            self._held.popleft()

    def _copy(self, target: Array, source: Array) -> None:
        self._device.copy(address(target), address(source), source.nbytes, self._stream)

    def _packing_memory(self) -> Array:
        if self._packing is None:
            place = self._device.allocate(PACKED_BYTES)
            self._packing = unowned(place, PACKED_BYTES, np.dtype(np.uint8))
            weakref.finalize(self, _free, self._device, place).atexit = False
        return self._packing


def _free(device: Device, place: int) -> None:
    with device.current():
        device.synchronize()
        device.free(place)
