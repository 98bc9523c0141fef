"""Several nodes: a small job over two test hosts, as root where namespaces are allowed."""

from __future__ import annotations

import re

import pytest

from tests.harness.on_hosts import on_hosts

JOB = """
import numpy as np
from collectives import Communicator
comm = Communicator()
assert (comm.size, comm.nodes, comm.local_size) == (4, 2, 2), (comm.size, comm.nodes, comm.local_size)
for size in (0, 3, 1003, 100_003, 4_000_003):
    x = np.arange(size, dtype=np.float64) % 7 + comm.rank
    comm.all_reduce(x, algorithm="hierarchical")
    assert (x == 4 * (np.arange(size) % 7) + 6).all(), size
print("rank", comm.rank, "is right")
"""
UNEVEN = """
import numpy as np
from collectives import Communicator
comm = Communicator().split(0 if Communicator().rank < 3 else 1)
x = np.ones(100_003)
comm.all_reduce(x)
assert (x == comm.size).all()
assert comm.size == 1 or (comm.nodes == 2 and "hierarchical" not in comm.algorithms("all_reduce"))
if comm.size > 1:
    here, parts = {"algorithm": "hierarchical"}, np.repeat(np.arange(3.0), 50_001)
    for root in range(3):
        x = np.full(100_003, comm.rank + 1.0)
        comm.reduce(x, root, **here)
        assert (x == (6 if comm.rank == root else comm.rank + 1)).all()
        whole, own = np.zeros(150_003), parts[comm.rank * 50_001 :][:50_001].copy()
        comm.gather(whole if comm.rank == root else None, own, root, **here)
        assert (whole == parts).all() or comm.rank != root
        comm.scatter(own, whole if comm.rank == root else None, root, **here)
        assert (own == comm.rank).all()
    comm.all_to_all(whole, np.full(150_003, float(comm.rank)), **here)
    assert (whole == parts).all()
print("rank", comm.rank, "is right")
"""


def test_a_rank_that_fails_gives_its_status() -> None:
    done = on_hosts("-c", "raise SystemExit(3)", ranks=1)
    assert done.returncode == 3, done.stdout + done.stderr


LATE = """
import os, signal, time
import numpy as np
from collectives import Communicator
comm = Communicator(timeout=2)
comm.barrier()
if comm.rank in RANKS:
    WHAT
comm.all_reduce(np.ones(1000), algorithm="ring")
"""
AFTER = "which is after barrier (operation 1)"


@pytest.mark.thorough
@pytest.mark.limit(60)
@pytest.mark.parametrize(
    ("ranks", "what", "missing"),
    [
        ("[3]", "time.sleep(60)", f"rank 3, {AFTER}"),
        ("[3]", "os.kill(os.getpid(), signal.SIGSTOP)", f"rank 3, {AFTER}"),
        ("[2, 3]", "os.kill(os.getpid(), signal.SIGSTOP)", "ranks 2, 3, which has not answered"),
    ],
    ids=["sleeps", "is stopped", "is stopped with all of its host"],
)
def test_a_late_rank_on_another_host_is_named_with_what_it_is_in(ranks: str, what: str, missing: str) -> None:
    done = on_hosts("-c", LATE.replace("RANKS", ranks).replace("WHAT", what))
    assert done.returncode != 0
    assert "rank 0 of 4 has waited" in done.stderr
    assert f"not arrived: {missing}\n" in done.stderr, done.stderr


@pytest.mark.thorough
@pytest.mark.limit(60)
def test_a_rank_on_another_host_that_is_stopped_inside_an_operation_is_named() -> None:
    what = "import threading; threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()"
    many = "while True:\n    comm.all_reduce(np.ones(1_000_000), algorithm='ring')\n"
    job = LATE.replace("RANKS", "[3]").replace("WHAT", what).rpartition("comm.all_reduce")[0] + many
    done = on_hosts("-c", job)
    assert done.returncode != 0
    assert re.search(r" of 4 has waited [23] s in all_reduce \(operation ", done.stderr), done.stderr
    assert re.search(r"silent for \d s, as if stopped or gone: rank 3\n", done.stderr), done.stderr


