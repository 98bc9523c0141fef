"""Supervises a job: runs it until it is done, is asked to stop, or fails too often.

status 0                          done
75, or a signal came              stopped: status 75, after an interrupt 130; it is not started again here; a scheduler
                                  may do so
2                                 the command was used wrongly: no restart makes it right
anything else                     started again from the newest checkpoint, after a pause that doubles while no
                                  newer checkpoint comes about, at most `max_restarts` times; given up when none
                                  has come about in `patience` runs in a row
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import newest
from ..checkpoint.folder import clean
from ..checkpoint.index import number_of
from ..errors import CheckpointError, UsageError
from ..job.signals import STOPPED
from .command import ranks_of, with_ranks
from .job import Job
from .report import status_of

_POLL_S = 0.05  # seconds
_INTERRUPT_GRACE_S = 5.0  # seconds that a job has to end after an interrupt
_STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


@dataclass(frozen=True)
class RestartPlan:
    """The command to run, and the limits of its restarts.

    checkpoint: the directory in which the command saves; None: progress is not known.
    patience: runs in a row without a newer checkpoint.
    backoff, longest_backoff: seconds of the first pause, and at most.
    ranks_on_restart: of the first restart, the second, ...; the last one holds from there on.
    min_ranks: after a run without a newer checkpoint one rank fewer, down to this.
    ranks_divide: then only numbers of ranks that divide this one, such as a global batch.
    """

    command: Sequence[str]
    checkpoint: Path | None = None
    max_restarts: int = 3
    patience: int = 3
    backoff: float = 1.0
    longest_backoff: float = 60.0
    ranks_on_restart: Sequence[int] = ()
    min_ranks: int | None = None
    ranks_divide: int | None = None


@dataclass
class RunResult:
    """Result of a run: the checkpoint that it began at, the cause of its end, and the newest checkpoint then.

    began_number, number: of these checkpoints, in the order of writing; another one may have the same path.
    """

    ranks: int | None
    began_at: str | None
    began_number: int = 0
    status: int = 0
    cause: str = ""
    came_to: str | None = None
    number: int = 0
    seconds: float = 0.0
    left_behind: list[str] = field(default_factory=list)


class Supervisor:
    """Runs a plan. runs: the results so far, for a report."""

    def __init__(self, plan: RestartPlan) -> None:
        self._plan = plan
        self.runs: list[RunResult] = []
        self._job: Job | None = None
        self._stop_signal: signal.Signals | None = None
        self._to_forward: deque[signal.Signals] = deque(maxlen=1)  # the last one, until a job has got it
        self._deadline: float | None = None
        if plan.ranks_on_restart or plan.min_ranks is not None:
            with_ranks(plan.command, 1)  # raises UsageError if the command does not say how many

    def run(self) -> int:
        """Runs the job to its end and returns the exit status.

        It is 0, the last run's, 75 if the job was asked to stop, or 130 if it was interrupted.
        """
        with self._signals():
            while True:
                run = self._run_once()
                restarts = len(self.runs) - 1
                if run.status == 0:
                    if restarts:
                        self._say(f"finished after {restarts} restart{'s' * (restarts > 1)}")
                    return 0
                why = self._why_not_again(run, restarts)
                if why:
                    self._say(f"{run.cause}; {why}")
                    return run.status if self._stop_signal is None else self._status_of_a_stop()
                pause = min(self._plan.longest_backoff, self._plan.backoff * 2 ** max(0, self._without_progress() - 1))
                ranks = self._next_ranks()
                where = f" on {ranks} rank{'s' * (ranks > 1)}" if ranks else ""
                start = f" from {run.came_to}" if run.came_to else " from the beginning" * bool(self._plan.checkpoint)
                self._say(f"{run.cause}; restart {restarts + 1} of {self._plan.max_restarts}{where}{start}")
                self._sleep(pause)
                if self._stop_signal is not None:
                    self._say(f"asked to stop by {self._stop_signal.name}")
                    return self._status_of_a_stop()

    def report(self) -> list[dict[str, Any]]:
        """Returns the runs as plain dictionaries."""
        return [asdict(run) for run in self.runs]

    # ---- one run ----------------------------------------------------------------------------------------------

    def _run_once(self) -> RunResult:
        ranks = self._next_ranks() if self.runs else ranks_of(self._plan.command)
        given = ranks == ranks_of(self._plan.command) or ranks is None
        command = self._plan.command if given else with_ranks(self._plan.command, ranks or 1)
        run = RunResult(ranks, *self._newest())
        begin = time.monotonic()
        try:
            first = self.runs[0] if self.runs else run
            progress = (run.began_at, run.began_number) != (first.began_at, first.began_number)
            self._job = job = Job(command, run.began_at if progress else None)
        except OSError as error:
            raise UsageError(f"{command[0]}: cannot be started: {error.strerror}") from None
        hang_status: int | None = None
        try:
            self._forward_signal(job)  # one that came while the job was being started
            while (returned := job.poll()) is None and (hang_status := job.report.status_if_launcher_hangs()) is None:
                time.sleep(_POLL_S)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    break
        finally:
            self._job = None
            run.left_behind = job.end()
            self._clean()
        run.status = hang_status or status_of(128 + signal.SIGINT if returned is None else returned)
        run.seconds = time.monotonic() - begin
        run.came_to, run.number = self._newest()
        if run.status:
            run.cause = job.cause(run.status)
        if run.left_behind:
            self._say(f"ended and removed what the job had left: {', '.join(run.left_behind)}")
        self.runs.append(run)
        return run

    def _clean(self) -> None:
        """Removes a checkpoint that the job was writing when it ended."""
        if self._plan.checkpoint is not None and self._plan.checkpoint.is_dir():
            with contextlib.suppress(OSError):  # the next save removes it
                clean(self._plan.checkpoint)

    def _why_not_again(self, run: RunResult, restarts: int) -> str:
        """Explains why the job is not started again; empty if it is."""
        if self._stop_signal is not None:
            return f"asked to stop by {self._stop_signal.name}"
        if run.status == STOPPED:
            return "not started again here"
        if run.status == 2:
            return "that will not change"
        stuck = self._without_progress()
        if self._plan.checkpoint is not None and stuck >= self._plan.patience:
            return f"giving up: no newer checkpoint in {stuck} run{'s' * (stuck > 1)} in a row"
        if restarts >= self._plan.max_restarts:
            return f"giving up after {restarts} restart{'s' * (restarts != 1)}"
        return ""

    def _without_progress(self) -> int:
        """Counts the last runs in a row without a newer checkpoint."""
        count = 0
        for run in reversed(self.runs):
            if (run.came_to, run.number) != (run.began_at, run.began_number):
                break
            count += 1
        return count

    def _next_ranks(self) -> int | None:
        """Chooses the number of ranks of the next run."""
        plan, last = self._plan, self.runs[-1].ranks
        if plan.ranks_on_restart:
            return plan.ranks_on_restart[min(len(self.runs), len(plan.ranks_on_restart)) - 1]
        if plan.min_ranks is not None and last is not None and self._without_progress():
            fewer = range(last - 1, plan.min_ranks - 1, -1)
            return next((ranks for ranks in fewer if not (plan.ranks_divide or 0) % ranks), last)
        return last

    def _newest(self) -> tuple[str | None, int]:
        """Finds the newest complete checkpoint, and its number. Raises UsageError."""
        if self._plan.checkpoint is None:
            return None, 0
        try:
            found, _ = newest(self._plan.checkpoint)
        except CheckpointError as error:
            raise UsageError(str(error)) from None
        return (None, 0) if found is None else (str(found), number_of(found))

    # ---- signals ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in _STOPS}
        for number, handler in before.items():
            # Under nohup SIGHUP is ignored, and is to be so by the job too. Said anew: UCX takes it when it is loaded.
            spared = number == signal.SIGHUP and handler is signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if spared else self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _status_of_a_stop(self) -> int:
        """Returns the exit status after a request to stop, also for a job that the signal ended without a save."""
        return 128 + signal.SIGINT if self._stop_signal is signal.SIGINT else STOPPED

    def _on_signal(self, number: int, _: Any) -> None:
        """Passes a request to stop on as SIGUSR1; on SIGTERM some launchers would kill the ranks.

        After an interrupt all signals but another interrupt are ignored: a terminal that is closed then sends SIGHUP.
        """
        again = self._stop_signal is signal.SIGINT
        if again and number != signal.SIGINT:
            return
        self._stop_signal = signal.Signals(number)
        if number == signal.SIGINT:
            self._deadline = time.monotonic() + (0 if again else _INTERRUPT_GRACE_S)
        self._to_forward.append(self._stop_signal)
        if self._job is not None:
            self._forward_signal(self._job)

    def _forward_signal(self, job: Job) -> None:
        """Passes on the last signal, once. Another one may come at any place in here; its handler passes it on."""
        try:
            asked = self._to_forward.pop()
        except IndexError:
            return
        job.signal(signal.SIGINT if asked is signal.SIGINT else signal.SIGUSR1)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._stop_signal is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal or the reader is gone
            print(f"mpidl.launch: {text}", file=sys.stderr, flush=True)
