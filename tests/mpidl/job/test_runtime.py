"""Joining the job, and how it ends when a rank fails. Each case is a job of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

JOIN = "import os, sys, time, mpidl, torch\ncomm = mpidl.init()\n"


@pytest.fixture
def job(mpirun, tmp_path: Path):
    """`job(ranks, source)` runs a program that has joined the job as `comm`."""

    def run(ranks: int, source: str, **env: str):
        program = tmp_path / "program.py"
        program.write_text(JOIN + source)
        return mpirun(ranks, str(program), **env)

    return run


# A framework that finds them takes itself for started by torchrun, and fails on MASTER_ADDR.
LEFT_ALONE = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
assert mpidl.init() is comm
assert not any(n in os.environ for n in names), [n for n in names if n in os.environ]
os.environ["RANK"] = "7"
mpidl.init()
assert os.environ.pop("RANK") == "7"
"""
EXPORTED = """
assert mpidl.init(export_ranks=True) is comm
assert [os.environ[n] for n in names] == [str(comm.rank), str(comm.rank), "3", "3"]
sys.stdout.write(f"fine{comm.rank}\\n")
"""
# It reads what the launchers of MPI set, too.
ACCELERATE = """
for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
    if comm.size > 1:
        os.environ.pop(name, None)
try:
    from accelerate import Accelerator
except ImportError:  # the variables by which it would decide
    sizes = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"}
    assert all(os.environ.get(name) == "1" for name in sizes & set(os.environ)), sizes & set(os.environ)
    assert not {"LOCAL_RANK", "WORLD_SIZE"} & set(os.environ)
else:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    accelerator.backward(accelerator.prepare(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum())
comm.barrier()
"""


def test_init_leaves_the_ranks_in_the_environment_alone_and_exports_them_on_request(job) -> None:
    """An accelerator that is made in between, on each rank, is one process without the size of the launcher."""
    done = job(3, LEFT_ALONE + ACCELERATE + EXPORTED)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["fine0", "fine1", "fine2"]


@pytest.mark.thorough
def test_an_accelerator_made_after_init_is_one_process(job) -> None:
    done = job(1, ACCELERATE)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_cores_are_divided_unless_the_environment_says_otherwise(job) -> None:
    show = "sys.stdout.write(f'{torch.get_num_threads()} {os.environ[\"OMP_NUM_THREADS\"]}\\n')"
    cores = len(os.sched_getaffinity(0))
    done = job(1, show, OMP_NUM_THREADS="")
    assert done.stdout.split() == [str(cores), str(cores)]
    done = job(2 * cores, show, OMP_NUM_THREADS="")
    assert set(done.stdout.split()) == {"1"}
    assert job(1, show, OMP_NUM_THREADS="1").stdout.split() == ["1", "1"]


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(job) -> None:
    done = job(3, "if comm.rank == 1:\n    raise KeyError('the reason')\ncomm.barrier()\ntime.sleep(60)")
    assert done.returncode != 0
    assert "rank 1 of 3 ends the job" in done.stderr
    assert "KeyError: 'the reason'" in done.stderr


@pytest.mark.thorough
def test_a_failure_of_an_engine_s_collective_ends_the_job(job) -> None:
    """A wrong argument on one rank only, while the others already wait for it."""
    done = job(2, "comm.all_reduce(torch.ones(3) if comm.rank else [1.0])")
    assert done.returncode != 0
    assert "needs a numpy or cupy array or a torch tensor" in done.stderr


def test_a_killed_rank_ends_the_job(job) -> None:
    done = job(3, f"if comm.rank == 2:\n    os.kill(os.getpid(), {signal.SIGKILL:d})\ncomm.barrier()\ntime.sleep(60)")
    assert done.returncode != 0
    assert re.search("signal:? 9", done.stdout + done.stderr, re.IGNORECASE)


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", ["True", "comm.rank == 1"])
def test_wrong_use_is_one_line_and_status_2_on_every_rank(job, wrong: str) -> None:
    done = job(
        3,
        "def check():\n"
        f"    if {wrong}:\n"
        "        raise mpidl.UsageError('no such\\nfile')\n"
        "    return 5\n"
        "try:\n"
        "    mpidl.agree_or_exit(comm, check)\n"
        "except SystemExit as end:\n"
        "    print(f'status {end.code}\\n', end='')\n"  # in one piece, so that ranks do not interleave
        "    raise",
    )
    assert done.returncode == 2
    assert done.stdout.count("status 2") == 3
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert lines == ["error: no such file" + ("" if wrong == "True" else " (on rank 1)")]


