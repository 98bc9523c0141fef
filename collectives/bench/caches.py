"""The bytes that the caches of a core can hold, from what the system says of them."""

from __future__ import annotations

import os
from pathlib import Path

from ..process import cores

_SYSTEM = Path("/sys/devices/system/cpu")
_UNITS = {"K": 10, "M": 20, "G": 30}


def cache_bytes(system: Path = _SYSTEM) -> int | None:
    """Bytes of all levels that a core of this process reaches, instructions not counted; None if nothing says so.

    Levels are added up, as in many processors one does not hold again what another holds. Of several cores' it is the
    largest.
    """
    found = [_of_core(system / f"cpu{core}" / "cache") for core in cores.usable()]
    return max(found, default=0) or _of_library()


def _of_core(folder: Path) -> int:
    total = 0
    for index in sorted(folder.glob("index*")):
        try:
            kind, size = ((index / name).read_text().strip() for name in ("type", "size"))
            if kind in ("Data", "Unified"):
                total += int(size[:-1]) << _UNITS[size[-1]] if size[-1] in _UNITS else int(size)
        except (OSError, ValueError, IndexError):
            continue
    return total


def _of_library() -> int | None:
    """The C library's own idea, for systems without these files."""
    names = ("SC_LEVEL1_DCACHE_SIZE", "SC_LEVEL2_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE")
    try:
        return sum(max(0, os.sysconf(name)) for name in names) or None
    except (OSError, ValueError, AttributeError):
        return None
