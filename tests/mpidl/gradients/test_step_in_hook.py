"""A hook of the user that steps in the backward pass, with this rank's own gradient, is refused on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mpidl
from tests.mpidl.zero import reference as zero
from tests.mpidl.zero.ways import WAYS, every_way

pytestmark = pytest.mark.mpi
CHANGED = r"blocks\.0\.inner\.weight: changed during the backward pass on rank \d"


def steps_in_backward(model: nn.Module, names: tuple[str, ...] = ("",), release: bool = True, **settings: Any) -> None:
    """torch's recipe: an optimizer for each parameter, which a hook steps."""
    for name, p in model.named_parameters():
        if name.startswith(names):
            optimizer = torch.optim.AdamW([p], lr=0.1, **settings)

            def hook(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                if release:
                    optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(hook)


def steps_at_the_node(model: nn.Module) -> list[Any]:
    """Its older form, which needs the nodes to be kept."""
    kept = []
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        node = p.view_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(lambda *_, optimizer=optimizer: optimizer.step())
        kept.append(node)
    return kept


def engine(comm, way: str, first: Any, then: Any, **settings: Any) -> tuple[nn.Module, mpidl.ZeroOptimizer | None]:
    """Returns what to call, and ZeRO's optimizer. first, then: give hooks before and after the engine's."""
    model = zero.made(zero.Several)
    first(model)
    optimizer = None
    called = model
    if way == "ddp":
        called = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, **settings)
    else:
        optimizer = mpidl.ZeroOptimizer(
            model, torch.optim.SGD, process_group=comm, **zero.SETTINGS[way], **zero.SGD, **settings
        )
    then(model)
    return called, optimizer


def nothing(_: nn.Module) -> None:
    pass


every_setting = pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=str,
)