@pytest.mark.thorough
def test_what_is_right_everywhere_goes_on(job) -> None:
    done = job(2, "assert mpidl.agree_or_exit(comm, lambda: comm.rank) == comm.rank")
    assert done.returncode == 0


@pytest.mark.thorough
def test_operations_in_flight_are_finished_before_the_end(job) -> None:
    done = job(2, "x = torch.ones(1_000_000)\nfor _ in range(5): comm.all_reduce(x, 'avg', async_op=True)")
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_job_without_mpirun_is_a_world_of_one(job, tmp_path: Path) -> None:
    import sys

    from tests.harness.launch import ROOT, environment, run

    program = tmp_path / "alone.py"
    program.write_text(JOIN + "x = torch.ones(3)\ncomm.all_reduce(x)\nprint(comm.size, x.sum().item())")
    done = run([sys.executable, str(program)], 60, ROOT, environment())
    assert done.stdout.split() == ["1", "3.0"], done.stderr


@pytest.mark.thorough
def test_an_error_that_all_ranks_have_is_told_once(job) -> None:
    done = job(3, "raise KeyError('the reason')")
    assert done.returncode == 1
    assert done.stderr.count("ends the job") == 1, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.thorough
def test_another_error_is_told_with_the_first(job) -> None:
    done = job(2, "raise KeyError(f'reason {comm.rank}')")
    assert done.returncode == 1
    assert "KeyError: 'reason 0'" in done.stderr
    assert "KeyError: 'reason 1'" in done.stderr


@pytest.mark.thorough
def test_an_exception_in_a_thread_ends_the_job_with_its_traceback(job) -> None:
    done = job(
        2,
        "import threading\n"
        "if comm.rank:\n"
        "    threading.Thread(target=lambda: {}['the reason'], name='feeder').start()\n"
        "comm.barrier() if comm.rank else time.sleep(60)",
    )
    assert done.returncode == 1
    assert "rank 1 of 2, in feeder ends the job" in done.stderr
    assert "KeyError: 'the reason'" in done.stderr


FORK = """
import signal
def fork(what):
    child = os.fork()
    if child == 0:
        what()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
if comm.rank:
    fork(lambda: {}['of a child'])
    fork(interrupt)
    time.sleep(1.3)  # an interrupt of this process would have ended the job by now
comm.barrier()
print("through\\n", end="")  # in one write, as output is not buffered and ranks may come at once
"""


@pytest.mark.thorough
def test_a_forked_child_ends_for_itself(job) -> None:
    done = job(2, FORK)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "through\n" * 2
    assert "KeyError: 'of a child'" in done.stderr
    assert "ends the job" not in done.stderr


@pytest.mark.thorough
def test_the_status_of_a_rank_that_exits_while_others_wait_is_the_job_s(job) -> None:
    done = job(2, "if comm.rank:\n    sys.exit(3)\ncomm.barrier()")
    assert done.returncode == 3, done.stderr
    assert "rank 1, which is at the end of its program with status 3, after" in done.stderr


INTERRUPT = (
    "import signal, threading\n"
    "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"  # as the launcher passes it on
)


@pytest.mark.thorough("in Python", "some waiting in MPI")
@pytest.mark.parametrize(
    "busy",
    [
        "time.sleep(60)",
        "time.sleep(60) if comm.rank == 2 else comm.barrier()",
        "comm.recv(torch.ones(1), (comm.rank + 1) % 3)",
    ],
    ids=["in Python", "some waiting in MPI", "all waiting in MPI"],
)
def test_an_interrupt_of_all_ranks_ends_them_at_once_with_one_line(job, busy: str) -> None:
    done = job(3, INTERRUPT + busy)
    assert done.returncode == 130, done.stderr
    assert done.stderr.count("ends the job: interrupted") == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["interrupt", "interrupt behind", "exception behind"])
