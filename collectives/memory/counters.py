"""Numbers in shared memory, one a rank, that only grow; a rank that waits for one sleeps until it has grown.

    numbers     rank 0     | rank 1     | ...        a cache line each, written by that rank alone
    sleepers    of rank 0's | of rank 1's | ...      a byte for each rank that may sleep, written by that rank, and
                                                     padding to whole words, so that a few reads tell if any sleeps

A look at a number takes less than a tenth of a microsecond, a message of the MPI library one or more. And MPI looks for
messages for as long as it waits, which takes a core from a rank that computes; here a rank looks for a while if its
program waits, lets others run between further looks, and then sleeps in the kernel until it is woken (a futex). From
time to time it also calls MPI, so that messages under way go on: another rank may come only after it has received one
that this rank is still sending.

Source: Franke, Russell and Kirkwood 2002, "Fuss, Futexes and Furwocks: Fast Userlevel Locking in Linux".
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from ..native import compiled
from ..process.idle_wait import caller_is_waiting

if TYPE_CHECKING:
    from .shared_memory import SharedMemory

STRIDE = 64  # bytes from one rank's number to the next one's
_WORD = 8  # bytes
# True if other cores see a core's writes in their order: a rank that sees a number sees what was written before it.
ORDERED = platform.machine() in ("x86_64", "AMD64")

_LOOKS, _YIELDS = 50, 2000  # before a rank sleeps: about 2 ms
_OVERSUBSCRIBED_LOOKS, _OVERSUBSCRIBED_YIELDS = 5, 100  # where the node has more ranks than cores
_LOOKS_IN_C, _YIELDS_IN_C = 200, 50  # before that, from C, where a look takes a tenth of the time
_GLANCE = 64  # yields between two calls of `progress_mpi`
_SHORTEST_SLEEP, _LONGEST_SLEEP = 1e-3, 16e-3  # seconds between them; the shortest while the program waits
_NAP = 5e-5  # seconds, where there is no futex
_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}  # the futex's numbers
_WAIT, _WAKE, _ALL_WAITERS = 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _find_futex() -> Callable[..., int] | None:
    """futex(address, operation, value, seconds); None where the system has none."""
    call = _CALLS.get(platform.machine())
    if sys.platform != "linux" or call is None:
        return None
    syscall = ctypes.CDLL(None).syscall
    low = 4 if sys.byteorder == "big" else 0  # it compares the lower half of a number

    def futex(address: int, operation: int, value: int, seconds: float = 0.0) -> int:
        found: int = syscall(
            call,
            ctypes.c_void_p(address + low),
            operation,
            ctypes.c_uint(value & 0xFFFFFFFF),
            ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9))),
            None,
            0,
        )
        return found

    own = ctypes.c_int64(0)
    return futex if futex(ctypes.addressof(own), _WAKE, 1) == 0 else None


_futex = _find_futex()
_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))


def progress_mpi() -> None:
    """Lets the MPI library progress what it has begun to send and to receive."""
    MPI.COMM_SELF.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


class _Other(NamedTuple):
    """Another rank, its number, the number's address, and the byte that says that this rank sleeps for it."""

    rank: int
    number: memoryview
    address: int
    asleep: int


class _Waiting:
    """Waits of one rank for the others' numbers. looks, yields: before it sleeps."""

    def __init__(self, memory: SharedMemory | bytearray, others: list[_Other], looks: int, yields: int) -> None:
        self._memory, self._others, self._polls = memory, others, (looks, yields)

    def for_all(self, target: int, has_moved_on: Callable[[int], bool] | None = None) -> bool:
        for other in self._others:  # every barrier asks, and a loop is faster
            if other.number[0] < target and not self._wait(other, target, has_moved_on):
                return False
        return True

    def _wait(self, other: _Other, target: int, has_moved_on: Callable[[int], bool] | None) -> bool:
        number = other.number
        if caller_is_waiting():
            looks, yields = self._polls
            for _ in range(looks):
                if number[0] >= target:
                    return True
            for turn in range(yields):
                _yield_core()
                if number[0] >= target:
                    return True
                if turn % _GLANCE == 0:
                    progress_mpi()
        self._memory[other.asleep] = 1
        sleep = _SHORTEST_SLEEP
        try:
            while (seen := number[0]) < target:
                if has_moved_on is not None and has_moved_on(other.rank):
                    return number[0] >= target  # it may have become so just before
                progress_mpi()
                if _futex is None:
                    time.sleep(_NAP)
                else:
                    _futex(other.address, _WAIT, seen, sleep)
                    sleep = _SHORTEST_SLEEP if caller_is_waiting() else min(2 * sleep, _LONGEST_SLEEP)
            return True
        finally:
            self._memory[other.asleep] = 0


