"""The end of a program while checkpoints are saved: a save in the background that fails, and one that is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = """
import errno, sys, mpidl, torch
from mpidl.checkpoint import save, tensorfile

comm, folder = mpidl.init(), sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
save(folder, model, step=1)
write = tensorfile.write_all

def full(descriptor, data, *offset):
    if {where}:
        raise OSError(errno.ENOSPC, "No space left on device")
    write(descriptor, data, *offset)

tensorfile.write_all = full
save(folder, model, step=2, background=True)
{end}
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "end", "status"), [("comm.rank == 1", "", 1), ("True", "sys.exit(75)", 75), ("False", "", 0)]
)
def test_it_is_told_at_the_end_which_is_no_success(mpirun, tmp_path: Path, where: str, end: str, status: int) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "checkpoints"
    program.write_text(PROGRAM.format(where=where, end=end))
    done = mpirun(2, program, folder)
    assert done.returncode == status, done.stderr
    told = [line for line in done.stderr.splitlines() if "step-00000002" in line]
    kept = sorted(path.name for path in folder.iterdir())
    if status == 0:
        assert (told, kept) == ([], ["latest", "step-00000001", "step-00000002"])
        return
    rank = 1 if where != "True" else 0
    by = " (on rank 1)" if rank else ""
    assert told == [
        f"mpidl: rank 0 of 2 ends the job: {folder}/step-00000002.tmp/rank0000{rank}-000.safetensors: No space left on "
        f"device{by}; step-00000002 was not saved, and earlier checkpoints are as they were"
    ]
    assert kept == ["latest", "step-00000001"]


INTERRUPTED = """
import sys, threading, time, types, mpidl, torch
from mpidl.checkpoint import folder, save

comm, path = mpidl.init(), sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
save(path, model, step=1)
if comm.rank == 0:  # never gets further than the new name of what it is to remove
    folder.shutil = types.SimpleNamespace(rmtree=lambda path, **_: time.sleep(60 * (path.suffix == ".gone")))
else:
    def fail():
        while not list(folder.Path(path).glob("*.gone")):
            time.sleep(0.01)
        raise ValueError("enough")

    threading.Thread(target=fail).start()
save(path, model, step=2, keep_last=1)
"""


def test_what_was_about_to_be_removed_when_the_job_ends_is(mpirun, tmp_path: Path) -> None:
    """By the rank that ends it, whichever rank had begun to remove it."""
    program, folder = tmp_path / "program.py", tmp_path / "checkpoints"
    program.write_text(INTERRUPTED)
    done = mpirun(2, program, folder)
    assert done.returncode == 1, done.stderr
    assert "ValueError: enough" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000002"]
