"""Fixtures: a GPU that models are trained on, real in runs with --gpu, or the stand-in in jobs of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

STANDIN = os.environ.get("MPIDL_STANDIN") == "1"
if STANDIN:
    from tests.mpidl.cuda import backend
else:
    collect_ignore = ["test_backend.py"]


@pytest.fixture(scope="session")
def standin() -> Any:
    """One for all tests, as the world's Communicator keeps what it has set up for it."""
    return backend.plug_in(backend.Gpu(seed=3))


@pytest.fixture(params=["standin"] if STANDIN else [pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The device on which to train, of torch. It fails the test if something that was queued on it failed."""
    if request.param == "cuda":
        from mpi4py import MPI

        yield torch.device("cuda", MPI.COMM_WORLD.Get_rank() % torch.cuda.device_count())
        torch.cuda.synchronize()
        return
    from collectives.backends.cuda import driver

    made = request.getfixturevalue("standin")
    made.order.forget_all()
    monkeypatch.setattr(driver, "open_device", lambda index: made)
    monkeypatch.setattr(driver, "unusable_reason", lambda: "")
    monkeypatch.setattr(driver, "TORCH", backend.NAME)
    yield backend.DEVICE
    made.synchronize()
