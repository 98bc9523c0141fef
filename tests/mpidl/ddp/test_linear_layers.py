"""Layers whose weight gradients are computed in the buckets compute, and are copied, as their class says."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune

import mpidl
from tests.mpidl.ddp.linear_layers import LAYERS, WIDTH, Two, Watched, data, made, steps

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("way", ["autocast", "functional_call", "func.grad", "vmap", "dual numbers", "penalty"])
def test_ways_of_computing_that_go_by_the_layers_class(comm, way: str) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Two), process_group=comm)
    x = data(4, WIDTH)

    def compute(model: Any) -> Any:
        inner = getattr(model, "module", model)
        if way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                model(x).backward()
            return [p.grad.clone() for p in inner.parameters()]
        if way == "functional_call":
            doubled = {name: (p * 2).detach().requires_grad_() for name, p in inner.named_parameters()}
            return torch.autograd.grad(functional_call(inner, doubled, (x,)), list(doubled.values()))
        if way == "func.grad":
            given = {name: p.detach() for name, p in inner.named_parameters()}
            return list(torch.func.grad(lambda given: functional_call(inner, given, (x,)))(given).values())
        if way == "vmap":
            return [torch.func.vmap(inner.first)(x.view(4, 1, WIDTH))]
        if way == "dual numbers":
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                return [torch.autograd.forward_ad.unpack_dual(inner.first(dual)).tangent]
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs), [inputs], create_graph=True)
        (model(inputs) + slope.square().sum()).backward()
        return [p.grad.clone() for p in inner.parameters()]

    for a, b in zip(compute(wrapped), compute(made(Two)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_layer_whose_weight_is_replaced_computes_with_the_new_one(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Two), process_group=comm)
    first = wrapped.module.first
    with torch.no_grad():
        nn.utils.parametrizations.weight_norm(first)
        x = data(4, WIDTH)
        first.parametrizations.weight.original0.mul_(2)
        torch.testing.assert_close(first(x), nn.functional.linear(x, first.weight, first.bias))


def bias_pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "bias", 0.5)


def bias_parametrised(layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh())


def bias_as_buffer(layer: nn.Module) -> None:
    values = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", values)


def bias_as_attribute(layer: nn.Module) -> None:
    values = layer.bias.detach()
    del layer.bias
    layer.bias = values


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def of_another_class(layer: nn.Module) -> None:
    layer.__class__ = Doubled


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "change",
    [bias_pruned, bias_parametrised, bias_as_buffer, bias_as_attribute, of_another_class],
    ids=lambda change: change.__name__,
)
def test_layers_that_were_changed_compute_what_they_are(comm, change: Any, when: str) -> None:
    """Before or after the model was wrapped."""
    model, alone = made(Two), made(Two)
    change(alone.first)
    if when == "before":
        change(model.first)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    if when == "after":
        change(model.first)
    x = data(4, WIDTH)
    assert torch.equal(model.first(x), alone.first(x))
    wrapped(x).backward()
    alone(x).backward()
    torch.testing.assert_close(model.first.weight.grad, alone.first.weight.grad)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["the class", "the function"])
def test_what_is_patched_is_called(comm, what: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, function = nn.Linear.forward, nn.functional.linear

    def patch() -> None:
        if what == "the class":
            monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 2)
        else:
            monkeypatch.setattr(nn.functional, "linear", lambda *arguments: function(*arguments) * 2)

    if when == "before":
        patch()
    model = made(Two)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    if when == "after":
        patch()
    x = data(4, WIDTH)
    assert torch.equal(model.first(x), function(x, model.first.weight, model.first.bias) * 2)
    wrapped(x).backward()


def test_modes_and_classes_of_torch_functions_see_the_layer(comm) -> None:
    class Calls(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    class Halved(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            result = super().__torch_function__(function, types, args, kwargs or {})
            return result / 2 if function is nn.functional.linear else result

    names: list[str] = []
    model = made(Two)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    with Calls():
        wrapped(data(4, WIDTH))
    assert names.count("linear") == 2
    x = data(4, WIDTH)
    for name in ("weight", "bias"):
        other = made(Two)
        setattr(other.first, name, Halved(getattr(other.first, name).detach()))
        of_it = mpidl.DistributedDataParallel(other, process_group=comm)
        assert torch.equal(of_it.module.first(x), model.first(x) / 2)


def test_arguments_as_of_the_layer(comm) -> None:
    """By name, of other layouts and dtypes, or wrong ones."""
    alone, wrapped = made(Two), mpidl.DistributedDataParallel(made(Two), process_group=comm)
    layer, x = wrapped.module.first, data(4, WIDTH)
    assert inspect.signature(layer.forward) == inspect.signature(alone.first.forward)
    assert torch.equal(layer(input=x), alone.first(x))
    for other in (x.to_sparse(), x.to_sparse_csr(), x.to_mkldnn()):
        assert torch.equal(layer(other).to_dense(), alone.first(other).to_dense())
    nested = layer(torch.nested.nested_tensor([x, x[:2]]))
    assert torch.equal(nested.unbind()[1], alone.first(torch.nested.nested_tensor([x, x[:2]])).unbind()[1])
    for arguments in ((), (x, x), (x.double(),), (data(4, WIDTH + 1),), (3,)):
        found = []
        for model in (wrapped.module, alone):
            with pytest.raises((TypeError, RuntimeError)) as error:
                model.first(*arguments)
            found.append((type(error.value), str(error.value)))
        assert found[0] == found[1]


def test_a_weight_that_backward_does_not_need_may_change(comm) -> None:
    model = made(LAYERS["linear"])
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    loss = wrapped(data(4, 5)).sum()
    with torch.no_grad():
        model.weight.add_(1)
    loss.backward()


def test_a_call_with_another_weight(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(LAYERS["linear without bias"]), process_group=comm)
    x, weight = data(4, 5), data(6, 5).requires_grad_()
    assert torch.equal(functional_call(wrapped.module, {"weight": weight}, (x,)), nn.functional.linear(x, weight))


def of_shallow_copies(model: nn.Module) -> nn.Module:
    made = copy.copy(model)
    made._modules = {name: copy.copy(layer) for name, layer in model._modules.items()}
    for layer in made._modules.values():
        layer._parameters = {name: nn.Parameter(p.detach().clone()) for name, p in layer._parameters.items()}
    return made


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, of_shallow_copies, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_are_ordinary_models(comm, way: Callable[[Any], Any]) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Two), process_group=comm)
    steps(wrapped, wrapped.module)
    twin = way(wrapped.module)
    assert twin.first.__dict__.keys() == nn.Linear(1, 1).__dict__.keys()
    with torch.no_grad():
        twin.first.weight.zero_()
        twin.first.bias.fill_(1)
        assert torch.equal(twin.first(data(3, WIDTH)), torch.ones(3, WIDTH))
    again = Watched(comm, twin)
    steps(again.wrapped, twin)
    assert again.in_place() == {"first.weight": True, "second.weight": True}


@pytest.mark.ranks(1)
def test_whole_models_are_compiled_and_exported(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Two), process_group=comm)
    x = data(4, WIDTH)
    torch._dynamo.reset()
    compiled = torch.compile(wrapped.module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wrapped.module(x))
    exported = torch.export.export(wrapped.module, (x,)).module()
    assert any(node.target is torch.ops.aten.linear.default for node in exported.graph.nodes)
    torch.testing.assert_close(exported(x), wrapped.module(x))
    traced = torch.jit.trace(wrapped.module, (x,))
    torch.testing.assert_close(traced(x), wrapped.module(x))


def test_two_wrappers_of_one_model(comm) -> None:
    """The later one has the layers; they are as they were when both are gone, and not before."""
    model = made(Two)
    one = mpidl.DistributedDataParallel(model, process_group=comm)
    other = Watched(comm, model)
    del one
    gc.collect()
    steps(other.wrapped, model)
    assert other.in_place() == {"first.weight": True, "second.weight": True}
    assert "forward" in model.first.__dict__
    for handle in other.handles:  # which keep it alive
        handle.remove()
    del other, handle
    gc.collect()
    assert "forward" not in model.first.__dict__


def test_layers_that_share_a_weight_are_left_as_they_were(comm) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    alone = copy.deepcopy(model)
    wrapped(data(4, WIDTH)).sum().backward()
    alone(data(4, WIDTH)).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)
    del wrapped
    gc.collect()
    assert all("forward" not in layer.__dict__ for layer in model)


def test_a_layer_with_a_forward_pass_of_its_own_keeps_it(comm) -> None:
    model = made(Two)
    model.first.forward = lambda x: nn.functional.linear(x, model.first.weight) * 3
    watched = Watched(comm, model)
    alone = made(Two)
    alone.first.forward = lambda x: nn.functional.linear(x, alone.first.weight) * 3
    alone(data(4, WIDTH)).backward()
    watched.model.first.bias.requires_grad_(False)
    watched.wrapped(data(4, WIDTH)).backward()
    torch.testing.assert_close(model.first.weight.grad, alone.first.weight.grad)
    assert watched.in_place() == {"first.weight": False, "second.weight": True}
