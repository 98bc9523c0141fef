"""More than 2^31 elements, and messages of more than 2 GiB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import sys
import numpy as np
from collectives import Communicator

comm = Communicator()
count = 2**31 + 5
x = np.ones(count, np.int8)
x[-1] = 7 + comm.rank
ends = slice(0, None, count - 1)
if sys.argv[1] == "send":
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.recv(x, 0)
    assert list(x[ends]) == [1, 7]
elif sys.argv[1] == "all_gather":
    parts = [count, 3]
    out = np.zeros(count + 3, np.int8) if comm.rank else np.concatenate([x, np.zeros(3, np.int8)])
    comm.all_gather(out, out[:count] if comm.rank == 0 else x[-3:], parts, algorithm=sys.argv[2])
    assert list(out[[0, count - 1, -1]]) == [1, 7, 8]
else:
    comm.all_reduce(x, algorithm=sys.argv[2])
    assert list(x[ends]) == [2, 15]
    assert x[1 << 20 :: 1 << 20].min() == x[:: 1 << 20].max() == 2
"""


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["all_reduce auto", "all_gather ring", "send"])
def test_counts_past_two_to_the_31(mpirun: Callable, tmp_path: Path, what: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = mpirun(2, path, *what.split(), timeout=100)
    assert done.returncode == 0, done.stderr
