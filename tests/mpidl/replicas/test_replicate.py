"""All tensors become the root's, in messages and by way of memory of bounded size."""

from __future__ import annotations

import pytest
import torch

from mpidl.replicas import broadcast as replicate
from mpidl.replicas.broadcast import broadcast_states


class Recorder:
    """A Communicator that sends nothing. sent: elements and addresses of what it was to broadcast."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        self.sent.append((x.numel(), x.data_ptr()))


def sent(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    recorder = Recorder()
    broadcast_states(recorder, tensors)  # type: ignore[arg-type]
    return recorder.sent


def floats(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size) for size in sizes]


@pytest.mark.mpi
@pytest.mark.parametrize("together", [0, 1, 40, 2**25])
def test_every_tensor_is_the_roots_whatever_its_layout(comm, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicate, "TOGETHER_BYTES", together)

    def states(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        dense = [torch.randn(0), torch.randn(3, 5), torch.randn(()), torch.randn(2, 3, dtype=torch.complex64)]
        strided = [torch.randn(4, 6).t(), torch.randn(7, 4)[:, ::2], torch.randn(1, 4, 3, 3)]
        strided[2] = strided[2].contiguous(memory_format=torch.channels_last)
        return [*dense, torch.randn(9).bfloat16(), *strided, torch.rand(5) > 0.5]

    root, mine = comm.size - 1, states(comm.rank)
    strides = [t.stride() for t in mine]
    broadcast_states(comm, mine, root)
    for found, expected, stride in zip(mine, states(root), strides, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.stride() == stride


def test_small_ones_of_a_dtype_are_one_message() -> None:
    halves = [torch.zeros(n, dtype=torch.bfloat16) for n in (3, 4)]
    assert [n for n, _ in sent(*floats(1, 2), *halves, *floats(5))] == [8, 7]


def test_messages_are_bounded_and_what_is_larger_goes_by_itself_from_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicate, "TOGETHER_BYTES", 40)
    tensors = floats(4, 11, 5, 1, 9, 2, 30)
    found = sent(*tensors)
    assert [n for n, _ in found] == [11, 30, 10, 9, 2]
    assert [at for _, at in found[:2]] == [tensors[1].data_ptr(), tensors[6].data_ptr()]
