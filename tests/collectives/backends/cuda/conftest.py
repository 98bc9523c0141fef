"""Fixtures: a GPU for the tests, as every rank of the run sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from collectives.backends.cuda import barrier, driver
from tests.collectives.backends.cuda.real import RealGpu
from tests.collectives.backends.cuda.standin import Gpu


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A stand-in that all ranks share; it fails the test if something that was queued on it failed."""
    made = Gpu()
    monkeypatch.setattr(barrier, "_DELAY_BYTES", 1 << 16)  # as a host copies slower than a GPU
    monkeypatch.setattr(driver, "open_device", lambda index: made)
    monkeypatch.setattr(driver, "unusable_reason", lambda: "")
    yield made
    made.synchronize()


@pytest.fixture(params=["standin", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Any:
    """The stand-in, and a real GPU in runs with --gpu."""
    if request.param == "standin":
        return request.getfixturevalue("standin")
    from mpi4py import MPI

    return RealGpu(MPI.COMM_WORLD.Get_rank())
