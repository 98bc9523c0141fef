"""DistributedDataParallel on unusual graphs: gradients equal the mean of what each rank's pass gives by itself."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.utils.checkpoint import checkpoint

import collectives
import mpidl
from tests.mpidl.ddp.reference import Several, check, data, follow, made, mean_gradients
from tests.mpidl.graphs import GRAPHS

pytestmark = pytest.mark.mpi


@pytest.mark.each("name")
@pytest.mark.parametrize("name", GRAPHS)
def test_gradients_are_the_mean_of_each_ranks_pass(comm, name: str) -> None:
    graph = GRAPHS[name]
    settings = {"find_unused_parameters": True} if graph.unused else {}
    follow(comm, graph.make, lambda m, rank: graph.loss(m, rank, 0), **settings)


@pytest.mark.at_most(4)
@pytest.mark.parametrize("settings", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ranks_that_use_different_parameters_and_one_that_none_uses(comm, settings: dict) -> None:
    orders = [(0,), (2, 1), (0, 0), (1,)]
    follow(comm, lambda: Several(4), lambda m, rank: m(data(rank), orders[rank]).sum(), **settings)


def test_what_no_rank_uses_keeps_its_gradient_to_the_bit(comm) -> None:
    """Also where a bucket has been through the mean, which rounds, and the weights' decay leaves it alone."""
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    wrapped(data(comm.rank), (0, 1)).sum().backward()
    before = {name: p.grad.clone() for name, p in model.layers[1].named_parameters()}
    model.layers[0].zero_grad()
    wrapped(data(comm.rank), (0,)).sum().backward()
    for name, p in model.layers[1].named_parameters():
        assert torch.equal(p.grad, before[name])
    assert model.layers[2].weight.grad is None
    weight = model.layers[2].weight.detach().clone()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    assert torch.equal(model.layers[2].weight, weight)


def test_a_graph_that_changes_is_named_under_static_graph(comm) -> None:
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, static_graph=True)
    wrapped(data(comm.rank), (0, 1)).sum().backward()
    wrapped(data(comm.rank), (0, 1)).sum().backward()
    last = (0, 2) if comm.rank == comm.size - 1 else (0, 1)
    with pytest.raises(mpidl.TrainingError, match=rf"graph changed: on rank {comm.size - 1} .*layers\.2"):
        wrapped(data(comm.rank), last).sum().backward()
    model.zero_grad()
    wrapped(data(comm.rank), (0, 1)).sum().backward()  # and training can go on
    check(model, mean_gradients(Several, lambda m, rank: m(data(rank), (0, 1)).sum(), comm.size))


def test_an_error_on_one_rank_is_an_error_on_all(comm) -> None:
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    order = (0, 1) if comm.rank == comm.size - 1 else (0, 1, 2)
    with pytest.raises(mpidl.TrainingError, match=rf"rank {comm.size - 1} gave no gradient to layers\.2\.weight"):
        wrapped(data(comm.rank), order).sum().backward()


@pytest.mark.mpi(min_size=2)
def test_what_no_rank_reaches_is_said_of_all(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Several), process_group=comm)
    with pytest.raises(mpidl.TrainingError, match=r"all ranks gave no gradient to layers\.2\.weight"):
        wrapped(data(comm.rank), (0, 1)).sum().backward()


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}], ids=str)
def test_parameters_that_were_replaced_are_named(comm, settings: dict) -> None:
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **settings)
    model.load_state_dict(made(Several).state_dict(), assign=True)
    with pytest.raises(mpidl.TrainingError, match=r"layers\.0\.weight.* and 1 more: replaced.*wrap"):
        wrapped(data(comm.rank), (0, 1, 2)).sum().backward()


