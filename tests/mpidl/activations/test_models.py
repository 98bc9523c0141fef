"""Models with checkpoints: names, copies, forwards that were replaced."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mpidl.activations import CheckpointStore, checkpoint_modules
from mpidl.errors import ConfigurationError
from mpidl.memory import measure_activations
from tests.mpidl.activations.checkpointed import assert_same, dropping, passed
from tests.mpidl.small_models import sequences


def test_a_model_keeps_its_names_and_can_be_put_back() -> None:
    model = dropping()
    names, types = list(model.state_dict()), [type(m) for m in model.modules()]
    with checkpoint_modules(model, every=2) as handle:
        assert handle.names == ["transformer.h.0", "transformer.h.2"]
        assert list(model.state_dict()) == names
        assert [type(m) for m in model.modules()] == types
        model.load_state_dict(dropping().state_dict())
        with pytest.raises(ConfigurationError, match=r"transformer\.h\.2 is checkpointed already"):
            checkpoint_modules(model, lambda m: m is model.transformer["h"][2])
        assert checkpoint_modules(model, lambda m: m is model.transformer["h"][1]).names == ["transformer.h.1"]
    handle.remove()
    assert ["forward" in block.__dict__ for block in model.transformer["h"]] == [False, True, False, False]


def test_a_forward_of_another_program_is_kept() -> None:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x.sin()
    theirs = layer.forward
    handle = checkpoint_modules(nn.ModuleList([layer]), nn.Linear)
    x = torch.randn(4, requires_grad=True)
    layer(x).sum().backward()
    assert_same(x.grad, x.detach().cos())
    handle.remove()
    assert layer.forward is theirs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_checkpointed_by_themselves(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = dropping()
    expected = passed(model)
    model.zero_grad()
    checkpoint_modules(model)
    other = copied(model)
    for p in model.parameters():
        p.data.zero_()
    assert_same(passed(other), expected)
    assert all(p.grad is None for p in model.parameters())
    with measure_activations(other) as saved:
        loss = other(*sequences(0, 0))
    assert loss.requires_grad
    with measure_activations(other) as all_of_it:
        loss = dropping()(*sequences(0, 0))
    assert saved.nbytes < all_of_it.nbytes / 2


def test_a_checkpointed_model_is_freed_at_once() -> None:
    model = dropping()
    checkpoint_modules(model, store=CheckpointStore())
    passed(model)
    gc.collect()
    gc.disable()
    try:
        block = torch.utils.weak.ref(model.transformer["h"][0])
        del model
        assert block() is None
    finally:
        gc.enable()


def test_names_of_arguments_that_checkpoint_has_too() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor, store: int, debug: int) -> torch.Tensor:
            return x * store * debug

    model = nn.ModuleList([Named()])
    checkpoint_modules(model, Named)
    assert model[0](torch.ones((), requires_grad=True), store=2, debug=3) == 6
