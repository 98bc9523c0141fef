"""verify(): reads a whole checkpoint and compares every checksum."""

from __future__ import annotations

from pathlib import Path

from . import folder, index, parts
from .index import Index
from .reading import Reader


def verify(path: str | Path) -> Index:
    """Reads all bytes of a checkpoint's directory; needs one process. Returns its index.

    Raises CheckpointError for the first file that is missing, cut short or damaged.
    """
    content = index.read(folder.path_of(path))
    folder.check_files(content)
    for each in parts.contents(content).values():
        with Reader(each) as reader:
            for name, entry in each.tensors.items():
                reader.check(name, 0, entry.count)
    return content
