"""The safetensors files whose tensors are those of a model, and the parts of them that a rank holds.

model   down.weight [2, 32], tied to embed.weight       file   embed.weight [4, 32]      rows 2 and 3 on rank 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigurationError, listed
from .mesh.placement import Cut, Run, placement
from .weight_files import files_of, import_safe_open

Rename = Callable[[str], str | None]
Read = Callable[[str], Any]


class ModelFiles:
    """Files that fit a model: each of its tensors is in them once at least, whole, and nothing else is.

    names: of each tensor of the model, several for a tied one.
    tensors: those of which the files have values.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, torch.Tensor],
        rename: Rename | None,
        may_miss: Callable[[str], bool] = lambda _: False,
        *,
        asked_by: str = "weights",
        model: str = "the model",
    ) -> None:
        """Opens the files and compares them.

        tensors: of the model, or of its parts over tp, by name.
        rename: from a name in the files to the model's; None from it leaves a tensor out.
        may_miss: which names the files may lack.
        asked_by, model: names for errors.

        Raises ConfigurationError for files that cannot be read, missing and unexpected names, other shapes, and two
        tensors of one name.
        """
        self._path, self._asked_by = path, asked_by
        self.names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in tensors.items():
            self.names.setdefault(tensor, []).append(name)
        self._keys: dict[str, tuple[Path, str]] = {}
        shapes = self._shapes(rename)
        wanted = {name: cut_of(tensor).shape for name, tensor in tensors.items()}
        absent = [names for names in self.names.values() if not any(name in shapes for name in names)]
        problems = {
            "missing names": [names[0] for names in absent if not all(may_miss(name) for name in names)],
            "unexpected names": sorted(shapes.keys() - tensors.keys()),
            "other shapes": [
                f"{name} (has {shape}, needs {wanted[name]})"
                for name, shape in shapes.items()
                if name in wanted and shape != wanted[name]
            ],
        }
        found = "; ".join(f"{problem}: {listed(names)}" for problem, names in problems.items() if names)
        if found:
            raise ConfigurationError(f"{asked_by}: {path} does not fit {model}; {found}")
        self.tensors = {tensor for name, tensor in tensors.items() if name in self._keys}

    def _shapes(self, rename: Rename | None) -> dict[str, tuple[int, ...]]:
        safe_open, problem = import_safe_open()
        shapes = {}
        for path in files_of(Path(self._path)):
            try:
                with safe_open(path, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118  (it is no dictionary)
                        name = key if rename is None else rename(key)
                        if name is None:
                            continue
                        if name in self._keys:
                            raise ConfigurationError(
                                f"{self._asked_by}: {self._keys[name][1]} and {key} are both {name}"
                            )
                        self._keys[name] = path, key
                        shapes[name] = tuple(file.get_slice(key).get_shape())
            except (problem, OSError) as error:
                raise ConfigurationError(f"{self._asked_by}: {path} cannot be read: {error}") from None
        return shapes

    def names_in_files(self, tensor: torch.Tensor) -> list[str]:
        """Returns the names of a tensor of the model by which the files have it."""
        return [name for name in self.names[tensor] if name in self._keys]

    def check_ties(self, rank: int = 0, ranks: int = 1) -> None:
        """Raises ConfigurationError if a tied tensor has several values, in one of `ranks` even parts of it."""
        with self.opened() as read:
            for tensor in self.names:
                names = self.names_in_files(tensor)
                start, stop = (tensor.numel() * number // ranks for number in (rank, rank + 1))
                if len(names) < 2 or start == stop:
                    continue
                first, *others = names
                value = elements(read(first), tensor, start, stop)
                for name in others:
                    if not torch.equal(elements(read(name), tensor, start, stop), value):
                        raise ConfigurationError(
                            f"{self._asked_by}: {self._path}: {name} differs from {first}; in the model they are one "
                            "tensor"
                        )

    @contextmanager
    def opened(self) -> Iterator[Read]:
        """Context with a function that returns safetensors' slice of the tensor of a name."""
        safe_open, problem = import_safe_open()
        reading = Path(self._path)
        with ExitStack() as stack:
            files: dict[Path, Any] = {}

            def read(name: str) -> Any:
                nonlocal reading
                reading, key = self._keys[name]
                if reading not in files:
                    files[reading] = stack.enter_context(safe_open(reading, framework="pt"))
                return files[reading].get_slice(key)

            try:
                yield read
            except (problem, OSError) as error:
                raise ConfigurationError(f"{self._asked_by}: {reading} cannot be read: {error}") from None


def cut_of(tensor: torch.Tensor) -> Cut:
    """Returns the elements of the whole tensor that one of the model has; all of them where nothing is cut."""
    shape = tuple(tensor.shape)
    return placement(tensor).cut or Cut(shape, tuple(((0, size),) for size in shape))


def elements(file_slice: Any, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Reads elements start..stop of a tensor of the model, flattened, which may be a part of that in the file.

    file_slice: as `get_slice` of safetensors gives it.
    """
    cut = cut_of(tensor)
    row = max(1, torch.Size(cut.part_shape[1:]).numel())
    first = start // row
    rows = read_rows(file_slice, cut, first, -(-stop // row))
    return rows.reshape(-1)[start - first * row : stop - first * row]


def read_rows(file_slice: Any, cut: Cut, first: int, stop: int) -> torch.Tensor:
    """Reads rows first..stop, along dimension 0, of a rank's part of a tensor in a file; all where it has no dimension.

    file_slice: as `get_slice` of safetensors gives it.
    """
    if not cut.shape:
        return file_slice[...]  # type: ignore[no-any-return]
    rows, before = [], 0
    for low, high in cut.runs[0]:
        inside = max(first, before), min(stop, before + high - low)
        if inside[0] < inside[1]:
            rows.append((low + inside[0] - before, low + inside[1] - before))
        before += high - low

    def read(index: tuple[slice, ...], runs: tuple[tuple[Run, ...], ...]) -> torch.Tensor:
        if not runs:
            return file_slice[index]  # type: ignore[no-any-return]
        some = [(start, stop) for start, stop in runs[0] if stop > start] or [(0, 0)]
        pieces = [read((*index, slice(*run)), runs[1:]) for run in some]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, len(index))

    return read((), (tuple(rows), *cut.runs[1:]))
