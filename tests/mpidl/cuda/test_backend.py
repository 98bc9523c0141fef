"""That the stand-in tells what would go wrong on a GPU; in its own jobs alone."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.mpi


def told(gpu: Any) -> list[str]:
    """Returns the errors so far, and clears them."""
    texts = [str(error) for error in gpu.errors]
    gpu.errors.clear()
    return texts


@pytest.mark.parametrize("wait", [True, False])
def test_a_use_that_no_stream_has_ordered_is_told(standin: Any, wait: bool) -> None:
    with standin.current():
        stream, x, y = standin.stream(), torch.ones(10, device="standin"), torch.zeros(10, device="standin")
        stream.wait(standin.torch_stream().record())
        standin.copy(y.data_ptr(), x.data_ptr(), 40, stream)
        if wait:
            standin.torch_stream().wait(stream.record())
            assert torch.equal(y.cpu(), torch.ones(10))
        else:
            y.add(1)
            x.add_(1)
        texts = told(standin)
        assert len(texts) == (0 if wait else 2), texts
        standin.synchronize()


@pytest.mark.parametrize("order", ["wait", "keep", "none"])
def test_memory_that_goes_while_another_stream_uses_it_is_told(standin: Any, order: str) -> None:
    with standin.current():
        stream, x, y = standin.stream(), torch.ones(10, device="standin"), torch.zeros(10, device="standin")
        stream.wait(standin.torch_stream().record())
        standin.copy(y.data_ptr(), x.data_ptr(), 40, stream)
        if order == "wait":
            standin.torch_stream().wait(stream.record())
        elif order == "keep":
            with standin.using(stream):
                standin.keep(x)
                standin.keep(y)
        del x, y
    texts = told(standin)
    assert len(texts) == (2 if order == "none" else 0), texts
    assert all("memory given back" in text for text in texts), texts
    standin.synchronize()


def test_memory_goes_once_its_own_stream_has_come_there(standin: Any) -> None:
    """Whatever operators run on other streams meanwhile."""
    gate = threading.Event()
    with standin.current():
        x, y = torch.ones(10, device="standin"), torch.zeros(10, device="standin")
        standin.torch_stream().queue(gate.wait)
        standin.copy(y.data_ptr(), x.data_ptr(), 40, standin.torch_stream())
        storages = [weakref.ref(tensor.inner.untyped_storage()) for tensor in (x, y)]
        del x, y
        with standin.using(standin.stream()):
            torch.ones(10, device="standin").add_(1)
        there = [storage() is not None for storage in storages]
        gate.set()
        standin.synchronize()
    assert there == [True, True]
    assert all(storage() is None for storage in storages)


def test_host_memory_that_goes_before_the_host_has_waited_is_told(standin: Any) -> None:
    for waits in (True, False):
        with standin.current():
            x, stream = torch.zeros(10, device="standin"), standin.stream()
            stream.wait(standin.torch_stream().record())
            staged = standin.host_memory(40)
            standin.copy(x.data_ptr(), staged.data_ptr(), 40, stream)
            standin.torch_stream().wait(stream.record())
            if waits:
                stream.record().wait()
            del staged
        standin.wait_for_all_lines()
        assert ["by the host" in text for text in told(standin)[:1]] == ([] if waits else [True])


def test_tensors_on_two_devices_do_not_mix(standin: Any) -> None:
    with pytest.raises(RuntimeError, match="tensors on standin:0 and on cpu"):
        torch.ones(3, device="standin") + torch.ones(3)
