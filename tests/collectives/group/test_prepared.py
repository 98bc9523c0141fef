"""Operations that are prepared ahead, and calls that the communicator keeps."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ArgumentError, ArgumentTypeError, Communicator, OperationError
from collectives.base import buffers
from collectives.group import calls
from collectives.group.prepared import PREPARABLE


def arguments_of(operation: str, comm: Communicator, filled: Any) -> tuple[list[Any], Any]:
    """Arrays for an operation, made by `filled(elements)`, and the one in which its result is."""
    p, root = comm.size, comm.rank == 0
    if operation == "barrier":
        return [], None
    if operation in ("all_reduce", "reduce", "scan", "exscan", "broadcast"):
        x = filled(5)
        return [x], x
    elements = {"reduce_scatter": (2, 2 * p), "all_gather": (2 * p, 2), "all_to_all": (2 * p, 2 * p)}
    out, x = (filled(n) for n in elements.get(operation, (2 * p, 2) if operation == "gather" else (2, 2 * p)))
    if operation == "gather" and not root:
        return [None, x], None
    if operation == "scatter" and not root:
        return [out, None], out
    return [out, x], out


@pytest.mark.mpi
@pytest.mark.parametrize("operation", PREPARABLE)
def test_a_prepared_operation_does_what_the_method_does(comm: Communicator, operation: str) -> None:
    def numbers(elements: int) -> torch.Tensor:
        return torch.arange(elements, dtype=torch.float32) + comm.rank

    arrays, result = arguments_of(operation, comm, numbers)
    call = comm.prepare(operation, *arrays)
    others, expected = arguments_of(operation, comm, numbers)
    for asynchronous in (False, True, False):
        getattr(comm, operation)(*others)
        work = call(async_op=asynchronous)
        assert (work is not None) == asynchronous
        if work is not None:
            work.wait()
        if result is not None:
            assert torch.equal(result, expected)
    call(timeout=60)
    getattr(comm, operation)(*others)
    assert result is None or torch.equal(result, expected)
    assert operation in repr(call)


@pytest.mark.mpi
def test_lists_operators_and_the_order_among_other_operations(comm: Communicator) -> None:
    xs = [np.full(3, comm.rank, np.int64), np.full((2, 2), 1.0)]
    call = comm.prepare("all_reduce", xs, op="max")
    y = np.full(4, 2.0)
    mean = comm.prepare("all_reduce", y, op="avg", algorithm="ring" if comm.size > 1 else "mpi")
    waited = [comm.all_reduce(y, async_op=True) for _ in range(3)]
    mean()  # after what is queued
    call()
    assert (y == 2.0 * comm.size**3).all()
    assert (xs[0] == comm.size - 1).all()
    assert (xs[1] == 1.0).all()
    for work in waited:
        assert work is not None
        assert work.is_completed()


@pytest.mark.mpi
def test_it_keeps_its_arrays_alive_and_the_communicator_keeps_it_not(comm: Communicator) -> None:
    x = np.ones(1000)
    call = comm.prepare("all_reduce", x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is not None
    call()
    found = alive()
    assert found is not None
    assert (found == comm.size).all()
    del call, found
    assert alive() is None


@pytest.mark.mpi
def test_calls_that_are_kept_do_not_keep_the_communicator() -> None:
    made = Communicator()
    made.all_reduce(x := np.ones(3))
    assert (x == made.size).all()
    gone = weakref.ref(made), weakref.ref(made._issuer)  # with the latter its communicators of MPI are dropped
    gc.disable()
    try:
        del made
        assert [where() for where in gone] == [None] * 2
    finally:
        gc.enable()


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize(
    ("operation", "arrays", "given", "error"),
    [
        ("allreduce", [np.ones(2)], {}, (ArgumentError, "'allreduce'.*all_reduce, ")),
        ("all_reduce", [np.ones(2)], {"async_op": True}, (ArgumentError, "async_op")),
        ("all_reduce", [np.ones(2)], {"timeout": 5}, (ArgumentError, "timeout")),
        ("all_reduce", ["text"], {}, (ArgumentTypeError, "x: got builtins.str")),
        ("broadcast", [np.ones(2)], {"root": 7}, (ArgumentError, "root.*7")),
    ],
)
def test_wrong_arguments_are_refused_as_it_is_prepared(
    comm: Communicator, operation: str, arrays: list[Any], given: dict[str, Any], error: tuple[Any, str]
) -> None:
    with pytest.raises(error[0], match=error[1]):
        comm.prepare(operation, *arrays, **given)


@pytest.mark.mpi
def test_it_is_refused_once_the_communicator_is_closed() -> None:
    made = Communicator()
    call = made.prepare("all_reduce", np.ones(2))
    made.close()
    with pytest.raises(OperationError, match="closed"):
        call()


@pytest.mark.mpi(max_size=2)
def test_a_failure_in_the_background_just_before_its_turn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Communicator()
    x = np.ones(2)
    turn = made._issuer.progress.turn

    def acquire(blocking: bool = True) -> bool:  # what is in the background fails just before
        made._refusal.give_up("something failed")
        return turn.acquire(blocking)

    monkeypatch.setattr(made._issuer.progress, "turn", SimpleNamespace(acquire=acquire, release=turn.release))
    call = made.prepare("all_reduce", x)
    with pytest.raises(OperationError, match="something failed"):
        call()
    assert (x == 1).all()


@pytest.mark.mpi
def test_within_a_compound_operation_it_is_a_part(comm: Communicator) -> None:
    x = np.ones(3)
    call = comm.prepare("all_reduce", x)

    def parts() -> None:
        call()
        call()

    work = comm.compound("twice", parts, async_op=True)
    assert work is not None
    work.wait()
    assert (x == comm.size**2).all()


@pytest.mark.mpi(max_size=2)
def test_kept_calls_leave_one_by_one(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "KEPT_CALLS", 8)
    seen: list[Any] = []
    inspect = buffers.inspect
    monkeypatch.setattr(buffers, "inspect", lambda x, *more, **given: (seen.append(x), inspect(x, *more, **given))[1])
    arrays = [np.ones(2) for _ in range(9)]
    for x in arrays:
        comm.all_reduce(x)
    assert len(seen) == 9
    for x in arrays[1:]:
        comm.all_reduce(x)
    assert len(seen) == 9, "calls were checked a second time"
    comm.all_reduce(arrays[0])
    assert len(seen) == 10
    assert all((x == comm.size ** (2 if comm.size > 1 else 1)).all() for x in arrays)
