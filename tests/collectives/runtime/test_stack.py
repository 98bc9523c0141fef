"""Threads read what others change: the calls of the main thread, tables of groups and of memory."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from collectives.memory.shared_memory import is_one_for_all, note_one_for_all, one_for_all
from collectives.runtime.stack import StackFrame, calls_of_main_thread, stack_of_main_thread
from collectives.runtime.watchdog import watch


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def asked(question: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as other:
        return other.submit(question).result()


def test_the_calls_are_those_of_the_main_thread() -> None:
    def inner() -> object:
        return asked(calls_of_main_thread)  # so deep

    calls = inner()
    assert isinstance(calls, list)
    own = [call.function for call in calls if call.file == __file__]
    assert own == ["asked", "inner", "test_the_calls_are_those_of_the_main_thread"]
    line = next(call.line for call in calls if call.function == "inner")
    with open(__file__) as program:
        assert "# so deep" in program.readlines()[line - 1]
    assert calls_of_main_thread()[0].function == "calls_of_main_thread"


def test_they_are_shown_as_in_a_traceback() -> None:
    shown = asked(stack_of_main_thread)  # as here
    assert isinstance(shown, str)
    here = shown.index("in test_they_are_shown_as_in_a_traceback\n")
    assert here < shown.index("    shown = asked(stack_of_main_thread)  # as here\n") < shown.index("in asked\n")


def test_calls_that_begin_and_end_meanwhile_are_read_whole(impatient: None) -> None:
    class Ending:
        def __del__(self) -> None:
            time.sleep(1e-6)

    def down(depth: int) -> int:
        kept = Ending()
        return down(depth - 1) + 1 if depth else int(kept is None)

    read: list[list[StackFrame]] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            read.append(calls_of_main_thread())

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(300):
        down(8)
    over.set()
    looking.join()
    known = {"down", "__del__", "__init__"}
    insides = [[call.function for call in calls if call.file == __file__] for calls in read]
    assert len(insides) > 10
    assert any("down" in functions for functions in insides)
    for functions in insides:
        assert functions[-1] == "test_calls_that_begin_and_end_meanwhile_are_read_whole"
        assert set(functions[:-1]) <= known


def test_groups_that_are_made_while_the_watchdog_lists_them(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the watchdog's thread would end the job."""
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.append(failure.exc_value))

    class Idle(SimpleNamespace):
        __hash__ = object.__hash__

    def idle() -> Idle:
        return Idle(look=lambda *_: None, interval=1e-6, closed=True)

    kept = [idle() for _ in range(2000)]
    for guard in kept:
        watch(guard)  # type: ignore[arg-type]
    until = time.monotonic() + 1
    while time.monotonic() < until and not failures:
        watch(kept.pop(0) if len(kept) > 2000 else idle())  # type: ignore[arg-type]
        kept.append(idle())
        watch(kept[-1])  # type: ignore[arg-type]
    assert not failures


def test_memory_that_is_made_and_freed_while_the_table_of_shared_memory_is_read(impatient: None) -> None:
    class Memory:
        address = 1 << 40

        def __init__(self) -> None:
            self.cycle = self  # which the garbage collector frees, in any thread

        def __len__(self) -> int:
            return 4096

    over = threading.Event()

    def make() -> None:
        while not over.is_set():
            note_one_for_all(Memory())

    before, usual = len(one_for_all), gc.get_threshold()
    making = threading.Thread(target=make)
    gc.set_threshold(3)
    try:
        making.start()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert not is_one_for_all(1)
    finally:
        over.set()
        making.join()
        gc.set_threshold(*usual)
    gc.collect()
    assert len(one_for_all) == before
