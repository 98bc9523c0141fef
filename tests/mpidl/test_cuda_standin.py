"""Training on the stand-in for a GPU, in jobs of its own: torch has to know of such a device before its first pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

FOLDER = "tests/mpidl/cuda"


@pytest.mark.limit(400)
def test_the_tests_of_training_pass_on_the_standin(mpirun: Callable[..., Any]) -> None:
    pytest.importorskip("torch.utils.backend_registration")
    done = mpirun(2, "-m", "pytest", "-q", "--only-mpi", "--brief", FOLDER, MPIDL_STANDIN="1", timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
