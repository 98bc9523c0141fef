"""Index of a checkpoint, the content of `index.json`, in memory and as text; `schema` says what is valid.

    tensors    name -> dtype, shape, and slices: elements start..stop of it lie under `key` in `file`, with checksums
               cut over a mesh: cuts, the runs of each dimension; then the elements are those of the slice's cut
    files      name -> bytes, checksum of its header
    number     of the directory's checkpoints, in the order of writing: file times change when they are copied
    the rest   step, ranks, the optimizer's groups, states of scheduler, sampler, ...: JSON
    checksum   CRC-32 of all of that

`collect` lists the names of tensors. A new field needs a check in `schema`, is written by `collect`, and read by
`loading` or, if it is about tensors, by `matching`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ..errors import CheckpointError
from ..mesh.placement import Cut
from ..regular_files import open_regular, read_regular
from . import cuts
from .json_checks import CODES, DTYPES
from .json_encoding import Malformed, shown
from .schema import BLOCK, LONGEST_INDEX, check_index
from .tensorfile import checksum

NAME = "index.json"
FORMAT = "mpidl-checkpoint"
VERSION = 2  # of whole models that lay over a mesh; all others are written as version 1, which has no cuts
_HEAD = 200  # bytes at its beginning in which the number stands


class StoredSlice(NamedTuple):
    """Elements start..stop of a flattened tensor, or of a cut of it: tensor `key` of `file`.

    crc32: of each block of its bytes.
    cut: number of the cut in the tensor's entry.
    """

    file: str
    key: str
    start: int
    stop: int
    crc32: list[str]
    cut: int = 0


@dataclass
class TensorEntry:
    """A logical tensor. Its slices cover each of its cuts without a gap, in order, and these cover the tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: list[StoredSlice] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)  # none: the slices are those of the whole

    @property
    def pieces(self) -> list[tuple[Cut, list[StoredSlice]]]:
        """Each cut with its slices."""
        found: list[tuple[Cut, list[StoredSlice]]] = [(cut, []) for cut in self.cuts or [cuts.whole(self.shape)]]
        for part in self.slices:
            found[part.cut][1].append(part)
        return found

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass
class Index:
    """Content of a checkpoint's index.

    path: the checkpoint's directory.
    about: all but the tensors and files.
    """

    path: Path
    about: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[str, dict[str, Any]]

    @property
    def file(self) -> Path:
        """Path of the index."""
        return self.path / NAME

    @property
    def number(self) -> int:
        """Number of the checkpoint in its directory, in the order of writing."""
        return int(self.about.get("number", 0))

    @property
    def replicas(self) -> int:
        """Number of ranks that held the same part of the model."""
        over = 1 if "parts" in self.about else math.prod(self.about.get("mesh", {}).values())
        return int(self.about["ranks"]) // over

    def text(self) -> str:
        """Returns the text of the file. Raises CheckpointError for content that could not be read again."""
        tensors = {name: _described(entry) for name, entry in self.tensors.items()}
        version = VERSION if "mesh" in self.about and "parts" not in self.about else 1
        head = {"format": FORMAT, "version": version, "number": self.number, "block_bytes": BLOCK}
        content = {**head, **self.about, "files": self.files, "tensors": tensors}
        try:
            check_index(content)
        except Malformed as error:
            raise CheckpointError(f"{self.file}: cannot be written as the format has it: {error}") from None
        content["checksum"] = content_checksum(content)
        text = json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"
        if len(text) > LONGEST_INDEX:
            raise CheckpointError(f"{self.file}: would have {len(text)} bytes, and may have {LONGEST_INDEX}")
        return text


def _described(entry: TensorEntry) -> dict[str, Any]:
    """Returns a tensor's entry as JSON."""
    made: dict[str, Any] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape)}
    if entry.cuts:
        made["cuts"] = [[[list(run) for run in runs] for runs in cut.runs] for cut in entry.cuts]
        return {**made, "slices": [part._asdict() for part in entry.slices]}
    fields = StoredSlice._fields[:-1]
    return {**made, "slices": [dict(zip(fields, part, strict=False)) for part in entry.slices]}


def _entry(described: Mapping[str, Any]) -> TensorEntry:
    shape = tuple(described["shape"])
    made = TensorEntry(DTYPES[described["dtype"]], shape, [StoredSlice(**part) for part in described["slices"]])
    made.cuts = [cut_of(shape, runs) for runs in described.get("cuts", ())]
    return made


def cut_of(shape: tuple[int, ...], runs: Sequence[Sequence[Sequence[int]]]) -> Cut:
    """Makes the cut of these runs, of JSON."""
    return Cut(shape, tuple(tuple((start, stop) for start, stop in of_dim) for of_dim in runs))


def merge(path: Path, about: dict[str, Any], parts: list[dict[str, Any]]) -> Index:
    """Makes one index of what each rank has written. Raises CheckpointError if the ranks contradict each other."""
    found: dict[str, tuple[TensorEntry, dict[Cut, list[StoredSlice]]]] = {}
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        files.update(part["files"])
        for name, (dtype, shape, slices) in part["tensors"].items():
            entry, by_cut = found.setdefault(name, (TensorEntry(DTYPES[dtype], tuple(shape)), {}))
            if (entry.dtype, entry.shape) != (DTYPES[dtype], tuple(shape)):
                raise CheckpointError(f"{path}: {name} is {CODES[entry.dtype]} on one rank and {dtype} on another")
            for piece in slices:
                runs = piece.pop("runs", None)
                cut = cuts.whole(entry.shape) if runs is None else cut_of(entry.shape, runs)
                by_cut.setdefault(cut, []).append(StoredSlice(**piece))
    for entry, by_cut in found.values():
        ordered = sorted(by_cut, key=lambda cut: cut.runs)
        entry.cuts = [] if ordered == [cuts.whole(entry.shape)] else ordered
        for number, cut in enumerate(ordered):
            pieces = sorted(by_cut[cut], key=lambda piece: (piece.start, piece.stop))
            entry.slices += [piece._replace(cut=number) for piece in pieces]
    return Index(path, about, {name: found[name][0] for name in sorted(found)}, files)


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
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{file}: has version {shown(version)} of the format; this mpidl reads versions 1 to {VERSION}"
        )
    said = content.pop("checksum", None)
    if said != content_checksum({"format": FORMAT, "version": version, **content}):
        raise CheckpointError(f"{file}: is damaged: its checksum is not {shown(said)}")
    if content.pop("block_bytes", None) != BLOCK:
        raise CheckpointError(f"{file}: has checksums of blocks of another size than {BLOCK} bytes")
    try:
        check_index(content)
    except Malformed as error:
        raise CheckpointError(f"{file}: is not as the format has it: {error}") from None
    tensors = {name: _entry(described) for name, described in content.pop("tensors").items()}
    return Index(path, content, tensors, content.pop("files"))


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"it holds {text}, which is no JSON")


def number_of(path: Path) -> int:
    """Reads a checkpoint's number from the start of its index, which may be damaged; 0 if absent. Raises OSError."""
    with open(open_regular(path / NAME), "rb") as file:
        found = re.search(rb'"number": ?(\d{1,15})\b', file.read(_HEAD))
    return int(found[1]) if found else 0


def content_checksum(content: Mapping[str, Any]) -> str:
    """Checksum of the content without the checksum: of its JSON with sorted keys and no blanks, in ASCII."""
    return checksum(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
