"""The pytest plugin: under mpirun all ranks run the same tests in step, and rank 0 reports.

- After each test the ranks exchange outcomes. A failure on any rank is one failure on all, shown with the
  rank's traceback and output; a test that runs on some ranks and is skipped on others is one too. As all
  ranks count the same failures, they all stop at the same test with -x and all end with the same status.
- If a rank failed and others never come, because they wait for it, the run is ended with the traceback.
- A test that some rank does not finish within the limit is ended and named (`@pytest.mark.limit(seconds)`,
  MPIDL_TEST_LIMIT).
- Tests marked `mpi` run under mpirun with --only-mpi; all others in one plain process.
- Tests marked `gpu` run with --gpu, which leaves out all others; without it they are counted as not run.
- `--share FOLDER`: several processes share the tests out among them (`share`).
- `--brief` leaves out what another case or number of ranks shows as well, `--twice` what other numbers of ranks show
  (`choice`).
- `@pytest.mark.ranks(2, 3)` leaves a test out at other numbers of ranks, where it would show nothing new. Over several
  hosts, where there are fewer numbers to choose from, it runs at all of them, if it is not marked `one_node`;
  `ranks(2, 4, exactly=True)` holds over hosts too, for a test that would fail at other numbers, and `at_most(4)` leaves
  one out at more, as the heads or sequences of its model are too few for them.
"""

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr
from _pytest._io import TerminalWriter
from _pytest.runner import runtestprotocol

from . import launch
from .agreement import Agreement, DivergedError, listed
from .choice import left_out, left_out_of_twice
from .last_words import show_last_words
from .limit import LIMIT, Limit
from .unread import has_nothing_for

_DIFFERENT_TESTS = 3  # exit status
_SHOWN = 10  # names in a message
_FEW_MODULES = 100  # are gone through each time


@dataclass
class Outcome:
    """One rank's outcome of a test, for the others. stop: why it wants the run to end, as from pytest.exit."""

    failures: list[str] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)
    skipped: bool = False
    stop: str = ""


@dataclass
class Crash:
    """A failure as pytest's summary shows it."""

    message: str


class Verdict(TerminalRepr):
    """A failure's text with all ranks' tracebacks, of which the summary repeats a line and not the whole."""

    def __init__(self, text: str) -> None:
        self.text = text
        errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        self.reprcrash = Crash(errors[0] if errors else text.splitlines()[-1])

    def __str__(self) -> str:
        return self.text

    def toterminal(self, tw: TerminalWriter) -> None:
        tw.line(self.text)