class Words(nn.Module):
    """An embedding of 5 words and a layer on it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed((x * 5).long() % 5)))


def loss_of_words(m: Any, rank: int) -> torch.Tensor:
    return m(data(rank)).square().sum()


def other_memory(m: Any) -> None:
    m.embed.weight.data = torch.randn(7, 4)


def new_parameter(m: Any) -> None:
    m.embed.weight = nn.Parameter(torch.randn(7, 4))


def new_module(m: Any) -> None:
    m.embed = nn.Embedding(7, 4)


def adapter(m: Any) -> None:
    m.head = nn.Sequential(m.head, nn.Linear(2, 2, bias=False))


CHANGES = {
    other_memory: r"^embed\.weight \(now \(7, 4\), before \(5, 4\)\): replaced, resized or added",
    new_parameter: r"^embed\.weight \(now \(7, 4\), before \(5, 4\)\): replaced, resized or added",
    new_module: r"^embed\.weight \(now \(7, 4\), before \(5, 4\)\): replaced, resized or added",
    adapter: r"^head\.1\.weight \(new, \(2, 2\)\): replaced, resized or added",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_parameters_that_were_resized_or_added_are_named(comm, change: Any, settings: dict) -> None:
    """Also after passes without it, and where one rank alone has them."""
    wrapped = mpidl.DistributedDataParallel(made(Words), process_group=comm, **settings)
    loss_of_words(wrapped, comm.rank).backward()
    if comm.rank == comm.size - 1:
        change(wrapped.module)
    where = "" if comm.rank == comm.size - 1 else rf"\(on rank {comm.size - 1}\)$"
    with pytest.raises(mpidl.TrainingError, match=f"{CHANGES[change]}.*wrap the model anew.*{where}"):
        loss_of_words(wrapped, comm.rank).backward()


def test_a_frozen_parameter_may_be_added_but_not_trained(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Words), process_group=comm)
    torch.manual_seed(1)
    adapter(wrapped.module)
    wrapped.module.head[1].requires_grad_(False)
    plain = copy.deepcopy(wrapped.module)
    loss_of_words(wrapped, comm.rank).backward()
    sum(loss_of_words(plain, rank) for rank in range(comm.size)).backward()
    torch.testing.assert_close(wrapped.module.embed.weight.grad, plain.embed.weight.grad / comm.size)
    wrapped.module.head[1].requires_grad_()
    with pytest.raises(mpidl.TrainingError, match=CHANGES[adapter]):
        loss_of_words(wrapped, comm.rank).backward()


def test_parameters_that_go_elsewhere_in_the_module_train_on(comm) -> None:
    def moved(m: Any) -> Any:
        nn.utils.parametrize.register_parametrization(m.head, "weight", nn.Tanh())
        m.embed = nn.Sequential(m.embed)
        return m

    wrapped = mpidl.DistributedDataParallel(made(Words), process_group=comm)
    moved(wrapped.module)
    loss_of_words(wrapped, comm.rank).backward()
    check(wrapped.module, mean_gradients(lambda: moved(Words()), loss_of_words, comm.size))


def test_parameters_taken_out_of_the_module(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Words), process_group=comm)
    wrapped.module.head.bias = None
    with pytest.raises(mpidl.TrainingError, match=r"^head\.bias: taken out .*wrap"):
        loss_of_words(wrapped, comm.rank).backward()
    tolerant = mpidl.DistributedDataParallel(made(Words), process_group=comm, find_unused_parameters=True)
    tolerant.module.head.bias = None
    loss_of_words(tolerant, comm.rank).backward()
    assert tolerant.module.head.weight.grad is not None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed((x * 5).long() % 5)))


def test_tied_parameters(comm) -> None:
    follow(comm, Tied, lambda m, rank: m(data(rank)).square().sum())


def test_parameters_frozen_and_unfrozen_between_passes(comm) -> None:
    model = made(Several)
    model.layers[2].requires_grad_(False)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5)

    def loss(m: Any, rank: int) -> torch.Tensor:
        return m(data(rank), (0, 1, 2)).sum()

    for frozen in ([2], [2], [], [0], [0], [1, 2], []):
        for number, layer in enumerate(model.layers):
            layer.requires_grad_(number not in frozen)
        model.zero_grad()
        loss(wrapped, comm.rank).backward()

        def make(frozen: list[int] = frozen) -> nn.Module:
            made_anew = Several()
            for number in frozen:
                made_anew.layers[number].requires_grad_(False)
            return made_anew

        check(model, mean_gradients(make, loss, comm.size))


@dataclass
class Output:
    first: torch.Tensor
    others: dict[str, torch.Tensor]


@dataclass(slots=True)
class Slotted:
    first: torch.Tensor
    others: dict[str, torch.Tensor]

    def __call__(self) -> None:
        """Some outputs can be called."""


@pytest.mark.parametrize(
    "pack",
    [
        lambda a, b: (a, [b]),
        lambda a, b: {"a": a, "b": {"c": b}},
        lambda a, b: Output(a, {"b": b}),
        lambda a, b: Slotted(a, {"b": b}),
        lambda a, b: SimpleNamespace(first=a, others={"b": b}),
    ],
    ids=["tuple", "dict", "dataclass", "slots", "object"],
)
def test_outputs_of_any_form(comm, pack: Callable[..., Any]) -> None:
    class Packs(Several):
        def forward(self, x, order):
            return pack(super().forward(x, order[:1]), super().forward(x, order[1:]))

    def loss(m: Any, rank: int) -> torch.Tensor:
        out = m(data(rank), (0, 1, 2))
        if isinstance(out, tuple):
            a, b = out[0], out[1][0]
        elif isinstance(out, dict):
            a, b = out["a"], out["b"]["c"]
        else:
            a, b = out.first, out.others["b"]
        return (a * b).sum()

    follow(comm, Packs, loss)


def test_several_forward_passes_of_a_model_with_running_statistics(comm) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.layer(x))

    def loss(m: Any, rank: int) -> torch.Tensor:
        a, b = m(data(rank)), m(data(rank + 10))
        return (a * b).sum() + a.square().sum()

    follow(comm, Normed, loss)


@pytest.mark.parametrize("retained", [False, True], ids=["two forward passes", "a retained graph"])
def test_several_backward_passes_behind_re_entrant_checkpoints(comm, retained: bool) -> None:
    """Without a forward pass in between. What the graph does not show of one may be behind the other, too."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.hidden, x, use_reentrant=True))

    def losses(m: Any, rank: int) -> list[torch.Tensor]:
        x = data(rank).requires_grad_()
        return [m(x).sum()] * 2 if retained else [m(x).sum(), m(x).sum()]

    model = made(Checkpointed)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, find_unused_parameters=True)
    expected = mean_gradients(Checkpointed, lambda m, rank: m(data(rank).requires_grad_()).sum(), comm.size, passes=2)
    for _ in range(2):
        model.zero_grad()
        for loss in losses(wrapped, comm.rank):
            loss.backward(retain_graph=retained)
        check(model, expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "re-entrant"])
