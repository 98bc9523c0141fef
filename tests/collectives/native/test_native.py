"""The part in C does what its twins in Python do, and is left out where it cannot be used."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import collectives.native
from collectives import ArgumentError, ArgumentTypeError, Communicator, OperationError
from collectives.backends.mpi_functions import NOTHING, native_call
from collectives.base import buffers
from collectives.base.buffers import DTYPES
from collectives.group import calls
from collectives.memory import shared_memory
from collectives.native import compiled
from collectives.runtime.positions import NO_WORDS

only_compiled = pytest.mark.skipif(compiled is None, reason="there is no compiler")


def arrays() -> dict[str, Any]:
    """Arrays, and what is none, of which some have no signature."""
    many = {f"tensor of {name}": torch.ones(3, 2, dtype=d.torch) for name, d in DTYPES.items() if d.torch is not None}
    many |= {f"array of {name}": np.ones((3, 2), d.storage) for name, d in DTYPES.items()}
    read_only = np.ones(3)
    read_only.flags.writeable = False
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    return many | {
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "scalar": torch.tensor(1.0),
        "numpy scalar": np.array(2.0),
        "slice": torch.ones(4, 4)[1:3],
        "slice of columns": torch.ones(4, 4)[:, 1:],
        "one column": torch.ones(4, 1),
        "turned": torch.ones(2, 3).t(),
        "turned, one row": torch.ones(1, 3).t(),
        "nothing": torch.ones(0, 3),
        "numpy nothing": np.ones((0, 3)),
        "numpy columns": np.ones((3, 2))[:, 0],
        "read-only": read_only,
        "dates": np.zeros(2, "M8[s]"),
        "big-endian": np.ones(2, ">f4"),
        "objects": np.array([None, 1]),
        "negated": torch._neg_view(torch.ones(3)),
        "negated part": torch.ones(1, dtype=torch.complex64).conj().imag,
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "freed": freed,
        "subclass": np.ones(2).view(np.matrix),
        "list": [torch.ones(2)],
        "none": None,
    }


def fake() -> torch.Tensor:
    """Makes a tensor of the compiler, which it imports; that takes as long as to import torch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


@only_compiled
@pytest.mark.parametrize("name", [*arrays(), "fake"])
def test_signatures_are_those_of_python(name: str) -> None:
    array = fake() if name == "fake" else arrays()[name]
    found, expected = calls.signature_of(array), buffers.signature(array)
    assert found == expected
    assert [type(part) for part in found or ()] == [type(part) for part in expected or ()]


@pytest.mark.mpi
def test_memory_that_is_one_for_all_has_another_signature(comm: Communicator) -> None:
    before, x = calls.signature_of(np.ones(2)), comm.shared(4, torch.float32)
    assert before is not None
    assert len(before) == 4
    seen = calls.signature_of(x)
    if comm.is_shared(x):
        assert seen is not None
        assert seen[-1] == "one for all"
    comm.barrier()


