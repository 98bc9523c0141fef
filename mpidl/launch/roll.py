"""Which process is which rank, for `mpidl.launch` to name the rank that a launcher knows by its process alone."""

from __future__ import annotations

from collections.abc import Mapping


def rank_of(process: int, node: str, processes: Mapping[int, tuple[str, int]]) -> int | None:
    """Of a process on a node, which its launcher may call by another name than it does itself; None: not known.

    processes: node and process number of each rank.
    """
    found = {rank: name for rank, (name, number) in processes.items() if number == process}
    there = [rank for rank, name in found.items() if name.split(".")[0] == node.split(".")[0]]
    return next(iter(there or (found if len(found) == 1 else ())), None)
