"""The argument `offload=`: the memory of optimizer state, the size of the buffer, and whether updates are delayed."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigurationError

PLACES = ("cpu", "disk")


@dataclass(frozen=True)
class Offload:
    """The memory in which ZeroOptimizer keeps optimizer state and fp32 masters.

    to: "cpu", memory of the host, in which they lie anyway where the model is on the CPU: then only `delayed_update`
        changes anything. "disk": a file for each rank.
    path: a directory for the file, on each node its own, best of an NVMe drive; by default that of `tempfile`. The file
        has no name in it: however the job ends, nothing is left.
    buffer_mb: memory through which state passes from and to the disk, in MiB, a rank: a third is read, a third stepped
        on, a third written at a time.
    delayed_update: the step is computed in a thread during the next forward and backward pass, and its weights are seen
        after the next step: gradients are those of weights one update old. Costs memory for a copy of this rank's
        gradients and new weights. Source: Ren et al. 2021, "ZeRO-Offload", section 5.2.
    delay_from: how many first steps are not delayed, in which gradients change fast. Counted from construction.
        Checkpoints save the count, a `state_dict` does not: give 0 where training goes on from one.

    Raises ConfigurationError.
    """

    to: str = "cpu"
    path: str | os.PathLike[str] | None = None
    buffer_mb: float = 96.0
    delayed_update: bool = False
    delay_from: int = 40

    def __post_init__(self) -> None:
        if self.to not in PLACES:
            raise ConfigurationError(f"Offload: got to={self.to!r}; needs one of {', '.join(PLACES)}")
        if self.path is not None and self.to != "disk":
            raise ConfigurationError(f"Offload: got path={str(self.path)!r}; needs to='disk' with it")
        size = self.buffer_mb
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < math.inf:
            raise ConfigurationError(f"Offload: got buffer_mb={size!r}; needs a size above 0, in MiB")
        if not isinstance(self.delayed_update, bool):
            raise ConfigurationError(f"Offload: got delayed_update={self.delayed_update!r}; needs True or False")
        first = self.delay_from
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ConfigurationError(f"Offload: got delay_from={first!r}; needs a number of steps of at least 0")

    @classmethod
    def of(cls, given: Offload | str | None) -> Offload | None:
        """Settings from what a user gave: "cpu" and "disk" are short for `Offload("cpu")` and `Offload("disk")`."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str) and given in PLACES:
            return cls(given)
        raise ConfigurationError(f"offload: got {given!r}; needs None, {', '.join(map(repr, PLACES))} or an Offload")

    def directory(self) -> Path:
        """The directory of the file. Raises ConfigurationError unless it is a directory."""
        directory = Path(tempfile.gettempdir() if self.path is None else self.path)
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise ConfigurationError(f"Offload: path {directory} {what}; needs a directory to write in")
        return directory