class Span:
    """Memory that is noted as one for all ranks: that of an array."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.address, self._nbytes = array.ctypes.data, array.nbytes

    def __len__(self) -> int:
        return self._nbytes


@only_compiled
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_arrays_are_seen_from_c_while_some_are_one_for_all(make: Callable[[Any], Any]) -> None:
    memory = np.zeros(12)
    span = Span(memory[4:8])
    shared_memory.note_one_for_all(span)
    asked: list[Any] = []
    given = (
        np.ndarray,
        buffers.PLAIN_TENSORS,
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
        calls.kinds(),
    )
    try:
        compiled.look_at(*given, shared_memory.one_for_all, asked.append)
        for place in range(12):
            array = make(memory[place:])
            found, expected = calls.signature_of(array), calls.signature_in_python(array)
            assert found == expected
            assert found is not None
            assert (found[-1] == "one for all") == (4 <= place < 8)
    finally:
        calls.signature_from_c()
    assert asked == []


@pytest.mark.mpi
def test_an_operation_is_found_again_by_any_spelling_of_its_arguments(comm: Communicator) -> None:
    root, x, out = comm.size - 1, np.zeros(2 * comm.size), np.zeros(2)
    spellings: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(x, "sum"),
        lambda: comm.all_reduce(x, op="sum", algorithm="auto"),
        lambda: comm.all_reduce(x, algorithm="auto", op="sum", async_op=False, timeout=None),
        lambda: comm.all_reduce(x=x),
        lambda: comm.all_reduce(x, timeout=60),
        lambda: comm.all_reduce(x, async_op=True).wait(),  # type: ignore[union-attr]
        lambda: comm.all_reduce([x]),
    ]
    for _ in range(2):
        for call in spellings:
            x[:] = 1
            call()
            assert (x == comm.size).all()
    for _ in range(3):
        x[:] = np.arange(2 * comm.size)
        comm.reduce_scatter(out, x, counts=[2] * comm.size)
        assert (out == comm.size * np.arange(2 * comm.rank, 2 * comm.rank + 2)).all()
        comm.all_gather(x, out)
        assert (x == comm.size * np.arange(2 * comm.size)).all()
        x[:] = comm.rank
        comm.broadcast(x, root)
        comm.broadcast(x, root=root)
        assert (x == root).all()
        comm.gather(x if comm.rank == root else None, out, root)
        comm.scatter(out, x if comm.rank == root else None, root=root)
        assert (out == comm.size * np.arange(2 * comm.rank, 2 * comm.rank + 2)).all()


@pytest.mark.mpi
def test_an_argument_that_only_equals_a_known_one_is_checked(comm: Communicator) -> None:
    x = np.ones(3)
    comm.broadcast(x, 0)
    comm.broadcast(x, 0)
    with pytest.raises(ArgumentTypeError, match="root: got False"):
        comm.broadcast(x, False)
    with pytest.raises(ArgumentTypeError, match="root"):
        comm.broadcast(x, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'mean'"):
        comm.all_reduce(x, "mean")
    with pytest.raises(TypeError, match="unexpected keyword"):
        comm.all_reduce(x, opp="sum")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values"):
        comm.all_reduce(x, x=x)  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing"):
        comm.all_reduce()  # type: ignore[call-arg]
    comm.barrier()


@pytest.mark.mpi
def test_an_array_in_the_place_of_another_is_another(comm: Communicator) -> None:
    """Even at the same address, with another length or type."""
    whole = torch.zeros(6)
    for x in (whole, whole[:3], whole.view(torch.int32), whole[:2].view(2, 1)):
        for _ in range(3):
            x.fill_(1)
            comm.all_reduce(x)
            assert (x == comm.size).all()


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_nans_are_the_same_bits_and_averages_those_of_numpy(comm: Communicator, op: str, dtype: Any) -> None:
    x = np.linspace(-3, 7, 11).astype(dtype) * (comm.rank + 1)
    x[comm.rank] = np.nan
    x[5] = -np.nan
    expected = sum(np.linspace(-3, 7, 11).astype(dtype) * dtype(r + 1) for r in range(comm.size))
    comm.all_reduce(x, op, algorithm="mpi")
    numbers = x.view(x.real.dtype)
    bits = {bytes(number) for number in numbers[np.isnan(numbers)].reshape(-1, 1)}
    assert len(bits) == 1 or comm.size == 1
    right = expected / (comm.size if op == "avg" else 1)
    kept = [i for i in range(11) if i != 5 and i >= comm.size]
    np.testing.assert_allclose(x[kept], np.asarray(right)[kept], rtol=1e-6)


@only_compiled
@pytest.mark.mpi
def test_an_error_of_the_library_is_one_of_the_operation() -> None:
    made = Communicator()
    x = np.ones(2)
    arguments = [MPI.memory.fromaddress(x.ctypes.data, x.nbytes), MPI.DOUBLE], made.size  # no rank's number
    call = native_call(made.mpi, "Bcast", arguments, NOTHING, lambda: None)
    assert call is not None
    with pytest.raises(MPI.Exception, match="root"):
        call()
    with pytest.raises(OperationError, match="broadcast"):
        made._issuer.prepare("broadcast", call, NO_WORDS).at_once(x)
    with pytest.raises(OperationError):
        made.all_reduce(x)


@only_compiled
@pytest.mark.mpi
def test_a_thread_in_the_background_takes_the_patient_way(comm: Communicator) -> None:
    assert compiled is not None
    told: list[str] = []
    names = ("function", "x", "count", "out", "count_out", "datatype", "op", "root", "comm", "width", "numbers")
    rest = {"shape": 5, "pointers": False, "divisor": 1.0, "unify": False, "failed": None, "kept": None}
    made = compiled.MpiCall(**dict.fromkeys(names, 0), **rest, patiently=lambda: told.append("patiently"))

    def background() -> None:
        compiled.in_background(True)
        made()

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert told == ["patiently"]


def test_methods_keep_their_names_and_signatures() -> None:
    assert list(inspect.signature(Communicator.all_reduce).parameters)[:3] == ["self", "x", "op"]
    assert (Communicator.all_reduce.__doc__ or "").startswith("Replaces x")
    assert Communicator.all_reduce.__name__ == "all_reduce"


@pytest.mark.mpi(max_size=1)
def test_nothing_is_left_of_many_calls(comm: Communicator) -> None:
    x, t = np.ones(4), torch.ones(4)
    for _ in range(10):
        comm.all_reduce(x), comm.all_reduce(t), comm.broadcast(t, 0)
    gc.collect()  # what other tests have left
    counts = [sys.getrefcount(o) for o in (x, t, t.dtype, x.dtype, None)]
    objects = len(gc.get_objects())
    for _ in range(1000):
        comm.all_reduce(x), comm.all_reduce(t), comm.broadcast(t, 0)
        with pytest.raises(ArgumentError):
            comm.all_reduce(x, "nothing")
    gc.collect()
    assert abs(len(gc.get_objects()) - objects) < 100
    found = [sys.getrefcount(o) for o in (x, t, t.dtype, x.dtype, None)]
    assert all(abs(now - before) < 100 for now, before in zip(found, counts, strict=True))


@pytest.mark.parametrize("other", ["another version", "none", "turned off"])
def test_without_the_module_all_is_python(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, package: str) -> Any:
        if other == "none":
            raise ImportError(name)
        return SimpleNamespace(VERSION=collectives.native.VERSION + (other == "another version"))

    monkeypatch.setattr(importlib, "import_module", module)
    if other == "turned off":
        monkeypatch.setenv("MPIDL_NATIVE", "0")
    assert collectives.native.load() is None


@pytest.mark.limit(150)
@only_compiled
def test_operations_pass_their_tests_without_it(mpirun: Callable[..., Any], brief: bool) -> None:
    names = ["group/test_prepared.py", "memory/test_counters.py", "native"]
    names += [] if brief else ["test_reductions.py", "test_movements.py"]
    tests = [f"tests/collectives/{name}" for name in names]
    done = mpirun(2, "-m", "pytest", "-q", "--only-mpi", "--brief", *tests, MPIDL_NATIVE="0", timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
