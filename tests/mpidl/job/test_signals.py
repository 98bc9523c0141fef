"""Signals that ask the job to stop: all ranks heed them after the same step."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

import mpidl
from mpidl import STOPPED, StopSignal
from tests.harness import launch

KINDS = [signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.mpi
@pytest.mark.parametrize("number", KINDS)
def test_all_ranks_hear_of_one_rank_s_signal_after_the_same_step(comm, number: signal.Signals) -> None:
    with StopSignal(process_group=comm) as stop:
        steps = []
        for step in range(5):
            if step == 2 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), number)
            if stop.requested():
                break
            steps.append(step)
        assert steps == [0, 1]
        assert stop.signal is number
        assert stop.requested() is number


@pytest.mark.mpi
def test_of_several_signals_all_ranks_name_the_same(comm) -> None:
    with StopSignal(process_group=comm) as stop:
        os.kill(os.getpid(), KINDS[comm.rank % 2])
        comm.barrier()
        assert stop.requested() is (signal.SIGTERM if comm.size == 1 or signal.SIGTERM > signal.SIGUSR1 else KINDS[1])


@pytest.mark.mpi
@pytest.mark.parametrize("first", [0, 1])
def test_of_several_signals_on_one_rank_the_highest_counts_whatever_their_order(comm, first: int) -> None:
    with StopSignal(process_group=comm) as stop:
        if comm.rank == comm.size - 1:
            signal.raise_signal(KINDS[first])
            signal.raise_signal(KINDS[1 - first])
        assert stop.requested() is max(KINDS)


@pytest.mark.mpi
def test_signals_are_given_back(comm) -> None:
    before = [signal.getsignal(number) for number in KINDS]
    with StopSignal(process_group=comm):
        assert [signal.getsignal(number) for number in KINDS] != before
    assert [signal.getsignal(number) for number in KINDS] == before
    assert StopSignal([], comm).requested() is None


@pytest.mark.mpi
@pytest.mark.parametrize("given", [signal.SIGKILL, 0, "USR1"])
def test_signals_that_cannot_be_caught_are_refused(comm, given: object) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(mpidl.ConfigurationError, match="cannot be caught"):
        StopSignal([signal.SIGTERM, given], comm)  # type: ignore[list-item]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.mpi
def test_another_thread_than_the_main_one_is_refused(comm) -> None:
    errors: list[Exception] = []

    def make() -> None:
        try:
            StopSignal(process_group=comm)
        except mpidl.ConfigurationError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_a_forked_child_ends_by_signals(comm) -> None:
    with StopSignal(process_group=comm):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize(("handler", "status"), [("SIG_DFL", -signal.SIGHUP), ("SIG_IGN", 0)])
def test_a_closed_terminal_ends_a_program_without_mpirun_but_not_under_nohup(handler: str, status: int) -> None:
    program = (
        f"import signal; signal.signal(signal.SIGHUP, signal.{handler})\n"
        "import os, mpidl\n"
        "mpidl.init()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
    )
    done = launch.run([sys.executable, "-c", program], 60, launch.ROOT, launch.environment())
    assert done.returncode == status, done.stderr


def test_a_stopped_job_ends_with_its_own_status_and_one_line(mpirun, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time, mpidl\n"
        "comm, stop = mpidl.init(), mpidl.StopSignal()\n"
        "for step in range(10**9):\n"
        "    if step == 3 and comm.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    if stop.requested():\n"
        "        stop.exit(f'after step {step}')\n"
    )
    done = mpirun(3, program)
    assert done.returncode == STOPPED == os.EX_TEMPFAIL
    assert done.stdout == "stopped by SIGUSR1, after step 3; status 75: can go on\n"
