"""Index of a checkpoint, the content of `index.json`, in memory and as text; `schema` says what is valid.

    tensors    name -> dtype, shape, and slices: elements start..stop of it lie under `key` in `file`, with checksums
    files      name -> bytes, checksum of its header
    number     of the directory's checkpoints, in the order of writing: file times change when they are copied
    the rest   step, ranks, the optimizer's groups, states of scheduler, sampler, ...: JSON
    checksum   CRC-32 of all of that

Names of tensors: model/NAME, optimizer/STATE/NAME, gradient/NAME, and what belongs to one rank alone under rank00003/.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ..errors import CheckpointError
from .checks import CODES, DTYPES
from .regular import open_regular, read_regular
from .schema import BLOCK, LONGEST_INDEX, check_index
from .tensorfile import checksum
from .tree import Malformed, shown

NAME = "index.json"
FORMAT = "mpidl-checkpoint"
VERSION = 1
_HEAD = 200  # bytes at its beginning in which the number stands


class StoredSlice(NamedTuple):
    """Elements start..stop of a flattened tensor: tensor `key` of `file`. crc32: of each block of its bytes."""

    file: str
    key: str
    start: int
    stop: int
    crc32: list[str]


@dataclass
class Entry:
    """A logical tensor; its slices cover it without a gap, in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: list[StoredSlice] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass
class Index:
    """Content of a checkpoint's index. path: the checkpoint's directory. about: all but the tensors and files."""

    path: Path
    about: dict[str, Any]
    tensors: dict[str, Entry]
    files: dict[str, dict[str, Any]]

    @property
    def file(self) -> Path:
        """Path of the index."""
        return self.path / NAME

    @property
    def number(self) -> int:
        """Number of the checkpoint in its directory, in the order of writing."""
        return int(self.about.get("number", 0))

    def text(self) -> str:
        """Returns the text of the file. Raises CheckpointError for content that could not be read again."""
        tensors = {
            name: {
                "dtype": CODES[entry.dtype],
                "shape": list(entry.shape),
                "slices": [part._asdict() for part in entry.slices],
            }
            for name, entry in self.tensors.items()
        }
        head = {"format": FORMAT, "version": VERSION, "number": self.number, "block_bytes": BLOCK}
        content = {**head, **self.about, "files": self.files, "tensors": tensors}
        try:
            check_index(content)
        except Malformed as error:
            raise CheckpointError(f"{self.file}: cannot be written as the format has it: {error}") from None
        content["checksum"] = _sum(content)
        text = json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"
        if len(text) > LONGEST_INDEX:
            raise CheckpointError(f"{self.file}: would have {len(text)} bytes, and may have {LONGEST_INDEX}")
        return text


def merge(path: Path, about: dict[str, Any], parts: list[dict[str, Any]]) -> Index:
    """Makes one index of what each rank has written."""
    tensors: dict[str, Entry] = {}
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        files.update(part["files"])
        for name, (dtype, shape, slices) in part["tensors"].items():
            entry = tensors.setdefault(name, Entry(DTYPES[dtype], tuple(shape)))
            entry.slices += [StoredSlice(**s) for s in slices]
    for entry in tensors.values():
        entry.slices.sort(key=lambda part: (part.start, part.stop))
    return Index(path, about, dict(sorted(tensors.items())), files)


def read(path: Path) -> Index:
    """Reads a directory's index. Raises CheckpointError if it is missing or damaged."""
    return parse(path, read_text(path))


def read_text(path: Path) -> str:
    """Reads the text of a directory's index. Raises CheckpointError if that fails."""
    file = path / NAME
    try:
        return read_regular(file, LONGEST_INDEX).decode()
    except FileNotFoundError:
        missing = "has no index.json: it is torn, or no checkpoint" if path.is_dir() else "no such directory"
        raise CheckpointError(f"{path}: {missing}") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file}: is damaged: it is no text") from None


def parse(path: Path, text: str) -> Index:
    """Parses the text of an index. Raises CheckpointError for a text that is damaged or no index."""
    try:
        return _parse(path, text)
    except ValueError as error:
        raise CheckpointError(f"{path / NAME}: is damaged or cut short: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path / NAME}: is not as the format has it: is nested too deeply") from None


def _parse(path: Path, text: str) -> Index:
    file = path / NAME
    content = json.loads(text, parse_constant=_no_constant)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{file}: is not the index of an mpidl checkpoint")
    version = content.pop("version", None)
    if version != VERSION:
        raise CheckpointError(f"{file}: has version {shown(version)} of the format; this mpidl reads version {VERSION}")
    said = content.pop("checksum", None)
    if said != _sum({"format": FORMAT, "version": VERSION, **content}):
        raise CheckpointError(f"{file}: is damaged: its checksum is not {shown(said)}")
    if content.pop("block_bytes", None) != BLOCK:
        raise CheckpointError(f"{file}: has checksums of blocks of another size than {BLOCK} bytes")
    try:
        check_index(content)
    except Malformed as error:
        raise CheckpointError(f"{file}: is not as the format has it: {error}") from None
    tensors = {
        name: Entry(DTYPES[e["dtype"]], tuple(e["shape"]), [StoredSlice(**s) for s in e["slices"]])
        for name, e in content.pop("tensors").items()
    }
    return Index(path, content, tensors, content.pop("files"))


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"it holds {text}, which is no JSON")


def number_of(path: Path) -> int:
    """Reads a checkpoint's number from the start of its index, which may be damaged; 0 if absent. Raises OSError."""
    with open(open_regular(path / NAME), "rb") as file:
        found = re.search(rb'"number": ?(\d{1,15})\b', file.read(_HEAD))
    return int(found[1]) if found else 0


def _sum(content: Mapping[str, Any]) -> str:
    """Checksum of the content without the checksum: of its JSON with sorted keys and no blanks, in ASCII."""
    return checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
