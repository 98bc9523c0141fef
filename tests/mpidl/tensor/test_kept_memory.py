"""Bytes that a layer keeps for backward, by formula: under sequence parallelism 1/tp of all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.tensor import traffic
from mpidl.tensor.communication import TensorGroup
from tests.mpidl.tensor.layered import BATCH, BUILDERS, TOKENS, WIDTH, gpt2, llama, loss
from tests.mpidl.tensor.reference import part_of
from tests.mpidl.tensor.with_dropout import seeded

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

ITEM = 8


def kept_bytes(model: nn.Module) -> int:
    """Bytes of all storage that a forward pass keeps for backward, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = seeded(lambda: loss(model))
    found = sum(storage.nbytes() for storage in kept.values())
    result.backward()
    return found


def of_a_layer(build: Callable[[int], nn.Module], **cuts: Any) -> int:
    """Bytes that a layer adds: those of a model of three less those of one of two."""
    found = []
    for layers in (2, 3):
        model = build(layers).double()
        if cuts:
            mpidl.parallelize(model, **cuts)
        found.append(kept_bytes(model))
    return found[1] - found[0]


WITH_DROPOUT = {**BUILDERS, "gpt2 with dropout": partial(gpt2, dropout=0.1)}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_with_sequences_in_pieces_a_layer_keeps_1_of_tp_of_everything(comm: Communicator, name: str) -> None:
    whole = of_a_layer(WITH_DROPOUT[name])
    with Mesh(tp=comm.size, comm=comm) as mesh:
        part = of_a_layer(WITH_DROPOUT[name], mesh=mesh, sequence_parallel=True)
    assert part * comm.size == whole


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_with_whole_sequences_each_rank_keeps_norms_and_the_inputs_of_regions(
    comm: Communicator, dropout: float
) -> None:
    """10 of the 34 bytes of Korthikanti et al.: two inputs of norms, two of regions, two masks; and what norms note."""
    build = partial(gpt2, dropout=dropout)
    whole = of_a_layer(build)
    masks, notes = 2 * WIDTH * (dropout > 0), 2 * 2
    replicated = BATCH * TOKENS * (4 * WIDTH + masks + notes) * ITEM
    with Mesh(tp=comm.size, comm=comm) as mesh:
        assert of_a_layer(build, mesh=mesh) * comm.size == whole + (comm.size - 1) * replicated


# ---- an input that is gathered again -------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_one_gather_serves_all_layers_of_a_region_in_each_backward_pass(comm: Communicator) -> None:
    whole, model = llama(1).double(), llama(1).double()
    model.load_state_dict(whole.state_dict())
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        for each in (whole, model):
            each.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
            each.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        losses = [loss(each) for each in (whole, model)]
        before = traffic(model).all_gathers
        for each in losses:
            each.backward(retain_graph=True)
        first = traffic(model).all_gathers - before
        for each in losses:
            each.backward()
        assert traffic(model).all_gathers - before == 2 * first
        assert first == 2 + 2 + 1  # regions again; gradients of regions' outputs; where pieces begin
        for (name, p), q in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            if p.requires_grad:
                torch.testing.assert_close(p.grad, part_of(q[1].grad, p), rtol=1e-4, atol=1e-6, msg=name)  # fp32 norms


@pytest.mark.ranks(2, exactly=True)
def test_a_gathered_input_is_released_after_its_last_use(comm: Communicator) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    model = llama(1).double()
    with Mesh(tp=2, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        with pytest.MonkeyPatch.context() as patch:
            gather = TensorGroup.all_gather

            def noted(*args: Any) -> torch.Tensor:
                assert sum(ref() is not None for ref in seen) <= 1
                seen.append(weakref.ref(result := gather(*args)))
                return result

            patch.setattr(TensorGroup, "all_gather", noted)
            result = loss(model)
            alive = [ref() for ref in seen if ref() is not None]
            assert len(alive) <= 1  # the hidden states that the output layer keeps
            del alive
            result.backward(retain_graph=True)
            assert sum(ref() is not None for ref in seen) <= 1
