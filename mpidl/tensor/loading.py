"""Loads weights from safetensors files, of which each rank of tp reads its parts.

    file     model.layers.0.mlp.up_proj.weight  [53, 32]      rank 0 reads rows 0..27, rank 1 rows 27..53

A model on the meta device gets memory for its parts alone. Its buffers that no file has, such as frequencies of rotary
positions, are computed as the model's construction does: by the tape of `mpidl.deferred_init`, or by `_init_weights` of
models of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import ConfigurationError
from ..job.agreement import check_everywhere
from ..model_files import ModelFiles, Rename, elements
from .deferred import give_value, recorded_views
from .tensor_parallel import ATTRIBUTE, TensorParallel


def load_safetensors(model: nn.Module, path: str | Path, *, rename: Rename | None = None) -> nn.Module:
    """Loads the weights of the plain model, in place, and returns it. Collective over tp.

    model: cut by `parallelize`, or whole; on the meta device or not.
    path: a file, or a directory as Hugging Face saves it.
    rename: from a name in the files to the model's; None from it leaves a tensor out.

    Converts values to the model's dtypes. Of tied weights the files may hold one.

    Raises ConfigurationError on every rank for files that cannot be read, missing and unexpected names, other shapes,
    and buffers on the meta device that nothing computes; the model is not to be used then.
    """
    tp: TensorParallel | None = getattr(model, ATTRIBUTE, None)

    def everywhere(action: Callable[[], Any]) -> Any:
        return action() if tp is None else check_everywhere(tp.comm, action)

    files = everywhere(lambda: _files(model, path, rename))
    everywhere(lambda: _fill_buffers(model, files, tp))
    everywhere(lambda: _load(files))
    return model


def _files(model: nn.Module, path: str | Path, rename: Rename | None) -> ModelFiles:
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"load_safetensors: path: got {path!r}; needs a path")
    tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if torch.is_tensor(t)}
    files = ModelFiles(path, tensors, rename, asked_by="load_safetensors", model=type(model).__name__)
    files.check_ties()
    return files


@torch.no_grad()
def _load(files: ModelFiles) -> None:
    """Reads this rank's part of each tensor."""
    with files.opened() as read:
        for tensor in files.names:
            stored = read(files.names_in_files(tensor)[0])
            value = elements(stored, tensor, 0, tensor.numel()).reshape(tensor.shape)
            if tensor.is_meta:
                give_value(tensor, value.to(tensor.dtype))
            else:
                tensor.copy_(value)


# ---- buffers that no file has ---------------------------------------------------------------------------------------


@torch.no_grad()
def _fill_buffers(model: nn.Module, files: ModelFiles, tp: TensorParallel | None) -> None:
    """Computes the buffers on the meta device that no file has, before parameters have memory."""
    left = {t: name for name, t in model.named_buffers() if t.is_meta and t not in files.tensors}
    for recording, views in recorded_views(model) if tp is None else tp.recorded:
        for t in [t for t in left if t in views]:
            give_value(t, recording.tape.value(views[t]).clone())
            del left[t]
    for t in left:
        give_value(t, _unset(t))
    for module, owner in _owners(model, set(left)):
        owner._init_weights(module)
    for t, name in left.items():
        unset = t.isnan() if t.is_floating_point() else t == _unset(t)
        if bool(unset.all() if t.dtype == torch.bool else unset.any()):  # a mask has true ones that were computed
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
    """Makes a tensor of values that no buffer has: NaN, or the least number; of truth values True."""
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    least = True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
    return torch.full(tensor.shape, least, dtype=tensor.dtype)
