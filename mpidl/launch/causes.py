"""Why a job ended: its status, and what the ranks, the watchdog and the launcher said."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from ..job.signals import STOPPED

_FAILED = re.compile(r"mpidl: rank (\d+) of \d+(, in [^\n]*?)? ends the job: (.*)")
_LATE = re.compile(r"\s*not arrived: (.*)")
_APART = re.compile(r"\s*the ranks are in different operations: (.*); MPIDL_DEBUG")
_SILENT = re.compile(r"\s*(silent for \d+ s, as if stopped or gone): (.*)")
_WAITED = re.compile(r"mpidl: rank \d+ of \d+ has waited \d+ s in (.*)")
_HYDRA_PID = re.compile(r"=\s+(?:RANK (\d+) )?PID (\d+) RUNNING AT (\S+)")  # Intel MPI's names the rank
_HYDRA_END = re.compile(r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")
_OPEN_MPI = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on")
_SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)")
_OPEN_MPI_END = re.compile(r"\bsignal (\d+)\b")
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
_FRAME = re.compile(r"\s|Traceback |During handling|The above exception|$")


def status_of(returned: int) -> int:
    """An exit status as a shell gives it: 128 and the signal's number for what a signal ended."""
    return returned if returned >= 0 else 128 - returned


def cause(
    status: int,
    lines: Sequence[str],
    rank_of: Callable[[int, str], int | None],
    last_seen: Callable[[int], str],
    killed_for_memory: bool = False,
) -> str:
    """In words, on one line. lines: the last ones that were written. rank_of: by process id and node.

    last_seen: what a rank that is gone was in, and who waited for it. killed_for_memory: whether the kernel has killed
    a process of this control group meanwhile, as memory ran out.
    """
    said = _said_by_a_rank(lines) or _said_by_the_watchdog(lines)
    said = said or _said_by_the_launcher(lines, rank_of, last_seen)
    if not said:
        said = ": ".join(filter(None, [_meaning(status), _said_by_all(status, lines)]))
    if killed_for_memory:
        said += "; the kernel has killed a process because memory ran out"
    return f"status {status}: {said}" if said else f"status {status}"


def _said_by_a_rank(lines: Sequence[str]) -> str:
    for place, line in enumerate(lines):
        found = _FAILED.match(line)
        if found:
            rank, where, what = found.groups()
            if what.startswith("Traceback"):  # its last line names the error
                after = [text for text in lines[place + 1 :] if not _FRAME.match(text)]
                what = after[0] if after else what
            return f"rank {rank}{where or ''}: {what.strip()}"
    return ""


def _said_by_all(status: int, lines: Sequence[str]) -> str:
    """The one line of `agree_or_exit`."""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors and status in (1, 2) else ""


def _said_by_the_watchdog(lines: Sequence[str]) -> str:
    operation = next((found[1] for found in map(_WAITED.match, lines) if found), "")
    late = [found[1] for found in map(_LATE.match, lines) if found]
    silent = [f"{found[2]}, {found[1]}" for found in map(_SILENT.match, lines) if found]
    apart = [f"ranks in other operations: {found[1]}" for found in map(_APART.match, lines) if found]
    return (
        f"waited in vain in {operation} for {'; '.join(dict.fromkeys(late or silent or apart)) or 'what hangs in it'}"
        if operation
        else ""
    )


def _said_by_the_launcher(
    lines: Sequence[str], rank_of: Callable[[int, str], int | None], last_seen: Callable[[int], str]
) -> str:
    for place, line in enumerate(lines):
        open_mpi, hydra, srun = _OPEN_MPI.search(line), _HYDRA_PID.match(line), _SRUN.match(line)
        if srun and srun[3].startswith("Exited"):  # the others, which srun kills then, are not the cause
            return ""
        if srun:
            number = _SIGNALS.get(srun[3].removesuffix(" (core dumped)"))
            who = f"rank {srun[2]}" if srun[2].isdigit() else f"ranks {srun[2]}"
            what = f"{who} on {srun[1]}: {f'ended by {_name(number)}' if number else srun[3]}"
            return _with(what, last_seen(int(srun[2])) if srun[2].isdigit() else "")
        rank: int | None
        if open_mpi:
            rank, node = int(open_mpi[1]), open_mpi[2]
        elif hydra:
            rank, node = int(hydra[1]) if hydra[1] else rank_of(int(hydra[2]), hydra[3]), hydra[3]
        else:
            continue
        who = f"process {hydra[2]}" if hydra and rank is None else f"rank {rank}"
        after = "\n".join(lines[place:])
        if ended := (_HYDRA_END if hydra else _OPEN_MPI_END).search(after):
            what = f"{who} on {node} was ended by {_name(int(ended[1]))}"
            return _with(what, "" if rank is None else last_seen(rank))
    return ""


def _with(what: str, more: str) -> str:
    return f"{what}: {more}" if more else what


def _meaning(status: int) -> str:
    if status == STOPPED:
        return "was asked to stop, and can go on"
    if status == 2:
        return "the command was used wrongly"
    return f"ended by {_name(status - 128)}" if 128 < status < 128 + signal.NSIG else ""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