def test_the_whole_model_in_a_checkpoint(comm, reentrant: bool) -> None:
    def loss(m: Any, rank: int) -> torch.Tensor:
        x = data(rank).requires_grad_()
        return checkpoint(lambda x: m(x, (0, 1, 2)), x, use_reentrant=reentrant).sum()

    follow(comm, Several, loss)


class Shares(Several):
    """A layer in two re-entrant checkpoints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x.requires_grad_()
        for number in (0, 1, 0):
            x = checkpoint(self.layers[number], x, use_reentrant=True)
        return self.layers[2](x)


def test_a_parameter_in_two_re_entrant_checkpoints_of_a_static_graph(comm) -> None:
    follow(comm, Shares, lambda m, rank: m(data(rank)).sum(), static_graph=True)


def test_a_gradient_that_comes_too_late_is_refused_with_the_setting_that_helps(comm) -> None:
    wrapped = mpidl.DistributedDataParallel(made(Shares), process_group=comm, bucket_cap_mb=1e-6)
    with pytest.raises(mpidl.TrainingError, match=r"layers\.0.*arrived twice.*static_graph=True"):
        wrapped(data(comm.rank)).sum().backward()


def test_functional_call(comm) -> None:
    def loss(m: Any, rank: int) -> torch.Tensor:
        scaled = {name: p * 2 for name, p in m.named_parameters()}
        return torch.func.functional_call(m, scaled, (data(rank), (0, 1, 2))).sum()

    follow(comm, Several, loss)


def test_gradients_of_gradients_are_refused(comm) -> None:
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    with pytest.raises(mpidl.TrainingError, match="create_graph=True"):
        wrapped(data(comm.rank), (0, 1, 2)).sum().backward(create_graph=True)
    model.zero_grad()
    wrapped(data(comm.rank), (0, 1, 2)).sum().backward()
    check(model, mean_gradients(Several, lambda m, rank: m(data(rank), (0, 1, 2)).sum(), comm.size))


def test_gradients_of_leaves_by_themselves_are_not_averaged(comm) -> None:
    """torch.autograd.grad to parameters, or to an input that is a leaf next to them, gives this rank's own."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    model = Scales()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    x = data(comm.rank).requires_grad_()
    (own,) = torch.autograd.grad(wrapped(x).sum(), [model.weight])
    torch.testing.assert_close(own, x.detach().sum(0))
    (slope,) = torch.autograd.grad(wrapped(x).sum(), x)
    assert (slope == 1).all()
    wrapped(x).sum().backward()
    check(model, mean_gradients(Scales, lambda m, rank: m(data(rank)).sum(), comm.size))


