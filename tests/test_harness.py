"""The harness itself: throw-away suites that fail, hang and disagree, run under mpirun and without."""

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.unread import has_nothing_for

SUITE = """
import ctypes, sys, threading, time, pytest
from mpi4py import MPI
world, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
pytestmark = pytest.mark.mpi
"""
IMPORTABLE = {"PYTHONPATH": str(launch.ROOT)}  # the throw-away suites run with this project's conftest
PYTEST = ("-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider")
Launcher = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def suite(tmp_path: Path, mpirun: Launcher) -> Callable[..., tuple[int, str]]:
    """`suite(body, *options, **environment)` runs the tests of `body` on 3 ranks: exit status and output."""

    def run(body: str, *options: str, **env: str) -> tuple[int, str]:
        write_suite(tmp_path, SUITE + textwrap.dedent(body))
        env = {**IMPORTABLE, "MPIDL_TEST_GRACE": "1", "MPIDL_TEST_LIMIT": "20", **env}
        done = mpirun(3, *PYTEST, "--only-mpi", f"--rootdir={tmp_path}", *options, cwd=tmp_path, **env)
        return done.returncode, done.stdout + done.stderr

    return run


def write_suite(folder: Path, text: str) -> None:
    """A suite of one file that runs with this project's conftest."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_it.py").write_text(text)


@pytest.mark.thorough
def test_a_suite_that_passes_everywhere_passes(suite: Callable) -> None:
    status, text = suite(
        """
        def test_fine(comm):
            assert comm.size == 3
        @pytest.mark.skipif(True, reason="nowhere")
        def test_nowhere():
            pass
        """
    )
    assert status == 0, text
    assert text.count("1 passed, 1 skipped") == 1, text


def test_a_failure_on_some_ranks_fails_the_test_once_with_their_tracebacks_and_the_next_goes_on(
    suite: Callable,
) -> None:
    status, text = suite(
        """
        def test_alone():
            print("printed by", rank)
            if rank == 2:
                raise RuntimeError("only here")
        def test_equal():
            world.Barrier()
            assert rank < 0, "everywhere"
        @pytest.fixture
        def breaks():
            yield
            if rank == 1:
                raise RuntimeError("and again afterwards")
        def test_twice(breaks):
            assert rank != 1, "at first"
        def test_never_reached():
            pass
        """,
        "--maxfail=3",
        CI="true",  # pytest then shortens nothing in its summary, which must not repeat the tracebacks
    )
    assert status != 0
    assert "FAILED test_it.py::test_alone - RuntimeError: only here" in text, text
    assert "rank 2 of 3" in text
    assert "RuntimeError: only here" in text
    assert "printed by 2" in text
    assert "printed by 1" not in text
    tracebacks = text.partition("short test summary")[0]
    assert tracebacks.count("AssertionError: everywhere") == 3, text  # equal up to the rank in `assert 0 < 0`
    assert "at first" in text
    assert "and again afterwards" in text
    # Had the ranks counted differently, some would have gone on to the last test and waited there.
    assert text.count("3 failed in") == 1, text


def test_a_rank_that_fails_while_others_wait_for_it_ends_the_run_with_its_traceback(suite: Callable) -> None:
    status, text = suite(
        """
        def test_goes_wrong_first():
            assert rank != 2, "an earlier failure"
        def test_waits():
            if rank == 1:
                raise RuntimeError("left the others")
            world.Barrier()
        """
    )
    assert status != 0
    assert "RuntimeError: left the others" in text
    assert "test_waits failed on rank 1, and rank 0, 2 did not come to an end" in text
    assert "an earlier failure" in text


def test_a_job_that_mpidl_ends_from_inside_of_a_test_says_why(suite: Callable) -> None:
    status, text = suite(
        """
        from collectives import Communicator
        def test_waits():
            comm = Communicator(timeout=1)
            if rank != 1:
                comm.barrier()
            time.sleep(20)
        """
    )
    assert status != 0
    assert "rank 0 of 3" in text, text
    assert "barrier" in text, text


@pytest.mark.thorough("in a blocking MPI call")
@pytest.mark.parametrize(
    "stuck",
    ["world.recv(source=0, tag=5)", "exec('while True: pass')"],
    ids=["in a blocking MPI call", "in Python"],
)
def test_a_test_that_a_rank_never_finishes_is_ended_and_named(suite: Callable, stuck: str) -> None:
    status, text = suite(
        f"""
        @pytest.mark.limit(2)
        def test_stuck():
            if rank == 1:
                {stuck}
        """
    )
    assert status != 0
    assert "test_stuck did not finish on rank 1 of 3 within 2 s; its threads" in text
    assert "test_stuck did not finish on rank 0 of 3 within 2 s (it waits for the outcome of rank 1)" in text
    assert 'test_it.py", line' in text


@pytest.mark.thorough
def test_a_process_that_cannot_leave_is_ended(suite: Callable) -> None:
    status, text = suite(
        """
        def test_leaves_a_thread():
            if rank == 1:
                threading.Thread(target=time.sleep, args=(1000,)).start()
        """,
        MPIDL_TEST_LIMIT="3",
    )
    assert status != 0
    assert "leaving after the last test did not finish on rank 1 of 3" in text


def test_a_test_skipped_on_some_ranks_only_is_a_failure(suite: Callable) -> None:
    status, text = suite(
        """
        def test_half():
            if rank != 1:
                pytest.skip("not here")
        """
    )
    assert status != 0
    assert "skipped on rank 0, 2 only" in text


@pytest.mark.thorough
def test_a_rank_that_wants_to_stop_stops_all(suite: Callable) -> None:
    status, text = suite(
        """
        def test_stops():
            if rank == 1:
                raise KeyboardInterrupt
        def test_never_reached():
            assert False, "reached"
        """
    )
    assert status != 0
    assert "KeyboardInterrupt on rank 1" in text
    assert "reached" not in text


@pytest.mark.thorough
def test_ranks_that_get_out_of_step_end_the_run(suite: Callable) -> None:
    status, text = suite(
        """
        def test_first(request):
            if rank == 1:
                request.session.items.reverse()
        def test_second():
            pass
        def test_third():
            pass
        """
    )
    assert status != 0
    assert "the ranks are no longer in step" in text
    assert "rank 1 comes from test_it.py::test_first" in text


def test_ranks_that_collect_different_tests_end_the_run(suite: Callable) -> None:
    status, text = suite(
        """
        def test_common():
            pass
        if rank == 1:
            def test_extra():
                pass
        """
    )
    assert status != 0
    assert "the ranks collected different tests" in text
    assert "rank 1: 2 tests, 0 errors, not on every rank: test_it.py::test_extra" in text


@pytest.mark.thorough
def test_an_error_of_one_rank_in_collection_is_shown(suite: Callable) -> None:
    status, text = suite(
        """
        if rank == 2:
            raise RuntimeError("cannot be imported here")
        def test_common():
            pass
        """
    )
    assert status != 0
    assert "RuntimeError: cannot be imported here" in text
    assert "rank 2: 0 tests, 1 errors" in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stuck",
    ["import time; time.sleep(1000)", "import ctypes; ctypes.PyDLL(None).sleep(1000)"],
    ids=["in Python", "with the interpreter's lock held"],
)
def test_the_limit_holds_without_mpi(tmp_path: Path, stuck: str) -> None:
    write_suite(tmp_path, f"def test_stuck():\n    {stuck}\n")
    env = launch.environment(MPIDL_TEST_LIMIT="1", MPIDL_TEST_BACKSTOP="1", **IMPORTABLE)
    done = launch.run([sys.executable, *PYTEST, "--capture=fd", str(tmp_path)], 30, tmp_path, env)
    assert done.returncode != 0
    assert 'test_it.py", line 2 in test_stuck' in done.stderr
    assert "PyDLL" in stuck or "test_stuck did not finish on this process within 1 s" in done.stderr


def test_mpi_tests_are_left_out_without_mpi_and_others_under_it(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.mpi\ndef test_mpi():\n    pass\ndef test_plain():\n    pass\n"
    write_suite(tmp_path, text)
    for options, name in (((), "test_plain"), (("--only-mpi",), "test_mpi")):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, str(tmp_path)]
        done = launch.run(command, 30, tmp_path, launch.environment(**IMPORTABLE))
        assert f"{name} PASSED" in done.stdout
        assert "1 passed, 1 deselected" in done.stdout


def test_files_without_tests_for_a_kind_of_run_are_not_imported(tmp_path: Path) -> None:
    """Each of these fails as it is imported."""
    write_suite(tmp_path, "import pytest\n@pytest.mark.mpi\ndef test_mpi():\n    pass\ndef test_plain():\n    pass\n")
    assert not has_nothing_for(Path(__file__), under_mpi=False)  # though a suite in it has the mark
    wrong = {"mpi": "import pytest\npytestmark = [\n    pytest.mark.mpi,\n]\n1 / 0\n", "plain": "1 / 0\n"}
    for options, other in (((), "mpi"), (("--only-mpi",), "plain")):
        for name in wrong:
            (tmp_path / f"test_{name}.py").unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
        (tmp_path / f"test_{other}.py").write_text(wrong[other])
        done = launch.run([*command, str(tmp_path)], 30, tmp_path, launch.environment(**IMPORTABLE))
        assert "1 passed, 1 deselected" in done.stdout, done.stdout
        named = [*command, str(tmp_path / f"test_{other}.py")]
        done = launch.run(named, 30, tmp_path, launch.environment(**IMPORTABLE))
        assert "ZeroDivisionError" in done.stdout


def test_processes_share_files_out_and_begin_with_those_that_may_take_longest(tmp_path: Path) -> None:
    body = "import pathlib, pytest, time\n{}\n@pytest.fixture(scope='module')\ndef kept():\n    yield\n"
    body += "    pathlib.Path({!r}).open('a').write(f'{{__name__}}\\n')\n"
    body += "def test_one(kept): time.sleep(0.3)\ndef test_two(kept): pass\n"
    ended = tmp_path / "ended"
    write_suite(tmp_path, body.format("", str(ended)))
    for name, mark in (("a", ""), ("b", "pytestmark = pytest.mark.limit(50)"), ("c", "")):
        (tmp_path / f"test_{name}.py").write_text(body.format(mark, str(ended)))
    (tmp_path / "claims").mkdir()
    command = [sys.executable, *PYTEST, "-vv", "--share", str(tmp_path / "claims"), str(tmp_path)]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(launch.run, command, 60, tmp_path, launch.environment(**IMPORTABLE)) for _ in range(2)]
        ran = [re.findall(r"test_(\w+)\.py::(\w+) PASSED", done.result().stdout) for done in both]
    assert sorted([*ran[0], *ran[1]]) == [(file, f"test_{n}") for file in ("a", "b", "c", "it") for n in ("one", "two")]
    assert ("b", "test_one") in (found[0] for found in ran if found)
    assert all(found[::2] == [(file, "test_one") for file, _ in found[1::2]] for found in ran)  # a file stays together
    assert sorted(ended.read_text().split()) == ["test_a", "test_b", "test_c", "test_it"]  # each fixture ends once


def test_tests_for_other_numbers_of_ranks_are_left_out(suite: Callable) -> None:
    body = """
        @pytest.mark.ranks(1, 2, 4)
        def test_others(): raise AssertionError
        @pytest.mark.ranks(2, 3)
        def test_these(): pass
        """
    status, output = suite(body)
    assert status == 0
    assert "1 passed, 1 deselected" in output


def test_over_hosts_tests_run_at_all_numbers_of_ranks_or_say_so(suite: Callable) -> None:
    body = """
        from tests.harness.agreement import Agreement
        Agreement.hosts = property(lambda self: 2)
        @pytest.mark.ranks(2)
        def test_anywhere(): pass
        @pytest.mark.one_node
        def test_on_a_node(): raise AssertionError
        @pytest.mark.ranks(2, exactly=True)
        def test_of_two(): raise AssertionError
        @pytest.mark.ranks(3, exactly=True)
        def test_of_three(): pass
        @pytest.mark.at_most(2)
        def test_of_a_small_model(): raise AssertionError
        """
    status, output = suite(body)
    assert status == 0
    assert "2 passed, 3 deselected" in output


CHOSEN_FROM = """
@pytest.mark.parametrize("case", range(8))
def test_dealt_out(case): pass
@pytest.mark.parametrize("case", range(8))
def test_both_here(case): pass
@pytest.mark.once
@pytest.mark.parametrize("case", range(8))
def test_once(case): pass
@pytest.mark.each("value")
@pytest.mark.parametrize("way", "ab")
@pytest.mark.parametrize("value", range(16))
def test_each(value, way): pass
@pytest.mark.brief_on(2)
@pytest.mark.parametrize("case", range(8))
def test_on_two(case): pass
@pytest.mark.every_size
def test_everywhere(): pass
@pytest.mark.thorough
def test_when_there_is_time(): pass
@pytest.mark.every_size
@pytest.mark.thorough("long", "longer")
@pytest.mark.parametrize("case", ["short", "long", "longer"])
def test_one_of_three(case): pass
@pytest.mark.ranks(3)
def test_here(): pass
@pytest.mark.ranks(2, 3)
def test_two_numbers(): pass
"""


def test_a_brief_run_deals_cases_out_over_the_numbers_of_ranks(tmp_path: Path, mpirun: Launcher) -> None:
    write_suite(tmp_path, SUITE + CHOSEN_FROM)
    found: dict[int, list[str]] = {}
    for ranks in (2, 3, 4, 5):
        options = ("--only-mpi", "--brief", "-vv", f"--rootdir={tmp_path}")
        done = mpirun(ranks, *PYTEST, *options, cwd=tmp_path, **IMPORTABLE)
        assert done.returncode == 0, done.stdout
        found[ranks] = re.findall(r"::(\S+) PASSED", done.stdout)
    cases = {ranks: {name for name in names if "dealt" in name} for ranks, names in found.items()}
    assert len(cases[2] | cases[3] | cases[4]) == len(cases[2]) + len(cases[3]) + len(cases[4]) == 2
    assert cases[5] == cases[4]
    assert len([name for ranks in (2, 3, 4) for name in found[ranks] if "once" in name]) == 1
    each = {ranks: [name[10:-1].split("-") for name in names if "each" in name] for ranks, names in found.items()}
    assert sorted(value for ranks in (2, 3, 4) for value, _ in each[ranks]) == sorted(map(str, range(16)))
    assert all({way for _, way in each[ranks]} == {"a", "b"} for ranks in (2, 3, 4))
    assert each[5] == each[4]
    assert [len([name for name in found[ranks] if "test_on_two" in name]) for ranks in (2, 3, 4, 5)] == [1, 0, 0, 0]
    assert [len([name for name in found[ranks] if "test_both" in name]) for ranks in (2, 3, 4, 5)] == [1, 0, 0, 0]
    assert all("test_everywhere" in names for names in found.values())
    assert ["test_here" in found[ranks] for ranks in (2, 3, 4, 5)] == [False, True, False, False]
    assert sum("test_two_numbers" in found[ranks] for ranks in (2, 3)) == 1
    assert all("test_one_of_three[short]" in names for names in found.values())
    assert not any(name in str(found) for name in ("test_when_there_is_time", "long"))


@pytest.mark.thorough
def test_each_case_runs_on_two_ranks_and_on_another_number(tmp_path: Path, mpirun: Launcher) -> None:
    write_suite(tmp_path, SUITE + CHOSEN_FROM)
    twice: dict[int, list[str]] = {}
    for ranks in (1, 2, 3, 4):
        options = ("--only-mpi", "--twice", "-vv", f"--rootdir={tmp_path}")
        done = mpirun(ranks, *PYTEST, *options, cwd=tmp_path, **IMPORTABLE)
        twice[ranks] = re.findall(r"::(\S+) PASSED", done.stdout)
    others = [name for ranks in (1, 3, 4) for name in twice[ranks] if "everywhere" not in name and "three" not in name]
    assert len(twice[2]) == 8 + 8 + 8 + 32 + 8 + 1 + 1 + 3 + 1
    assert sorted(others) == sorted([*(name for name in twice[2] if name in others), "test_here"])
    assert len(others) == 8 + 8 + 8 + 32 + 8 + 1 + 1 + 1


def test_mpirun_passes_on_output_status_and_changes_of_the_environment(mpirun: Launcher) -> None:
    program = 'import os; os.write(1, f\'{os.environ["A"]} {"OMP_NUM_THREADS" in os.environ}\\n\'.encode())'
    done = mpirun(2, "-c", program, A="set", OMP_NUM_THREADS=None)
    assert done.returncode == 0
    assert sorted(done.stdout.split()) == ["False", "False", "set", "set"]
    done = mpirun(1, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)")
    assert done.returncode == 3
    assert "why" in done.stderr


@pytest.mark.thorough
def test_mpirun_starts_a_job_of_its_own_from_a_process_that_is_in_one(mpirun: Launcher) -> None:
    inner = "import os; from mpi4py import MPI; os.write(1, b'size %d\\n' % MPI.COMM_WORLD.size)"
    outer = (
        "from mpi4py import MPI; from tests.harness.launch import mpirun\n"
        f"if MPI.COMM_WORLD.rank == 0: print(mpirun(2, '-c', {inner!r}).stdout)"
    )
    done = mpirun(3, "-c", outer)
    assert done.stdout.split("\n")[:2] == ["size 2", "size 2"], done.stdout + done.stderr


def test_mpirun_ends_all_ranks_after_its_timeout(tmp_path: Path, mpirun: Launcher) -> None:
    program = f"import os\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close()\nwhile True: pass"
    with pytest.raises(AssertionError, match="did not end within"):
        mpirun(2, "-c", program, timeout=3)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    for _ in range(100):
        if not any(map(alive, pids)):
            break
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    """Returns True while a process runs; one that has ended but was not waited for does not."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_make_test_shows_the_slowest_tests_of_each_phase() -> None:
    shown = subprocess.run(["make", "-n", "test"], cwd=launch.ROOT, capture_output=True, text=True)
    phases = [line for line in shown.stdout.splitlines() if "-m pytest" in line]
    assert len(phases) == 2, shown.stdout + shown.stderr
    assert all("--durations=10 --durations-min=1" in line for line in phases)
