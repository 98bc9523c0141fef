"""Cause of a job's end in one line, from its status, its output, the ends of its processes and the ranks' positions.

    while it runs   `refresh`: which process is which rank, and which processes have ended, in their order
    once it ended   `close`: where the ranks were, from the pages of their positions (`collectives.diagnostics`)
    then            `cause`: the first of these that exists: a launcher that hangs, a rank's line, the watchdog's, the
                    launcher's, the status with the line of `agree_or_exit`;
                    where a rank's line says that another rank's memory is gone, how that rank ended

When a rank is killed its launcher kills the others, and MPICH's then names any of them. The system reports the ends of
processes in their order, and keeps the order until it is asked (epoll on descriptors of processes):

    rank 1 is killed -> mpirun kills ranks 0 and 2 -> `refresh`: 1, 0, 2
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import select
import signal
import time
from collections import deque
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from collectives.diagnostics import Position, Witness, listing

from ..job.signals import STOPPED

Group = Mapping[int, Position]

TOGETHER = 1.0  # seconds: a process that ends longer before another has nothing to do with it
UNHEEDED = 10.0  # seconds after a signal has ended a rank in which its launcher should end the job
_FAILED = re.compile(r"mpidl: rank (\d+) of \d+(, in [^\n]*?)? ends the job: (.*)")
_WAITED = re.compile(r"mpidl: rank \d+ of \d+ has waited \d+ s in (.*)")
_REASONS = {  # of the watchdog, the plainest first, and how each is told
    re.compile(r"\s*not arrived: (.*)"): r"\1",
    re.compile(r"\s*(silent for \d+ s, as if stopped or gone): (.*)"): r"\2, \1",
    re.compile(r"\s*the ranks are in different operations: (.*); MPIDL_DEBUG.*"): r"ranks in other operations: \1",
}
_INTEL = re.compile(r"=\s+RANK (\d+) PID (\d+) RUNNING AT (\S+)\n=\s+KILLED BY SIGNAL: (\d+)")
_HYDRA_PID = re.compile(r"=\s+(?:RANK (\d+) )?PID (\d+) RUNNING AT (\S+)")  # some versions name the rank
_HYDRA_END = re.compile(r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")
_OPEN_MPI = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on")
_OPEN_MPI_END = re.compile(r"\bsignal (\d+)\b")
_SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)")
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
_GONE = re.compile(r"the memory of local rank \d+ \(process (\d+)\) is out of reach")
_FRAME = re.compile(r"\s|Traceback |During handling|The above exception|$")


class Report:
    """Gathers facts on a job's ranks. The order of their ends is known on Linux alone.

    ranks: by process id, those on this machine, as the launcher's variables number them.
    processes: node and process id of each rank, as the ranks tell.
    groups: where the ranks of this node were, by their numbers in the world.
    """

    def __init__(self, witness: Witness | None = None) -> None:
        self.ranks: dict[int, int] = {}
        self.processes: Mapping[int, tuple[str, int]] = {}
        self.groups: Sequence[Group] = []
        self._witness = witness
        self._open = getattr(os, "pidfd_open", None)
        self._ready = select.epoll() if self._open and hasattr(select, "epoll") else None
        self._watched: dict[int, int] = {}  # process ids by descriptors
        self._end_times: dict[int, float] = {}  # in their order, with the time by which they had ended
        self._ends_to_check: deque[tuple[int, float]] = deque()  # those that `status_if_launcher_hangs` has not seen
        self._hang_in_words = ""  # what it has found

    def watch(self, process: int) -> None:
        """Waits for the end of a process from now on."""
        with contextlib.suppress(OSError):  # it has ended before, or the system has no such descriptors
            if self._ready is not None and self._open is not None:
                number = self._open(process)
                self._watched[number] = process
                self._ready.register(number, select.EPOLLIN)

    def refresh(self) -> None:
        """Takes note of new ranks, and of processes that have ended."""
        if self._witness is not None:
            self._witness.look()
            self.processes = self._witness.processes
        for number, _ in self._ready.poll(0) if self._watched and self._ready is not None else ():
            process, now = self._watched.pop(number), time.monotonic()
            self._end_times[process] = now
            self._ends_to_check.append((process, now))
            os.close(number)

    def status_if_launcher_hangs(self) -> int | None:
        """Returns the job's exit status if a signal ended a rank a while ago and the launcher goes on; else None.

        Intel MPI's launcher does so where the rank has not initialised MPI yet, for which the others wait. Only ranks
        on this machine are seen, with Linux; each is looked at once. `cause` tells of it.
        """
        until = time.monotonic() - UNHEEDED
        while self._ends_to_check and self._ends_to_check[0][1] < until:
            process, _ = self._ends_to_check.popleft()
            number = self._signal_of_unstarted_rank(process)
            if number:
                told = f"rank {self.ranks[process]} was ended by {_signal_name(number)}"
                self._hang_in_words = f"{told} before it had initialised MPI, and its launcher did not end the job"
                return 128 + number
        return None

    def _signal_of_unstarted_rank(self, process: int) -> int:
        """The signal that ended a rank which had not initialised MPI and which its launcher has not waited for; or 0.

        A process that a rank has started bears the rank's variables too: its parent is a rank, or is gone.
        """
        if process not in self.ranks or self.ranks[process] in self.processes:
            return 0
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        is_zombie, parent = fields[0] == "Z", int(fields[1])
        return int(fields[-1]) & 0x7F if is_zombie and parent > 1 and parent not in self.ranks else 0

    def close(self) -> None:
        """Looks a last time and closes the descriptors; the facts stay."""
        self.refresh()
        if self._witness is not None:
            self.groups = self._witness.groups()
            self._witness.close()
            self._witness = None
        for number in self._watched:
            os.close(number)
        self._watched = {}
        if self._ready is not None:
            self._ready.close()
            self._ready = None

    # ---- the rank that ended first, and where it was ------------------------------------------------------------

    def first_to_end(self, process: int, among: Container[int]) -> int:
        """Returns the first to end of `among`, of those that ended together with this process; else this one."""
        since = self._end_times.get(process, math.inf) - TOGETHER
        return next((pid for pid, ended in self._end_times.items() if ended > since and pid in among), process)

    def rank_of_first(self, process: int, node: str) -> int | None:
        """The rank that ended first, where the launcher names this process; None: not known.

        The launcher may call the node by another name than the rank does. MPICH's may name a process that it has ended
        itself because of the first.
        """
        found = {rank: name for rank, (name, number) in self.processes.items() if number == process}
        there = [rank for rank, name in found.items() if name.split(".")[0] == node.split(".")[0]]
        named = next(iter(there or (found if len(found) == 1 else ())), None)
        here = self._ranks_here()
        return here.get(self.first_to_end(process, here)) if named is None or here.get(process) == named else named

    def last_seen(self, rank: int) -> str:
        """Tells which operation a rank was in and which ranks waited for it, after "rank 1"; empty if nothing is known.

        Of several groups that the rank is in the one tells in which most others waited, and where none did the one of
        most operations; of a rank on another node, any.
        """
        known = [group for group in self.groups if rank in group] or self.groups
        known = [group for group in known if any(position.number or position.message for position in group.values())]
        if not known:
            return ""
        group = max(known, key=lambda group: (len(_waiting(rank, group)), max(p.number for p in group.values())))
        together: dict[str, list[int]] = {}
        for other, position in sorted(_waiting(rank, group).items()):
            together.setdefault(position.description, []).append(other)
        waiting = [
            f"{listing(ranks)} {'were' if len(ranks) > 1 else 'was'} {where}" for where, ranks in together.items()
        ]
        return ", ".join(([f"it was {group[rank].description}"] if rank in group else []) + waiting)

    # ---- why it ended -------------------------------------------------------------------------------------------

    def cause(self, status: int, lines: Sequence[str], killed_for_memory: bool = False) -> str:
        """Explains in one line why the job ended. lines: the last ones of its output.

        killed_for_memory: True if the kernel has killed a process of this control group meanwhile, as memory ran out.
        """
        cause = _said_by_a_rank(lines)
        out_of_reach = _GONE.search(cause)
        cause = (out_of_reach and self._describe_end_of(int(out_of_reach[1]), lines)) or cause
        cause = self._hang_in_words or cause or _said_by_the_watchdog(lines) or self._said_by_the_launcher(lines)
        cause = cause or ": ".join(filter(None, [_status_in_words(status), _said_by_all(status, lines)]))
        if killed_for_memory:
            cause += "; the kernel has killed a process because memory ran out"
        return f"status {status}: {cause}" if cause else f"status {status}"

    def _describe_end_of(self, process: int, lines: Sequence[str]) -> str:
        """Tells of the rank with this process, which another one missed; empty if it was not the first to end."""
        here = self._ranks_here()
        if process not in here or process not in self._end_times or self.first_to_end(process, here) != process:
            return ""
        told = f"rank {here[process]} ended before the others"
        return self._said_by_the_launcher(lines) or ": ".join(filter(None, [told, self.last_seen(here[process])]))

    def _ranks_here(self) -> Mapping[int, int]:
        """Ranks on this machine by their processes."""
        own = platform.node()
        return {number: rank for rank, (name, number) in self.processes.items() if name == own} or self.ranks

    def _said_by_the_launcher(self, lines: Sequence[str]) -> str:
        if intel := _INTEL.findall("\n".join(lines)):
            return self._said_by_intel([(int(rank), int(process), node, int(by)) for rank, process, node, by in intel])
        for index, line in enumerate(lines):
            rank: int | None = None
            if srun := _SRUN.match(line):
                node, ranks, ended = srun.groups()
                if ended.startswith("Exited"):  # the others, which srun kills then, are not the cause
                    return ""
                number = _SIGNALS.get(ended.removesuffix(" (core dumped)"))
                rank = int(ranks) if ranks.isdigit() else None
                who = f"ranks {ranks}" if rank is None else f"rank {ranks}"
                what = f"{who} on {node}: {f'ended by {_signal_name(number)}' if number else ended}"
            else:
                if open_mpi := _OPEN_MPI.search(line):
                    rank, node, end = int(open_mpi[1]), open_mpi[2], _OPEN_MPI_END
                    who = f"rank {rank}"
                elif hydra := _HYDRA_PID.match(line):
                    node, end = hydra[3], _HYDRA_END
                    rank = int(hydra[1]) if hydra[1] else self.rank_of_first(int(hydra[2]), node)
                    who = f"process {hydra[2]}" if rank is None else f"rank {rank}"
                else:
                    continue
                if not (signalled := end.search("\n".join(lines[index:]))):
                    continue
                what = f"{who} on {node} was ended by {_signal_name(int(signalled[1]))}"
            return ": ".join(filter(None, [what, "" if rank is None else self.last_seen(rank)]))
        return ""

    def _said_by_intel(self, ends: Sequence[tuple[int, int, str, int]]) -> str:
        """Tells which rank ended first, from the lines of Intel MPI's launcher.

        ends: rank, process, node and signal of each.

        The launcher tells of every rank that a signal has ended, also of those that it has killed itself. One that
        another signal than SIGKILL has ended was not killed by the launcher; else it is the one that ended first, which
        may have ended with a status and not be among them.
        """
        rank, process, node, number = next((end for end in ends if end[3] != signal.SIGKILL), ends[0])
        if number == signal.SIGKILL and len(ends) > 1:
            first = self.rank_of_first(process, node)
            if first is None:
                return f"ranks on {node} were ended by {_signal_name(number)}"
            if first not in {end[0] for end in ends}:
                return ": ".join(filter(None, [f"rank {first} ended before the others", self.last_seen(first)]))
            rank = first
        told = f"rank {rank} on {node} was ended by {_signal_name(number)}"
        return ": ".join(filter(None, [told, self.last_seen(rank)]))


def status_of(returned: int) -> int:
    """An exit status as a shell gives it: 128 and the signal's number for what a signal ended."""
    return returned if returned >= 0 else 128 - returned


