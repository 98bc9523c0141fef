"""Directories, the instant of a save, saving in the background, and disks that are full."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpidl
from mpidl.checkpoint import (
    claim,
    directory_lock,
    export_safetensors,
    folder,
    import_safetensors,
    load,
    newest,
    save,
    tensorfile,
    verify,
    wait,
    writing,
)
from mpidl.checkpoint.collect import Piece
from mpidl.job.ending import TEMP_PATHS
from mpidl.zero import ShardedGradient
from tests.mpidl.checkpoint.training import ENGINES, Run
from tests.mpidl.small_models import MODELS, fresh

pytestmark = pytest.mark.mpi


def names(folder: Path) -> list[str]:
    """Lists a directory without the running job's lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != directory_lock.NAME)


def test_the_last_few_are_kept(comm, shared: Path) -> None:
    model = torch.nn.Linear(3, 2)
    for step in (10, 20, 30):
        save(shared, model, step=step, keep_last=2, process_group=comm)
    assert names(shared) == ["latest", "step-00000020", "step-00000030"]
    # Going on from an older step: it is the order of writing that counts.
    save(shared, model, step=15, keep_last=2, process_group=comm)
    assert names(shared) == ["latest", "step-00000015", "step-00000030"]
    assert (shared / "latest").read_text() == "step-00000015\n"
    assert newest(shared)[0] == shared / "step-00000015"
    comm.barrier()
    save(shared, model, step=40, keep_last=1, process_group=comm)
    assert names(shared) == ["latest", "step-00000040"]


def test_copies_are_in_the_order_of_writing(comm, shared: Path) -> None:
    """Whatever the times of their files; and what is torn does not count among those that are kept."""
    model = torch.nn.Linear(3, 2)
    for step in (10, 20, 30, 5):
        save(shared / "first", model, step=step, process_group=comm)
    if comm.rank == 0:
        for number, step in enumerate((5, 30, 10, 20)):
            name = f"step-{step:08d}"
            shutil.copytree(shared / "first" / name, shared / "copy" / name)
            os.utime(shared / "copy" / name / "index.json", (10**9 + number, 10**9 + number))
        (shared / "copy" / "step-00000030" / "rank00000-000.safetensors").unlink()
    comm.barrier()
    assert newest(shared / "copy")[0] == shared / "copy" / "step-00000005"
    comm.barrier()
    save(shared / "copy", model, step=7, keep_last=3, process_group=comm)
    assert names(shared / "copy") == ["latest", *(f"step-{step:08d}" for step in (5, 7, 20, 30))]
    assert newest(shared / "copy")[0] == shared / "copy" / "step-00000007"


def test_the_same_step_again_takes_the_place_of_the_former(comm, shared: Path) -> None:
    model = torch.nn.Linear(3, 2)
    for value in (1, 2):
        save(shared, model, step=7, extra=value, process_group=comm)
    assert names(shared) == ["latest", "step-00000007"]
    assert load(shared, model, process_group=comm).extra == 2
    # Killed between the two renames, where there are no hard links: the former one is still there, under the name that
    # it had for that moment.
    if comm.rank == 0:
        (shared / "step-00000007").rename(shared / "step-00000007.old")
    comm.barrier()
    assert newest(shared)[0] == shared / "step-00000007.old"
    assert load(shared, model, process_group=comm).extra == 2
    save(shared, model, step=8, process_group=comm)
    assert names(shared) == ["latest", "step-00000007", "step-00000008"]