@every_setting
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("release", [True, False], ids=["", "kept"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", ""])
def test_ddp(comm, settings: dict, before: bool, release: bool, fused: bool) -> None:
    def hooks(model: nn.Module) -> None:
        steps_in_backward(model, release=release, fused=fused)

    called, _ = engine(comm, "ddp", *((hooks, nothing) if before else (nothing, hooks)), **settings)
    with pytest.raises(mpidl.TrainingError, match=rf"{CHANGED}.* hook"):
        called(zero.data(comm.rank)).sum().backward()


def test_ddp_at_the_nodes(comm) -> None:
    kept: list[Any] = []
    called, _ = engine(comm, "ddp", lambda model: kept.extend(steps_at_the_node(model)), nothing)
    with pytest.raises(mpidl.TrainingError, match=CHANGED):
        called(zero.data(comm.rank)).sum().backward()


def test_ddp_and_a_hook_that_takes_the_gradient(comm) -> None:
    def hook(p: torch.Tensor) -> None:
        p.grad = None

    def hooks(model: nn.Module) -> None:
        model.head.weight.register_post_accumulate_grad_hook(hook)

    called, _ = engine(comm, "ddp", nothing, hooks)
    with pytest.raises(mpidl.TrainingError, match=r"head\.weight: .*taken away"):
        called(zero.data(comm.rank)).sum().backward()


@pytest.mark.parametrize("of", ["parameter", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ddp_and_a_hook_that_writes_into_the_data(comm, of: str, dtype: torch.dtype) -> None:
    model = zero.made(zero.Several).to(dtype)
    called = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
    weight = model.blocks[0].inner.weight
    called(zero.data(comm.rank).to(dtype)).sum().backward()

    def hook(given: torch.Tensor) -> None:
        weight.data.sub_(given.grad if of == "parameter" else given, alpha=0.1)

    handle = weight.register_post_accumulate_grad_hook(hook) if of == "parameter" else weight.register_hook(hook)
    with pytest.raises(mpidl.TrainingError, match=CHANGED):
        called(zero.data(comm.rank).to(dtype)).sum().backward()
    handle.remove()
    weight.register_post_accumulate_grad_hook(lambda p: print(end=""))  # one that changes nothing
    called(zero.data(comm.rank).to(dtype)).sum().backward()


def test_ddp_and_hooks_that_come_and_go_within_a_pass(comm) -> None:
    model = zero.made(zero.Several)
    called = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
    weight, head = model.blocks[0].inner.weight, model.head.weight

    def once(_: torch.Tensor) -> None:
        handle.remove()
        weight.register_hook(lambda gradient: None)  # in time for this pass

    handle = head.register_post_accumulate_grad_hook(once)
    for step in range(3):
        called(zero.data(comm.rank, step)).sum().backward()
    assert head.grad is not None


def test_ddp_and_a_hook_that_writes_into_data_that_are_not_contiguous(comm) -> None:
    model = zero.made(zero.Several)
    weight = model.blocks[0].inner.weight
    weight.data = weight.data.t().contiguous().t()
    called = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)
    weight.register_post_accumulate_grad_hook(lambda p: None)
    called(zero.data(comm.rank)).sum().backward()

    def hook(p: torch.Tensor) -> None:
        p.data.sub_(p.grad)

    weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(mpidl.TrainingError, match=CHANGED):
        called(zero.data(comm.rank)).sum().backward()


@pytest.mark.parametrize("of", ["parameter", "gradient", "module"])
def test_ddp_and_a_hook_that_gives_other_memory(comm, of: str) -> None:
    def hook(p: torch.Tensor) -> None:
        p.data = p.data - 0.1 * p.grad

    def hooks(model: nn.Module) -> None:
        weight, head = model.head.weight, model.head
        if of == "parameter":
            weight.register_post_accumulate_grad_hook(hook)
        elif of == "gradient":
            weight.register_hook(lambda gradient: setattr(weight, "data", weight.data - 0.1 * gradient))
        else:
            head.register_full_backward_hook(lambda *_: setattr(weight, "data", weight.data * 0.9))

    called, _ = engine(comm, "ddp", nothing, hooks)
    with pytest.raises(mpidl.TrainingError, match=r"head\.weight: changed .*on rank"):
        called(zero.data(comm.rank)).sum().backward()


@pytest.mark.parametrize("way", ["ddp", *WAYS])
def test_on_one_rank(comm, way: str) -> None:
    def hooks(model: nn.Module) -> None:
        if comm.rank == comm.size - 1:
            steps_in_backward(model, ("blocks.1.inner.weight",))

    called, _ = engine(comm, way, hooks, nothing)
    where = rf"blocks\.1\.inner\.weight: changed during the backward pass on rank {comm.size - 1}"
    with pytest.raises(mpidl.TrainingError, match=where):
        called(zero.data(comm.rank)).sum().backward()


@every_way
@pytest.mark.parametrize("fused", [True, False], ids=["fused", ""])
def test_the_stages(comm, way: str, fused: bool) -> None:
    called, _ = engine(comm, way, lambda model: steps_in_backward(model, fused=fused), nothing)
    with pytest.raises(mpidl.TrainingError, match="changed during the backward pass on rank"):
        called(zero.data(comm.rank)).sum().backward()


@pytest.mark.parametrize("way", ["ddp", *WAYS])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", ""])
def test_under_no_sync_alone(comm, way: str, fused: bool) -> None:
    """On one rank, in the first pass of an accumulation: the pass that communicates refuses it, on every rank."""
    quiet = True

    def hooks(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW([model.head.weight], lr=0.1, fused=fused)

        def hook(_: torch.Tensor) -> None:
            if quiet:
                optimizer.step()

        if comm.rank == comm.size - 1:
            model.head.weight.register_post_accumulate_grad_hook(hook)

    called, optimizer = engine(comm, way, hooks, nothing)
    with called.no_sync() if optimizer is None else optimizer.no_sync():
        called(zero.data(comm.rank)).sum().backward()
    quiet = False
    where = rf"head\.weight: changed during a backward pass under no_sync on rank {comm.size - 1}"
    with pytest.raises(mpidl.TrainingError, match=where):
        called(zero.data(comm.rank)).sum().backward()
    if way == "ddp":  # the stages' weights are damaged
        called(zero.data(comm.rank)).sum().backward()


@pytest.mark.parametrize("way", ["ddp", *WAYS])
def test_passes_and_steps_under_no_sync_are_fine(comm, way: str) -> None:
    """Local SGD makes such; ZeRO only accumulates."""
    called, optimizer = engine(comm, way, nothing, nothing)
    local = torch.optim.SGD(called.parameters(), lr=0.1) if way == "ddp" else None
    for _ in range(2):
        with called.no_sync() if optimizer is None else optimizer.no_sync():
            called(zero.data(comm.rank)).sum().backward()
        if local is not None:
            local.step()
    called(zero.data(comm.rank)).sum().backward()


@every_way
def test_a_hook_that_comes_after_the_engine_s_finds_no_gradient(comm, way: str) -> None:
    called, optimizer = engine(comm, way, nothing, steps_in_backward)
    assert optimizer is not None
    called(zero.data(comm.rank)).square().sum().backward()
    optimizer.step()
    plain = zero.Plain(zero.Several, comm.size)
    plain.step(lambda m, rank: m(zero.data(rank)).square().sum().backward())
    zero.check(called, optimizer, plain.model)


@every_way
def test_a_step_of_the_zero_optimizer_in_a_hook(comm, way: str) -> None:
    called, optimizer = engine(comm, way, nothing, nothing)
    assert optimizer is not None
    x = zero.data(comm.rank).requires_grad_()
    x.register_hook(lambda _: optimizer.step())
    with pytest.raises(mpidl.TrainingError, match=r"step\(\) inside a backward pass"):
        called(x).sum().backward()


@pytest.mark.parametrize("way", ["ddp", *WAYS])
def test_hooks_that_read_and_changes_between_passes_are_fine(comm, way: str) -> None:
    norms: list[float] = []

    def reads(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: norms.append(float(p.norm())))

    called, optimizer = engine(comm, way, reads, nothing)
    called(zero.data(comm.rank)).sum().backward()
    if way == "ddp":
        steps = torch.optim.SGD(called.parameters(), **zero.SGD)
        steps.step()
    else:
        assert optimizer is not None
        optimizer.step()
    called(zero.data(comm.rank)).sum().backward()
    assert len(norms) == 16


@pytest.mark.parametrize("way", ["ddp", "stage 1"])
def test_a_pass_inside_the_step_of_another_optimizer_leaves_torch_s_hooks_as_they_are(comm, way: str) -> None:
    """It may run in another thread, too: torch goes through a list of hooks as an optimizer steps."""
    call, _ = engine(comm, way, nothing, nothing)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    x = torch.ones(2, 3)
    hooks = [lambda *_: call(x).sum().backward(), lambda *_: None]
    handles = [register_optimizer_step_pre_hook(hook) for hook in hooks]
    try:
        other.step()
    finally:
        for handle in handles:
            handle.remove()
