"""unwrap: a model is a plain one again, and goes on in any other engine to the bit."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi

BF16 = {"precision": mpidl.Precision(torch.bfloat16, reduce_dtype=torch.float32)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 1": ("stage 1", {}),
    "stage 2": ("stage 2", {}),
    "stage 3": ("stage 3", {}),
    "stage 3 gathered": ("stage 3 gathered", {}),
    "stage 3 by nodes": ("stage 3", {"shard_group": "node"}),
    "stage 1 bf16": ("stage 1", BF16),
    "stage 3 bf16": ("stage 3", BF16),
    "stage 2 disk": ("stage 2", {"offload": "disk"}),
    "stage 3 disk bf16": ("stage 3", {"offload": "disk", **BF16}),
}


def hooks(model: nn.Module) -> list[str]:
    """Calls besides the modules', and attributes of modules and parameters in place of a class's."""
    found = []
    for module in model.modules():
        found += [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
        found += vars(module).keys() & {"__deepcopy__", "__reduce_ex__", "zero_grad", "forward"}
    for p in model.parameters():
        found += [name for name in ("_backward_hooks", "_post_accumulate_grad_hooks") if getattr(p, name)]
        found += [name for name in vars(p) if name.startswith("_mpidl") and vars(p)[name] is not None]
    return found


@pytest.mark.parametrize("model", ["mixture", "gpt2"])
@pytest.mark.parametrize("case", CASES)
def test_the_model_is_a_plain_one_again_and_goes_on_to_the_bit(comm, case: str, model: str) -> None:
    engine, settings = CASES[case]
    whole = Run(engine, comm, fresh(MODELS[model]), **settings)
    whole.steps(0, 2)
    run = Run(engine, comm, fresh(MODELS[model]), **settings)
    run.steps(0, 2)
    weights = mpidl.broadcast_object(comm, run.weights())
    states = run.optimizer.state_dict()
    plain = run.optimizer.unwrap()
    assert plain is run.model
    assert hooks(plain) == []
    like = fresh(MODELS[model])
    for (name, p), other in zip(plain.named_parameters(), like.parameters(), strict=True):
        assert (type(p), p.dtype, p.requires_grad) == (nn.Parameter, other.dtype, other.requires_grad), name
        assert p.untyped_storage().nbytes() == p.nbytes, name  # of its own, and no part of what the engine had
    state = plain.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in state)
    with pytest.raises(mpidl.TrainingError, match="was taken off its model by unwrap"):
        run.optimizer.step()

    twin = copy.deepcopy(plain)
    twin(*sequences(2, 0)).backward()
    assert any(p.grad is not None and p.grad.any() for p in twin.parameters())
    precision = {name: settings[name] for name in BF16 if name in settings}
    again = Run("stage 1" if WAYS[engine]["stage"] == 3 else "stage 3", comm, plain, **precision)
    again.optimizer.load_state_dict(states)
    again.schedule.load_state_dict(run.schedule.state_dict())
    assert again.steps(2, 4) == whole.steps(2, 4)


def test_it_can_be_wrapped_in_anything(comm) -> None:
    model = fresh(MODELS["gpt2"])
    losses = []
    for engine in ("stage 3", "stage 1", "stage 3", "ddp"):
        run = Run(engine, comm, model)
        losses += run.steps(0, 1)
        if engine != "ddp":
            made = run.optimizer._parts
            parts = [weakref.ref(part) for part in (made.parameters, made.shard_reducer, made.guard)]
            del made
            run.optimizer.unwrap()
            gc.collect()
            assert [part() for part in parts] == [None] * 3
    assert losses == sorted(losses, reverse=True)  # of the same batch


@pytest.mark.parametrize("engine", ["stage 1", pytest.param("stage 3", marks=pytest.mark.one_node)])
def test_what_cannot_be_unwrapped_goes_on(comm, engine: str) -> None:
    run, other = (Run(engine, comm, fresh(MODELS["gpt2"])) for _ in range(2))
    run.steps(0, 1)
    other.steps(0, 1)
    with (
        run.optimizer.gathered(),
        pytest.raises(mpidl.TrainingError, match=r"unwrap: inside `with optimizer\.gathered"),
    ):
        run.optimizer.unwrap()
    bias = run.model.transformer["ln_f"].bias
    laid_out = bias.data
    if comm.rank == comm.size - 1:
        bias.data = torch.zeros(3)
    with pytest.raises(mpidl.TrainingError, match="other memory was put in its place"):
        run.optimizer.unwrap()
    bias.data = laid_out
    assert run.steps(1, 2) == other.steps(1, 2)
