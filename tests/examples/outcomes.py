"""Calls programs' main() with many command lines in one MPI job, and tells how each ended on every rank.

    mpirun -n 2 python outcomes.py examples/gpt2_zero3.py '[["--batch", "0"], ...]' [PROGRAM LINES]...

A program is a file, or a package that `python -m` runs, such as collectives.bench. "{rank}" in an argument becomes the
rank. "signal:3" is no argument: the last rank gets SIGUSR1 once step 3 is done, in programs with `mpidl.resuming`.
Rank 0 prints JSON: for each command line, of all programs in turn, a list over the ranks of [status (0: it returned
None or 0), what was written to standard output, to standard error].
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import mpidl
from mpidl.resuming import Checkpoints


def main_of(program):
    """The function that a program runs."""
    if not program.endswith(".py"):
        return importlib.import_module(f"{program}.__main__").main
    path = Path(__file__).resolve().parents[2] / program
    sys.path.insert(0, str(path.parent))
    return runpy.run_path(str(path))["main"]


asked = [(main_of(name), json.loads(lines)) for name, lines in zip(sys.argv[1::2], sys.argv[2::2], strict=True)]
comm = mpidl.init()
outcomes = []
signalled = 0
after = Checkpoints.after


def after_a_signal(kept, done, *arguments, **settings):
    """Checkpoints.after, once the signal has come."""
    if done == signalled and comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    after(kept, done, *arguments, **settings)


Checkpoints.after = after_a_signal
for main, arguments in [(main, line) for main, lines in asked for line in lines]:
    signalled = sum(int(argument[7:]) for argument in arguments if argument.startswith("signal:"))
    given = [argument for argument in arguments if not argument.startswith("signal:")]
    sys.argv[1:] = [argument.replace("{rank}", str(comm.rank)) for argument in given]
    out, errors, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status = main() or 0
        except SystemExit as end:
            status = end.code
    outcomes.append(mpidl.all_gather_object(comm, (status, out.getvalue(), errors.getvalue())))
if comm.rank == 0:
    print(json.dumps(outcomes))
