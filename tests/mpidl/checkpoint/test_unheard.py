"""A save in the background that fails, and a program that ends without asking after it."""

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
