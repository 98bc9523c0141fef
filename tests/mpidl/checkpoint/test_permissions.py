"""Files that must not be read or written, refused by the system: the tests drop root's rights to files."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import mpidl
from mpidl.checkpoint import export_safetensors
from tests.mpidl.checkpoint.test_damage import assert_refused
from tests.mpidl.checkpoint.training import Run

pytestmark = pytest.mark.mpi
NOBODY = 65534


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Drops rights to files alone, of this thread and those it starts: MPI reads memory of its own user's processes."""
    become = ctypes.CDLL(None).setfsuid if os.geteuid() == 0 else lambda user: None
    become(NOBODY)
    try:
        yield
    finally:
        become(os.geteuid())


@pytest.fixture
def open_to_all(comm) -> Iterator[Path]:
    """A directory that every user comes to."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as made:
        folder = Path(mpidl.broadcast_object(comm, made))
        os.chmod(made, 0o777)
        comm.barrier()
        yield folder
        comm.barrier()
        if comm.rank == 0:
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o777)


def change(comm, path: Path, mode: int) -> None:
    """The mode of a file or directory, by rank 0."""
    if comm.rank == 0:
        path.chmod(mode)
    comm.barrier()


@pytest.mark.parametrize("what", ["rank00000-000.safetensors", "index.json", "."])
def test_what_must_not_be_read_is_named(comm, open_to_all: Path, what: str) -> None:
    run = Run("stage 3", comm)
    run.steps(0, 1)
    run.save(open_to_all, 1)
    run.steps(1, 2)
    path = open_to_all / "step-00000001"
    change(comm, path / what, 0)
    with as_an_ordinary_user():
        assert_refused(run, lambda: run.load(path), str(path), "Permission denied")
    change(comm, path / what, 0o777)
    for file in path.iterdir():
        change(comm, file, 0o666)
    with as_an_ordinary_user():
        assert run.load(path).step == 1


@pytest.mark.parametrize("background", [False, True])
def test_where_nothing_must_be_written_the_former_checkpoint_stays(comm, open_to_all: Path, background: bool) -> None:
    run = Run("stage 3", comm)
    run.steps(0, 1)
    run.save(open_to_all, 1)
    before = sorted(path.name for path in open_to_all.iterdir())
    run.steps(1, 2)
    change(comm, open_to_all, 0o555)
    with as_an_ordinary_user():

        def save() -> None:
            run.save(open_to_all, 2, background=background).wait()

        assert_refused(run, save, str(open_to_all), "Permission denied")
        comm.barrier()
    assert sorted(path.name for path in open_to_all.iterdir()) == before
    assert run.load(open_to_all).step == 1


def test_an_export_that_must_not_be_written_is_named(comm, open_to_all: Path) -> None:
    model = torch.nn.Linear(3, 3)
    change(comm, open_to_all, 0o555)
    with (
        as_an_ordinary_user(),
        pytest.raises(mpidl.CheckpointError, match=f"{open_to_all}.*Permission denied"),
    ):
        export_safetensors(open_to_all / "model", model, process_group=comm)
    assert list(open_to_all.iterdir()) == []
