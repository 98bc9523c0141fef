"""Reader of ranges of logical tensors from a checkpoint's files; reads only the bytes that are asked for.

    wanted    [      low .................. high      ]      of the flattened tensor
    slices    [ rank00000 | rank00001   | rank00002   ]      each read from where low..high overlaps it

Memory of the same dtype on the CPU is read into directly, other memory through a buffer of one block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from . import folder, index, parts
from .index import Index, StoredSlice
from .matching import Request
from .schema import BLOCK
from .tensorfile import TensorFile, as_bytes

_MOST_OPEN = 64  # files; a process may not open very many


class Reader:
    """Reads a checkpoint's tensors. A context manager, inside which up to 64 files stay open."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._files: dict[str, TensorFile] = {}
        self._opened: deque[str] = deque()
        self._stack = ExitStack()
        self._buffer = memoryview(bytearray())  # one block, once there is something to check or to convert

    def open(self, name: str, low: int, high: int) -> None:
        """Opens the files that hold elements low..high of a tensor, and sees that they are those of the index."""
        for _ in self._overlaps(name, low, high):
            pass

    def check(self, name: str, low: int, high: int) -> None:
        """Reads the blocks that begin in elements low..high of a tensor, and compares their checksums.

        So ranks that share out the elements read every block once.
        """
        itemsize = self.index.tensors[name].dtype.itemsize
        for file, part, start, stop in self._overlaps(name, low, high):
            first, last = (start - part.start) * itemsize, (stop - part.start) * itemsize
            file.check(part.key, part.crc32, first, last, self._block())

    def read(self, names: Sequence[str], low: int, high: int, target: torch.Tensor) -> None:
        """Fills a tensor of high - low elements with elements low..high, converted; of several names with the mean."""
        if target.numel() == 0:
            return
        if not target.is_contiguous():
            whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            self.read(names, low, high, whole)
            target.copy_(whole)
            return
        flat = target.detach().view(-1)
        if len(names) == 1:
            self._read(names[0], low, high, flat)
            return
        total = torch.zeros(high - low, dtype=torch.promote_types(flat.dtype, torch.float64))
        one = torch.empty(high - low, dtype=self.index.tensors[names[0]].dtype)
        for name in names:
            self._read(name, low, high, one)
            total += one
        flat.copy_(total / len(names))

    def fill(self, requests: Iterable[Request], after_each: Callable[[], None] = lambda: None) -> None:
        """Reads all requests of a plan."""
        for request in requests:
            self.read(request.names, request.low, request.high, request.target)
            after_each()

    def tensor(self, name: str) -> torch.Tensor:
        """Reads a whole tensor, to the CPU."""
        entry = self.index.tensors[name]
        made = torch.empty(entry.shape, dtype=entry.dtype)
        self.read([name], 0, entry.count, made)
        return made

    def chunks(self, name: str, step: int) -> Iterator[torch.Tensor]:
        """Yields a whole tensor, flat, in consecutive pieces of at most `step` elements, each checked."""
        entry = self.index.tensors[name]
        for low in range(0, entry.count, step):
            high = min(low + step, entry.count)
            self.check(name, low, high)
            piece = torch.empty(high - low, dtype=entry.dtype)
            self._read(name, low, high, piece)
            yield piece

    def _read(self, name: str, low: int, high: int, flat: torch.Tensor) -> None:
        dtype = self.index.tensors[name].dtype
        direct = flat.dtype == dtype and flat.device.type == "cpu"
        for file, part, start, stop in self._overlaps(name, low, high):
            at = file.spans[part.key].begin + (start - part.start) * dtype.itemsize
            if direct:
                file.read_into(as_bytes(flat[start - low : stop - low]), at)
                continue
            step = BLOCK // dtype.itemsize
            for first in range(start, stop, step):
                count = min(step, stop - first)
                block = self._block()[: count * dtype.itemsize]
                file.read_into(block, at + (first - start) * dtype.itemsize)
                flat[first - low : first - low + count].copy_(torch.frombuffer(block, dtype=dtype))

    def _overlaps(self, name: str, low: int, high: int) -> Iterator[tuple[TensorFile, StoredSlice, int, int]]:
        entry = self.index.tensors[name]
        for part in entry.slices:
            start, stop = max(low, part.start), min(high, part.stop)
            if start < stop:
                yield self._file(part, entry.dtype), part, start, stop

    def _file(self, part: StoredSlice, dtype: torch.dtype) -> TensorFile:
        if part.file not in self._files:
            path = self.index.path / part.file
            file = self._stack.enter_context(TensorFile(path))
            said = self.index.files[part.file]
            if file.bytes != said["bytes"]:
                raise CheckpointError(f"{path}: is cut short or damaged: has {file.bytes} bytes, needs {said['bytes']}")
            if said.get("header") not in (None, file.header):
                raise CheckpointError(f"{path}: is not the file that the index tells of: its header differs")
            self._files[part.file] = file
        if part.file not in self._opened:
            if len(self._opened) >= _MOST_OPEN:
                self._files[self._opened.popleft()].close()
            self._opened.append(part.file)
        file = self._files[part.file]
        span = file.spans.get(part.key)
        size = (part.stop - part.start) * dtype.itemsize
        if span is None or span.dtype != dtype or span.end - span.begin != size:
            raise CheckpointError(f"{file.path}: does not hold {part.key} as the index tells")
        return file

    def _block(self) -> memoryview:
        if not len(self._buffer):
            self._buffer = memoryview(bytearray(BLOCK))
        return self._buffer

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *of: Any) -> None:
        self._stack.__exit__(*of)


def verify(path: str | Path) -> Index:
    """Reads all bytes of a checkpoint's directory; needs one process. Returns its index.

    Raises CheckpointError for the first file that is missing, cut short or damaged.
    """
    content = index.read(folder.path_of(path))
    folder.check_files(content)
    for each in parts.contents(content).values():
        with Reader(each) as reader:
            for name, entry in each.tensors.items():
                reader.check(name, 0, entry.count)
    return content
