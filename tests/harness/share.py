"""Several processes that share the tests out among them, so that all end at about the same time.

`--share FOLDER`: a process runs the files of tests that it is the first to claim there, and leaves the others to those
that have the same folder. It begins with the files whose tests may take longest, by their `limit`, and by the jobs that
they start; what is left at the end is short. The tests of a file stay together, in their order, as they share fixtures.

Nothing waits for another process: a claim is a file that only one can create.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from .limit import LIMIT


class Share:
    """folder: where the claims lie, empty as the processes start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @pytest.hookimpl(trylast=True)  # of what is left to run
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Puts the files first that take longest, in the same order in every process."""
        items[:] = [item for file in sorted(_files(items), key=_most_seconds, reverse=True) for item in file]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Runs the claimed files; each one's fixtures are torn down at its end. None: pytest's loop says why."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        for file in _files(session.items):
            if self._claim(file[0].path):
                _run(session, file)
        return True

    def _claim(self, path: Path) -> bool:
        try:
            (self._folder / str(path).replace("/", "-").lstrip("-")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _files(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    return (list(file) for _, file in groupby(items, lambda item: item.path))


def _most_seconds(file: list[pytest.Item]) -> float:
    marks = (item.get_closest_marker("limit") for item in file)
    jobs = sum(item.get_closest_marker("job") is not None for item in file)
    return sum(mark.args[0] for mark in marks if mark) + jobs * LIMIT / 10


def _run(session: pytest.Session, file: list[pytest.Item]) -> None:
    for item, following in zip(file, [*file[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
