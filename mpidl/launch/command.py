"""Reads the number of ranks from the command line of a launcher, and replaces it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import UsageError

_SEPARATE = ("-n", "-np", "--np", "-c", "--ntasks", "--n")  # the number is the next argument
_JOINED = re.compile(r"(-n|-np|--np=|--ntasks=|--n=)(\d+)")


def is_launcher(command: Sequence[str]) -> bool:
    """Recognises a command that starts ranks by its name."""
    return bool(command) and bool(re.search(r"(mpirun|mpiexec|srun|prterun|hydra)[^/]*$", command[0]))


def ranks_of(command: Sequence[str]) -> int | None:
    """Returns the number of ranks in a launcher's command line; None if there is none."""
    place = _place(command)
    return None if place is None else int(re.sub(r"\D+", "", command[place]))


def with_ranks(command: Sequence[str], ranks: int) -> list[str]:
    """Returns the command for another number of ranks. Raises UsageError if it names none."""
    place = _place(command)
    if place is None:
        raise UsageError(f"{' '.join(command[:4])}: needs -n, -np or --ntasks with a number, to start fewer ranks")
    return [*command[:place], re.sub(r"\d+$", str(ranks), command[place]), *command[place + 1 :]]


def _place(command: Sequence[str]) -> int | None:
    """Finds the argument with the number, before the program that is started, which has options of its own."""
    if not is_launcher(command):
        return None
    for place, argument in enumerate(command[1:], 1):
        if argument in _SEPARATE and command[place + 1 : place + 2] and command[place + 1].isdigit():
            return place + 1
        if _JOINED.fullmatch(argument):
            return place
        if re.search(r"(^|/)python[\d.]*$|\.py$", argument):
            return None
    return None
