"""Reads what lies in a directory of checkpoints."""

from __future__ import annotations

from pathlib import Path

from mpidl.checkpoint import directory_lock


def names(folder: Path) -> list[str]:
    """Lists a directory without the running job's lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != directory_lock.NAME)
