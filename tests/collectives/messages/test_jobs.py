"""Messages under way while their sender is elsewhere: in a collective, or at the end of its program.

In a collective the library moves them only when it is called.
"""

from __future__ import annotations

import pytest

from tests.harness import launch

_PROGRAM = """
import numpy as np
from collectives import Communicator

comm = Communicator()
x = comm.empty(1000, np.float32)
for size in (2_000, 200_000, 4_000_000):
    for async_op in (False, True):
        x[:] = 1
        data = np.full(size, comm.rank + 1.0, np.float32)
        if comm.rank == 0:
            sent = [comm.send(data, other, async_op=True) for other in range(1, comm.size)]
            work = comm.all_reduce(x, async_op=async_op)
            for each in sent if work is None else [work, *sent]:
                each.wait()
        else:
            comm.recv(data, 0)  # and only then the collective
            comm.all_reduce(x)
            assert (data == 1).all()
        assert (x == comm.size).all()
comm.barrier()
if comm.rank == 0:
    print("right")
"""


@pytest.mark.thorough
@pytest.mark.job
@pytest.mark.parametrize("transport", ["tcp,self", "sm,self"])
def test_a_message_arrives_while_its_sender_waits_in_a_collective(transport: str) -> None:
    """The names are Open MPI's; other libraries take no notice of them."""
    transports = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": transport, "OMPI_MCA_smsc": "^cma,xpmem,knem"}
    done = launch.mpirun(2, "-c", _PROGRAM, timeout=60, **transports)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr


_ENDS = """
import time
import numpy as np
from collectives import Communicator

comm = Communicator()
data = np.full(1 << 20, comm.rank + 1.0)
if comm.rank == 0:
    comm.recv(np.empty(1 << 20), 1, async_op=True)  # for which nothing is sent
    comm.send(data, 1, async_op=True)
else:
    while comm._dispatch.positions.all()[0].operation != "the end of its program":
        pass
    time.sleep(0.2)  # until the interpreter has freed the sender's objects
    comm.recv(data, 0)
    assert (data == 1).all()
    print("right")
"""


@pytest.mark.thorough
@pytest.mark.job
def test_what_was_sent_arrives_after_the_end_of_the_sender_s_program() -> None:
    done = launch.mpirun(2, "-c", _ENDS, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "right"), done.stderr
