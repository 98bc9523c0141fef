"""Encodes nested Python values as JSON and tensors, and decodes them, with no pickle.

    {"lr": 0.1, "at": (1, tensor)}   ->   {"lr": 0.1, "at": {"$tuple": [1, {"$tensor": "extra/0"}]}}   and that tensor

Numbers, strings, booleans and None stand for themselves; what JSON cannot say is an object of one key that begins with
a dollar sign. Tensors of one element without a dimension stand in the JSON, exactly.

`check` finds out whether `decode` can work, before anything is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError, ConfigurationError

_SCALARS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
_SCALAR_NAMES = [str(dtype).removeprefix("torch.") for dtype in _SCALARS]
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
DEPTH = 64  # values within each other
_LARGEST = 1 << 63
_SHOWN = 60  # characters of a value in a message


class Malformed(ValueError):
    """Error in a nested value.

    what: is wrong with it.
    place: keys and numbers, from the outside to the inside.
    """

    def __init__(self, what: str, place: tuple[Any, ...] = ()) -> None:
        super().__init__(what, place)
        self.what, self.place = what, place

    def __str__(self) -> str:
        """Returns place and problem in one line."""
        where = ".".join(_cut(str(key)) for key in self.place)
        return f"{where}: {self.what}" if where else self.what


def within(key: Any, error: Malformed) -> Malformed:
    """Returns the error with a key put before its place."""
    return Malformed(error.what, (key, *error.place))


def check_at(key: Any, check: Callable[..., None], *values: Any) -> None:
    """Calls a check, and adds the key to the place of the error that it raises."""
    try:
        check(*values)
    except Malformed as error:
        raise within(key, error) from None


def shown(value: Any) -> str:
    """Formats a value for a message: short, and in one line."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return _cut(repr(value))


