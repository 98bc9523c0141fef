"""That the stand-in tells what would go wrong on a GPU; in its own jobs alone."""

from __future__ import annotations

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


def test_tensors_on_two_devices_do_not_mix(standin: Any) -> None:
    with pytest.raises(RuntimeError, match="tensors on standin:0 and on cpu"):
        torch.ones(3, device="standin") + torch.ones(3)