def test_a_checkpoint_that_is_being_written_is_removed_and_no_other(job, tmp_path: Path, how: str) -> None:
    end = "raise KeyError('why')\n" if "exception" in how else "time.sleep(60)\n"
    done = job(
        2,
        "from pathlib import Path\n"
        "from mpidl.checkpoint import tensorfile\n"
        "torch.manual_seed(0)\n"
        f"folder, model = Path({str(tmp_path)!r}) / 'kept', torch.nn.Linear(3, 2)\n"
        "mpidl.checkpoint.save(folder, model, step=1)\n"
        "write = tensorfile.write_all\n"
        "def slow(*arguments):\n"
        "    (folder / f'writing-{comm.rank}').touch()\n"
        "    time.sleep(60) if comm.rank else write(*arguments)\n"
        "tensorfile.write_all = slow\n"
        + ("" if "exception" in how else INTERRUPT.replace("0.3", "1.5"))
        + f"mpidl.checkpoint.save(folder, model, step=2, background={'behind' in how})\n"
        "while len(list(folder.glob('writing-*'))) < 2:\n"
        "    time.sleep(0.01)\n" + end,
    )
    assert done.returncode == (1 if "exception" in how else 130), done.stderr
    left = sorted(path.name for path in (tmp_path / "kept").iterdir() if not path.name.startswith("writing"))
    assert left == ["latest", "step-00000001"], done.stderr


@pytest.mark.thorough
def test_a_program_that_catches_an_interrupt_goes_on(job) -> None:
    done = job(
        2,
        INTERRUPT + "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(1.5)\n    comm.barrier()\n"
        "print('went on\\n', end='')",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on") == 2


# The end of a program that has begun a `try:`, and goes on after one interrupt or two.
CATCHES_TWO = """
    time.sleep(60)
except KeyboardInterrupt:
    try:
        time.sleep(2)
    except KeyboardInterrupt:
        time.sleep(2)
"""


@pytest.mark.thorough
def test_of_two_interrupts_that_python_notices_at_once_neither_ends_a_program_that_goes_on(job) -> None:
    done = job(
        1,
        "import signal, threading\n"
        "lock = threading.Lock()\n"
        "def interrupt_twice():\n"
        "    for _ in range(2):\n"
        "        time.sleep(0.2)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    lock.release()\n"
        "lock.acquire()\n"
        "threading.Thread(target=interrupt_twice).start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"  # other threads take it, and do not wake this one
        "try:\n"
        "    lock.acquire()\n"  # Python notices nothing until this returns
        f"{CATCHES_TWO}print('went on\\n', end='')",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on\n"


@pytest.mark.thorough
def test_an_interrupt_that_python_notices_before_its_byte_is_read_ends_no_program(job) -> None:
    done = job(
        1,
        "import select, signal\n"
        "look, sent = select.select, []\n"
        "def late(*args):\n"
        "    found = look(*args)\n"
        "    if not (found[0] or sent):\n"
        "        time.sleep(0.5)\n"  # until the program is where it catches the second one
        "        sent.append(os.kill(os.getpid(), signal.SIGINT))\n"
        "        time.sleep(0.5)\n"  # in which Python notices it
        "    return found\n"
        "select.select = late\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        f"{CATCHES_TWO}print(len(sent), 'went on\\n', end='')",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 went on\n"


@pytest.mark.thorough
def test_a_handler_that_a_program_puts_in_place_later_is_the_one_that_counts(job) -> None:
    done = job(
        1,
        "import signal\n"
        "before = signal.signal(signal.SIGINT, lambda *_: print('heard\\n', end=''))\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(0.2)\n"
        "signal.signal(signal.SIGINT, before)\n"
        "time.sleep(1.5)\n"
        "print('went on\\n', end='')",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "heard\nwent on\n"


def test_the_compiler_waits_until_it_is_needed() -> None:
    """It would double the time of the import, on every rank."""
    code = "import sys, mpidl\nsys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