def _cut(text: str) -> str:
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encodes a value for JSON; adds its tensors to `tensors` under names that begin with `where`.

    Raises ConfigurationError, with the place, for anything that is no number, string, bytes, None, tensor, numpy
    array, dictionary, list or tuple.
    """
    try:
        encoded = _encode(value, where, where, tensors)
        check(encoded, {})
    except (RecursionError, Malformed):
        raise ConfigurationError(
            f"{where}: is nested too deeply, or holds itself; a checkpoint keeps {DEPTH} values within each other"
        ) from None
    return encoded


def check(value: Any, names: dict[str, bool], depth: int = 0) -> None:
    """Raises Malformed unless `decode` can work. names: gets the tensors that `decode` will ask for, each once.

    Their values in `names` are True for those that become arrays.
    """
    if not isinstance(value, dict | list):
        return
    if depth >= DEPTH:
        raise Malformed(f"is nested more than {DEPTH} deep")
    tag = tag_of(value)
    inner = value if tag is None else _content(tag, value[tag], names)  # type: ignore[call-overload]
    for key, item in inner.items() if isinstance(inner, dict) else enumerate(inner):
        check_at(key if tag is None else tag, check, item, names, depth + 1)


def tag_of(value: Any) -> str | None:
    """Returns the only key of an object that encodes another type; else None."""
    if isinstance(value, dict) and len(value) == 1:
        key = next(iter(value))
        return str(key) if key.startswith("$") else None
    return None


def _content(tag: str, content: Any, names: dict[str, bool]) -> list[Any]:
    """Checks a tagged value, and returns the values inside it."""
    if tag == "$tuple" and isinstance(content, list):
        return content
    if tag == "$dict" and isinstance(content, list) and all(isinstance(p, list) and len(p) == 2 for p in content):
        if all(_hashable(key) for key, _ in content):
            return [part for pair in content for part in pair]
    elif tag in _MEANS and _MEANS[tag](content):
        return []
    elif tag == "$tensor" and isinstance(content, str):
        if content in names:
            raise Malformed(f"{tag}: is {shown(content)}, which stands in another place too")
        names[content] = False
        return []
    elif tag == "$array" and tag_of(content) in ("$tensor", "$scalar"):
        of_torch = str(tag_of(content))
        _content(of_torch, content[of_torch], names)
        if of_torch == "$tensor":
            names[content[of_torch]] = True
            return []
        if content[of_torch][0] != "bfloat16":
            return []
    raise Malformed(f"{tag}: is {shown(content)}, which cannot be one")


def _is_scalar(content: Any) -> bool:
    """Returns True for [dtype, value] that make a tensor without dimensions."""
    if not isinstance(content, list) or len(content) != 2 or content[0] not in _SCALAR_NAMES:
        return False
    dtype, value = getattr(torch, content[0]), content[1]
    if not dtype.is_floating_point:
        return type(value) is int and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
    if tag_of(value) == "$float":
        return _MEANS["$float"](value["$float"])
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


_MEANS: dict[str, Callable[[Any], bool]] = {
    "$float": lambda content: isinstance(content, str) and content in ("nan", "inf", "-inf"),
    "$bytes": lambda content: isinstance(content, str) and re.fullmatch("([0-9a-f]{2})*", content) is not None,
    "$dtype": lambda content: isinstance(content, str) and content in _DTYPES,
    "$scalar": _is_scalar,
}


def _hashable(key: Any) -> bool:
    """Returns True if the decoded key can be one of a dictionary."""
    tag = tag_of(key)
    if tag == "$tuple":
        return isinstance(key[tag], list) and all(map(_hashable, key[tag]))
    return not isinstance(key, dict | list) or tag in ("$float", "$bytes", "$dtype", "$scalar", "$tensor")


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
        return {"$array": _encode(torch.from_numpy(np.array(value, order="C")), path, where, tensors)}
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


def check_kinds(saved: Any, here: Any, lists_grow: bool = True) -> None:
    """Raises Malformed where one encoded value is a number, text, sequence, ... and the other one something else.

    None fits anything. Of objects the keys that both have are compared; tuples have to be of one length.
    lists_grow: lists need not.
    """
    was, now = kind_of(saved), kind_of(here)
    if None in (saved, here) or one_is_scalar(saved, here):
        return
    if was != now:
        raise Malformed(f"is a {was}; needs a {now}")
    one, other = inner_of(saved), inner_of(here)
    if now == "sequence" and len(one) != len(other):
        if lists_grow and list in (type(saved), type(here)):
            return
        raise Malformed(f"has {len(one)} values; needs {len(other)}")
    for key in one.keys() & other.keys():
        check_at(key, check_kinds, one[key], other[key], lists_grow)


_KINDS = {"$tuple": "sequence", "$dict": "mapping", "$float": "number", "$scalar": "number", "$bytes": "text"}
_KINDS |= {"$tensor": "tensor", "$array": "tensor", "$dtype": "dtype"}


def one_is_scalar(saved: Any, here: Any) -> bool:
    """Returns True if both are numbers or tensors, and one of them a tensor without dimensions."""
    return {kind_of(saved), kind_of(here)} <= {"number", "tensor"} and "$scalar" in (tag_of(saved), tag_of(here))


def inner_of(encoded: Any) -> dict[Any, Any]:
    """Returns the values inside an encoded one, by keys or numbers."""
    tag = tag_of(encoded)
    if tag == "$dict":
        return {key: value for key, value in encoded[tag] if not isinstance(key, list | dict)}
    if tag == "$tuple" or isinstance(encoded, list):
        return dict(enumerate(encoded if tag is None else encoded[tag]))
    return encoded if isinstance(encoded, dict) and tag is None else {}


def kind_of(encoded: Any) -> str:
    """Returns the kind of an encoded value, in a word for an error. None and booleans are numbers here."""
    if isinstance(encoded, dict):
        return _KINDS.get(tag_of(encoded) or "", "mapping")
    return "sequence" if isinstance(encoded, list) else "text" if isinstance(encoded, str) else "number"


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Decodes what `encode` returned. tensor: reads a tensor by its name."""
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
    """Lists the tensors that `decode` will ask for."""
    names: dict[str, bool] = {}
    check(value, names)
    return [*names]