@pytest.mark.parametrize("instant", range(13))
@pytest.mark.parametrize(("step", "acts"), [(1, 11), (2, 7)])
def test_a_kill_at_any_instant_leaves_a_complete_checkpoint(
    comm, shared: Path, monkeypatch, step: int, acts: int, instant: int
) -> None:
    """Each step by which rank 0 finishes is the last one that happens; also where it replaces the only one.

    `latest` names a complete one at any time, also after what a restart clears away.
    """
    model = torch.nn.Linear(3, 2)
    save(shared, model, step=1, process_group=comm)
    done = 0

    class Killed(BaseException):
        pass

    def mortal(call: Any) -> Any:
        def act(*arguments: Any, **settings: Any) -> Any:
            nonlocal done
            if done == instant:
                raise Killed
            done += 1
            return call(*arguments, **settings)

        return act

    if comm.rank == 0:
        from mpidl.checkpoint import index

        for name in ("write_text", "sync"):
            monkeypatch.setattr(folder, name, mortal(getattr(folder, name)))
        monkeypatch.setattr(Path, "rename", mortal(Path.rename))
        temporary = folder.begin(shared, step)
        part = writing.write_part(temporary, 0, [], {}, 1 << 20)
        about = {"step": step, "extra": None, "micro_step": 0, "ranks": 1, "engine": "plain", "own": [{}]}
        about["model"] = {"class": "None", "parameters": [], "buffers": [], "tied": {}}
        try:
            folder.commit(temporary, index.merge(temporary, about, [part]), keep_last=1)
            killed = False
        except Killed:
            killed = True
        monkeypatch.undo()
        assert killed == (instant < acts)
        for _ in range(2):
            found, _ = newest(shared)
            assert found is not None
            assert verify(found).about["step"] in (1, 2)
            assert verify(shared / (shared / "latest").read_text().strip()).about["step"] in (1, 2)
            folder.clean(shared)
    comm.barrier()
    save(shared, model, step=3, keep_last=1, process_group=comm)
    assert names(shared) == ["latest", "step-00000003"]


