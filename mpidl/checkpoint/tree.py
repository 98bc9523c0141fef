"""Nested Python values as JSON and tensors, and back, with no pickle.

    {"lr": 0.1, "at": (1, tensor)}   ->   {"lr": 0.1, "at": {"$tuple": [1, {"$tensor": "extra/0"}]}}   and that tensor

Numbers, strings, booleans and None stand for themselves; what JSON cannot say is an object of one key that begins with
a dollar sign. Tensors of one element without a dimension stand in the JSON, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError, ConfigurationError

_SCALARS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """What JSON can hold of `value`; its tensors are added to `tensors` under names that begin with `where`.

    Raises ConfigurationError, with the place, for anything that is no number, string, bytes, None, tensor, numpy
    array, dictionary, list or tuple.
    """
    try:
        return _encode(value, where, where, tensors)
    except RecursionError:
        raise ConfigurationError(f"{where}: is nested too deeply, or holds itself") from None


def _encode(value: Any, path: str, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return int(value) if type(value) not in (bool, str, type(None), int) and isinstance(value, int) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative and value.itemsize <= 8:
        return {"$array": _encode(torch.from_numpy(np.ascontiguousarray(value)), path, where, tensors)}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        if value.dim() == 0 and value.dtype in _SCALARS:
            return {"$scalar": [str(value.dtype).removeprefix("torch."), _encode(value.item(), path, where, tensors)]}
        name = f"{where}/{len(tensors)}"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, list):
        return [_encode(v, f"{path}[{i}]", where, tensors) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(v, f"{path}[{i}]", where, tensors) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [(key, _encode(v, f"{path}[{key!r}]", where, tensors)) for key, v in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[_encode(key, f"{path}'s keys", where, tensors), v] for key, v in pairs]}
    raise ConfigurationError(
        f"{path}: got a {type(value).__name__}; a checkpoint keeps numbers, strings, None, tensors, arrays, and "
        "dictionaries, lists and tuples of them"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """What `encode` was given. tensor: gives a tensor by its name."""
    if isinstance(value, list):
        return [decode(v, tensor) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(v, tensor) for key, v in value.items()}
    kind, content = next(iter(value.items()))
    if kind == "$tuple":
        return tuple(decode(v, tensor) for v in content)
    if kind == "$dict":
        return {decode(key, tensor): decode(v, tensor) for key, v in content}
    if kind == "$float":
        return float(content)
    if kind == "$bytes":
        return bytes.fromhex(content)
    if kind == "$dtype":
        return getattr(torch, content)
    if kind == "$scalar":
        return torch.tensor(decode(content[1], tensor), dtype=getattr(torch, content[0]))
    if kind == "$array":
        return decode(content, tensor).numpy()
    if kind == "$tensor":
        return tensor(content)
    raise CheckpointError(f"the index holds {kind}, which this version does not know")


def names_in(value: Any) -> list[str]:
    """The tensors that `decode` will ask for."""
    if isinstance(value, list):
        return [name for v in value for name in names_in(v)]
    if not isinstance(value, dict):
        return []
    if len(value) == 1 and isinstance(value.get("$tensor"), str):
        return [value["$tensor"]]
    return [name for v in value.values() for name in names_in(v)]
