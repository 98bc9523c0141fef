"""Initial values from safetensors files, of which a rank reads the rows that hold its slices.

Of a parameter that is cut over tp, a slice is one of this rank's part of it, which is in several places of the file:

    file    q0 q1 q2 q3 k0 k1 k2 k3      rank 0 of tp has q0 q1 k0 k1, and of these its second rank of dp reads the
            q4 q5 q6 q7 k4 k5 k6 k7      second row: q4 q5 k4 k5
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from collectives import Communicator

from ...errors import ConfigurationError, listed
from ...job.agreement import check_everywhere
from ...mesh.placement import Cut, Run, placement
from ...replicas.start_check import check_settings_agree
from ...weight_files import files_of, library
from .value_targets import Targets, wanted

Rename = Callable[[str], str | None]


@dataclass(frozen=True)
class Safetensors:
    """The source of weights: safetensors files.

    path: a file, or a directory as Hugging Face saves it: `model.safetensors`, or several files and
        `model.safetensors.index.json`. The same on every rank.
    rename: from a name in the files to the model's; None from it leaves a tensor out.
    missing: whether the files may lack a name of the model, as that of an adapter or a new head: what is there, or what
        gives values to a model on the meta device, stays. By default they may lack none.
    """

    path: str | Path
    rename: Rename | None = None
    missing: Callable[[str], bool] | None = None


class WeightFiles:
    """Opened and compared with a model, whose tensors they fit. tensors: those of which they have the values.

    names: the model's, several for a tied one; one of them must be in the files, or all may be missing. Raises
    ConfigurationError for missing or unexpected names, other shapes, and files that cannot be read.
    """

    def __init__(self, given: Safetensors | str | Path, names: Mapping[str, torch.Tensor]) -> None:
        self._given = given if isinstance(given, Safetensors) else Safetensors(given)
        if not isinstance(self._given.path, str | os.PathLike):
            raise ConfigurationError(f"weights: got {self._given.path!r}; needs a path, or a zero.Safetensors with one")
        for argument in ("rename", "missing"):
            function = getattr(self._given, argument)
            if not (function is None or callable(function)):
                raise ConfigurationError(f"{argument}: got {function!r}; needs a function of a name")
        self._names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in names.items():
            self._names.setdefault(tensor, []).append(name)
        self._tensors_in_files: dict[str, tuple[Path, str]] = {}
        self._compare(names, self._shapes())
        self.tensors = {tensor for name, tensor in names.items() if name in self._tensors_in_files}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        safe_open, problem = library()
        shapes = {}
        for path in files_of(Path(self._given.path)):
            try:
                with safe_open(path, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118  (it is no dictionary)
                        name = key if self._given.rename is None else self._given.rename(key)
                        if name is None:
                            continue
                        if name in self._tensors_in_files:
                            raise ConfigurationError(
                                f"weights: {self._tensors_in_files[name][1]} and {key} are both {name}"
                            )
                        self._tensors_in_files[name] = path, key
                        shapes[name] = tuple(file.get_slice(key).get_shape())
            except (problem, OSError) as error:
                raise ConfigurationError(f"weights: {path} cannot be read: {error}") from None
        return shapes

    def _compare(self, names: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        may_miss = self._given.missing or (lambda _: False)
        absent = [same for same in self._names.values() if not any(name in shapes for name in same)]
        missing = [same[0] for same in absent if not all(may_miss(name) for name in same)]
        problems = {
            "missing names": missing,
            "unexpected names": sorted(shapes.keys() - names.keys()),
            "other shapes": [
                f"{name} (has {shape}, needs {_cut_of(names[name]).shape})"
                for name, shape in shapes.items()
                if name in names and shape != _cut_of(names[name]).shape
            ],
        }
        found = "; ".join(f"{problem}: {listed(names)}" for problem, names in problems.items() if names)
        if found:
            raise ConfigurationError(f"weights: {self._given.path} does not fit the model; {found}")

    def check(self, comm: Communicator) -> None:
        """Raises on every rank if the ranks' files lack other names, or a tied tensor has several values. Collective.

        ModelMismatch, and ConfigurationError. Of a tensor under several names each rank compares an even part.
        """
        lacking = [names[0] for tensor, names in self._names.items() if tensor not in self.tensors]
        check_settings_agree(comm, "weights", {"missing names": lacking})
        check_everywhere(comm, lambda: self._check_ties(comm.rank, comm.size))

    def _check_ties(self, rank: int, ranks: int) -> None:
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for tensor, names in self._names.items():
                present = [name for name in names if name in self._tensors_in_files]
                start, stop = (tensor.numel() * number // ranks for number in (rank, rank + 1))
                if len(present) < 2 or start == stop:
                    continue
                first, *others = (self._read(stack, files, name, tensor, start, stop) for name in present)
                for name, other in zip(present[1:], others, strict=True):
                    if not torch.equal(first, other):
                        raise ConfigurationError(
                            f"weights: {self._given.path}: {name} differs from {present[0]}; in the model they are "
                            "one tensor"
                        )

    def fill(self, targets: Targets) -> None:
        """Reads what the targets want."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for tensor, ranges in targets.items():
                if wanted(ranges):
                    name = next(name for name in self._names[tensor] if name in self._tensors_in_files)
                    for target in ranges:
                        target.write(self._read(stack, files, name, tensor, target.start, target.stop))

    def _read(
        self, stack: ExitStack, files: dict[Path, Any], name: str, tensor: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Elements start..stop of a tensor of the model, flattened, which may be a part of that in the file."""
        path, key = self._tensors_in_files[name]
        if path not in files:
            files[path] = stack.enter_context(library()[0](path, framework="pt"))
        cut = _cut_of(tensor)
        if not cut.shape:
            return files[path].get_tensor(key).reshape(-1)[start:stop]  # type: ignore[no-any-return]
        row = max(1, torch.Size(cut.part_shape[1:]).numel())
        first = start // row
        rows = read_rows(files[path].get_slice(key), cut, first, -(-stop // row))
        return rows.reshape(-1)[start - first * row : stop - first * row]


def _cut_of(tensor: torch.Tensor) -> Cut:
    """Returns the elements of the whole tensor that one of the model has; all of them where nothing is cut."""
    shape = tuple(tensor.shape)
    return placement(tensor).cut or Cut(shape, tuple(((0, size),) for size in shape))


def read_rows(file_slice: Any, cut: Cut, first: int, stop: int) -> torch.Tensor:
    """Reads rows first..stop, along dimension 0, of a rank's part of a tensor in a file.

    file_slice: as `get_slice` of safetensors gives it. cut: of at least one dimension.
    """
    rows, before = [], 0
    for low, high in cut.runs[0]:
        inside = max(first, before), min(stop, before + high - low)
        if inside[0] < inside[1]:
            rows.append((low + inside[0] - before, low + inside[1] - before))
        before += high - low

    def read(index: tuple[slice, ...], runs: tuple[tuple[Run, ...], ...]) -> torch.Tensor:
        if not runs:
            return file_slice[index]  # type: ignore[no-any-return]
        pieces = [read((*index, slice(*run)), runs[1:]) for run in runs[0]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, len(index))

    return read((), (tuple(rows), *cut.runs[1:]))
