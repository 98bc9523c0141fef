"""Keeps MPI uninitialised for commands that are one process and no job, such as `python -m mpidl.memory`.

For such a command Python imports the whole package first, mpi4py with it, and that would initialise MPI, which fails on
a login node, for example.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise

_COMMANDS = ("mpidl.memory", "mpidl.checkpoint", "mpidl.launch")


def is_standalone(interpreter: Sequence[str], program: str) -> bool:
    """Returns whether Python is about to run such a command.

    interpreter: sys.orig_argv.
    program: sys.argv[0].
    """
    return program == "-m" and any(  # "-m mpidl.memory", "-Im mpidl.memory" or "-mmpidl.memory"
        option.startswith("-") and "m" in option and (option.partition("m")[2] or name) in _COMMANDS
        for option, name in pairwise([*interpreter, ""])
    )


if is_standalone(sys.orig_argv, sys.argv[0] if sys.argv else ""):
    os.environ["MPI4PY_RC_INITIALIZE"] = "0"
