"""GPU arrays as arguments: seen without a copy, refused with a reason; on the stand-in."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ArgumentError, ArgumentTypeError, Communicator
from collectives.backends.cuda import driver
from collectives.base.buffers import DTYPES, DeviceBuffer, inspect, signature
from tests.collectives.backends.cuda.standin import Gpu
from tests.harness import launch

MISSING = driver.unusable_reason.__wrapped__


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_an_array_is_seen_where_it_is(standin: Gpu, name: str, kind: str) -> None:
    x = standin.put(torch.zeros(2, 3, dtype=getattr(torch, name)), kind)
    place = x.data_ptr() if kind == "tensor" else x.address
    data = inspect(x, "x", writable=True)
    assert isinstance(data, DeviceBuffer)
    assert (data.address, data.size, data.dtype.name, data.device) == (place, 6, name, 0)
    part = data.part(2, 5)
    assert (part.address - place, part.size, part.device) == (2 * data.dtype.itemsize, 3, 0)
    assert data.unowned().address == place


def test_a_signature_distinguishes_arrays(standin: Gpu) -> None:
    x, y = (standin.put(torch.zeros(4)) for _ in range(2))
    assert signature(x) == signature(x) != signature(y)
    assert signature(x[:2]) != signature(x)
    t = standin.put(torch.zeros(4), "tensor")
    assert signature(t) == signature(t[:4])
    assert signature(t) != signature(t[:2])
    assert signature(standin.put(torch.zeros(0))) is None


def refused(standin: Gpu, change: str) -> Any:
    x = standin.put(torch.zeros(3, 4))
    if change == "strides":
        x.strides = (4, 12)
    elif change == "read-only":
        x.read_only = True
    else:
        x.dtype = change
    return x


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ("strides", ArgumentError, "non-contiguous array of shape"),
        ("read-only", ArgumentError, "read-only"),
        (">f4", ArgumentTypeError, "native byte order"),
        ("S4", ArgumentTypeError, "needs one of float64"),
    ],
)
def test_what_cannot_be_used_is_refused(standin: Gpu, change: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        inspect(refused(standin, change), "x", writable=True)


def test_strides_of_an_array_in_one_piece_are_fine(standin: Gpu) -> None:
    x = standin.put(torch.zeros(3, 4))
    x.strides = (16, 4)
    assert inspect(x, "x", writable=True).size == 12


def test_without_cupy_it_says_what_to_install(standin: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unusable_reason", MISSING)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ArgumentTypeError, match=r"x: .*GPU 0, .*: cupy is not installed \(pip install"):
        inspect(standin.put(torch.zeros(3)), "x", writable=True)


@pytest.mark.mpi
def test_arrays_of_one_operation_are_in_one_place(comm: Communicator, standin: Gpu) -> None:
    x = standin.put(torch.zeros(4 * comm.size))
    with pytest.raises(ArgumentTypeError, match="out on the host and x on GPU 0"):
        comm.reduce_scatter(np.zeros(4, np.float32), x)
    with pytest.raises(ArgumentTypeError, match="arrays on GPU 0, the host"):
        comm.all_reduce([x, np.zeros(4, np.float32)])
    comm.all_reduce(x)


@pytest.mark.mpi
def test_one_gpu_a_communicator(comm: Communicator, standin: Gpu) -> None:
    x = standin.put(torch.zeros(4))
    comm.all_reduce(x)
    x.device.id = 1
    with pytest.raises(ArgumentError, match="on GPU 1; needs one on GPU 0"):
        comm.broadcast(x)
    with pytest.raises(ArgumentError, match="got algorithm 'star'"):
        comm.all_reduce(standin.put(torch.zeros(4)), algorithm="star")


@pytest.mark.mpi
def test_asking_for_a_gpu_where_there_is_none_says_so_in_one_line(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "unusable_reason", lambda: "cupy sees no GPU")
    with pytest.raises(ArgumentError) as refused:
        comm.empty(3, torch.float32, device="cuda")
    assert str(refused.value) == "empty: got device 'cuda', and no GPU can be used here: cupy sees no GPU"
    x = comm.empty(3, torch.float32)  # and the ranks go on
    x.fill_(1)
    comm.all_reduce(x)
    assert (x == comm.size).all()


def test_nothing_of_a_gpu_is_imported_for_arrays_of_the_host() -> None:
    code = (
        "import sys, numpy, torch; from collectives import Communicator; c = Communicator(); "
        "c.all_reduce(numpy.ones(3)); c.all_reduce([torch.ones(3)]); assert 'cupy' not in sys.modules"
    )
    done = launch.run([sys.executable, "-c", code], 60, launch.ROOT, launch.environment())
    assert done.returncode == 0, done.stderr
