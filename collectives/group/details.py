"""Describes an operation's arguments in words, which a rank writes next to its position, for reports.

They follow the operation's name: "sum of 5 float32 by ring". They must be the same on all ranks of an operation, so
that a report of the watchdog shows what does not fit.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from ..base.buffers import Buffer
from ..base.partition import Splits, even_counts
from ..base.reduction import Reduction
from ..runtime.positions import words

_ROOM = 16  # letters of counts


def describe_arrays(algorithm: str, checked: Sequence[Any]) -> bytes:
    """The words for an operation's checked arguments: arrays, operator, root, counts or splits."""
    arrays = [given for given in checked if isinstance(given, Buffer)]
    size: int | None = max(data.size for data in arrays)
    operator, root, parts = "", "", ""
    for given in checked:
        if isinstance(given, Reduction):
            operator = f"{given.name} "
        elif isinstance(given, list):
            size = sum(given)
            parts = "" if given == even_counts(size, len(given)) else _in_parts(given)
        elif isinstance(given, Splits):
            size = size if given.uniform else None  # each rank's own
        elif isinstance(given, int):
            root = f" root {given}"
    elements = "" if size is None else f"{size} "
    return words(f"{operator}of {elements}{arrays[0].dtype.name}{root} by {algorithm}{parts}")


def _in_parts(counts: Sequence[int]) -> str:
    """Counts in words, those of many ranks by a checksum, as there is room for few."""
    text = ", ".join(map(str, counts))
    return f" in parts of {text}" if len(text) <= _ROOM else f" in parts #{zlib.crc32(text.encode()):08x}"


def describe_parts(operator: Reduction, parts: Sequence[Buffer]) -> bytes:
    """The words for arrays that are handed in one by one."""
    dtypes = ", ".join(dict.fromkeys(part.dtype.name for part in parts))
    return words(f"{operator.name} of {len(parts)} parts of {sum(part.size for part in parts)} {dtypes}")


def describe_list(operator: Any, arrays: Sequence[Buffer], root: int, rooted: bool, algorithms: Sequence[str]) -> bytes:
    """The words for a list of arrays. algorithms: of each batch."""
    name = f"{operator} " if isinstance(operator, str) else ""
    end = f" root {root}" if rooted else ""
    dtypes = ", ".join(dict.fromkeys(array.dtype.name for array in arrays))
    ways = ", ".join(dict.fromkeys(algorithms))
    size = sum(array.size for array in arrays)
    return words(f"{name}of {len(arrays)} arrays of {size}{end} by {ways}: {dtypes}")
