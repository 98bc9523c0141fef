"""Every Python snippet of README and docs runs as it stands, on 2 ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .run_snippets import run
from .settings import AFTER, NEEDS_A_GPU, SETTINGS
from .snippets import ROOT, snippets

ALL = snippets("python")
HERE = [snippet.name for snippet in ALL if snippet.name not in NEEDS_A_GPU]

_ALONE = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}  # what needs a GPU is another test's


def test_there_is_a_setting_for_no_other_snippets() -> None:
    assert {*SETTINGS, *AFTER, *NEEDS_A_GPU} <= {snippet.name for snippet in ALL}
    assert len(HERE) > 15


@pytest.mark.limit(240)  # all in one job
def test_snippets_run_as_they_stand(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    job = mpirun(2, "-m", "tests.docs.run_snippets", tmp_path, *HERE, cwd=ROOT, timeout=220, **_ALONE)
    done = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("*.ok"))
    assert done == sorted(HERE * 2), job.stdout + job.stderr
    assert job.returncode == 0, job.stderr


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NEEDS_A_GPU)
def test_snippets_for_gpus_run_as_they_stand(name: str) -> None:
    run({snippet.name: snippet for snippet in ALL}[name])
