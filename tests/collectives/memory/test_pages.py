"""Pages that come and go, operations made of several, and the two groups that nodes make."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time

import numpy as np
import pytest
import torch

from collectives import ArgumentError, OperationError
from collectives.memory.pages import Pages

pytestmark = pytest.mark.mpi

SIZE = 1 << 20  # elements; 1 << 22 bytes
HAS_ADVICE = hasattr(mmap, "MADV_REMOVE")


@pytest.mark.parametrize("shared", [True, False])
def test_pages_are_reserved_filled_discarded_and_filled_again(comm, shared: bool) -> None:
    pages = comm.pages(2 * SIZE * 4, shared=shared)
    first, second = pages.tensor(0, SIZE, torch.float32), pages.tensor(SIZE * 4, SIZE, torch.float32)
    assert pages.shared == comm.is_shared(first) == (shared and comm.local_size > 1)
    own = torch.full((SIZE,), float(comm.rank + 1)).tensor_split(comm.size)[comm.rank]
    expected = torch.cat([part.fill_(r + 1.0) for r, part in enumerate(torch.empty(SIZE).tensor_split(comm.size))])
    writer = not pages.shared or comm.local_rank == 0  # of each node
    for _ in range(2):
        if writer:
            pages.reserve(0, 2 * SIZE * 4)
            second.fill_(7.0)
        comm.barrier()
        comm.all_gather(first, own)
        assert torch.equal(first, expected)
        comm.barrier()
        if writer:
            pages.discard(0, SIZE * 4)
        comm.barrier()
        assert first.count_nonzero() == 0 or not HAS_ADVICE
        assert (second == 7.0).all()
        comm.barrier()


@pytest.mark.skipif(not HAS_ADVICE, reason="the system cannot take pages back")
def test_discarded_pages_are_free_for_others(comm) -> None:
    """Counted in the file itself: other programs use the file system, too."""
    if comm.local_size == 1:
        assert comm.pages(10).shared is False
        return
    pages = comm.pages(SIZE)
    used = lambda: os.fstat(pages.file).st_blocks * 512  # noqa: E731
    assert used() == 0
    comm.barrier()
    pages.reserve(0, SIZE)
    assert used() == SIZE
    comm.barrier()
    if comm.local_rank == 0:
        pages.discard(0, SIZE // 2 - 1)
    comm.barrier()
    assert used() == SIZE // 2


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")
def test_huge_pages_bring_no_byte_beyond_what_is_reserved(comm) -> None:
    """Private bytes of this mapping, as the system counts them; other regions of it stay as they are."""
    size, huge = 9 << 20, 2 << 20
    pages = Pages.private(4 * size)

    def resident() -> int:
        """Bytes of the pages that are there, of which the system keeps a bit each."""
        with open("/proc/self/pagemap", "rb") as table:
            table.seek(pages.address // mmap.PAGESIZE * 8)
            entries = np.frombuffer(table.read(4 * size // mmap.PAGESIZE * 8), np.uint64)
        return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE

    for start in (size, 2 * size):
        pages.reserve(start, size)
        pages.tensor(start, size, torch.uint8).fill_(3)
    assert resident() == 2 * size
    pages.discard(size, size)
    pages.reserve(3 * size, huge // 2)
    pages.tensor(3 * size, huge // 2, torch.uint8).fill_(3)
    assert resident() == size + huge // 2
    assert pages.tensor(size, size, torch.uint8).count_nonzero() == 0
    assert (pages.tensor(2 * size, size, torch.uint8) == 3).all()


def test_too_much_is_refused_before_it_is_touched(comm) -> None:
    pages = Pages(mmap.mmap(-1, 10), os.open(os.devnull, os.O_RDONLY))  # a file that takes none
    with pytest.raises(OperationError, match=r"no room for 4096 bytes .*/dev: Bad file descriptor"):
        pages.reserve(0, 4096)


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "is too small: enlarge it"), (errno.EIO, "Input/output")])
def test_an_error_says_what_has_run_out(comm, code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    pages = comm.pages(SIZE)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    if pages.shared:
        with pytest.raises(OperationError, match=message):
            pages.reserve(0, SIZE)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_compound_operation_uses_what_its_first_parts_found(comm, async_op: bool) -> None:
    """The second part's size depends on the first's result, and nothing that is issued comes between."""
    found = torch.zeros(comm.size * comm.size, dtype=torch.int64)
    total = torch.zeros(1, dtype=torch.int64)

    def task() -> None:
        comm.all_reduce(total.add_(comm.rank + 1))
        comm.all_gather(found[: comm.size], torch.tensor([int(total)]))

    work = comm.compound("two parts", task, async_op=async_op)
    x = np.ones(3)
    comm.all_reduce(x)
    if work is not None:
        work.wait()
    assert (x == comm.size).all()
    everyone = comm.size * (comm.size + 1) // 2
    assert found[: comm.size].tolist() == [everyone] * comm.size


@pytest.mark.parametrize("closed", ["it", "what it is a duplicate of"])
def test_a_compound_operation_that_is_under_way_ends_before_its_communicators_are_closed(comm, closed: str) -> None:
    """Its parts are operations of the group that is being closed, and of another duplicate."""
    group = comm.duplicate()
    other, own = group.duplicate(), group.duplicate()
    x, closing = np.ones(3), threading.Event()

    def task() -> None:
        closing.wait(10)
        time.sleep(0.05)  # for `close` to begin
        own.all_reduce(x)
        other.all_reduce(x)

    own.compound("two parts", task, async_op=True)
    closing.set()
    (own if closed == "it" else group).close()
    assert (x == comm.size**2).all()
    group.close()


def test_the_parts_of_a_compound_operation_are_not_asynchronous(comm) -> None:
    separate = comm.duplicate()  # which is unusable afterwards
    work = separate.compound("wrong", lambda: separate.barrier(async_op=True), async_op=True)
    with pytest.raises(OperationError, match=r"wrong .* failed: .*async_op inside a compound") as raised:
        work.wait()
    assert isinstance(raised.value.__cause__, ArgumentError)


def test_the_groups_of_a_node_and_across_nodes(comm) -> None:
    within, across = comm.split_by_node()
    assert (within.size, within.rank) == (comm.local_size, comm.local_rank)
    assert (across.size, within.nodes) == (comm.nodes, 1)
    x = np.array([comm.rank])
    within.all_reduce(x)
    across.all_reduce(x)
    assert x[0] == comm.size * (comm.size - 1) // 2


@pytest.mark.mpi
@pytest.mark.parametrize("shared", [True, False])
def test_of_those_that_share_memory_one_may_claim_it(comm, shared: bool) -> None:
    pages = comm.pages(10, shared=shared)
    claims = np.array([pages.claim()], np.int64)
    assert claims[0] == pages.claim()  # again: still the same one's
    comm.all_reduce(claims)
    assert claims[0] == (comm.nodes if shared else comm.size)