PARTS = """
import numpy as np, torch
from collectives import Communicator
comm = Communicator()
total = 1_500_007  # several segments
for dtype in (torch.float32, torch.bfloat16, torch.int32):
    for counts in ([total // 4] * 4, [total, 0, 3, 700_001], [0, 0, 0, 0]):
        mine = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
        values = [torch.randn(sum(counts), generator=torch.Generator().manual_seed(r)) * 100 for r in range(4)]
        values = [v.to(dtype) for v in values]
        for op in ("sum", "max") + ("avg",) * dtype.is_floating_point:
            expected = values[comm.rank].clone()
            comm.all_reduce(expected, op, algorithm="hierarchical")
            for symmetric in (True, False, comm.rank != 1):  # of all, of none, of all but one
                x = torch.empty(sum(counts), dtype=dtype)
                flat = comm.empty(sum(counts), dtype)
                x = flat if symmetric else x
                x.copy_(values[comm.rank])
                for out in (torch.empty(counts[comm.rank], dtype=dtype), x[mine]):
                    comm.reduce_scatter(out, x, op, counts=counts, algorithm="hierarchical")
                    assert torch.equal(out, expected[mine]), (dtype, counts, op, symmetric)
            for shared in (True, False):
                pages = comm.pages(max(1, expected.nbytes), shared=shared)
                whole = pages.tensor(0, sum(counts), dtype)
                comm.all_gather(whole, expected[mine].clone(), counts=counts, algorithm="hierarchical")
                assert torch.equal(whole, expected), (dtype, counts, shared)
                comm.barrier()
print("rank", comm.rank, "is right")
"""


@pytest.mark.thorough
@pytest.mark.limit(90)
def test_ranks_of_two_hosts_reduce_over_shared_memory_and_the_network() -> None:
    """Parts of all sizes are those of the all-reduce, bit by bit."""
    done = on_hosts("-c", JOB + PARTS, timeout=80)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is right") == 2 * 4, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.limit(60)
def test_uneven_hosts_reduce_by_messages_and_have_the_other_hierarchical_operations() -> None:
    done = on_hosts("-c", UNEVEN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is right") == 4, done.stdout + done.stderr


ALONE = """
import torch
from pathlib import Path
from collectives import Communicator

def sent():
    "Bytes at the interfaces, less those of segments that TCP has sent again, which are more on a busy machine."
    fields = [line.replace(":", " ").split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return sum(int(each[9]) for each in fields if each[0] != "lo") - 1448 * int(values[names.index("RetransSegs")])

comm = Communicator()
assert comm.local_size == 1 and comm.nodes == comm.size
N = comm.size
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    for size in (0, 1, 5000, 3_000_001):  # whole to every node; several segments
        values = [(torch.randn(size, generator=torch.Generator().manual_seed(r)) * 100).to(dtype) for r in range(N)]
        for op in ("sum", "max") + ("avg",) * dtype.is_floating_point:
            expected = values[0].to(wide)
            for v in values[1:]:
                expected = torch.maximum(expected, v.to(wide)) if op == "max" else expected + v.to(wide)
            expected = (expected / N if op == "avg" else expected).to(dtype)
            for x in (torch.empty(size, dtype=dtype), comm.empty(size, dtype)):
                x.copy_(values[comm.rank])
                comm.barrier()
                before = sent()
                comm.all_reduce(x, op, algorithm="hierarchical")
                if size > 5000:
                    most = 2 * (N - 1) / N * x.nbytes * 1.05
                    assert sent() - before < most, (dtype, sent() - before, most)
                assert torch.equal(x, expected), (dtype, size, op)
                counts = [size // N] * (N - 1) + [size - size // N * (N - 1)]
                mine = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
                x.copy_(values[comm.rank])
                kept = x.clone()
                for out in (torch.empty(counts[comm.rank], dtype=dtype), x[mine]):
                    comm.reduce_scatter(out, x, op, counts=counts, algorithm="hierarchical")
                    assert torch.equal(out, expected[mine]), (dtype, size, op)
                kept[mine] = x[mine]
                assert torch.equal(x, kept), "more than its own part was changed"
print("rank", comm.rank, "is right")
"""


@pytest.mark.thorough
@pytest.mark.limit(90)
@pytest.mark.parametrize("number", [2, 3])
def test_hosts_of_one_rank_send_16_bits_as_16_and_add_them_in_32(number: int) -> None:
    done = on_hosts("-c", ALONE, number=number, ranks=1, timeout=80)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is right") == number, done.stdout + done.stderr
