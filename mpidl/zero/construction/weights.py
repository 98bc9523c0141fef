"""Values from safetensors files, of which a rank reads the rows that hold its slices."""

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
from ...replicas.consistency import check_settings_agree
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
        self._places: dict[str, tuple[Path, str]] = {}
        self._compare(names, self._shapes())
        self.tensors = {tensor for name, tensor in names.items() if name in self._places}

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
                        if name in self._places:
                            raise ConfigurationError(f"weights: {self._places[name][1]} and {key} are both {name}")
                        self._places[name] = path, key
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
                f"{name} (has {shape}, needs {tuple(names[name].shape)})"
                for name, shape in shapes.items()
                if name in names and shape != tuple(names[name].shape)
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
                present = [name for name in names if name in self._places]
                start, stop = (tensor.numel() * number // ranks for number in (rank, rank + 1))
                if len(present) < 2 or start == stop:
                    continue
                first, *others = (self._read(stack, files, name, start, stop) for name in present)
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
                    name = next(name for name in self._names[tensor] if name in self._places)
                    for target in ranges:
                        target.write(self._read(stack, files, name, target.start, target.stop))

    def _read(self, stack: ExitStack, files: dict[Path, Any], name: str, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop of a tensor, flattened."""
        path, key = self._places[name]
        if path not in files:
            files[path] = stack.enter_context(library()[0](path, framework="pt"))
        part = files[path].get_slice(key)
        shape = part.get_shape()
        if not shape:
            return files[path].get_tensor(key).reshape(-1)[start:stop]  # type: ignore[no-any-return]
        row = max(1, torch.Size(shape[1:]).numel())
        first = start // row
        rows: torch.Tensor = part[first : -(-stop // row)]
        return rows.reshape(-1)[start - first * row : stop - first * row]
