"""Loads weights from safetensors files, of which each rank of tp reads its parts.

    file     model.layers.0.mlp.up_proj.weight  [53, 32]      rank 0 reads rows 0..27, rank 1 rows 27..53

A model on the meta device gets memory for its parts alone. Its buffers that no file has, such as frequencies of rotary
positions, are computed as the model's construction does: by the tape of `mpidl.deferred_init`, or by `_init_weights` of
models of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import ConfigurationError, listed
from ..job.agreement import check_everywhere
from ..mesh import placement
from ..weight_files import files_of, library
from .deferred import give_memory, recorded_views
from .tensor_parallel import ATTRIBUTE, TensorParallel

Rename = Callable[[str], str | None]


def load_safetensors(model: nn.Module, path: str | Path, *, rename: Rename | None = None) -> nn.Module:
    """Loads the weights of the plain model, in place, and returns it. Collective over tp.

    model: cut by `parallelize`, or whole; on the meta device or not. path: a file, or a directory as Hugging Face saves
    it. rename: from a name in the files to the model's; None from it leaves a tensor out. Values are converted to the
    model's dtypes. Of tied weights the files may have one. Raises ConfigurationError on every rank for files that
    cannot be read, missing and unexpected names, other shapes, and buffers on the meta device that nothing computes;
    the model is not to be used then.
    """
    tp: TensorParallel | None = getattr(model, ATTRIBUTE, None)

    def everywhere(action: Callable[[], Any]) -> Any:
        return action() if tp is None else check_everywhere(tp.comm, action)

    files = everywhere(lambda: _Files(model, path, rename))
    everywhere(lambda: _fill_buffers(model, files, tp))
    everywhere(files.load)
    return model


class _Files:
    """Opened files that fit a model: the names of each tensor of the model, and their places in files."""

    def __init__(self, model: nn.Module, path: str | Path, rename: Rename | None) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigurationError(f"load_safetensors: path: got {path!r}; needs a path")
        self._path = Path(path)
        tensors = {
            name: t for name, t in model.state_dict(keep_vars=True).items() if torch.is_tensor(t)
        }  # parameters and what buffers are saved
        self._names: dict[torch.Tensor, list[str]] = {}
        for name, t in tensors.items():
            self._names.setdefault(t, []).append(name)
        self._tensors_in_files: dict[str, tuple[Path, str]] = {}
        shapes = self._shapes(rename)
        problems = {
            "missing names": [names[0] for names in self._names.values() if not any(name in shapes for name in names)],
            "unexpected names": sorted(shapes.keys() - tensors.keys()),
            "other shapes": [
                f"{name} (has {shape}, needs {_whole_shape(tensors[name])})"
                for name, shape in shapes.items()
                if name in tensors and shape != _whole_shape(tensors[name])
            ],
        }
        found = "; ".join(f"{problem}: {listed(names)}" for problem, names in problems.items() if names)
        if found:
            raise ConfigurationError(f"load_safetensors: {path} does not fit {type(model).__name__}; {found}")

    @property
    def tensors(self) -> set[torch.Tensor]:
        """The tensors of the model of which the files have values."""
        return set(self._names)

    def _shapes(self, rename: Rename | None) -> dict[str, tuple[int, ...]]:
        safe_open, problem = library()
        shapes = {}
        for path in files_of(self._path):
            try:
                with safe_open(path, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118  (it is no dictionary)
                        name = key if rename is None else rename(key)
                        if name is not None:
                            self._tensors_in_files[name] = path, key
                            shapes[name] = tuple(file.get_slice(key).get_shape())
            except (problem, OSError) as error:
                raise ConfigurationError(f"load_safetensors: {path} cannot be read: {error}") from None
        return shapes

    @torch.no_grad()
    def load(self) -> None:
        """Reads this rank's part of each tensor."""
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for tensor, names in self._names.items():
                first, *others = (name for name in names if name in self._tensors_in_files)
                value = self._read(stack, opened, first, tensor)
                for name in others:
                    if not torch.equal(self._read(stack, opened, name, tensor), value):
                        raise ConfigurationError(
                            f"load_safetensors: {self._path}: {name} differs from {first}; in the model they are one "
                            "tensor"
                        )
                if tensor.is_meta:
                    give_memory(tensor, value.to(tensor.dtype))
                else:
                    tensor.copy_(value)

    def _read(self, stack: ExitStack, opened: dict[Path, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
        path, key = self._tensors_in_files[name]
        safe_open, problem = library()
        try:
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            cut = placement(tensor).cut
            dims = [] if cut is None else [d for d, runs in enumerate(cut.runs) if runs != ((0, cut.shape[d]),)]
            if cut is None or not dims:
                return opened[path].get_tensor(key)  # type: ignore[no-any-return]
            if len(dims) > 1:
                return cut.of(opened[path].get_tensor(key))
            part = opened[path].get_slice(key)
            before = (slice(None),) * dims[0]
            pieces = [part[(*before, slice(start, stop))] for start, stop in cut.runs[dims[0]] if stop > start]
            return torch.cat(pieces, dims[0]) if pieces else tensor.new_empty(cut.part_shape, device="cpu")
        except (problem, OSError) as error:
            raise ConfigurationError(f"load_safetensors: {path}: {key} cannot be read: {error}") from None


def _whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    cut = placement(tensor).cut
    return tuple(tensor.shape) if cut is None else cut.shape


# ---- buffers that no file has ---------------------------------------------------------------------------------------


@torch.no_grad()
def _fill_buffers(model: nn.Module, files: _Files, tp: TensorParallel | None) -> None:
    """Computes the buffers on the meta device that no file has, before parameters have memory."""
    left = {t: name for name, t in model.named_buffers() if t.is_meta and t not in files.tensors}
    for recording, views in recorded_views(model) if tp is None else tp.recorded:
        for t in [t for t in left if t in views]:
            give_memory(t, recording.tape.value(views[t]).clone())
            del left[t]
    for t in left:
        give_memory(t, _unset(t))
    for module, owner in _owners(model, set(left)):
        owner._init_weights(module)
    for t, name in left.items():
        if bool(t.isnan().any() if t.is_floating_point() else (t == _unset(t)).any()):
            raise ConfigurationError(
                f"load_safetensors: {name} is on the meta device and in no file; needs a model that was built by "
                "mpidl.deferred_init"
            )
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and any(torch.is_tensor(t) and t.is_meta for t in tree_leaves(value)):
                raise ConfigurationError(
                    f"load_safetensors: {name}.{key} is on the meta device and no buffer; needs one, or a model that "
                    "was not built there"
                )


def _owners(model: nn.Module, wanted: set[torch.Tensor]) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the modules with such buffers, and the models of transformers that they are of."""
    inner: dict[nn.Module, Any] = {}
    for outer in model.modules():  # an inner one comes later
        if callable(getattr(outer, "_init_weights", None)) and hasattr(outer, "config"):
            inner.update(dict.fromkeys(outer.modules(), outer))
    for module, owner in inner.items():
        if any(t in wanted for t in module.buffers(recurse=False)):
            yield module, owner


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor of values that no buffer has: NaN, or the least number; True of truth values."""
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    least = True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
    return torch.full(tensor.shape, least, dtype=tensor.dtype)
