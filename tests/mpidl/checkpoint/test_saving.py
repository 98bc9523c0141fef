"""Directories, copies in their order, the instant of a save, and saving in the background."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import mpidl
from mpidl.checkpoint import folder, load, newest, save, tensorfile, verify, wait, writing
from mpidl.zero import ShardedGradient
from tests.mpidl.checkpoint.folders import names
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.small_models import MODELS, fresh
from tests.mpidl.zero.ways import ENGINES

pytestmark = pytest.mark.mpi


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
    run = Run("stage 3", comm, model)
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
    """It leaves before the program waits for it."""

    def tensors() -> list[torch.Tensor]:
        gc.collect()
        found = [thing for thing in gc.get_objects() if torch.is_tensor(thing)]
        return [tensor for tensor in found if not isinstance(tensor, ShardedGradient | FakeTensor)]  # without storage

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
    run = Run("stage 3", comm)
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
