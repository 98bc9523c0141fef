"""Communication hooks of DistributedDataParallel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl import comm_hooks

pytestmark = pytest.mark.mpi


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def gradients(comm, hook: Any = None, state: Any = None, passes: int = 3) -> list[torch.Tensor]:
    model = net()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-4)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    for _ in range(passes):
        model.zero_grad()
        wrapped(torch.randn(5, 4, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_the_plain_mean_as_a_hook_changes_no_bit(comm) -> None:
    for plain, hooked in zip(gradients(comm), gradients(comm, comm_hooks.allreduce, comm), strict=True):
        assert torch.equal(plain, hooked)


@pytest.mark.parametrize(
    ("hook", "error"), [(comm_hooks.fp16_compress, 2e-3), (comm_hooks.bf16_compress, 2e-2)], ids=["fp16", "bf16"]
)
def test_compressed_means_are_near_and_equal_on_all_ranks(comm, hook: Any, error: float) -> None:
    for exact, found in zip(gradients(comm), gradients(comm, hook), strict=True):
        torch.testing.assert_close(found, exact, rtol=error, atol=error * float(exact.abs().max()))
        assert not torch.equal(found, exact)
        theirs = found.clone()
        comm.broadcast(theirs)
        assert torch.equal(theirs, found)


def test_what_a_hook_sees(comm) -> None:
    seen: list[comm_hooks.GradBucket] = []

    def hook(state: str, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
        assert state == "state"
        seen.append(bucket)
        assert bucket.buffer().dim() == 1
        assert sum(g.count_nonzero() for g in bucket.gradients()) == bucket.buffer().count_nonzero()
        for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert g.shape == p.shape
        bucket.set_buffer(torch.full_like(bucket.buffer(), 2.0))
        return comm_hooks.completed(bucket.buffer() * 3)

    found = gradients(comm, hook, "state", passes=1)
    assert all((g == 6).all() for g in found)
    assert [b.index() for b in seen] == list(range(len(seen)))
    assert [b.is_last() for b in seen] == [False] * (len(seen) - 1) + [True]
    assert len(seen) > 1


def test_data_that_a_hook_sets_is_not_the_bucket_s(comm) -> None:
    def hook(state: Any, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
        for g in bucket.gradients():
            g.data = torch.zeros_like(g)
        return comm_hooks.allreduce(state, bucket)

    for found, expected in zip(gradients(comm, hook, comm), gradients(comm), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_torch_future_is_a_handle(comm) -> None:
    def hook(_: Any, bucket: comm_hooks.GradBucket) -> Any:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([bucket.buffer() * 0 + 7])
        return future

    assert all((g == 7).all() for g in gradients(comm, hook))


def test_a_hook_that_raises_or_returns_nothing(comm) -> None:
    def raises(_: Any, bucket: comm_hooks.GradBucket) -> Any:
        raise ValueError("the hook's own error")

    with pytest.raises(ValueError, match="the hook's own error"):
        gradients(comm, raises)
    with pytest.raises(mpidl.TrainingError, match=r"returned None; needs a handle with wait\(\)"):
        gradients(comm, lambda *_: None)


def test_after_a_hook_that_raised_the_buckets_begin_anew(comm) -> None:
    seen: list[tuple[int, bool]] = []

    def raises_once(_: Any, bucket: comm_hooks.GradBucket) -> Any:
        seen.append((bucket.index(), bucket.is_last()))
        if len(seen) == 2:
            raise ValueError("the hook's own error")
        return comm_hooks.allreduce(comm, bucket)

    model = net()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-4, static_graph=True)
    wrapped.register_comm_hook(None, raises_once)
    with pytest.raises(ValueError, match="the hook's own error"):
        wrapped(torch.ones(5, 4)).square().sum().backward()
    model.zero_grad()
    del seen[2:]
    wrapped(torch.randn(5, 4, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
    assert [index for index, _ in seen[2:]] == list(range(len(seen) - 2))
    assert [last for _, last in seen[2:]] == [False] * (len(seen) - 3) + [True]
    for p, expected in zip(model.parameters(), gradients(comm, passes=1), strict=True):
        assert torch.equal(p.grad, expected)


def test_one_hook_and_before_training(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(net(), process_group=comm)
    with pytest.raises(TypeError, match="needs a callable") as caught:
        wrapped.register_comm_hook(None, "allreduce")  # type: ignore[arg-type]
    assert isinstance(caught.value, mpidl.ConfigurationError)
    with pytest.raises(TypeError, match=r"the hook is <lambda>\(bucket\); needs .* hook\(state, bucket\)"):
        wrapped.register_comm_hook(None, lambda bucket: bucket)  # type: ignore[misc, arg-type]
    wrapped.register_comm_hook(None, comm_hooks.allreduce)
    with pytest.raises(RuntimeError, match="has a hook already") as again:
        wrapped.register_comm_hook(None, comm_hooks.allreduce)
    assert isinstance(again.value, mpidl.ConfigurationError)
    begun = mpidl.DistributedDataParallel(net(), process_group=comm)
    begun(torch.ones(1, 4)).sum().backward()
    with pytest.raises(mpidl.ConfigurationError, match="training has begun"):
        begun.register_comm_hook(None, comm_hooks.allreduce)


def wrong_bucket(state: Any, bucket: int) -> comm_hooks.Handle:
    raise NotImplementedError


def wrong_second(state: Any, gradients: torch.Tensor) -> Any:
    raise NotImplementedError


def wrong_return(state: Any, bucket: comm_hooks.GradBucket) -> torch.Tensor:
    raise NotImplementedError


def list_of_buckets(state: Any, bucket: list[comm_hooks.GradBucket]) -> Any:
    raise NotImplementedError


def maybe_tensor(state: Any, bucket: torch.Tensor | None) -> Any:
    raise NotImplementedError


def future_of_int(state: Any, bucket: comm_hooks.GradBucket) -> torch.futures.Future[int]:
    raise NotImplementedError


def beside_unknown(state: Unknown, bucket: int) -> Any:  # type: ignore[name-defined]  # noqa: F821
    raise NotImplementedError


class Called:
    def __call__(self, state: Any, bucket: int) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (wrong_bucket, "bucket is annotated as int; needs mpidl.comm_hooks.GradBucket"),
        (wrong_second, "bucket is annotated as Tensor"),
        (wrong_return, r"annotated to return Tensor; needs a handle with wait\(\)"),
        (Called(), "bucket is annotated as int"),
        (partial(wrong_bucket), "bucket is annotated as int"),
        (list_of_buckets, r"bucket is annotated as list\["),
        (maybe_tensor, r"bucket is annotated as torch.Tensor \| None"),
        (future_of_int, r"annotated to return torch.*Future\[int\]"),
        (beside_unknown, "bucket is annotated as int"),
    ],
    ids=["bucket", "second", "return", "object", "partial", "list", "optional", "future", "unknown"],
)
def test_a_hook_with_annotations_that_do_not_fit(comm, hook: Any, message: str) -> None:
    wrapped = mpidl.DistributedDataParallel(net(), process_group=comm)
    with pytest.raises(ValueError, match=message):
        wrapped.register_comm_hook(None, hook)


def test_annotations_that_fit(comm) -> None:
    def future(state: object, bucket: comm_hooks.GradBucket) -> torch.futures.Future[torch.Tensor]:
        made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        made.set_result(bucket.buffer() * 0 + 7)
        return made

    def anything(state: Unknown, bucket: dist.GradBucket) -> Any:  # type: ignore[name-defined]  # noqa: F821
        return future(state, bucket)

    def plain(_, bucket):  # type: ignore[no-untyped-def]
        return future(None, bucket)

    class Method:
        def hook(self, state: Any, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
            return future(state, bucket)

    def either(state: Any, bucket: comm_hooks.GradBucket | None) -> torch.futures.Future[torch.Tensor] | None:
        assert bucket is not None
        return future(state, bucket)

    def futures(state: Any, bucket: comm_hooks.GradBucket) -> torch.futures.Future[list[torch.Tensor]]:
        raise NotImplementedError

    def nothing(state: Any, bucket: comm_hooks.GradBucket) -> torch.futures.Future[None]:
        raise NotImplementedError

    def maybe(state: Any, bucket: comm_hooks.GradBucket) -> torch.futures.Future[torch.Tensor | None]:
        raise NotImplementedError

    def anything_later(state: Any, bucket: comm_hooks.GradBucket) -> torch.futures.Future[object]:
        raise NotImplementedError

    for accepted in (futures, nothing, maybe, anything_later):
        comm_hooks.check(accepted)
    for hook in (future, anything, plain, Method().hook, lambda s, b: future(s, b), either):
        assert all((g == 7).all() for g in gradients(comm, hook, passes=1))
