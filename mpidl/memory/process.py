"""The system's figures of this process: its resident set, and its share of memory that several processes hold."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

MIB = 1 << 20


def peak_rss_mib() -> float:
    """Largest resident set of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


def rss_mib() -> float:
    """Resident set of this process now, in MiB (its peak where the system does not tell)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_rss_mib()
    return pages * resource.getpagesize() / MIB


def pss_mib() -> float:
    """Proportional set size of this process now, in MiB: memory shared by several counts for each with its share.

    What ranks of a node hold adds up to what the node holds. Where the system does not tell, the resident set.
    """
    return _of_rollup("Pss:")


def data_mib() -> float:
    """The part of the proportional set size that is data: memory of this process and shared memory, no files.

    The rest is mostly code, whose share falls and rises as other processes that use it come and go.
    """
    return _of_rollup("Pss_Anon:", "Pss_Shmem:")


def _of_rollup(*names: str) -> float:
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return rss_mib()
    found = [int(line.split()[1]) for line in lines if line.startswith(names)]
    return sum(found) / 1024 if len(found) == len(names) else rss_mib()
