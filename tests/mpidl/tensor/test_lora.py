"""Adapters of low rank around cut layers: training them equals one process, with the base frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh
from mpidl.mesh import placement
from tests.mpidl.tensor.reference import all_in_float64, build, largest_difference, loss_of, part_of, tokens, train
from tests.mpidl.tensor.test_plans import raised_on_every_rank

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


class Adapted(nn.Module):
    """A linear layer with adapters, of the structure that peft gives it."""

    def __init__(self, base: Any, rank: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base
        sizes = base.weight.shape if type(base).__name__ in ("Projection", "Conv1D") else base.weight.shape[::-1]
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(sizes[0], rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, sizes[1], bias=False)})

    def forward(self, x: torch.Tensor) -> Any:
        result = self.base_layer(x)
        y = self.lora_dropout["default"](x)
        return result + self.lora_B["default"](self.lora_A["default"](y)) * 1.5


def adapted(name: str, targets: tuple[str, ...], dropout: float = 0.0) -> nn.Module:
    """The model with adapters around the layers of these names, and all else frozen."""
    model = build(name)
    torch.manual_seed(1)
    for p in model.parameters():
        p.requires_grad_(False)
    for module in list(model.modules()):
        for child, layer in list(module.named_children()):
            if child in targets and hasattr(layer, "weight"):
                setattr(module, child, Adapted(layer, 3, dropout).double())
    return model


def by_peft(name: str, targets: tuple[str, ...]) -> nn.Module:
    """LoRA by peft, whose B begins with zeros, here with random numbers."""
    peft = pytest.importorskip("peft")
    model = build(name)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, target_modules=list(targets), init_lora_weights=False, lora_bias=True)
    return peft.get_peft_model(model, config).double()  # type: ignore[no-any-return]


LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: adapted("llama, one key head", LLAMA),
    "gpt2": lambda: adapted("gpt2", ("c_attn", "c_fc", "c_proj")),
    "bert": lambda: adapted("bert", ("query", "value", "dense")),
    "qwen2, output": lambda: adapted("qwen3", ("v_proj", "lm_head")),
    "peft llama": lambda: by_peft("llama, two key heads", LLAMA),
    "peft gpt2": lambda: by_peft("hf gpt2", ("c_attn", "c_fc", "c_proj")),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("plan", [None, "auto"])
@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_in_one_process(
    comm: Communicator, name: str, plan: str | None, sequence_parallel: bool, fewer: Callable[[int], int]
) -> None:
    """By gradient descent with momentum, as Adam makes rounding large where adapters have next to no gradient."""
    whole, model = CASES[name](), CASES[name]()
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, plan, sequence_parallel=sequence_parallel)
        loss_of(whole, tokens(0)).backward()
        loss_of(model, tokens(0)).backward()
        trained = 0
        for (at, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), at
            if q.grad is not None and p.grad is not None:
                trained += 1
                torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-9, atol=1e-11, msg=at)
        assert trained >= 4
        whole.zero_grad()
        model.zero_grad()
        losses = []
        for each in (model, whole):
            optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
            losses.append(train(each, fewer(20), optimizer))
        assert losses[0] == pytest.approx(losses[1], abs=1e-10)
        assert largest_difference(model, whole) < 1e-9
        if comm.size > 1:
            cut = {at.split(".")[-3] for at, p in model.named_parameters() if ".lora_" in at and placement(p).cut}
            assert cut >= {"lora_A", "lora_B"} or name == "qwen2, output"
        mpidl.unparallelize(model)
        assert largest_difference(model, whole) < 1e-9
        torch.testing.assert_close(loss_of(model, tokens(9)), loss_of(whole, tokens(9)), rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_of_adapters_leaves_the_ranks_equal(comm: Communicator, name: str) -> None:
    model = adapted(name, ("c_attn", "c_fc", "c_proj", "query", "dense"), dropout=0.5)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        train(model, 3)
        replicated = {at: p for at, p in model.named_parameters() if placement(p).cut is None}
        mpidl.check_replicas(replicated, process_group=mesh["tp"])
        state = torch.get_rng_state()
        assert len({bytes(other) for other in mpidl.all_gather_object(comm, state.numpy().tobytes())}) == 1


@pytest.mark.ranks(2, exactly=True)
def test_other_kinds_of_adapters_are_refused_by_name(comm: Communicator) -> None:
    model = adapted("gpt2", ("c_fc",))
    inner: Any = model.get_submodule("transformer.h.1.mlp.c_fc")
    inner.lora_magnitude_vector = nn.ModuleDict({"default": nn.Identity()})
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        match = "transformer.h.1.mlp.c_fc: has adapters with lora_magnitude_vector"
        raised_on_every_rank(comm, ConfigurationError, match, lambda: mpidl.parallelize(model, mesh))