@pytest.mark.parametrize("refused", [False, True], ids=["raised", "refused"])
def test_the_graph_of_an_earlier_forward_pass_after_an_exception(comm, refused: bool) -> None:
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-6)
    later, sooner = (wrapped(data(comm.rank), (0, 1, 2)).sum() for _ in range(2))
    if refused:
        with pytest.raises(mpidl.TrainingError):
            sooner.backward(create_graph=True)
    else:
        handle = model.layers[1].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sooner.backward()
        handle.remove()
    model.zero_grad()
    later.backward()
    check(model, mean_gradients(Several, lambda m, rank: m(data(rank), (0, 1, 2)).sum(), comm.size))


def test_an_exception_in_the_middle_of_a_pass(comm) -> None:
    """All ranks see it; what was launched is awaited, and the next step is right."""
    model = made(Several)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-6)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("in backward")

    out = wrapped(data(comm.rank), (0, 1, 2))
    handle = model.layers[1].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"):
        out.sum().backward()
    handle.remove()
    model.zero_grad()
    wrapped(data(comm.rank), (0, 1, 2)).sum().backward()
    check(model, mean_gradients(Several, lambda m, rank: m(data(rank), (0, 1, 2)).sum(), comm.size))


@pytest.mark.ranks(2)
def test_a_compiled_module_and_a_compiled_wrapper(comm) -> None:
    def loss(m: Any, rank: int) -> torch.Tensor:
        return m(data(rank), (0, 1, 2)).sum()

    expected = mean_gradients(Several, loss, comm.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for outside in (False, True):
            torch._dynamo.reset()
            model = made(Several)
            inner: Any = model if outside else torch.compile(model, backend="aot_eager")
            wrapped: Any = mpidl.DistributedDataParallel(inner, process_group=comm, bucket_cap_mb=1e-5)
            if outside:
                wrapped = torch.compile(wrapped, backend="aot_eager")
            for _ in range(3):
                model.zero_grad()
                loss(wrapped, comm.rank).backward()
                check(model, expected)


@pytest.mark.ranks(2)
def test_the_compiler_sees_the_model_and_nothing_of_this_project(comm, monkeypatch) -> None:
    traced: list[str] = []
    compile_frame = convert_frame._compile

    def noted(code: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(code.co_filename)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noted)
    torch._dynamo.reset()
    wrapped: Any = torch.compile(mpidl.DistributedDataParallel(made(Several), process_group=comm), backend="eager")
    for _ in range(2):
        wrapped(data(comm.rank), (0, 1, 2)).sum().backward()
    assert inspect.getfile(Several) in traced
    ours = tuple(str(Path(package.__file__).parent) for package in (mpidl, collectives))
    assert not [file for file in traced if file.startswith(ours)]


def test_in_eval_mode_gradients_are_averaged_too(comm) -> None:
    def loss(m: Any, rank: int) -> torch.Tensor:
        m.eval()
        return m(data(rank))

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1), nn.Flatten(0))

    follow(comm, make, lambda m, rank: loss(m, rank).sum())