def _waiting(rank: int, group: Group) -> dict[int, Position]:
    """The others that are in an operation which the rank has not come out of, or in a message with it."""
    own = group.get(rank)

    def waits(there: Position) -> bool:
        if there.message:
            return there.waits_for(rank)
        return there.inside and (own is None or own.number <= there.number)

    return {other: there for other, there in group.items() if other != rank and waits(there)}


def _said_by_a_rank(lines: Sequence[str]) -> str:
    for index, line in enumerate(lines):
        if found := _FAILED.match(line):
            rank, where, what = found.groups()
            if what.startswith("Traceback"):  # its last line names the error
                what = next((text for text in lines[index + 1 :] if not _FRAME.match(text)), what)
            return f"rank {rank}{where or ''}: {what.strip()}"
    return ""


def _said_by_the_watchdog(lines: Sequence[str]) -> str:
    operation = next((found[1] for found in map(_WAITED.match, lines) if found), "")
    told = ([found.expand(how) for found in map(reason.match, lines) if found] for reason, how in _REASONS.items())
    why = next(filter(None, told), ["a rank that hangs"])
    return f"waited without end in {operation} for {'; '.join(dict.fromkeys(why))}" if operation else ""


def _said_by_all(status: int, lines: Sequence[str]) -> str:
    """The one line of `agree_or_exit`."""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors and status in (1, 2) else ""


def _status_in_words(status: int) -> str:
    if status == STOPPED:
        return "was asked to stop, and can go on"
    if status == 2:
        return "the command was used wrongly"
    return f"ended by {_signal_name(status - 128)}" if 128 < status < 128 + signal.NSIG else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
