"""Communication hooks of ZeroOptimizer, those of DistributedDataParallel among them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import mpidl
from mpidl import comm_hooks
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero import reference as zero
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi
ways = pytest.mark.parametrize("way", WAYS)
Trained = dict[str, torch.Tensor]


def whole_bucket(comm: Any, bucket: comm_hooks.GradBucket) -> Any:
    """A hook as users write it for DistributedDataParallel."""
    return comm.all_reduce(bucket.buffer(), "avg", async_op=True)


def new_values(comm: Any, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
    """A hook whose handle gives another array than the bucket's, complete at once."""
    values = bucket.buffer().clone()
    comm.all_reduce(values, "avg")
    return comm_hooks.completed(values)


def train(comm, way: str, hook: Any = None, micro: int = 1, **settings: Any) -> Trained:
    """The weights after three steps, whole on every rank."""
    model = fresh(MODELS["gpt2"], comm.rank)
    made = mpidl.ZeroOptimizer(
        model, torch.optim.SGD, process_group=comm, lr=0.1, momentum=0.9, **{**zero.SETTINGS[way], **settings}
    )
    if hook is not None:
        made.register_comm_hook(comm, hook)
    for step in range(3):
        for number in range(micro):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, number))
            with made.no_sync() if number % 2 == 0 and number < micro - 1 else contextlib.nullcontext():
                model(x, y).backward()
        made.step()
        made.zero_grad()
    with made.gathered(writable=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@ways
@pytest.mark.parametrize("micro", [1, 3])
def test_the_plain_mean_as_a_hook_changes_no_bit(comm, way: str, micro: int) -> None:
    plain, hooked = train(comm, way, micro=micro), train(comm, way, comm_hooks.allreduce, micro)
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@ways
@pytest.mark.parametrize("hook", [whole_bucket, new_values])
def test_hooks_that_reduce_whole_buckets_are_right(comm, way: str, hook: Any) -> None:
    torch.testing.assert_close(train(comm, way, hook), train(comm, way), rtol=1e-5, atol=1e-6)


@ways
@pytest.mark.parametrize(
    ("hook", "error"), [(comm_hooks.fp16_compress, 2e-3), (comm_hooks.bf16_compress, 2e-2)], ids=["fp16", "bf16"]
)
def test_compressed_means_are_near_and_equal_on_all_ranks(comm, way: str, hook: Any, error: float) -> None:
    exact, found = train(comm, way), train(comm, way, hook)
    torch.testing.assert_close(found, exact, rtol=error, atol=error)
    assert any(not torch.equal(found[name], exact[name]) for name in exact)
    for values in found.values():
        theirs = values.clone()
        comm.broadcast(theirs)
        assert torch.equal(theirs, values)


@ways
def test_with_steps_in_the_backward_pass(comm, way: str) -> None:
    plain = train(comm, way)
    hooked = train(comm, way, comm_hooks.allreduce, step_in_backward=True)
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@ways
def test_what_a_hook_sees(comm, way: str) -> None:
    seen: list[tuple[int, bool]] = []
    covered: dict[int, int] = {}

    def hook(_: Any, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
        seen.append((bucket.index(), bucket.is_last()))
        covered[bucket.index()] = len(bucket.buffer()[bucket.needed()])
        assert sum(g.count_nonzero() for g in bucket.gradients()) == bucket.buffer().count_nonzero()
        assert all(
            g.shape == p.shape for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True) if p.numel()
        )
        with pytest.raises(mpidl.TrainingError, match=r"bucket\.reduce: got values of shape \(1,\)"):
            bucket.reduce(torch.zeros(1))
        assert covered[bucket.index()] * comm.size >= bucket.buffer().numel()
        return bucket.reduce()

    train(comm, way, hook)
    each = len(seen) // 3
    assert [index for index, _ in seen[:each]] == list(range(each))
    assert [last for _, last in seen[:each]] == [False] * (each - 1) + [True]


def test_wrong_hooks_are_refused(comm) -> None:
    model = fresh(MODELS["gpt2"], comm.rank)
    made = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=2, process_group=comm, lr=0.1)
    with pytest.raises(TypeError, match="register_comm_hook: got 'allreduce' as the hook"):
        made.register_comm_hook(None, "allreduce")  # type: ignore[arg-type]
    made.register_comm_hook(None, lambda _, bucket: comm_hooks.completed(bucket.buffer()[:3]))
    with pytest.raises(RuntimeError, match="has a hook already"):
        made.register_comm_hook(None, comm_hooks.allreduce)
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(0, 0))
    loss = model(x, y)
    with pytest.raises(mpidl.TrainingError, match="result has 3 elements; needs the bucket's"):
        loss.backward()


def test_a_hook_comes_before_training(comm) -> None:
    model = fresh(MODELS["gpt2"], comm.rank)
    made = mpidl.ZeroOptimizer(model, torch.optim.SGD, stage=2, process_group=comm, lr=0.1)
    x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(0, 0))
    model(x, y).backward()
    with pytest.raises(RuntimeError, match="training has begun"):
        made.register_comm_hook(None, comm_hooks.allreduce)
    made.step()
