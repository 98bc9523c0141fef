"""Reads the number of ranks from the command line of a launcher, and replaces it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError

_SEPARATE = ("-n", "-np", "--np", "-c", "--ntasks", "--n")  # the number is the next argument; srun's -c is of cores
_JOINED = re.compile(r"(-n|-np|--np=|--ntasks=|--n=)(\d+)")


def is_launcher(command: Sequence[str]) -> bool:
    """Recognises a command that starts ranks by its name."""
    return bool(command) and bool(re.search(r"(mpirun|mpiexec|srun|prterun|hydra)[^/]*$", command[0]))


def ranks_of(command: Sequence[str]) -> int | None:
    """Returns the number of ranks in a launcher's command line; None if there is none."""
    index = _index(command)
    return None if index is None else int(re.sub(r"\D+", "", command[index]))


def with_ranks(command: Sequence[str], ranks: int) -> list[str]:
    """Returns the command for another number of ranks. Raises UsageError if it names none."""
    index = _index(command)
    if index is None:
        raise UsageError(f"{' '.join(command[:4])}: needs -n, -np or --ntasks with a number, to start fewer ranks")
    return [*command[:index], re.sub(r"\d+$", str(ranks), command[index]), *command[index + 1 :]]


def _index(command: Sequence[str]) -> int | None:
    """Finds the argument with the number.

    Looks no further than a Python program, which has options of its own; other programs are not recognised.
    """
    if not is_launcher(command):
        return None
    separate = [name for name in _SEPARATE if name != "-c" or not Path(command[0]).name.startswith("srun")]
    for index, argument in enumerate(command[1:], 1):
        if argument in separate and command[index + 1 : index + 2] and command[index + 1].isdigit():
            return index + 1
        if _JOINED.fullmatch(argument):
            return index
        if re.search(r"(^|/)python[\d.]*$|\.py$", argument):
            return None
    return None
