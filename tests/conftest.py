"""Fixtures of all tests; how tests run under mpirun is in `harness`."""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import launch
from tests.harness.plugin import Harness
from tests.harness.share import Share

os.environ.setdefault("MPIDL_CALIBRATE", "0")  # also for jobs: which algorithm runs must not depend on a clock

FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--brief", action="store_true", help="leave out what another case or number of ranks shows too")
    parser.addoption("--twice", action="store_true", help="run every case on 2 ranks and on one other number of them")
    parser.addoption("--share", metavar="FOLDER", type=Path, help="run what no other process with the folder runs")
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU, and no others")


@pytest.hookimpl(trylast=True)  # after the terminal reporter is there
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): ends the run if the test takes longer")
    config.addinivalue_line("markers", "ranks(*numbers): leaves the test out at other numbers of ranks")
    config.addinivalue_line("markers", "one_node: is about ranks that share memory; left out over several hosts")
    config.addinivalue_line("markers", "at_most(ranks): left out on more ranks, which there are over several hosts")
    config.addinivalue_line("markers", "every_size: runs on 1, 2, 3 and 4 ranks also with --brief")
    config.addinivalue_line("markers", "brief_on(ranks): with --brief runs on this number of ranks alone")
    config.addinivalue_line("markers", "each(parameter): with --brief a case of each of its values runs, not two")
    config.addinivalue_line("markers", "once: with --brief one case of it runs, not two")
    config.addinivalue_line("markers", "thorough(*cases): left out with --brief, or these cases of it")
    config.addinivalue_line("markers", "gpu: needs a GPU; runs with --gpu alone")
    config.addinivalue_line("markers", "job: starts jobs under mpirun; set by itself")
    config.pluginmanager.register(Harness(config), "mpidl-harness")
    if config.getoption("--share"):
        config.pluginmanager.register(Share(config.getoption("--share")), "mpidl-share")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Notes on the test that it failed on this rank."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh Communicator over all ranks of the run; a rank that failed does not close it, others may wait.

    One for all tests would save 8 ms of the 160 that a test takes on 2 ranks, and what one test leaves in it would be
    in the next one's way.
    """
    from collectives import Communicator

    made = Communicator()
    yield made
    if not request.node.stash.get(FAILED, False):
        made.close()


@pytest.fixture(scope="session")
def brief(request: pytest.FixtureRequest) -> bool:
    """True with --brief: a job of many runs then makes only those that the chosen tests look at."""
    return request.config.getoption("--brief")


@pytest.fixture
def fewer(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """`fewer(30)`: steps of a training, all of them, or a quarter with --brief, which show nearly the same."""
    return (lambda steps: steps // 4) if request.config.getoption("--brief") else (lambda steps: steps)


@pytest.fixture
def mpirun() -> Callable[..., Any]:
    """`mpirun(ranks, *arguments, timeout=60, **environment)`: python under mpirun; see `harness.launch`."""
    return launch.mpirun
