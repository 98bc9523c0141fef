"""Reads ranges of logical tensors from a checkpoint's files, and no other bytes.

    wanted    [      low .................. high      ]      of the flattened tensor, or of a cut of it
    slices    [ rank00000 | rank00001   | rank00002   ]      each read from where low..high overlaps it

Long runs of elements that both have side by side are read into memory of the same dtype on the CPU directly, into other
memory through a buffer of one block. Of short ones, as of columns, many are read at once and copied to their indices.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from ..mesh.placement import Cut
from . import cuts, folder, index, parts
from .index import Index, StoredSlice
from .matching import Request
from .schema import BLOCK
from .tensorfile import TensorFile, as_bytes

MOST_OPEN = 64  # files; a process may not open very many
_LONG = 64 << 10  # bytes of a run that is read by itself, and of a gap that is not read
_AT_ONCE = 1 << 18  # elements of short runs, with what lies between them
Overlap = tuple[TensorFile, StoredSlice, Any, Any, Any]  # places in the cut, places in the slice, lengths


class CheckpointReader:
    """Reads a checkpoint's tensors. A context manager, inside which up to 64 files stay open."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._files: dict[str, TensorFile] = {}
        self._opened: deque[str] = deque()
        self._stack = ExitStack()
        self._buffer = memoryview(bytearray())  # one block, once there is something to check or to convert

    def open(self, name: str, cut: Cut, low: int, high: int) -> None:
        """Opens the files that hold elements low..high of a cut, and sees that they are those of the index."""
        for _ in self._overlaps(name, cut, low, high):
            pass

    def check(self, name: str, cut: Cut, low: int, high: int) -> None:
        """Reads the blocks that begin in elements low..high of a cut, and compares their checksums.

        So ranks that share out the elements read every block once.
        """
        itemsize = self.index.tensors[name].dtype.itemsize
        for file, part, _, at, length in self._overlaps(name, cut, low, high):
            first, last = -(-at * itemsize // BLOCK), -(-(at + length) * itemsize // BLOCK)
            for begin, end in zip(first[first < last].tolist(), last[first < last].tolist(), strict=True):
                file.check(part.key, part.crc32, range(begin, end), self._block())

    def read(
        self, names: Sequence[str], cut: Cut, low: int, high: int, target: torch.Tensor, ranks: int | None = None
    ) -> None:
        """Fills a tensor of high - low elements with elements low..high of a cut, converted.

        names: of several the mean.
        ranks: see `Request`.
        """
        if target.numel() == 0:
            return
        if not target.is_contiguous():
            whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            self.read(names, cut, low, high, whole, ranks)
            target.copy_(whole)
            return
        flat = target.detach().view(-1)
        over = len(names) if ranks is None else ranks
        if over == 1:
            self._read(names[0], cut, low, high, flat)
            return
        total = torch.zeros(high - low, dtype=torch.promote_types(flat.dtype, torch.float64))
        one = torch.empty(high - low, dtype=self.index.tensors[names[0]].dtype)
        for name in names:
            self._read(name, cut, low, high, one)
            total += one
        flat.copy_(total / over)

    def fill(self, requests: Iterable[Request], after_each: Callable[[], None] = lambda: None) -> None:
        """Reads all requests of a plan."""
        for request in requests:
            self.read(request.names, request.cut, request.low, request.high, request.target, request.ranks)
            after_each()

    def tensor(self, name: str) -> torch.Tensor:
        """Reads a whole tensor, to the CPU."""
        entry = self.index.tensors[name]
        made = torch.empty(entry.shape, dtype=entry.dtype)
        self.read([name], cuts.whole(entry.shape), 0, entry.count, made)
        return made

    def chunks(self, name: str, step: int) -> Iterator[torch.Tensor]:
        """Yields a whole tensor, flat, in consecutive pieces of at most `step` elements, each checked."""
        entry = self.index.tensors[name]
        whole = cuts.whole(entry.shape)
        for low in range(0, entry.count, step):
            high = min(low + step, entry.count)
            self.check(name, whole, low, high)
            piece = torch.empty(high - low, dtype=entry.dtype)
            self._read(name, whole, low, high, piece)
            yield piece

    def _read(self, name: str, cut: Cut, low: int, high: int, flat: torch.Tensor) -> None:
        dtype = self.index.tensors[name].dtype
        for file, part, at, elsewhere, length in self._overlaps(name, cut, low, high):
            begin = file.spans[part.key].begin
            long = length * dtype.itemsize >= _LONG
            if len(length) == 1:
                long[:] = True
            for to, source, count in zip(*(a[long].tolist() for a in (at, elsewhere, length)), strict=True):
                self._read_run(file, begin + source * dtype.itemsize, flat[to - low : to - low + count], dtype)
            if not long.all():
                runs = (at[~long] - low, elsewhere[~long], length[~long])
                self._read_short_runs(file, begin, runs, flat, dtype)

    def _read_run(self, file: TensorFile, offset: int, target: torch.Tensor, dtype: torch.dtype) -> None:
        """Fills a tensor with elements that lie side by side in a file."""
        if target.dtype == dtype and target.device.type == "cpu":
            file.read_into(as_bytes(target), offset)
            return
        step = BLOCK // dtype.itemsize
        for first in range(0, target.numel(), step):
            count = min(step, target.numel() - first)
            block = self._block()[: count * dtype.itemsize]
            file.read_into(block, offset + first * dtype.itemsize)
            target[first : first + count].copy_(torch.frombuffer(block, dtype=dtype))

    def _read_short_runs(
        self, file: TensorFile, begin: int, runs: tuple[Any, Any, Any], flat: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Fills places of a tensor with runs of elements, many by one read. begin: of the file's tensor.

        runs: places in `flat`, places in the file's tensor, lengths.
        """
        order = np.argsort(runs[1], kind="stable")
        at, source, length = (array[order] for array in runs)
        end = source + length
        gaps = np.flatnonzero((source[1:] - end[:-1]) * dtype.itemsize > _LONG) + 1
        first = 0
        while first < len(at):
            last = max(int(np.searchsorted(end, source[first] + _AT_ONCE, "right")), first + 1)
            gap = int(np.searchsorted(gaps, first, "right"))
            if gap < len(gaps):
                last = min(last, int(gaps[gap]))
            block = self._block()[: int(end[last - 1] - source[first]) * dtype.itemsize]
            file.read_into(block, begin + int(source[first]) * dtype.itemsize)
            places = at[first:last], source[first:last] - source[first], length[first:last]
            size = int(np.gcd.reduce(np.concatenate(places)))  # elements that go together in all of these runs
            given, taken = (torch.from_numpy(cuts.places(starts // size, places[2] // size)) for starts in places[:2])
            values = _rows(torch.frombuffer(block, dtype=dtype), size).index_select(0, taken)
            values = values.view(dtype).to(flat.device, flat.dtype)
            _rows(flat, size).index_copy_(0, given.to(flat.device), _bits(values))
            first = last

    def _overlaps(self, name: str, cut: Cut, low: int, high: int) -> Iterator[Overlap]:
        entry = self.index.tensors[name]
        for saved, slices in entry.pieces:
            begins = [part.start for part in slices]
            for at, elsewhere, length in cuts.common_runs(cut, saved, low, high):
                if not len(at):
                    continue
                end = elsewhere + length
                first = bisect.bisect_right(begins, int(elsewhere.min())) - 1
                for part in slices[max(first, 0) : bisect.bisect_left(begins, int(end.max()))]:
                    start, stop = np.maximum(elsewhere, part.start), np.minimum(end, part.stop)
                    kept = start < stop
                    if kept.any():
                        to, source = (at + start - elsewhere)[kept], (start - part.start)[kept]
                        yield self._file(part, entry.dtype), part, to, source, (stop - start)[kept]

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
            if len(self._opened) >= MOST_OPEN:
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

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *of: Any) -> None:
        self._stack.__exit__(*of)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Views elements as integers of their size, which can be indexed whatever the dtype."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _rows(flat: torch.Tensor, size: int) -> torch.Tensor:
    """Views elements as rows of `size`, without those left over."""
    return _bits(flat[: flat.numel() // size * size]).view(-1, size)


def verify(path: str | Path) -> Index:
    """Reads all bytes of a checkpoint's directory; needs one process. Returns its index.

    Raises CheckpointError for the first file that is missing, cut short or damaged.
    """
    content = index.read(folder.path_of(path))
    folder.check_files(content)
    for each in parts.contents(content).values():
        with CheckpointReader(each) as reader:
            for name, entry in each.tensors.items():
                reader.check(name, cuts.whole(entry.shape), 0, entry.count)
    return content