class Harness:
    """Runs tests in step over the ranks; a plain process is one rank that needs no agreement."""

    def __init__(self, config: pytest.Config) -> None:
        self._everything = config.getoption("--with-mpi")
        self._choice = left_out if config.getoption("--brief") else None
        if config.getoption("--twice"):
            self._choice = left_out_of_twice
        self._on_gpu = config.getoption("--gpu")
        self._need_a_gpu = 0
        self._under_mpi = config.getoption("--only-mpi") or self._everything
        # pytest captures neither here nor through this descriptor.
        self._stderr = open(os.dup(2), "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
        self._collection_errors: list[str] = []
        self._failed_before: list[str] = []
        self._frozen_modules = 0
        self._agreement: Agreement | None = None
        who = "this process"
        if self._under_mpi:
            self._agreement = Agreement()
            who = f"rank {self._agreement.rank} of {self._agreement.size}"
            if self._agreement.rank > 0:
                # The terminal reporter has no switch for silence, and other plugins need it to be there.
                config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
        self._limit = Limit(who, self._stderr, self._waits_for, self._end)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leaves files unread that have no test for this kind of run."""
        return True if not self._everything and has_nothing_for(collection_path, self._under_mpi) else None

    @pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Marks what starts jobs, and leaves out, without a word of skipping, what is not for this kind of run."""
        for item in items:
            if "mpirun" in getattr(item, "fixturenames", ()):
                item.add_marker("job")
        chosen: list[pytest.Item] = []
        left: list[pytest.Item] = []
        for item in items:
            fits = self._everything or (
                (item.get_closest_marker("mpi") is not None) == self._under_mpi and self._shows_something_here(item)
            )
            needs_a_gpu = item.get_closest_marker("gpu") is not None
            self._need_a_gpu += fits and needs_a_gpu
            (chosen if fits and needs_a_gpu == self._on_gpu else left).append(item)
        if self._choice is not None and not self._everything:
            spared = set(self._choice(chosen, self._agreement.size if self._agreement else 0))
            chosen = [item for item in chosen if item not in spared]
            left += spared
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = chosen

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what was left out for want of a GPU."""
        if self._need_a_gpu and not self._on_gpu:
            terminalreporter.write_line(f"not run, as they need a GPU: {self._need_a_gpu} tests (make test-gpu)")

    def _shows_something_here(self, item: pytest.Item) -> bool:
        if self._agreement is None:
            return True
        over_hosts = self._agreement.hosts > 1
        if over_hosts and item.get_closest_marker("one_node") is not None:
            return False
        mark = item.get_closest_marker("at_most")
        if mark is not None and self._agreement.size > mark.args[0]:
            return False
        mark = item.get_closest_marker("ranks")
        if mark is None or (over_hosts and not mark.kwargs.get("exactly")):
            return True
        return self._agreement.size in mark.args

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors.append(f"{report.nodeid}\n{report.longreprtext}")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All ranks must have found the same tests, in the same order, and the same errors."""
        self._freeze_modules()
        if self._agreement is None:
            return
        show_last_words(self._stderr)
        names = [item.nodeid for item in session.items]
        with self._limit.watch("the agreement on the collected tests", LIMIT):
            found = self._together("the collection", (names, self._collection_errors))
        if any(other != found[0] for other in found):
            pytest.exit(_difference(found), returncode=_DIFFERENT_TESTS)

    def _freeze_modules(self) -> None:
        """Modules stay: tests that look for garbage need not go through all of torch and what others have imported."""
        if len(sys.modules) > self._frozen_modules + _FEW_MODULES:
            gc.collect()
            gc.freeze()
            self._frozen_modules = len(sys.modules)

    def pytest_internalerror(self, excrepr: object) -> None:
        """Rank 0 shows its own."""
        if self._agreement and self._agreement.rank > 0:
            self._stderr.write(f"\n{self._headed([self._agreement.rank], str(excrepr))}\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Setup, call and teardown on every rank, then the exchange, then the reports."""
        mark = item.get_closest_marker("limit")
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with self._limit.watch(item.nodeid, mark.args[0] if mark else LIMIT):
            reports, stop = _run(item, nextitem, in_step=self._agreement is not None)
            if self._agreement is not None:
                stop = self._agree(item, reports, stop)
        self._freeze_modules()
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if stop:
            pytest.exit(stop, returncode=pytest.ExitCode.INTERRUPTED)
        return True

    def pytest_unconfigure(self) -> None:
        """Leaves together: a launcher may end the others when the first one leaves with a status of failure.

        A process that cannot leave, for a thread that goes on or an MPI that waits, is ended as well.
        """
        self._limit.start("leaving after the last test", LIMIT)
        sys.stdout.flush()
        if self._agreement is not None:
            self._together("the end", None)

    def _together(self, what: str, value: Any, failures: Sequence[str] = ()) -> list[Any]:
        """All ranks' values. If the ranks cannot agree, says why and what failed here, and ends the run."""
        assert self._agreement
        try:
            return self._agreement.exchange(what, value, bool(failures))
        except DivergedError as diverged:
            if not diverged.failed or self._agreement.rank == diverged.failed[0]:
                self._tell_failed_before()
            for failure in failures:
                self._stderr.write(f"\n{self._headed([self._agreement.rank], failure)}\n")
            self._stderr.write(f"\n{diverged}; ending the run\n")
            self._agreement.abort()
            raise

    def _agree(self, item: pytest.Item, reports: list[pytest.TestReport], stop: str) -> str:
        """Makes this rank's reports say what happened on all ranks; why to stop, if any rank wants to."""
        assert self._agreement
        mine = Outcome(stop=stop)
        for report in reports:
            mine.skipped |= report.skipped
            if report.failed:
                mine.failures.append(report.longreprtext)
                mine.sections = list(report.sections)
        outcomes = self._together(item.nodeid, mine, [*mine.failures, *filter(None, [stop])])
        text = self._verdict(outcomes)
        if text:
            self._failed_before.append(f"{item.nodeid}\n{text}")
            _fail_once(reports, text, self._others_output(outcomes))
        stops = [f"{outcome.stop} on rank {rank}" for rank, outcome in enumerate(outcomes) if outcome.stop]
        return ", ".join(stops)

    def _verdict(self, outcomes: list[Outcome]) -> str:
        """Describes the failures of all ranks; ranks with the same traceback share it. Empty if there are none."""
        ranks_by_text: dict[str, list[int]] = {}
        for rank, outcome in enumerate(outcomes):
            for failure in outcome.failures:
                ranks_by_text.setdefault(failure, []).append(rank)
        texts = [self._headed(ranks, failure) for failure, ranks in ranks_by_text.items()]
        skips = [rank for rank, outcome in enumerate(outcomes) if outcome.skipped]
        if skips and len(skips) < len(outcomes):
            texts.append(f"skipped on rank {listed(skips)} only")
        return "\n".join(texts)

    def _others_output(self, outcomes: list[Outcome]) -> list[tuple[str, str]]:
        """The captured output of the ranks that failed; pytest shows this rank's own itself."""
        assert self._agreement
        return [
            (f"{title}, rank {rank}", text)
            for rank, outcome in enumerate(outcomes)
            for title, text in outcome.sections
            if rank != self._agreement.rank
        ]

    def _headed(self, ranks: list[int], text: str) -> str:
        assert self._agreement
        return f"{f' rank {listed(ranks)} of {self._agreement.size} ':-^80}\n{text}"

    def _waits_for(self) -> str:
        missing = self._agreement.missing if self._agreement else []
        return f" (it waits for the outcome of rank {listed(missing)})" if missing else ""

    def _end(self) -> None:
        """Ends the whole run, from any thread."""
        if self._agreement is None:
            launch.end_all()
            os._exit(1)
        if self._agreement.rank == 0:
            self._tell_failed_before()
        self._agreement.abort()

    def _tell_failed_before(self) -> None:
        """The failures that pytest would have shown at the end, which does not come."""
        for failed in self._failed_before:
            self._stderr.write(f"\nfailed before: {failed}\n")


def _run(item: pytest.Item, nextitem: pytest.Item | None, in_step: bool) -> tuple[list[pytest.TestReport], str]:
    """The reports of a test, and why it wants the run to end, which a plain process raises as it came."""
    try:
        return runtestprotocol(item, log=False, nextitem=nextitem), ""
    except (KeyboardInterrupt, pytest.exit.Exception) as wish:
        if not in_step:
            raise
        return [], f"{type(wish).__name__}{f': {wish}' if str(wish) else ''}"


def _fail_once(reports: list[pytest.TestReport], text: str, sections: list[tuple[str, str]]) -> None:
    """Turns the reports into one failure, so that every rank counts the same; a rank that stops has none."""
    if not reports:
        return
    chosen = next((report for report in reports if report.failed), None)
    chosen = chosen or next((report for report in reports if report.when == "call"), reports[0])
    for report in reports:
        report.outcome = "passed"
    chosen.outcome, chosen.longrepr = "failed", Verdict(text)
    chosen.sections.extend(sections)


def _difference(found: list[tuple[list[str], list[str]]]) -> str:
    """Describes how the ranks' collected tests and errors differ."""
    lines = ["the ranks collected different tests"]
    common = set.intersection(*(set(names) for names, _ in found))
    for rank, (names, errors) in enumerate(found):
        extra = [name for name in names if name not in common]
        lines.append(f"rank {rank}: {len(names)} tests, {len(errors)} errors{_only(extra)}")
        lines += errors
    if all(set(names) == common for names, _ in found) and any(names != found[0][0] for names, _ in found):
        lines.append("the tests are the same, but not their order")
    return "\n".join(lines)


def _only(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f", not on every rank: {', '.join(names[:_SHOWN])}{more}" if names else ""
