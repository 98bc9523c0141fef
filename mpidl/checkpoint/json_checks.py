"""Checks of single JSON values, and their combination for lists, objects and records; `schema` is made of them.

A check is a function of a value that raises Malformed. The checks of a record are a dictionary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .json_encoding import Malformed, check_at, shown

_LARGEST = (1 << 63) - 1
_LONGEST_NAME = 10_000
_LONGEST_DOCUMENT = 16 << 20
_MOST_DIMENSIONS = 64  # torch's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
SIZES = {code: dtype.itemsize for code, dtype in DTYPES.items()}

Check = Callable[[Any], None]


def integer_check(least: int = 0) -> Check:
    """Returns a check for an integer of at least `least` that fits in 64 bits; no boolean."""

    def check(value: Any) -> None:
        if type(value) is not int or not least <= value <= _LARGEST:
            raise Malformed(f"is {shown(value)}; needs an integer of at least {least}")

    return check


def text(value: Any) -> None:
    """Checks a name: a text without null characters that UTF-8 can encode."""
    if type(value) is not str or len(value) > _LONGEST_NAME:
        raise Malformed(f"is {shown(value)}; needs a text of at most {_LONGEST_NAME} characters")
    if "\0" in value or not (value.isascii() or _is_unicode(value)):
        raise Malformed(f"is {shown(value)}; needs a text without null characters and surrogates")


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def nullable(inner: Check) -> Check:
    """Returns a check for None or a value that `inner` takes."""

    def check(value: Any) -> None:
        if value is not None:
            inner(value)

    return check


def items(inner: Check) -> Check:
    """Returns a check for a list of values that `inner` takes."""

    def check(value: Any) -> None:
        if type(value) is not list:
            raise Malformed(f"is {shown(value)}; needs a list")
        for number, item in enumerate(value):
            check_at(number, inner, item)

    return check


def mapping(inner: Check, key: Check = text) -> Check:
    """Returns a check for an object with names that `key` takes and values that `inner` takes."""

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Malformed(f"is {shown(value)}; needs an object")
        for name, item in value.items():
            check_at(name, key, name)
            check_at(name, inner, item)

    return check


def boolean(value: Any) -> None:
    """Checks a boolean."""
    if type(value) is not bool:
        raise Malformed(f"is {shown(value)}; needs true or false")


def record(needed: Mapping[str, Check], optional: Mapping[str, Check] | None = None, exact: bool = False) -> Check:
    """Returns a check for an object with these fields. exact: and with no others."""
    known = {**needed, **(optional or {})}

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise Malformed(f"is {shown(value)}; needs an object")
        for name, inner in known.items():
            if name in value:
                check_at(name, inner, value[name])
            elif name in needed:
                raise Malformed(f"lacks {name}")
        if exact and not value.keys() <= known.keys():
            raise Malformed(f"has {shown(min(value.keys() - known.keys()))}, which is unknown")

    return check


def dtype_code(value: Any) -> None:
    """Checks the code of a dtype in safetensors' format."""
    if type(value) is not str or value not in DTYPES:
        raise Malformed(f"is {shown(value)}; needs the name of a dtype, such as F32")


def text_of_form(pattern: re.Pattern[str], what: str) -> Check:
    """Returns a check for a text of this form. what: the text's name and an example, for the error."""

    def check(value: Any) -> None:
        if type(value) is not str or not pattern.fullmatch(value):
            raise Malformed(f"is {shown(value)}; needs the name of {what}")

    return check


def one_of(choices: Sequence[str]) -> Check:
    """Returns a check for one of these texts."""

    def check(value: Any) -> None:
        if value not in choices:
            raise Malformed(f"is none of {', '.join(choices)}")

    return check


def bytes_of(code: str, shape: Iterable[int]) -> int:
    """Computes the bytes of a tensor. Raises Malformed for an invalid shape."""
    sizes = list(shape)
    if len(sizes) > _MOST_DIMENSIONS or any(type(size) is not int or size < 0 for size in sizes):
        raise Malformed(f"has the shape {shown(sizes)}; needs at most {_MOST_DIMENSIONS} sizes of at least 0")
    if math.prod(max(size, 1) for size in sizes) * SIZES[code] > _LARGEST:
        raise Malformed(f"has the shape {shown(sizes)}, which no memory holds")
    return math.prod(sizes) * SIZES[code]


any_list: Check = items(lambda value: None)


def document(value: Any) -> None:
    """Checks the text of a file."""
    if type(value) is not str or len(value) > _LONGEST_DOCUMENT or not _is_unicode(value):
        raise Malformed(f"is {shown(value)}; needs a text of at most {_LONGEST_DOCUMENT} characters")
