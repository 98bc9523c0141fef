"""Column- and row-parallel layers by themselves, and the ranks' inputs, judged by the whole layers of torch."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh, TrainingError
from mpidl.job.objects import all_gather_object
from mpidl.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mpidl.tensor.counting import exchange_bytes
from tests.mpidl.tensor.reference import build, loss_of, part_of, tokens

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

IN, FEATURES, OUT = 6, 13, 5


def whole_network(bias: bool = True, features: int = FEATURES) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(IN, features, bias, dtype=torch.float64),
        nn.GELU(),
        nn.Linear(features, OUT, bias, dtype=torch.float64),
    )


def cut_network(mesh: Mesh, bias: bool = True, features: int = FEATURES) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        ColumnParallelLinear(IN, features, bias, mesh=mesh, dtype=torch.float64),
        nn.GELU(),
        RowParallelLinear(features, OUT, bias, mesh=mesh, dtype=torch.float64),
    )


def check_same(model: nn.Module, whole: nn.Module, x: torch.Tensor) -> None:
    """Compares results, and gradients of the input and of all weights."""
    inputs = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad) for _ in range(2)]
    assert inputs[0].stride() == x.stride()
    y, expected = model(inputs[0]), whole(inputs[1])
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    if expected.requires_grad and torch.is_grad_enabled():
        for each in (y, expected):
            (each.sin() * 3).sum().backward()
    if x.requires_grad and torch.is_grad_enabled():
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        expected_gradient = None if q.grad is None else part_of(q.grad, p)
        torch.testing.assert_close(p.grad, expected_gradient, rtol=1e-12, atol=1e-12, msg=name)


def random_input(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "a vector": lambda: random_input(IN),
    "a matrix": lambda: random_input(3, IN),
    "sequences": lambda: random_input(2, 4, IN),
    "four dimensions": lambda: random_input(2, 1, 3, IN),
    "no rows": lambda: random_input(0, IN),
    "columns of a matrix": lambda: random_input(IN, 4).t(),
    "sequences first": lambda: random_input(4, 2, IN).transpose(0, 1),
    "a row many times": lambda: random_input(1, IN).expand(5, IN),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", INPUTS)
def test_a_pair_of_layers_computes_as_the_whole_one(comm: Communicator, shape: str, bias: bool) -> None:
    x = INPUTS[shape]()
    with Mesh(tp=comm.size, comm=comm) as mesh:
        if shape == "a row many times":
            model, whole = cut_network(mesh, bias), whole_network(bias)
            torch.testing.assert_close(model(x), whole(x))
            return
        check_same(cut_network(mesh, bias), whole_network(bias), x.requires_grad_())
        check_same(cut_network(mesh, bias), whole_network(bias), x.detach())


def test_layers_take_their_input_by_its_name_too(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model, whole, x = cut_network(mesh), whole_network(), random_input(3, IN)
        up, down = (layer for layer in model if isinstance(layer, nn.Linear))
        torch.testing.assert_close(down(input=up(input=x).tanh()), whole[-1](whole[0](x).tanh()))
        embedding, tokens = VocabParallelEmbedding(7, 4, mesh=mesh), torch.tensor([[1, 6, 0]])
        torch.testing.assert_close(embedding(input=tokens), embedding(tokens))


@pytest.mark.parametrize("features", [1, 3, 13])
def test_initial_values_are_those_of_one_process(comm: Communicator, features: int) -> None:
    """Also the random numbers that follow, and also with fewer features than ranks."""
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = cut_network(mesh, features=features)
        after = torch.rand(3)
        whole = whole_network(features=features)
        assert torch.equal(torch.rand(3), after)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(p.detach(), part_of(q.detach(), p))
        assert sum(p.numel() for p in model.parameters()) <= sum(p.numel() for p in whole.parameters())
        check_same(model, whole, random_input(3, IN).requires_grad_())
        torch.manual_seed(4)
        embedding = VocabParallelEmbedding(features, 4, mesh=mesh)
        torch.manual_seed(4)
        of_whole = nn.Embedding(features, 4)
        assert torch.equal(embedding.weight.detach(), part_of(of_whole.weight.detach(), embedding.weight))


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias", "0", "2", "all"])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(comm: Communicator, frozen: str) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        for trains_input in (True, False):
            model, whole = cut_network(mesh), whole_network()
            for each in (model, whole):
                for name, p in each.named_parameters():
                    p.requires_grad_(not (frozen == "all" or name.startswith(frozen)))
            check_same(model, whole, random_input(3, IN).requires_grad_(trains_input))


@pytest.mark.parametrize("mode", ["no_grad", "inference", "eval", "train"])
def test_modes(comm: Communicator, mode: str) -> None:
    modes: dict[str, Any] = {"no_grad": torch.no_grad(), "inference": torch.inference_mode()}
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model, whole = cut_network(mesh).train(mode == "train"), whole_network()
        with modes.get(mode, contextlib.nullcontext()):
            check_same(model, whole, random_input(3, IN))
            assert model(random_input(3, IN)).requires_grad == (mode in ("eval", "train"))


def test_autocast_computes_in_its_dtype_and_gradients_are_in_the_weights(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model, whole = cut_network(mesh).float(), whole_network()
        x = random_input(3, IN).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            assert y.dtype == torch.bfloat16
            y.float().sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        of_whole = x.detach().double().requires_grad_()
        expected = whole(of_whole)
        expected.sum().backward()
        torch.testing.assert_close(y.double(), expected, rtol=0.03, atol=0.03)
        torch.testing.assert_close(x.grad.double(), of_whole.grad, rtol=0.03, atol=0.03)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.double(), part_of(q.grad, p), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_layers_are_as_accurate_as_torchs(comm: Communicator, dtype: torch.dtype) -> None:
    exact = whole_network()
    x = random_input(3, IN)
    with Mesh(tp=comm.size, comm=comm) as mesh:
        y = cut_network(mesh).to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact(x), rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_a_graph_that_is_kept_gives_its_gradients_twice(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model, whole, x = cut_network(mesh), whole_network(), random_input(3, IN)
        for each in (model, whole):
            y = each(x).sum() + each(2 * x).square().sum()
            y.backward(retain_graph=True)
            y.backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert q.grad is not None
            torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-12, atol=1e-12)


def test_copies_of_layers_compute_with_the_same_ranks(comm: Communicator) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = cut_network(mesh)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        check_same(copied, whole_network(), random_input(3, IN).requires_grad_())


@pytest.mark.ranks(2, 3)
def test_dropout_between_layers_differs_over_tp_and_agrees_after_them(comm: Communicator) -> None:
    """13 features, of which the ranks draw different numbers; and an output layer that no row-parallel one follows."""

    def agree(value: Any) -> bool:
        return all(torch.equal(other, value) for other in all_gather_object(comm, value))

    with Mesh(tp=comm.size, comm=comm) as mesh:
        torch.manual_seed(0)
        up, down = ColumnParallelLinear(IN, 13, mesh=mesh), RowParallelLinear(13, IN, mesh=mesh)
        head, dropout = ColumnParallelLinear(IN, 2 * comm.size, mesh=mesh), nn.Dropout(0.5)
        for _ in range(3):
            features = dropout(up(torch.ones(8, IN)).detach() * 0 + 1)
            assert not agree(features[:, :4].detach())
            hidden = dropout(down(up(torch.ones(8, IN)).relu()))
            assert agree(hidden.detach())
            assert agree(torch.get_rng_state())
            head(hidden).sum().backward()
            assert agree(torch.get_rng_state())
            down.eval()(features)
            assert agree(torch.get_rng_state())


@pytest.mark.parametrize("features", [1, 13])
@pytest.mark.parametrize("shape", ["a vector", "sequences", "columns of a matrix", "no rows"])
def test_a_layer_may_give_its_whole_output_and_take_a_whole_input(
    comm: Communicator, shape: str, features: int
) -> None:
    x = INPUTS[shape]()
    with Mesh(tp=comm.size, comm=comm) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(
            ColumnParallelLinear(IN, features, mesh=mesh, gather_output=True, dtype=torch.float64),
            nn.GELU(),
            RowParallelLinear(features, OUT, mesh=mesh, input_is_parallel=False, dtype=torch.float64),
        )
        check_same(model, whole_network(features=features), x.requires_grad_())
        assert model[0](x).shape == (*x.shape[:-1], features)
        dropped = nn.Dropout(0.5)(copy.deepcopy(model)[0](x.detach()))
        assert all(torch.equal(other, dropped) for other in all_gather_object(comm, dropped.detach()))


@pytest.mark.ranks(2, 3)
def test_layers_of_a_mesh_share_their_memory(comm: Communicator) -> None:
    x = torch.ones(512, 64)
    with Mesh(tp=comm.size, comm=comm) as mesh:
        held = []
        for pairs in (1, 6):
            layers = [
                layer
                for _ in range(pairs)
                for layer in (ColumnParallelLinear(64, 96, mesh=mesh), RowParallelLinear(96, 64, mesh=mesh))
            ]
            nn.Sequential(*layers)(x).sum().backward()
            held.append(exchange_bytes(nn.Sequential(*layers)))
        assert held[1] <= 4 * x.nbytes
        assert held[1] - held[0] <= 2 * x.nbytes  # the two places of sums that are kept
        gone = weakref.ref(layers.pop())
        del layers
        gc.collect()
        assert gone() is None


# ---- inputs of the ranks -------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("what", ["values", "shapes"])
def test_with_mpidl_debug_different_inputs_are_one_error(
    comm: Communicator, what: str, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == 1:  # for all ranks
        monkeypatch.setenv("MPIDL_DEBUG", "1")
    model = build("gpt2")
    with Communicator() as group, Mesh(tp=comm.size, comm=group) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        loss_of(model, tokens(0)).backward()
        last = comm.rank == comm.size - 1
        x = tokens(int(last)) if what == "values" else tokens(0)[:, : 13 - last]
        with pytest.raises(TrainingError, match=f"rank {comm.size - 1} of tp.*mesh="):
            loss_of(model, x)
        comm.barrier()
        loss_of(model, tokens(0)).backward()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("change", ["another", "out of range", "shape"])
def test_with_mpidl_debug_different_targets_are_one_error(
    comm: Communicator, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank looks up its own targets in its part of the vocabulary, so that all would get one wrong loss."""
    monkeypatch.setenv("MPIDL_DEBUG", "1")
    model = build("gpt2")
    with Communicator() as group, Mesh(tp=comm.size, comm=group) as mesh:
        mpidl.parallelize(model, mesh)
        x, y = tokens(0), tokens(1)
        model(x, y).backward()
        logits = model.lm_head(torch.ones(6, model.config.embd, dtype=torch.float64))
        target = torch.arange(6)
        if comm.rank == comm.size - 1:
            y[0, 0] = (y[0, 0] + 1) % 257 if change == "another" else 10_000
            target = target[:5] if change == "shape" else target.flip(0)
        wrong = partial(F.cross_entropy, logits, target) if change == "shape" else partial(model, x, y)
        with pytest.raises(TrainingError, match=f"the targets of rank {comm.size - 1} of tp.*mesh="):
            wrong()
        comm.barrier()
        model(x, tokens(1)).backward()


@pytest.mark.ranks(2, 3)
def test_with_mpidl_debug_layers_by_themselves_compare_their_inputs(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDL_DEBUG", "1")
    with Communicator() as group, Mesh(tp=comm.size, comm=group) as mesh:
        model = cut_network(mesh)
        model(torch.full((2, IN), torch.nan, dtype=torch.float64))  # which equals nothing
        x = random_input(2, IN)
        model(x)
        with pytest.raises(TrainingError, match="rank 1 of tp"):
            model(x.flip(0) if comm.rank == 1 else x)
