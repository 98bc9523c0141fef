"""Training on the stand-in for a GPU, in jobs of its own: torch has to know of such a device before its first pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

FOLDER = "tests/mpidl/cuda"


@pytest.mark.limit(400)
@pytest.mark.parametrize("way", ["auto", pytest.param("staged", marks=pytest.mark.thorough)])
def test_the_tests_of_training_pass_on_the_standin(mpirun: Callable[..., Any], way: str) -> None:
    """Where the ranks reach each other's memory, and where all goes through the host's: then stage 3 gathers."""
    pytest.importorskip("torch.utils.backend_registration")
    arguments = ("-m", "pytest", "-q", "--only-mpi", "--brief", FOLDER)
    done = mpirun(2, *arguments, MPIDL_STANDIN="1", MPIDL_CUDA=way, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
