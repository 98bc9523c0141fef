"""The example under the launcher, asked to stop: it finishes the step, saves, and ends with a status of its own."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives.memory.leftovers import mapped
from mpidl import STOPPED
from mpidl.checkpoint import newest, verify
from tests.harness import launch
from tests.kill import Training


@pytest.mark.limit(120)
@pytest.mark.job
def test_a_request_to_stop_is_a_checkpoint_and_a_status(tmp_path: Path) -> None:
    training = Training(tmp_path, argparse.Namespace(kills=10_000, ranks=2, then=[], zero=3))
    process = training.start()
    try:
        while training.newest() < 3:
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)  # which the launcher passes on in a way that every MPI waits for
        status = process.wait(60)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    said = (tmp_path / "said").read_text()
    assert status == STOPPED, said
    stopped = re.search(r"stopped by SIGUSR1, after step (\d+), which is saved; status 75: can go on", said)
    assert stopped, said
    assert training.newest() == int(stopped[1]) < training.steps
    verify(training.checkpoints / f"step-{training.newest():08d}")
    assert not training.ranks()
    assert "asked to stop by SIGTERM" in said
    assert "Traceback" not in said


@pytest.mark.thorough
@pytest.mark.limit(120)
@pytest.mark.job
@pytest.mark.parametrize("launched", [False, True], ids=["mpirun", "mpidl.launch"])
def test_ctrl_c_ends_all_and_leaves_nothing(tmp_path: Path, launched: bool) -> None:
    """With a checkpoint after every step and state on a disk, so that there is something to leave."""
    training = Training(tmp_path, argparse.Namespace(kills=10_000, ranks=2, then=[], zero=3))
    more = ["--checkpoint-dir", str(training.checkpoints), "--save-every", "1", "--offload", "disk"]
    command = training.command("results.json", *more)
    if launched:
        command = [sys.executable, "-m", "mpidl.launch", "--checkpoint", str(training.checkpoints), "--", *command]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env=training.environment, cwd=launch.ROOT, start_new_session=True
        )
    try:
        while training.newest() < 3:
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.01)
        segments = {path for pid in training.ranks().values() for path in mapped(pid)}
        before = set(os.listdir(tmp_path / "tmp"))  # torch leaves an empty directory
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        status = process.wait(60)
        left = [*training.ranks().values()]
    finally:
        process.kill()
        process.wait()
        for pid in training.ranks().values():
            os.kill(pid, signal.SIGKILL)
    text = (tmp_path / "said").read_text()
    assert status == 130 if launched else status in (130, 1), text  # 1 is Open MPI's
    assert "Traceback" not in text
    assert left == []
    assert [path for path in segments if Path(path).exists()] == []
    assert set(os.listdir(tmp_path / "tmp")) <= before
    assert os.listdir(tmp_path / "shm") == []
    left = os.listdir(training.checkpoints)  # a checkpoint whose removal was interrupted goes when the next job saves
    assert [name for name in left if not re.fullmatch(r"latest|step-\d+(\.gone)?", name)] == []
    found, passed = newest(training.checkpoints)
    assert found is not None
    assert passed == []
    verify(found)
