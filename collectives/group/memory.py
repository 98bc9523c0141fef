"""Memory of a group of ranks: arrays in symmetric memory, arrays that are one for a node, and memory without pages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.cuda.arrays import gpu_index
from ..backends.cuda.pages import DevicePages
from ..base import arguments, buffers
from ..errors import OperationError
from ..memory.pages import Pages
from ..memory.shared_memory import SharedMemory
from ..runtime.positions import words
from .ordered_group import OrderedGroup


class GroupMemory(OrderedGroup):
    """A group that allocates memory in which its ranks reach each other."""

    def empty(self, shape: int | Sequence[int], dtype: Any, *, device: Any = "cpu") -> Any:
        """An uninitialised array in symmetric memory: the node's other ranks reach it without a copy of their own.

        A torch tensor for a torch dtype, else a numpy array; freed like any other. Collective: every rank makes the
        same calls in the same order, with the same dtype. Where the node cannot share memory it is an ordinary array.
        device: as torch has it; on a GPU ("cuda", "cuda:1") it is a torch or cupy array.
        """
        return self._allocate("empty", shape, dtype, device, shared=False)

    def shared(self, shape: int | Sequence[int], dtype: Any, *, device: Any = "cpu") -> Any:
        """An uninitialised array that is the same memory on all ranks of the node; otherwise like `empty`.

        For the output of all_gather: each rank writes its part in place, and to gather is only to wait. Where the ranks
        of some node cannot share memory every rank of the group has an array of its own, and the same all_gather sends
        messages. Reductions refuse such an array, as all ranks' contributions would be one.
        """
        return self._allocate("shared", shape, dtype, device, shared=True)

    def pages(self, nbytes: int, *, shared: bool = True, device: Any = "cpu") -> Pages | DevicePages:
        """Allocates addresses without pages; `reserve` brings pages, `discard` frees them. Collective.

        shared: the same memory on all ranks of the node, as of `shared`, where those of every node can share it. A rank
        that writes to shared pages without `reserve` may be killed when memory runs out.
        device: as torch has it; on a GPU each rank has its own, in which addresses change (`backends.cuda.pages`).
        """
        if gpu_index("pages", device) is not None:
            return DevicePages(device)
        size = arguments.elements("pages: nbytes", nbytes)
        made: list[SharedMemory] = []
        self._calls.forget()  # as for any new memory

        def task() -> None:
            kind = buffers.describe(np.uint8)
            memory = self._dispatch.allocate(size, kind, shared=True, reserved=False) if shared else None
            if memory is not None:
                made.append(memory)

        self._issuer.issue("pages", task, words("shared" if shared else "private"), async_op=False)
        return Pages(made[0], made[0].file) if made else Pages.private(size)

    def is_shared(self, array: Any) -> bool:
        """Returns whether an array is from `shared`, and one memory for all ranks of the node indeed."""
        return self._dispatch.is_shared(buffers.inspect(array, "is_shared", writable=False).address)

    def _allocate(self, operation: str, shape: int | Sequence[int], dtype: Any, device: Any, *, shared: bool) -> Any:
        kind = buffers.describe(dtype)
        elements = arguments.elements(f"{operation}: shape", shape)
        index = gpu_index(operation, device)
        of_dtype = f"of {kind.name}"
        made: list[Any] = []
        self._calls.forget()  # an array that is freed may have had an address that is now of this memory

        def on_gpu() -> None:
            assert index is not None
            with contextlib.suppress(MemoryError):
                nbytes = elements * kind.itemsize
                made.append(self._dispatch.allocate_on_gpu(index, nbytes, kind, shared=shared))

        if index is not None:
            self._issuer.issue(operation, on_gpu, words(of_dtype), async_op=False)
            if not made:
                raise OperationError(f"{operation}: a GPU of this group has no room for {elements} of {kind.name}")
            sizes = (shape,) if isinstance(shape, int) else tuple(shape)
            return self._dispatch.gpu.group(index).array(made[0], sizes, dtype)

        def task() -> None:
            memory = self._dispatch.allocate(elements * kind.itemsize, kind, shared=shared)
            if memory is not None:
                made.append(buffers.over(memory, memory.offset(self.local_rank), shape, dtype))

        self._issuer.issue(operation, task, words(of_dtype), async_op=False)
        return made[0] if made else buffers.empty(shape, dtype)
