"""Backends are asked what they serve, and a new one needs no more than its class and its line in the registry."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import ArgumentError, Communicator, MismatchError
from collectives.backends import registry
from collectives.backends.backend import Backend, Call, Resources
from collectives.base.buffers import Buffer
from collectives.base.reduction import Reduction
from collectives.schedules.algorithms import ALGORITHMS, NAMES


class Own(Backend):
    """A backend of the test's."""

    name = "own"

    def __init__(self, resources: Resources) -> None:
        self._comm = resources.comm

    def all_reduce(self, x: Buffer, op: Reduction) -> Call:
        def call() -> None:
            x.flat[:] = sum(self._comm.allgather(x.flat.copy()))

        return call

    def barrier(self) -> Call:
        return self._comm.Barrier


def test_the_order_of_all_schedules_is_that_of_each_operation() -> None:
    for operation, makers in ALGORITHMS.items():
        assert [name for name in NAMES if name in makers] == list(makers), operation


@pytest.mark.mpi
def test_algorithms_are_those_that_backends_serve(comm: Communicator) -> None:
    known = ("symmetric", "symmetric_or_mpi", "hierarchical")
    shared = [name for name in known if name in comm.algorithms("all_reduce")]
    for operation, makers in ALGORITHMS.items():
        served = [name for name in shared if name == "symmetric" or operation not in ("scan", "exscan")]
        assert comm.algorithms(operation) == ["auto", "mpi", *served, *makers]


@pytest.mark.mpi
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_new_backend_serves_the_operations_that_it_defines(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    monkeypatch.setattr(registry, "MAKERS", (*registry.MAKERS, Own))
    monkeypatch.setenv("MPIDL_DEBUG", debug)
    comm = Communicator()
    assert comm.algorithms("all_reduce")[-1] == "own"
    assert "own" not in comm.algorithms("broadcast")
    x, y = np.full(5, comm.rank + 1.0), np.full(3, comm.rank + 1.0)
    comm.all_reduce(x, algorithm="own")
    comm.all_reduce([x, y], algorithm="own")
    total = sum(range(1, comm.size + 1))
    assert (x == total * comm.size).all()
    assert (y == total).all()
    with pytest.raises(ArgumentError, match=r"broadcast: got algorithm 'own'; .*auto, mpi, "):
        comm.broadcast(x, algorithm="own")
    if debug == "1" and comm.size > 1:
        with pytest.raises(MismatchError, match="all_reduce sum of 5 float64 by own"):
            comm.all_reduce(x, algorithm="own" if comm.rank else "mpi")
    comm.close()
