"""Output of a command, passed on by the restart wrapper."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from mpidl.launch.job import Job
from mpidl.launch.streams import OutputStream

PARTS = (
    "import sys, time; sys.stdout.write('a\\n0%\\r'); sys.stdout.flush(); time.sleep(0.2); sys.stdout.write('9%\\nend')"
)


def started(command: list[str], target: int) -> tuple[subprocess.Popen[bytes], OutputStream]:
    """A process that writes to `target`."""
    stream = OutputStream(target)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stream.write_end)
    stream.begin()
    return process, stream


def test_all_bytes_come_through_and_the_last_lines_are_kept(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    script = PARTS + "; sys.stderr.buffer.write(b'\\xff\\n' + b'x' * 300_000 + b'\\n')"
    job = Job([sys.executable, "-c", script])
    while job.poll() is None:
        time.sleep(0.02)
    job.end()
    out, err = capfdbinary.readouterr()
    assert out == b"a\n0%\r9%\nend"
    assert err == b"\xff\n" + b"x" * 300_000 + b"\n"
    assert job.lines == ["\ufffd", "x" * 300_000, "a", "0%\r9%", "end"]


def test_what_is_written_comes_at_once() -> None:
    reading, writing = os.pipe()
    process, stream = started(["sh", "-c", "printf now; exec sleep 60"], writing)
    try:
        assert os.read(reading, 10) == b"now"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    stream.join(10)
    os.close(reading)
    os.close(writing)


def test_a_terminal_stays_one() -> None:
    """And its lines end as the command has written them, which the true terminal changes once."""
    leader, follower = pty.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("4H", 17, 91, 0, 0))
    process, stream = started(["sh", "-c", "test -t 1 && stty size <&1"], follower)
    assert process.wait(30) == 0
    stream.join(10)
    assert stream.lines == ["17 91"]
    assert os.read(leader, 100) == b"17 91\r\n"
    os.close(leader)
    os.close(follower)


def test_a_terminal_that_is_closed_does_not_stop_the_command() -> None:
    leader, follower = pty.openpty()
    process, stream = started(["sh", "-c", "echo a; read go; echo b && echo c; exit 7"], follower)
    os.read(leader, 100)
    os.close(leader)
    assert process.stdin
    process.stdin.close()
    assert process.wait(30) == 7
    stream.join(10)
    assert stream.lines == ["a", "b", "c"]
    os.close(follower)


def test_a_target_that_does_not_block_is_waited_for() -> None:
    """Another process that writes to the same pipe or terminal may have made it so."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    wanted = 200_000
    with contextlib.suppress(BlockingIOError):
        while True:  # until it is full
            wanted += os.write(writing, b"x" * 4096)
    process, stream = started([sys.executable, "-c", "print('x' * 9999 + '\\n' + 'x' * 189_999)"], writing)
    while not stream.lines:
        time.sleep(0.01)
    time.sleep(0.1)  # it is about to write
    found = 0
    while found < wanted and select.select([reading], [], [], 10)[0]:
        found += len(os.read(reading, 1 << 16))
    assert found == wanted
    assert process.wait(30) == 0
    stream.join(10)
    os.close(reading)
    os.close(writing)


def test_where_no_process_reads_the_command_sees_it() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process, _ = started(
        ["sh", "-c", "trap '' PIPE; while echo more 2>/dev/null; do sleep 0.02; done; exit 7"], writing
    )
    assert process.wait(30) == 7
    os.close(writing)