class Counters:
    """The numbers of the ranks of a node, as seen by one of them.

    memory: shared by them, and zero at first; private to a rank that is alone.
    start, sleepers: bytes of it at which the numbers, one every `STRIDE` bytes, and the `nbytes_of_sleepers` begin.
    oversubscribed: whether the node has more ranks than cores.

    advance(number): raises this rank's number and wakes its sleepers.
    wait_for_all(target, has_moved_on=None): True once every rank's number is at least `target`; False if
        `has_moved_on(rank)` says that one's never will be.
    others: for each other rank, the next one first, where its number is and the byte that says that this rank sleeps.
    in_c: `native.Numbers`, whose methods these two are; None where there is no C.
    """

    def __init__(
        self,
        memory: SharedMemory | bytearray,
        start: int,
        sleepers: int,
        rank: int,
        ranks: int,
        *,
        oversubscribed: bool,
    ) -> None:
        polls = (_OVERSUBSCRIBED_LOOKS, _OVERSUBSCRIBED_YIELDS) if oversubscribed else (_LOOKS, _YIELDS)
        places = [start + other * STRIDE for other in range(ranks)]
        numbers = [memoryview(memory)[place : place + 8].cast("q") for place in places]
        base = 0 if isinstance(memory, bytearray) else memory.address
        self._numbers = numbers
        width = _padded(ranks)
        asleep = memoryview(memory)[sleepers + rank * width :][:width].cast("q")
        wake = partial(_wake, base + places[rank])
        self.others = [
            _Other(other, numbers[other], base + places[other], sleepers + other * width + rank)
            for other in ((rank + step) % ranks for step in range(1, ranks))
        ]
        waiting = _Waiting(memory, self.others, *polls)
        self.in_c: Any = None
        if compiled is None:
            self.advance, self.wait_for_all = _advancing(numbers[rank], asleep, wake), waiting.for_all
            return
        polls = polls if oversubscribed else (_LOOKS_IN_C, _YIELDS_IN_C)
        others = tuple(other.number for other in self.others)
        self.in_c = compiled.Numbers(numbers[rank], others, asleep, wake, *polls, waiting.for_all)
        self.advance, self.wait_for_all = self.in_c.advance, self.in_c.wait_for_all

    @staticmethod
    def nbytes_of_sleepers(ranks: int) -> int:
        """Bytes of memory that sleepers need."""
        return ranks * _padded(ranks)

    def of(self, rank: int) -> int:
        """A rank's number."""
        return self._numbers[rank][0]


def _padded(ranks: int) -> int:
    """A byte for each rank, in whole words."""
    return -(-ranks // _WORD) * _WORD


def _wake(address: int) -> None:
    """Wakes who sleeps for the number at that address."""
    if _futex is not None:
        _futex(address, _WAKE, _ALL_WAITERS)


def _advancing(own: memoryview, asleep: memoryview, wake: Callable[[], None]) -> Callable[[int], None]:
    """Returns a function by which a rank's number grows to that which it is given, and wakes who sleeps for it.

    own: the number.
    asleep: words that say who sleeps. Every operation of a group calls it: names of a function take half the time of an
        object's, a word a third of that of a piece of the memory.
    """
    fence = threading.Lock()
    begin_fence, end_fence = fence.acquire, fence.release  # half the time of a `with`

    def advance(number: int) -> None:
        own[0] = number
        begin_fence()  # an atomic instruction: who goes to sleep after the look below sees the number before it
        end_fence()
        if asleep[0]:
            wake()

    def advance_for_many(number: int) -> None:
        own[0] = number
        begin_fence()
        end_fence()
        if any(asleep):
            wake()

    return advance if len(asleep) == 1 else advance_for_many


class Barrier:
    """Returns from a call when all ranks of the node have made it.

    memory: as for Counters, from byte `start` on, a multiple of STRIDE, for `Barrier.nbytes(ranks)` bytes.
    fence: makes the ranks see each other's writes where the processor does not.
    """

    def __init__(
        self,
        memory: SharedMemory,
        start: int,
        rank: int,
        ranks: int,
        *,
        oversubscribed: bool,
        fence: Callable[[], object],
    ) -> None:
        self._counters = Counters(memory, start, start + ranks * STRIDE, rank, ranks, oversubscribed=oversubscribed)
        self._advance, self._wait_for_all = self._counters.advance, self._counters.wait_for_all
        self._fence = None if ORDERED else fence
        self._met = array("q", [0])

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of memory that it needs."""
        return ranks * STRIDE + Counters.nbytes_of_sleepers(ranks)

    def __call__(self) -> None:
        """Waits until all ranks of the node have called it. Collective."""
        self._met[0] = number = self._met[0] + 1
        self._advance(number)
        self._wait_for_all(number)
        if self._fence is not None:
            self._fence()

    @property
    def native_arguments(self) -> dict[str, Any] | None:
        """The arguments of `native.OneCopy` with which it meets as this does; None where it cannot."""
        numbers = self._counters.in_c
        return None if numbers is None or self._fence is not None else {"numbers": numbers, "met": self._met}
