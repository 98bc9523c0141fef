"""Communication hooks in DDP and in every way of ZeRO."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl import comm_hooks
from mpidl.gradients.hook_check import check_hook
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.reference import SETTINGS
from tests.mpidl.zero.ways import WAYS, every_way

pytestmark = pytest.mark.mpi
every_engine = pytest.mark.parametrize("engine", ["ddp", *WAYS])


def made(comm, engine: str, model: nn.Module, **settings: Any) -> tuple[Any, Any, Any]:
    """Returns what to call, the optimizer, and the one of them that takes a hook."""
    sgd = {"lr": 0.1, "momentum": 0.9}
    if engine == "ddp":
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=0.005, **settings)
        return wrapped, torch.optim.SGD(model.parameters(), **sgd), wrapped
    given = {**SETTINGS[engine], **sgd, **settings}
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.SGD, process_group=comm, **given)
    return model, optimizer, optimizer


def train(
    comm, engine: str, hook: Any = None, micro: int = 1, steps: int = 3, state: Any = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Returns the weights after some steps, whole on every rank. state: of the hook, by default the Communicator."""
    model = fresh(MODELS["gpt2"], comm.rank)
    called, optimizer, owner = made(comm, engine, model, **settings)
    if hook is not None:
        owner.register_comm_hook(comm if state is None else state, hook)
    for step in range(steps):
        for number in range(micro):
            x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, number))
            with owner.no_sync() if number % 2 == 0 and number < micro - 1 else contextlib.nullcontext():
                called(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with contextlib.nullcontext() if engine == "ddp" else optimizer.gathered(writable=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_equal_on_all_ranks(comm, values: torch.Tensor) -> None:
    theirs = values.clone()
    comm.broadcast(theirs)
    assert torch.equal(theirs, values)


def whole_bucket(comm: Any, bucket: comm_hooks.GradBucket) -> Any:
    """Reduces all of a bucket, as users write it for DistributedDataParallel."""
    return comm.all_reduce(bucket.buffer(), "avg", async_op=True)


def new_values(comm: Any, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
    """Returns a handle that gives another array than the bucket's, complete at once."""
    values = bucket.buffer().clone()
    comm.all_reduce(values, "avg")
    return comm_hooks.completed(values)


@pytest.mark.each("engine")
@pytest.mark.parametrize(("engine", "micro"), [("ddp", 1), *((way, micro) for way in WAYS for micro in (1, 3))])
def test_the_plain_mean_as_a_hook_changes_no_bit(comm, engine: str, micro: int) -> None:
    plain, hooked = train(comm, engine, micro=micro), train(comm, engine, comm_hooks.allreduce, micro)
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@every_way
@pytest.mark.parametrize("hook", [whole_bucket, new_values])
def test_hooks_that_reduce_whole_buckets_are_right(comm, way: str, hook: Any) -> None:
    torch.testing.assert_close(train(comm, way, hook), train(comm, way), rtol=1e-5, atol=1e-6)


every_compression = pytest.mark.parametrize(
    ("hook", "error"), [(comm_hooks.fp16_compress, 2e-3), (comm_hooks.bf16_compress, 2e-2)], ids=["fp16", "bf16"]
)


@every_way
@every_compression
def test_compressed_training_is_near_and_equal_on_all_ranks(comm, way: str, hook: Any, error: float) -> None:
    exact, found = train(comm, way), train(comm, way, hook)
    torch.testing.assert_close(found, exact, rtol=error, atol=error)
    assert any(not torch.equal(found[name], exact[name]) for name in exact)
    for values in found.values():
        check_equal_on_all_ranks(comm, values)


@every_way
def test_with_steps_in_the_backward_pass(comm, way: str) -> None:
    plain = train(comm, way)
    hooked = train(comm, way, comm_hooks.allreduce, step_in_backward=True)
    assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@pytest.mark.each("engine")
@every_engine
def test_what_a_hook_sees(comm, engine: str) -> None:
    seen: list[tuple[int, bool]] = []

    def hook(state: str, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last()))
        assert bucket.buffer().dim() == 1
        assert sum(g.count_nonzero() for g in bucket.gradients()) == bucket.buffer().count_nonzero()
        for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert g.shape == p.shape or not p.numel()
        with pytest.raises(mpidl.TrainingError, match=r"bucket\.reduce: got values of shape \(1,\)"):
            bucket.reduce(torch.zeros(1))
        needed = bucket.buffer()[bucket.needed()].numel()
        assert needed * (1 if engine == "ddp" else comm.size) >= bucket.buffer().numel()
        return bucket.reduce(process_group=comm)

    train(comm, engine, hook, steps=1, state="state")
    assert [index for index, _ in seen] == list(range(len(seen)))
    assert [last for _, last in seen] == [False] * (len(seen) - 1) + [True]
    assert len(seen) > 1


# ---- what a hook may do, with DDP ----------------------------------------------------------------------------------


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


@every_compression
def test_compressed_means_are_near_and_equal_on_all_ranks(comm, hook: Any, error: float) -> None:
    for exact, found in zip(gradients(comm), gradients(comm, hook), strict=True):
        torch.testing.assert_close(found, exact, rtol=error, atol=error * float(exact.abs().max()))
        assert not torch.equal(found, exact)
        check_equal_on_all_ranks(comm, found)


def test_a_hook_sets_the_bucket_and_returns_other_values(comm) -> None:
    def hook(_: Any, bucket: comm_hooks.GradBucket) -> comm_hooks.Handle:
        bucket.set_buffer(torch.full_like(bucket.buffer(), 2.0))
        return comm_hooks.completed(bucket.buffer() * 3)

    assert all((g == 6).all() for g in gradients(comm, hook, passes=1))


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


@pytest.mark.each("engine")
@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_one_hook_and_before_training(comm, engine: str) -> None:
    _, _, owner = made(comm, engine, net())
    with pytest.raises(TypeError, match="register_comm_hook: got 'allreduce' as the hook; needs a callable") as caught:
        owner.register_comm_hook(None, "allreduce")
    assert isinstance(caught.value, mpidl.ConfigurationError)
    with pytest.raises(TypeError, match=r"the hook is <lambda>\(bucket\); needs .* hook\(state, bucket\)"):
        owner.register_comm_hook(None, lambda bucket: bucket)
    owner.register_comm_hook(None, comm_hooks.allreduce)
    with pytest.raises(RuntimeError, match="has a hook already") as again:
        owner.register_comm_hook(None, comm_hooks.allreduce)
    assert isinstance(again.value, mpidl.ConfigurationError)
    called, optimizer, begun = made(comm, engine, net())
    called(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="training has begun") as late:
        begun.register_comm_hook(None, comm_hooks.allreduce)
    assert isinstance(late.value, mpidl.ConfigurationError)
    optimizer.step()


@pytest.mark.each("engine")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_a_result_of_another_size_is_refused(comm, engine: str, size: int) -> None:
    """Also one that a copy would spread over the bucket, and one that begins where the bucket does."""
    called, _, owner = made(comm, engine, fresh(MODELS["gpt2"], comm.rank))
    owner.register_comm_hook(None, lambda _, bucket: comm_hooks.completed(bucket.buffer()[:size]))
    loss = called(*(part.chunk(comm.size)[comm.rank] for part in sequences(0, 0)))
    with pytest.raises(mpidl.TrainingError, match=f"result has {size} elements; needs the bucket's"):
        loss.backward()


class ComplexProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().square().sum() + (self.weight * 1j * x).real.sum()


@every_engine
@every_compression
def test_complex_gradients_keep_both_parts(comm, engine: str, hook: Any, error: float) -> None:
    def trained(hook: Any) -> torch.Tensor:
        model = ComplexProduct()
        called, optimizer, owner = made(comm, engine, model)
        if hook is not None:
            owner.register_comm_hook(comm, hook)
        called(torch.arange(1.0, 6.0) * (comm.rank + 1.3)).backward()
        optimizer.step()
        with contextlib.nullcontext() if engine == "ddp" else optimizer.gathered(writable=False):
            return model.weight.detach().clone()

    exact, found = trained(None), trained(hook)
    assert (exact.imag != 0).all()
    torch.testing.assert_close(found, exact, rtol=error, atol=error)
    assert not torch.equal(found, exact)
    check_equal_on_all_ranks(comm, found)


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


def next_to_unknown(state: Unknown, bucket: int) -> Any:  # type: ignore[name-defined]  # noqa: F821
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
        (next_to_unknown, "bucket is annotated as int"),
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
        check_hook(accepted)
    for hook in (future, anything, plain, Method().hook, lambda s, b: future(s, b), either):
        assert all((g == 7).all() for g in gradients(comm, hook, passes=1))
