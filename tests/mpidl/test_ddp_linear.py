"""Weight gradients that are computed in the buckets: where they are, where not, and that nothing else changes."""

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
from torch.utils.checkpoint import checkpoint

import mpidl
from mpidl.ddp import linear
from mpidl.models.gpt2 import Projection

pytestmark = pytest.mark.mpi


WIDTH = 16  # so that each weight begins with a cache line, wherever it comes in its bucket


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(WIDTH, 5)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, WIDTH),
    "linear without bias": lambda: nn.Linear(5, 6, bias=False),
    "one output": lambda: nn.Linear(5, 1, bias=False),
    "conv1d": conv1d,
    "projection": lambda: Projection(5, WIDTH, 0.5),
}


def made(make: Callable[[], Any]) -> Any:
    """A model, the same on every rank."""
    torch.manual_seed(0)
    return make()


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Watched:
    """A wrapped model, and where the gradients of its weights lie when they arrive, before they are averaged.

    found: of each weight that arrived in the last pass, whether in its place in a bucket, and what.
    """

    def __init__(self, comm: Any, model: nn.Module, **settings: Any) -> None:
        self.found: dict[str, tuple[bool, torch.Tensor]] = {}
        self.handles = [
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._arrived(name, p))
            for name, p in model.named_parameters()
        ]
        self.model = model
        self.wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **settings)

    def _arrived(self, name: str, p: torch.Tensor) -> None:
        places = {
            id(q): view
            for bucket in self.wrapped._reducer.queue.buckets
            for q, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self.found[name] = (p.grad.data_ptr() == places[id(p)].data_ptr(), p.grad.clone())

    def in_place(self) -> dict[str, bool]:
        """Of the weights that have arrived since the last call."""
        found, self.found = self.found, {}
        return {name: there for name, (there, _) in found.items() if name.endswith("weight")}


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (1, 1, 5), (2, 1, 3, 5)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_they_are_written_to_their_places_with_the_bits_of_the_layer_alone(comm, layer: str, shape: tuple) -> None:
    alone, watched = made(LAYERS[layer]), Watched(comm, made(LAYERS[layer]))
    for step in range(3):
        x, theirs = (data(*shape, seed=step).requires_grad_() for _ in range(2))
        y = alone(theirs)
        out = watched.wrapped(x)
        assert torch.equal(out, y)
        factors = data(*y.shape, seed=7)
        alone.zero_grad()
        watched.model.zero_grad()
        (y * factors).sum().backward()
        (out * factors).sum().backward()
        assert torch.equal(x.grad, theirs.grad)
        for name, p in alone.named_parameters():
            assert torch.equal(watched.found[name][1], p.grad), name
        for p, own in zip(watched.model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, own.grad)
        assert watched.in_place() == {"weight": True}


def test_a_place_that_does_not_begin_with_a_cache_line_is_copied_to(comm) -> None:
    """There the same product can have other bits than in new memory."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 11, bias=False), nn.Linear(11, 7, bias=False), nn.Linear(7, 16, bias=False))

    alone, watched = made(make), Watched(comm, made(make))
    for _ in range(3):
        alone.zero_grad()
        watched.model.zero_grad()
        alone(data(12, 7)).square().sum().backward()
        watched.wrapped(data(12, 7)).square().sum().backward()
        for name, p in alone.named_parameters():
            assert torch.equal(watched.found[name][1], p.grad), name
        # They lie in the order 2, 1, 0; 112 elements are whole lines, 77 are not.
        assert watched.in_place() == {"2.weight": True, "1.weight": True, "0.weight": False}


def test_small_weights_are_left_as_they_were(comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """To call Python for them takes longer than the copy."""
    monkeypatch.setattr(linear, "_SMALLEST", WIDTH * 2 * WIDTH * 4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH))
    watched = Watched(comm, model)
    assert ["forward" in layer.__dict__ for layer in model] == [False, True]
    watched.wrapped(data(4, WIDTH)).sum().backward()
    assert watched.in_place() == {"0.weight": False, "1.weight": True}


@pytest.mark.parametrize(
    "x", [data(5), data(0, 5), data(5, 3).t(), data(3, 2, 5).transpose(0, 1)], ids=["1-D", "empty", "2-D", "3-D"]
)
def test_inputs_of_other_forms(comm, x: torch.Tensor) -> None:
    """One sample, none, and some that are not contiguous."""
    alone, watched = made(LAYERS["linear"]), Watched(comm, made(LAYERS["linear"]))
    alone(x).square().sum().backward()
    watched.wrapped(x).square().sum().backward()
    for p, own in zip(watched.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, own.grad)


class Two(nn.Module):
    """Two layers and an activation in place. calls: of the first."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.calls = calls
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = torch.relu_(self.first(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.hidden(x)).square().sum()


class InCheckpoint(Two):
    """The first layer is computed once more in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.hidden, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.second(hidden).square().sum()


def steps(call: Any, model: nn.Module, passes: int = 1) -> list[torch.Tensor]:
    """The gradients after a step of several backward passes, the same on all ranks."""
    model.zero_grad()
    for number in range(passes):
        call(data(4, WIDTH, seed=number)).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "passes", "settings", "first"),
    [
        (Two, 1, {}, True),
        (Two, 2, {}, False),  # the second pass adds to what the first has left
        (lambda: Two(2), 1, {}, False),
        (Two, 1, {"gradient_as_bucket_view": False}, False),
        (lambda: InCheckpoint(False), 1, {}, True),
        (lambda: InCheckpoint(True), 1, {"static_graph": True}, True),
    ],
    ids=["once", "two passes", "called twice", "own memory", "checkpoint", "re-entrant checkpoint"],
)
def test_ways_through_a_model(comm, make: Any, passes: int, settings: dict, first: bool) -> None:
    watched = Watched(comm, made(make), **settings)
    alone = made(make)
    for _ in range(3):
        expected = steps(alone, alone, passes)
        found = steps(watched.wrapped, watched.model, passes)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        if passes == 1:
            assert watched.in_place()["first.weight"] == first


def test_under_no_sync_they_gather_in_memory_of_their_own(comm) -> None:
    watched = Watched(comm, made(Two))
    with watched.wrapped.no_sync():
        steps(watched.wrapped, watched.model)
    assert watched.in_place() == {"first.weight": False, "second.weight": False}


def test_what_somebody_is_to_see_keeps_its_values(comm) -> None:
    """A hook of the user's, and torch.autograd.grad, get this rank's own gradient, and may keep it."""
    watched = Watched(comm, made(Two))
    seen: list[torch.Tensor] = []
    handle = watched.model.first.weight.register_hook(seen.append)
    watched.wrapped(data(4, WIDTH, seed=comm.rank)).backward()
    assert watched.in_place() == {"first.weight": False, "second.weight": True}
    handle.remove()
    seen += torch.autograd.grad(watched.wrapped(data(4, WIDTH, seed=comm.rank)), [watched.model.first.weight])
    alone = made(Two)
    alone(data(4, WIDTH, seed=comm.rank)).backward()
    watched.model.zero_grad()
    watched.wrapped(torch.zeros(4, WIDTH)).backward()
    for values in seen:
        assert torch.equal(values, alone.first.weight.grad)


def test_a_gradient_taken_within_the_pass_is_not_the_buckets(comm) -> None:
    watched = Watched(comm, made(Two))
    taken: list[torch.Tensor] = []

    def take(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            inner = watched.model.first(data(4, WIDTH)).sum()
        taken.extend(torch.autograd.grad(inner, [watched.model.first.weight]))

    hidden = watched.model.second.register_full_backward_hook(lambda *_: take(data(1)))
    watched.wrapped(data(4, WIDTH, seed=comm.rank)).backward()
    hidden.remove()
    alone = made(Two)
    alone.first(data(4, WIDTH)).sum().backward()
    assert torch.equal(taken[0], alone.first.weight.grad)
    assert watched.in_place()["first.weight"]


def test_a_weight_that_others_use_too(comm) -> None:
    """An embedding whose weight a linear layer shares gets the sum of both."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x)).square().sum()

    watched, alone = Watched(comm, made(Tied)), made(Tied)
    for _ in range(3):
        for model, call in ((alone, alone), (watched.model, watched.wrapped)):
            model.zero_grad()
            call(torch.tensor([1, 2, 2])).backward()
        torch.testing.assert_close(watched.model.head.weight.grad, alone.head.weight.grad)


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


def test_only_the_gradients_that_are_wanted_are_computed(comm) -> None:
    """Of a pass to the inputs alone, no weight learns."""
    wrapped = mpidl.DistributedDataParallel(made(Two), process_group=comm)
    x = data(4, WIDTH).requires_grad_()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    loss = wrapped(x)
    with profiler:
        torch.autograd.grad(loss, [x])
    products = sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")
    assert products == 2  # dx of each layer


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