def test_without_hard_links_the_same_step_is_replaced_too(comm, shared: Path, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    test_the_same_step_again_takes_the_place_of_the_former(comm, shared)


def test_saving_and_loading_need_one_unit_and_one_block_of_memory(comm, shared: Path, monkeypatch) -> None:
    """Looked at whenever a block is checked, which is when most is there."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6)))  # 72 MiB with Adam's states
    run = Run("zero3", comm, model)
    run.call(torch.ones(1, 1024)).sum().backward()
    run.finish()
    highest = 0.0
    inside = tensorfile.checksum

    def looked(*arguments: Any) -> int:
        nonlocal highest
        highest = max(highest, mpidl.memory.data_mib())
        return inside(*arguments)

    monkeypatch.setattr(tensorfile, "checksum", looked)
    unit, block = model[0].weight.nbytes / 2**20, tensorfile.BLOCK / 2**20
    for act in (lambda: run.save(shared, 1), lambda: run.load(shared)):
        before = highest = mpidl.memory.data_mib()
        act()
        assert highest - before < unit + block + 1


@pytest.mark.parametrize("engine", ENGINES)
def test_in_the_background_the_copy_is_saved_and_training_goes_on(comm, shared: Path, monkeypatch, engine: str) -> None:
    run = Run(engine, comm)
    run.steps(0, 1)
    held = threading.Event()
    write = tensorfile.write_all

    def late(*arguments: Any) -> None:
        assert held.wait(60)
        write(*arguments)

    monkeypatch.setattr(tensorfile, "write_all", late)
    saving = run.save(shared, 1, background=True)
    losses = run.steps(1, 3)  # the weights that were to be saved are no more
    assert not saving.done()
    assert newest(shared)[0] is None
    comm.barrier()
    held.set()
    assert wait(run.call) == saving.path == shared / "step-00000001"
    assert wait(run.call) is None
    assert saving.done()
    assert names(saving.path) == ["index.json", *(f"rank{r:05d}-000.safetensors" for r in range(comm.size))]
    again = Run(engine, comm, fresh(MODELS["gpt2"], rank=1))
    again.load(shared)
    assert again.steps(1, 3) == losses


def test_what_has_been_written_in_the_background_leaves_memory(comm, shared: Path, monkeypatch) -> None:
    """Before anybody waits for it."""

    def tensors() -> list[torch.Tensor]:
        gc.collect()
        found = [thing for thing in gc.get_objects() if torch.is_tensor(thing)]
        return [tensor for tensor in found if not isinstance(tensor, ShardedGradient)]  # which has no storage

    def held() -> int:
        storages = [tensor.untyped_storage() for tensor in tensors()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    model = fresh(lambda: torch.nn.Linear(100, 100))
    earlier = tensors()  # those of other tests stay until the end of this one
    before, going_on = held(), threading.Event()
    write = tensorfile.write_all

    def late(*arguments: Any) -> None:
        assert going_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(tensorfile, "write_all", late)
    saving = save(shared, model, background=True, random_states=False, process_group=comm)
    copied = held() - before
    going_on.set()
    while not saving.done():
        time.sleep(0.01)
    assert sum(mpidl.all_gather_object(comm, copied)) == sum(p.nbytes for p in model.parameters())
    assert held() == before
    assert wait(model) == saving.path
    del earlier


def test_a_program_that_changes_its_directory_saves_where_it_was(comm, shared: Path, monkeypatch) -> None:
    model = torch.nn.Linear(300, 300)
    going_on = threading.Event()
    write = tensorfile.write_all

    def late(*arguments: Any) -> None:
        assert going_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(tensorfile, "write_all", late)
    monkeypatch.chdir(shared)
    save("kept", model, step=1, background=True, process_group=comm)
    monkeypatch.chdir("/")
    going_on.set()
    assert wait(model) == shared / "kept" / "step-00000001"
    assert names(shared / "kept") == ["latest", "step-00000001"]


def test_the_next_save_waits_for_the_one_before(comm, shared: Path) -> None:
    run = Run("zero3", comm)
    for step in range(1, 5):
        run.steps(step - 1, step)
        run.save(shared, step, background=True, keep_last=2)
    assert wait(run.model) == shared / "step-00000004"
    assert names(shared) == ["latest", "step-00000003", "step-00000004"]
    comm.barrier()
    for path in sorted(shared.glob("step-*")) if comm.rank == 0 else []:
        verify(path)


def test_another_model_s_save_leaves_one_that_is_under_way_alone(comm, shared: Path, monkeypatch) -> None:
    first, second = (fresh(lambda: torch.nn.Linear(3, 2)) for _ in range(2))
    if comm.rank == 0:
        (shared / "step-00000009.tmp").mkdir()  # left by a job that was killed
    going_on = threading.Event()
    write = tensorfile.write_all

    def late(*arguments: Any) -> None:
        assert threading.current_thread() is threading.main_thread() or going_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(tensorfile, "write_all", late)
    save(shared, first, step=1, background=True, process_group=comm)
    save(shared, second, step=2, process_group=comm)
    try:
        with pytest.raises(
            mpidl.CheckpointError, match=r"step-00000001.tmp: is still being written, for another model"
        ):
            save(shared, second, step=1, process_group=comm)
    finally:
        going_on.set()
    assert wait(first) == shared / "step-00000001"
    assert names(shared) == ["latest", "step-00000001", "step-00000002"]
    comm.barrier()
    for path in sorted(shared.glob("step-*")) if comm.rank == 0 else []:
        verify(path)


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
    run = Run("zero1", comm)
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
    plain = Piece.copy

    def copy(self: Piece) -> Piece:
        if comm.rank == comm.size - 1:
            raise MemoryError("not enough memory")
        return plain(self)

    monkeypatch.setattr(Piece, "copy", copy)
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
@pytest.mark.parametrize("where", ["all_gather_object", "gather_json", "on_rank_0"])
def test_an_interrupt_while_ranks_agree_lets_the_same_step_be_saved(
    comm, shared: Path, monkeypatch, where: str
) -> None:
    """A terminal sends it to all ranks."""
    model = torch.nn.Linear(3, 2)
    save(shared, model, step=1, process_group=comm)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, where, interrupt)
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


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("engine", ["plain", "ddp"])
@pytest.mark.parametrize("what", ["model/transformer.wte.weight", "optimizer/exp_avg/transformer.wte.weight"])
def test_replicas_that_differ_are_refused_by_name(comm, shared: Path, engine: str, what: str) -> None:
    run = Run(engine, comm)
    run.steps(0, 1)
    weight = run.model.transformer["wte"].weight
    changed = weight.data if what.startswith("model") else run.optimizer.state[weight]["exp_avg"]
    if comm.rank == comm.size - 1:
        changed[-1, -1] += 1e-3
    last, rest = comm.size - 1, ", ".join(map(str, range(comm.size - 1)))
    said = f"the ranks' replicas differ, of which each writes a part: {what} on rank {last} from rank"
    with pytest.raises(mpidl.CheckpointError) as raised:
        run.save(shared, 1)
    assert str(raised.value) == f"step-00000001 was not saved: {said}{'s' * (last > 1)} {rest}"
    assert names(shared) == []
    if what.startswith("model"):
        with pytest.raises(mpidl.CheckpointError, match="was not exported: the ranks' replicas differ"):
            export_safetensors(shared / "out", run.call, process_group=comm)
    assert names(shared) == []
    comm.barrier()
    run.save(shared, 1, compare=False)
    assert names(shared) == ["latest", "step-00000001"]


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_that_differ_are_rank_0_s_or_each_rank_s_own(comm, shared: Path, broadcast: bool) -> None:
    model = fresh(lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    replica = mpidl.DistributedDataParallel(model, process_group=comm, broadcast_buffers=broadcast)
    replica(torch.arange(6.0).view(2, 3)).sum().backward()
    model[1].running_mean += comm.rank  # as by a pass without gradients over samples of its own
    mean = model[1].running_mean.clone()
    means = mpidl.all_gather_object(comm, mean)
    save(shared, replica)
    model[1].running_mean.zero_()
    load(shared, replica)
    assert torch.equal(model[1].running_mean, means[0] if broadcast else mean)


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"step": -1}, "step: got -1"),
        ({"step": 1.5}, "step: got 1.5"),
        ({"keep_last": 0}, "keep_last: got 0"),
        ({"keep_last": True}, "keep_last: got True"),
        ({"micro_step": True}, "micro_step: got True"),
        ({"scheduler": 3}, "scheduler: got a int"),
        ({"optimizer": "Adam"}, "optimizer: got str"),
        ({"step": np.float64(1)}, "step: got "),
        ({"file_bytes": 0}, "file_bytes: got 0"),
    ],
)
def test_wrong_arguments_are_refused(comm, shared: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=said):
        save(shared, torch.nn.Linear(3, 2), process_group=comm, **settings)
    assert names(shared) == []


def test_integers_of_numpy_are_integers(comm, shared: Path) -> None:
    model = torch.nn.Linear(3, 2)
    count = np.int64(1)
    for step in np.arange(4, 6):
        save(shared, model, step=step, micro_step=np.int64(0), keep_last=count, file_bytes=count, process_group=comm)
    assert names(shared) == ["latest", "step-00000005"]
    assert load(shared / "latest", model, process_group=comm).step == 5


def test_paths_that_are_none_are_refused(comm, shared: Path) -> None:
    model = torch.nn.Linear(3, 2)
    for call in (save, load, export_safetensors, import_safetensors):
        with pytest.raises(mpidl.ConfigurationError, match="path: got NoneType; needs a directory's path"):
            call(None, model, process_group=comm)  # type: ignore[operator]
    with pytest.raises(mpidl.ConfigurationError, match="path: got int; needs a directory's path"):
        claim(3, comm)  # type: ignore[arg-type]
    if comm.rank == 0:
        (shared / "notes").write_text("mine")
    comm.barrier()
    for refused in (save, export_safetensors):
        with pytest.raises(mpidl.CheckpointError, match=r"notes: is a file; needs a directory"):
            refused(shared / "notes", model, process_group=comm)  # type: ignore[operator]
    with pytest.raises(mpidl.CheckpointError, match=r"notes: is a file; needs the directory of a checkpoint"):
        load(shared / "notes", model, process_group=comm)
    assert names(shared) == ["notes"]


def test_models_and_optimizers_that_do_not_belong_together_are_refused(comm, shared: Path) -> None:
    run, other = Run("zero2", comm), Run("zero2", comm)
    with pytest.raises(mpidl.ConfigurationError, match="is not the one that trains this model"):
        save(shared, run.model, other.optimizer)
    with pytest.raises(mpidl.ConfigurationError, match="in group 0 is no parameter of the model"):
        save(shared, torch.nn.Linear(3, 2), torch.optim.SGD(torch.nn.Linear(3, 2).parameters()), process_group=comm)
    with pytest.raises(mpidl.ModelMismatch, match="step=0, rank 1 has step=1") if comm.size > 1 else _nothing():
        save(shared, run.model, run.optimizer, step=comm.rank)
    with pytest.raises(mpidl.ModelMismatch, match="scheduler='LambdaLR'") if comm.size > 1 else _nothing():
        save(shared, run.model, run.optimizer, None if comm.rank else run.schedule)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...
