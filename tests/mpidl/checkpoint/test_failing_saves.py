"""Saves that fail: disks that are full, ranks without memory or threads, interrupts."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl.checkpoint import directory_lock, folder, load, newest, save, tensorfile, verify, wait, writing
from mpidl.checkpoint.collect import PieceToWrite
from mpidl.job.ending import TEMP_PATHS
from tests.mpidl.checkpoint.folders import names
from tests.mpidl.checkpoint.training import Run

pytestmark = pytest.mark.mpi


@pytest.fixture
def fails(comm, monkeypatch) -> Any:
    """Lets the last rank's disk be full after so many bytes."""

    def set_up(after: int) -> None:
        left = after if comm.rank == comm.size - 1 else 1 << 40
        write = tensorfile.write_all

        def full(descriptor: int, data: Any, *offset: int) -> None:
            nonlocal left
            left -= len(data)
            if left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(descriptor, data, *offset)

        monkeypatch.setattr(tensorfile, "write_all", full)

    return set_up


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("after", [0, 2000])
def test_a_disk_that_fills_up_is_told_to_all_and_the_former_one_stays(
    comm, shared: Path, fails, monkeypatch, background: bool, after: int
) -> None:
    run = Run("stage 1", comm)
    run.steps(0, 1)
    run.save(shared, 1)
    losses = run.steps(1, 3)
    fails(after)

    def attempt() -> None:
        run.save(shared, 3, background=background)
        run.steps(3, 4)
        run.save(shared, 4)  # where a failure in the background surfaces

    with pytest.raises(mpidl.CheckpointError) as raised:
        attempt()
    told = mpidl.all_gather_object(comm, str(raised.value))
    assert len(set(told)) == 1
    file = shared / "step-00000003.tmp" / f"rank{comm.size - 1:05d}-000.safetensors"
    assert f"{file}: No space left on device" in told[0]
    assert "step-00000003 was not saved, and earlier checkpoints are as they were" in told[0]
    comm.barrier()
    assert names(shared) == ["latest", "step-00000001"]
    monkeypatch.undo()
    run.load(shared)
    assert run.steps(1, 3) == losses
    run.save(shared, 3, background=background)
    wait(run.model)
    assert newest(shared)[0] == shared / "step-00000003"


@pytest.mark.ranks(2)
@pytest.mark.limit(60)
def test_a_rank_that_cannot_copy_for_the_background_is_an_error_on_every_rank(comm, shared: Path, monkeypatch) -> None:
    model = torch.nn.Linear(3, 2)
    plain = PieceToWrite.copy

    def copy(self: PieceToWrite) -> PieceToWrite:
        if comm.rank == comm.size - 1:
            raise MemoryError("not enough memory")
        return plain(self)

    monkeypatch.setattr(PieceToWrite, "copy", copy)
    with pytest.raises(mpidl.CheckpointError) as raised:
        save(shared, model, step=1, background=True, process_group=comm)
    told = mpidl.all_gather_object(comm, str(raised.value))
    assert len(set(told)) == 1
    assert "step-00000001 was not saved" in told[0]
    assert f"was not copied: not enough memory (on rank {comm.size - 1})" in told[0]
    assert names(shared) == []
    assert not TEMP_PATHS
    monkeypatch.undo()
    save(shared, model, step=1, background=True, process_group=comm)
    assert wait(model) == shared / "step-00000001"


@pytest.mark.limit(60)
@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_that_can_start_no_thread_writes_at_once(comm, shared: Path, monkeypatch, rank: int) -> None:
    model = torch.nn.Linear(3, 2)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if comm.rank == rank % comm.size:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    saving = save(shared, model, step=1, background=True, process_group=comm)
    monkeypatch.undo()
    assert wait(model) == saving.path == shared / "step-00000001"
    comm.barrier()
    assert names(shared) == ["latest", "step-00000001"]
    assert not TEMP_PATHS


@pytest.mark.limit(60)
@pytest.mark.parametrize("where", ["all_gather_object", "gather_object", "on_rank_0"])
def test_an_interrupt_while_ranks_agree_lets_the_same_step_be_saved(
    comm, shared: Path, monkeypatch, where: str
) -> None:
    """A terminal sends it to all ranks."""
    model = torch.nn.Linear(3, 2)
    save(shared, model, step=1, process_group=comm)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Communicator if where == "gather_object" else writing, where, interrupt)
    interrupted_and_saved(comm, shared, model, monkeypatch, 2)
    assert names(shared) == ["latest", "step-00000001", "step-00000002"]


@pytest.mark.limit(60)
@pytest.mark.parametrize("step", [1, 2])
def test_an_interrupt_while_a_checkpoint_is_committed_lets_the_same_step_be_saved(
    comm, shared: Path, monkeypatch, step: int
) -> None:
    """Whatever of it rank 0 waits for the disk with."""
    model = torch.nn.Linear(3, 2)
    synced = os.fsync
    instants = 0

    for instant in range(20):
        into, count = shared / str(instant), 0
        save(into, model, step=1, process_group=comm)

        def interrupt(descriptor: int, instant: int = instant) -> None:
            nonlocal count
            count += 1
            if count > instant:
                raise KeyboardInterrupt
            synced(descriptor)

        def commit(comm: Any, act: Any) -> None:
            try:
                if comm.rank == 0:
                    with monkeypatch.context() as patched:
                        patched.setattr(os, "fsync", interrupt)
                        act()
            except KeyboardInterrupt:
                pass
            comm.barrier()
            raise KeyboardInterrupt

        monkeypatch.setattr(writing, "on_rank_0", commit)
        interrupted_and_saved(comm, into, model, monkeypatch, step)
        assert names(into) == ["latest", *(f"step-{kept:08d}" for kept in sorted({1, step}))]
        if not mpidl.broadcast_object(comm, count > instant):
            break
        instants += 1
    assert instants >= (5 if step == 2 else 8)


