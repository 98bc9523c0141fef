"""The order of accesses to a stand-in's memory, by what streams and the host have waited for, whatever the timing.

    stream a   ... write x   E          a write or read of x on another stream must come after E, and so must the
    stream b        wait for E, read x  return of x's memory: else it is told, though this time all may have gone well

Each piece of work of a stream has a number. clocks: of each stream, what of all streams it comes after. Work that the
host queues comes after all that any of its threads has waited for. Source: Mattern 1989, "Virtual Time and Global
States of Distributed Systems".
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

Range = tuple[int, int]  # addresses
Clock = dict[int, int]


class Order:
    """The accesses to memory so far. errors: takes those that nothing orders. Streams are known by their numbers."""

    def __init__(self, errors: list[BaseException]) -> None:
        self._errors = errors
        # Memory is given back by finalizers too, in the midst of anything: those look at the accesses, and change none.
        self._lock = threading.RLock()
        self._clocks: dict[int, Clock] = {}
        self._host: Clock = {}
        self._accesses: dict[Range, tuple[tuple[int, int] | None, Clock]] = {}  # the last write, and reads since
        self._near: dict[int, set[Range]] = {}  # by page: those that lie in it

    def _clock(self, stream: int) -> Clock:
        clock = self._clocks.setdefault(stream, {stream: 0})
        _join(clock, self._host)
        return clock

    def event(self, stream: int) -> Clock:
        """The clock of an event that is recorded on the stream now."""
        with self._lock:
            return dict(self._clock(stream))

    def of_all_streams(self) -> Clock:
        """The clock of the end of all that was queued so far."""
        with self._lock:
            return {stream: clock[stream] for stream, clock in self._clocks.items()}

    def wait(self, stream: int, event: Clock) -> None:
        """The stream waits for an event."""
        with self._lock:
            _join(self._clock(stream), event)

    def host_waits(self, event: Clock) -> None:
        """The host has waited for an event."""
        with self._lock:
            _join(self._host, event)

    def access(self, stream: int, read: Sequence[Range], written: Sequence[Range]) -> None:
        """The stream reads and writes memory, after all that it holds."""
        with self._lock:
            clock = self._clock(stream)
            clock[stream] += 1
            writes = set(written)
            for place in {*read, *written}:
                for other in self._overlapping(place):
                    write, reads = self._accesses[other]
                    before = {**(dict([write]) if write else {}), **(reads if place in writes else {})}
                    for who in _later(before, clock):
                        kind = "written" if place in writes else "read"
                        self._tell(f"{kind} on stream {stream} while stream {who} still uses it")
                    if place in writes and place[0] <= other[0] and other[1] <= place[1]:
                        self._remove(other)
                last, since = self._accesses.get(place, (None, {}))
                if place in writes:
                    last, since = (stream, clock[stream]), {}
                else:
                    since = {**since, stream: clock[stream]}
                self._accesses[place] = (last, since)
                for page in _pages(place):
                    self._near.setdefault(page, set()).add(place)

    def give_back(self, place: Range, streams: Sequence[int] = ()) -> bool:
        """The memory is given back, once all that these streams hold is done; none of them: now, by the host.

        Returns False, and tells it, if that may be too early.
        """
        with self._lock:
            clock = dict(self._host)
            for stream in streams:
                _join(clock, self._clock(stream))
            told = False
            for other in self._overlapping(place):
                write, reads = self._accesses.get(other, (None, {}))
                for who in _later({**(dict([write]) if write else {}), **reads}, clock):
                    whose = f"in the order of stream {streams[0]}" if streams else "by the host"
                    self._tell(f"memory given back {whose} while stream {who} still uses it")
                    told = True
            return not told

    def forget(self, start: int, stop: int) -> None:
        """Marks memory as not used yet."""
        with self._lock:
            for other in self._overlapping((start, stop)):
                self._remove(other)

    def forget_all(self) -> None:
        """Forgets the accesses to all memory."""
        with self._lock:
            self._accesses.clear()
            self._near.clear()

    def _tell(self, error: str) -> None:
        self._errors.append(AssertionError(error))

    def _overlapping(self, place: Range) -> set[Range]:
        near = (other for page in _pages(place) for other in self._near.get(page, ()))
        return {other for other in near if other[0] < place[1] and place[0] < other[1]}

    def _remove(self, place: Range) -> None:
        del self._accesses[place]
        for page in _pages(place):
            self._near[page].discard(place)


def _later(accesses: Clock, clock: Clock) -> list[int]:
    """The streams whose accesses the clock does not come after."""
    return [stream for stream, number in accesses.items() if clock.get(stream, 0) < number]


def _pages(place: Range) -> range:
    return range(place[0] >> 14, (place[1] - 1 >> 14) + 1)


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
