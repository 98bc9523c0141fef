"""Safetensors files, written and read in blocks: no tensor is copied whole, and every block has a checksum.

    8 bytes   length of the header
    header    JSON: name -> dtype, shape, where its bytes begin and end; padded with blanks to a multiple of 8
    data      the tensors side by side, row by row, little-endian

The checksums, CRC-32 of every block of 4 MiB of a tensor's bytes, stand in the checkpoint's index. Any part of a tensor
can so be read and checked by itself. Source: the format's description at github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..errors import CheckpointError
from ..regular_files import open_regular
from .json_checks import CODES, DTYPES
from .schema import BLOCK, check_header

_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class TensorSpan:
    """Bytes begin..end of a file that hold a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk.

    bytes: of the whole file.
    header: its checksum.
    blocks: those of each tensor.
    """

    bytes: int
    header: str
    blocks: dict[str, list[str]] = field(default_factory=dict)


def checksum(data: Any) -> str:
    """Computes the CRC-32 of bytes, as 8 digits."""
    return f"{zlib.crc32(data):08x}"


def code_of(dtype: torch.dtype, name: str) -> str:
    """Returns the format's name of a dtype. Raises CheckpointError, naming the tensor, for a dtype it lacks."""
    if dtype not in CODES:
        raise CheckpointError(f"{name}: a tensor of {dtype} cannot be kept in a safetensors file")
    return CODES[dtype]


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorSpan]]:
    """Makes a file's header, and lays out these tensors (name, dtype, shape) behind it."""
    ordered = sorted(tensors, key=lambda t: -t[1].itemsize)  # so that every tensor is aligned to its elements
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in ordered:
        size = dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": code_of(dtype, name), "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = struct.pack("<Q", len(text)) + text
    spans = {}
    for name, dtype, shape in ordered:
        begin, end = entries[name]["data_offsets"]
        spans[name] = TensorSpan(dtype, tuple(shape), len(first) + begin, len(first) + end)
    return first, spans


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    raw: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def blocks_of(tensor: torch.Tensor) -> Iterable[memoryview]:
    """Yields a tensor's bytes block by block, in the order of its elements; copies one block at a time from a GPU."""
    flat = tensor.detach().reshape(-1)
    step = BLOCK // flat.dtype.itemsize
    for start in range(0, flat.numel(), step):
        yield as_bytes(flat[start : start + step].cpu().contiguous())


def write_file(
    path: Path,
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int], Callable[[], torch.Tensor]]],
    metadata: Mapping[str, str] | None = None,
) -> WrittenFile:
    """Writes tensors (name, dtype, shape, function that returns the values) into a new file, and waits for the disk."""
    first, spans = header_of([(name, dtype, shape) for name, dtype, shape, _ in tensors], metadata)
    by_name = {name: values for name, _, _, values in tensors}
    sums: dict[str, list[str]] = {}
    with naming_path(path), path.open("xb", buffering=0) as file:
        write_all(file.fileno(), first)
        for name in spans:
            sums[name] = []
            for block in blocks_of(by_name[name]()):
                sums[name].append(checksum(block))
                write_all(file.fileno(), block)
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    return WrittenFile(size, checksum(first), sums)


def write_all(descriptor: int, data: Any, offset: int | None = None) -> None:
    """Writes all of the bytes, at an offset of the file or where it stands."""
    left = memoryview(data)
    while len(left):
        if offset is None:
            done = os.write(descriptor, left)
        else:
            done = os.pwrite(descriptor, left, offset)
            offset += done
        left = left[done:]


class naming_path:
    """Context manager that adds a file's path to an OSError that names no file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(self._path)


class TensorFile:
    """A safetensors file to read from; once closed it is opened again when it is read.

    Raises CheckpointError, naming the file, for what is none, or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        try:
            with naming_path(path):
                self.bytes = os.fstat(self._opened()).st_size
                self.spans = self._read_header(self._opened())
        except BaseException:
            self.close()
            raise

    def _opened(self) -> int:
        if self._descriptor < 0:
            try:
                self._descriptor = open_regular(self.path)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from None
        return self._descriptor

    def _read_header(self, descriptor: int) -> dict[str, TensorSpan]:
        first = os.pread(descriptor, 8, 0)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(_LONGEST_HEADER, self.bytes - 8):
            raise CheckpointError(f"{self.path}: is no safetensors file: its header is cut short or missing")
        text = os.pread(descriptor, length, 8)
        self.header = checksum(first + text)
        try:
            entries = json.loads(text)
            check_header(entries)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: is no safetensors file: its header cannot be read ({error})") from None
        entries.pop("__metadata__", None)
        spans = {}
        for name, entry in entries.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            spans[name] = TensorSpan(DTYPES[entry["dtype"]], tuple(entry["shape"]), begin, end)
        needed = max((span.end for span in spans.values()), default=8 + length)
        if self.bytes < needed:
            raise CheckpointError(f"{self.path}: is cut short: has {self.bytes} bytes, needs {needed}")
        return spans

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills the memory with the bytes at an offset of the file."""
        descriptor = self._opened()
        while len(target):
            with naming_path(self.path):
                done = os.preadv(descriptor, [target[: 64 << 20]], offset)
            if done == 0:
                raise CheckpointError(f"{self.path}: is cut short at byte {offset}")
            target, offset = target[done:], offset + done

    def check(self, name: str, sums: Sequence[str], blocks: Iterable[int], buffer: memoryview) -> None:
        """Reads blocks of a tensor, by their numbers, and compares their checksums."""
        span = self.spans[name]
        for number in blocks:
            begin = span.begin + number * BLOCK
            block = buffer[: min(BLOCK, span.end - begin)]
            self.read_into(block, begin)
            if checksum(block) != sums[number]:
                raise CheckpointError(
                    f"{self.path}: is damaged: bytes {begin} to {begin + len(block)}, of {name}, are not what was "
                    "written (CRC-32)"
                )

    def close(self) -> None:
        """Closes the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
