"""The limits of this process's control group (cgroup), and the processes that the kernel has killed in it.

A container sees its own group as the root of /sys/fs/cgroup. Elsewhere, under Slurm and systemd, the group is a folder
below, which /proc/self/cgroup names, and each of the folders above it sets limits too:

    0::/system.slice/slurmstepd.scope/job_7/step_0      version 2: /sys/fs/cgroup/system.slice/...
    4:memory:/slurm/uid_1000/job_7                      version 1: /sys/fs/cgroup/memory/slurm/...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """Returns the number of cores that the group may use at a time; None without a limit."""
    limits = []
    for folder in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):  # another version's, or no limit
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            limits.append(quota / period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            limits += [quota / period] * (quota > 0)
    return min(limits, default=None)


def memory_limit() -> int | None:
    """Returns the bytes that the group may use; None without a limit. Version 1 has a huge number in place of none."""
    limits = []
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


def killed_for_memory() -> int:
    """Returns how many of the group's processes the kernel has killed so far for want of memory."""
    for folder in _folders("memory"):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = (folder / name).read_text().split()
                return int(words[words.index("oom_kill") + 1])
    return 0


def _folders(controller: str) -> Iterator[Path]:
    """The folders of the group and of those above it, the innermost first; of either version."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = ROOT / "unified" if (ROOT / "unified").is_dir() else ROOT
        elif controller in controllers.split(","):
            root = next((r for r in (ROOT / controllers, ROOT / controller) if r.is_dir()), ROOT)
        else:
            continue
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))
