"""`.grad` under ZeRO where `__torch_dispatch__` does not come by itself: `.data =`, `out=`, and ways to raw memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import mpidl
from tests.mpidl.zero.methods.test_clipping import follow_clipped
from tests.mpidl.zero.reference import Several, engine, plainly
from tests.mpidl.zero.ways import every_part, every_way

pytestmark = pytest.mark.mpi


def gradients(parameters: Any) -> list[Any]:
    return [p.grad for p in parameters if p.grad is not None]


def clamp_data(parameters: Any) -> None:
    for gradient in gradients(parameters):
        gradient.data = gradient.data.clamp(-0.01, 0.01)


def scale_data(parameters: Any) -> torch.Tensor:
    found = gradients(parameters)
    total = torch.sqrt(sum(gradient.data.norm() ** 2 for gradient in found))
    for gradient in found:
        gradient.data = gradient.data * (0.05 / total)
    torch.testing.assert_close(get_total_norm(found), torch.tensor(0.05))
    return total


def set_data_of_others(parameters: Any) -> None:
    """A tensor that refers to the gradient, and a result, have a `.data` of their own."""
    for gradient in gradients(parameters):
        kept, other = gradient * 2, gradient.detach()
        other.data = kept
        torch.testing.assert_close(other.norm(), gradient.norm() * 2)
        kept.data = gradient
        torch.testing.assert_close(kept.norm(), gradient.norm())


def clamp_out(parameters: Any) -> torch.Tensor:
    parameters = list(parameters)
    get_total_norm(gradients(parameters))
    for gradient in gradients(parameters):
        assert torch.clamp(gradient, -0.1, 0.1, out=gradient) is gradient
    return clip_grad_norm_(parameters, 0.05)


def arithmetic_out(parameters: Any) -> torch.Tensor:
    found = gradients(parameters)
    for gradient in found:
        before = gradient.norm()
        half = torch.mul(gradient, 0.5, out=gradient.clone())
        torch.sub(gradient, half, out=gradient)
        torch.testing.assert_close(gradient.norm(), before / 2)
        gradient.sub_(half * 0.5)
        torch.where(torch.gt(gradient, 0.2, out=half) > 0, half, gradient, out=gradient)
    return get_total_norm(found)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data clamped": clamp_data,
    "data scaled": scale_data,
    "data of others": set_data_of_others,
    "clamp out": clamp_out,
    "arithmetic out": arithmetic_out,
}


@every_way
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.each("change")
def test_what_is_assigned_to_data_or_written_by_out_is_stepped_on(comm, way: str, change: str) -> None:
    follow_clipped(comm, way, CHANGES[change])


@every_part
def test_sixteen_bits_take_assigned_data_and_out(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way, precision=mpidl.Precision(torch.bfloat16))
    plainly(model, comm.rank, 0).float().backward()
    clip_grad_norm_(model.parameters(), 1e9)  # which makes them fp32
    gradient = model.head.weight.grad
    before = gradient.norm()
    gradient.data = gradient.data * 0.5
    torch.mul(gradient, 0.5, out=gradient)
    torch.testing.assert_close(gradient.norm(), before / 4)
    optimizer.step()


def out_alone(gradient: Any) -> None:
    torch.clamp(gradient, -0.1, 0.1, out=gradient)


def data_alone(gradient: Any) -> None:
    gradient.data = gradient.data * 0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("change", [out_alone, data_alone])
@pytest.mark.parametrize("way", ["stage 1", "stage 2", "stage 3"])
def test_what_one_rank_assigns_or_writes_alone_is_refused_at_the_step(comm, way: str, change: Any) -> None:
    model, optimizer = engine(comm, Several, way)
    plainly(model, comm.rank, 0).backward()
    if comm.rank == 1:
        change(model.head.weight.grad)
    with pytest.raises(mpidl.ModelMismatch, match=r"step: rank 0 .*rank 1 .*head\.weight"):
        optimizer.step()


def set_data(to: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    return lambda model, gradient: setattr(gradient, "data", to(model, gradient))


REFUSED: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "whole": (set_data(lambda _, g: torch.zeros(g.shape)), r"its \.grad was set to a Tensor of torch\.float32"),
    "gathered": (set_data(lambda _, g: g.full_tensor() * 0.5), r"its \.grad was set to a Tensor"),
    "another's": (set_data(lambda m, _: m.blocks[0].inner.weight.grad), r"a ShardedGradient of blocks\.0"),
    "flags": (set_data(lambda _, g: g > 0), r"of torch\.bool"),
    "into whole": (lambda _, g: torch.abs(g, out=torch.zeros(g.shape)), r"abs\.out\(\) with out=; .*leave out= off"),
    "of whole": (lambda _, g: torch.add(torch.ones(g.shape), 1, out=g), r"add\.out\(\) with out="),
    "of numbers": (lambda _, g: torch.add(torch.tensor(1.0), 1, out=g), r"add\.out\(\) with out="),
    "zeros": (lambda _, g: torch.zeros(g.shape, out=g), r"zeros\.out\(\) with out="),
    "other": (lambda m, g: torch.abs(m.head.bias.grad, out=g), r"abs\.out\(\) with out="),
    "norm": (lambda _, g: torch.linalg.vector_norm(g, out=torch.empty(())), r"linalg_vector_norm\.out\(\) with out="),
    "sum": (lambda _, g: torch.sum(g, dim=(0, 1), out=torch.empty(())), r"sum\.IntList_out\(\) with out="),
    "largest": (lambda _, g: torch.amax(g, (0, 1), out=torch.empty(())), r"amax\.out\(\) with out="),
    "all": (lambda _, g: torch.all(g, out=torch.empty((), dtype=torch.bool)), r"all\.all_out\(\) with out="),
    "each": (lambda _, g: torch.ops.aten._foreach_mul.Scalar_out([g], 2, out=[g]), r"_foreach_mul\.Scalar_out\(\)"),
    "each of several": (lambda _, g: torch._foreach_addcmul_([g], [g], [g], 2), r"addcmul_\(\)"),
    "largest of a row": (lambda m, _: m.head.bias.grad.max(0), r"max\.dim\(\)"),
    "powers": (lambda _, g: torch._foreach_pow(2.0, [g]), r"pow\(\)"),
    "numpy": (lambda _, g: np.asarray(g), r"numpy\(\)"),
    "list": (lambda _, g: g.tolist(), r"tolist\(\)"),
    "numpy's dlpack": (lambda _, g: np.from_dlpack(g), r"__dlpack"),
    "dlpack": (lambda _, g: torch.from_dlpack(g), r"__dlpack"),
    "dlpack's device": (lambda _, g: g.__dlpack_device__(), r"__dlpack_device__\(\)"),
    "address": (lambda _, g: g.data_ptr(), r"data_ptr\(\)"),
    "shared": (lambda _, g: g.share_memory_(), r"share_memory_\(\)"),
    "a function": (lambda _, g: g.apply_(lambda x: x), r"apply_\(\)"),
    "size": (lambda _, g: g.resize_(3), r"resize_\.default\(\)"),
    "set": (lambda _, g: g.set_(torch.zeros(g.shape)), r"set_\.source_Tensor\(\)"),
    "pickle": (lambda _, g: pickle.dumps(g), "pickling"),
    "save": (lambda _, g: torch.save({"gradient": g}, io.BytesIO()), "pickling"),
}


@pytest.mark.parametrize("way", ["stage 1", "stage 2", "stage 3"])
def test_what_is_not_of_the_same_gradient_or_needs_memory_is_refused_by_name(comm, way: str) -> None:
    model, optimizer = engine(comm, Several, way)
    plainly(model, comm.rank, 0).backward()
    gradient = model.head.weight.grad
    before = gradient.full_tensor()
    for act, message in REFUSED.values():
        with pytest.raises(mpidl.TrainingError, match=rf"(head|0\.inner)\.(weight|bias): .*{message}"):
            act(model, gradient)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(gradient)
    storage = gradient.untyped_storage()
    assert (storage.nbytes(), storage.device.type) == (24, "meta")
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(gradient.shape).set_(storage)
    assert torch.equal(gradient.full_tensor(), before)
    optimizer.step()
