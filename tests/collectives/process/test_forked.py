"""A forked child of a rank is no rank: it may not use MPI, and ends without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import atexit, gc, multiprocessing, os, sys, time
import numpy as np
from collectives import Communicator, OperationError
from collectives.draining import exempt_from_watchdog

comm = Communicator()
rank, size = comm.rank, comm.size
x, parts, one = np.ones(1000), np.ones(size), np.ones(1)
symmetric = comm.empty(4, np.float64)
symmetric[:] = 1
steps = comm.partitioned_all_reduce([symmetric])
group, dropped = comm.split(0), comm.split(0)
comm.all_reduce(x)
comm.barrier()
prepared = comm.prepare("all_reduce", np.ones(3))
later = comm.all_reduce(np.ones(3), async_op=True) if rank == 0 else None  # the others come to it after the children
message = comm.recv(np.ones(1), 1, tag=5, async_op=True) if rank == 0 else None

OPERATIONS = [
    lambda: comm.all_reduce(x),
    lambda: comm.all_reduce(x, async_op=True),
    lambda: comm.all_reduce([x, one]),
    lambda: comm.reduce_scatter(one, parts),
    lambda: comm.reduce(x),
    lambda: comm.all_gather(parts, one),
    lambda: comm.all_to_all(parts.copy(), parts),
    lambda: comm.broadcast(x),
    lambda: comm.gather(parts if rank == 0 else None, one),
    lambda: comm.scatter(one, parts if rank == 0 else None),
    lambda: comm.send(one, (rank + 1) % size),
    lambda: comm.recv(one, (rank + 1) % size),
    lambda: comm.sendrecv(one, (rank + 1) % size, one.copy(), (rank + 1) % size),
    lambda: comm.probe((rank + 1) % size),
    lambda: comm.iprobe((rank + 1) % size),
    lambda: comm.scan(x),
    lambda: comm.exscan(x),
    lambda: comm.prepare("all_reduce", x)(),
    prepared,
    lambda: comm.barrier(),
    lambda: comm.compound("all", lambda: None),
    lambda: comm.partitioned_all_reduce([symmetric]),
    lambda: steps.hand_in(symmetric),
    lambda: comm.split(0),
    lambda: comm.split_by_node(),
    lambda: comm.duplicate(),
    lambda: comm.empty(4, np.float64),
    lambda: comm.shared(4, np.float64),
    lambda: comm.pages(4),
    lambda: comm.abort(),
    lambda: group.all_reduce(x),
    lambda: Communicator(),
]
if rank == 0:
    OPERATIONS += [later.wait, message.wait, lambda: message.wait(0.1), message.is_completed]


def be_refused():
    global dropped
    for number, operation in enumerate(OPERATIONS):
        try:
            operation()
        except OperationError as error:
            assert "was forked from" in str(error) and "\\n" not in str(error), error
        else:
            raise AssertionError(f"operation {number} was not refused")
    exempt_from_watchdog(comm)
    comm.close()
    group.close()
    dropped = None
    gc.collect()


def forked(end):
    "The exit status of a child that is refused everything and ends so."
    child = os.fork()
    if child == 0:
        atexit.register(print, "at exit\\n", end="")
        be_refused()
        end()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fail():
    sys.excepthook = lambda *_: None
    raise ZeroDivisionError


assert forked(lambda: sys.exit(3)) == 3
assert forked(sys.exit) == 0
assert forked(lambda: sys.exit("why")) == 1
assert forked(fail) == 1
assert forked(lambda: os._exit(4)) == 4
worker = multiprocessing.get_context("fork").Process(target=be_refused)
worker.start()
worker.join()
assert worker.exitcode == 0
child = os.fork()
if child == 0:
    be_refused()  # and comes to the end of the program
else:
    assert os.waitpid(child, 0)[1] == 0
    if rank == 0:
        open(__file__ + ".done", "w").close()  # no child needs that `later` is under way any more
        later.wait()
        message.wait()
    else:
        while not os.path.exists(__file__ + ".done"):
            time.sleep(0.01)
        comm.all_reduce(np.ones(3))
        if rank == 1:
            comm.send(one, 0, tag=5)
    x[:] = 1
    comm.all_reduce(x)
    steps.hand_in(symmetric)
    steps.wait()
    group.all_reduce(one)
    assert (x == size).all() and (symmetric == size).all() and one[0] == size
    print("right\\n", end="")
"""


@pytest.mark.thorough("4")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_forked_child_is_refused_and_ends_while_its_parent_goes_on(
    mpirun: Callable, tmp_path: Path, ranks: int
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = mpirun(ranks, path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right\n") == ranks
    assert done.stdout.count("at exit\n") == 4 * ranks