def interrupted_and_saved(comm, shared: Path, model: Any, monkeypatch, step: int) -> None:
    """Saves a step, by which an interrupt comes, and then once more, as a program does that catches it."""
    with pytest.raises(KeyboardInterrupt):
        save(shared, model, step=step, extra="first", process_group=comm)
    assert not TEMP_PATHS
    comm.barrier()
    assert not [name for name in names(shared) if name.endswith(".tmp")]
    comm.barrier()
    monkeypatch.undo()
    save(shared, model, step=step, extra="second", process_group=comm)
    found = load(shared, model, process_group=comm)
    assert (found.step, found.extra) == (step, "second")


def test_files_of_what_another_rank_may_commit_are_removed_under_another_name(comm, shared: Path, monkeypatch) -> None:
    if comm.rank == 0:
        temporary = folder.begin(shared, 1)
        remove, left = shutil.rmtree, []

        def look(path: Path, **settings: Any) -> None:
            left.append(temporary.exists())
            remove(path, **settings)

        monkeypatch.setattr(folder.shutil, "rmtree", look)
        folder.discard(temporary)
        assert left == [False]
    comm.barrier()
    assert names(shared) == []


@pytest.mark.limit(60)
def test_an_interrupt_before_the_thread_starts_leaves_nothing_to_wait_for(comm, shared: Path, monkeypatch) -> None:
    model = torch.nn.Linear(3, 2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(comm), "barrier", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(shared, model, step=1, background=True, process_group=comm)
    assert not TEMP_PATHS
    comm.barrier()
    assert names(shared) == []
    assert wait(model) is None
    save(shared, model, step=1, background=True, process_group=comm)
    assert wait(model) == shared / "step-00000001"


@pytest.mark.limit(60)
def test_an_interrupt_of_a_wait_leaves_the_checkpoint_to_be_waited_for(comm, shared: Path, monkeypatch) -> None:
    model = torch.nn.Linear(3, 2)
    saving = save(shared, model, step=1, background=True, process_group=comm)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            wait(model)
    assert wait(model) == saving.path
    assert wait(model) is None
    assert not TEMP_PATHS


@pytest.fixture
def small_disk(comm, shared: Path) -> Iterator[Path]:
    """A file system of 200 KB, of memory."""
    disk = shared / "disk"
    mounted = False
    if comm.rank == 0:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
        mounted = bool(shutil.which("mount")) and subprocess.run(command, capture_output=True).returncode == 0
    mounted = mpidl.broadcast_object(comm, mounted)
    if not mounted:
        pytest.skip("cannot mount a tmpfs here")
    yield disk
    comm.barrier()
    directory_lock.release()
    if comm.rank == 0:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_full_as_the_checkpoint_is_named_leaves_no_half_written_text(
    comm, shared: Path, monkeypatch
) -> None:
    model = torch.nn.Linear(3, 2)
    save(shared, model, step=1, process_group=comm)
    synced = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("latest.tmp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(mpidl.CheckpointError, match=r"latest.tmp: No space left on device"):
        save(shared, model, step=1, process_group=comm)
    comm.barrier()
    assert "latest.tmp" not in names(shared)
    assert verify(shared / (shared / "latest").read_text().strip())
    assert load(shared, model, process_group=comm).step == 1


def test_an_end_as_the_checkpoint_is_named_removes_the_half_written_text(comm, shared: Path, monkeypatch) -> None:
    """On whichever rank: the end of a job removes `TEMP_PATHS`."""
    synced = os.fsync
    unfinished = []

    def look(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("latest.tmp"):
            unfinished.extend(TEMP_PATHS)
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    save(shared, torch.nn.Linear(3, 2), step=1, process_group=comm)
    assert comm.rank or shared / "latest.tmp" in unfinished
    assert not TEMP_PATHS


def test_too_small_a_disk_is_noticed_before_anything_is_written(comm, small_disk: Path) -> None:
    model = torch.nn.Linear(300, 300)
    with pytest.raises(mpidl.CheckpointError, match=r"the disk is too full: the checkpoint takes \d\.\d MB"):
        save(small_disk, model, process_group=comm)
    assert names(small_disk) == []


@pytest.mark.one_node
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_really_full(comm, small_disk: Path, monkeypatch, background: bool) -> None:
    monkeypatch.setattr("mpidl.checkpoint.saving.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 1 << 40))
    model = torch.nn.Linear(100, 100)
    save(small_disk, model, step=1, process_group=comm)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    larger = torch.nn.Linear(300, 300)
    with pytest.raises(mpidl.CheckpointError, match="No space left on device"):
        save(small_disk, larger, step=2, background=background, process_group=comm).wait()
    comm.barrier()
    assert names(small_disk) == ["latest", "step-00000001"]
    load(small_disk, model, process_group=comm)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
