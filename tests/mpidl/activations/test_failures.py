"""Exceptions in checkpoints, functions that run otherwise the second time, and wrong arguments."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpidl.activations import CheckpointStore, checkpoint, checkpoint_modules
from mpidl.errors import ConfigurationError
from tests.mpidl.activations.checkpointed import assert_same, dropping, passed
from tests.mpidl.small_models import small_gpt2


@pytest.mark.parametrize("again", [False, True], ids=["in forward", "in the second run"])
def test_an_exception_leaves_nothing_behind(store, again: bool) -> None:
    model = dropping()
    expected = passed(model)
    checkpoint_modules(model, store=store)
    runs = []

    def fail(*_: Any) -> None:
        runs.append(1)
        if len(runs) == (2 if again else 1):
            raise KeyError("on purpose")

    handle = model.transformer["h"][2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        passed(model)
    handle.remove()
    gc.collect()
    assert store is None or store.nbytes == store.bytes_on_disk == 0
    assert_same(passed(model), expected)


def test_another_second_run_is_noticed(store) -> None:
    runs: list[int] = []

    def changing(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin() if len(runs) == 1 else (x[:1] * 2).sin()

    y = checkpoint(changing, torch.randn(40, requires_grad=True) * 1, store=store)
    with pytest.raises(RuntimeError, match=r"different (metadata|number)"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checkpoint(3), "checkpoint: got 3; needs a function"),
        (lambda: checkpoint(torch.sin, torch.ones(1), use_reentrant=True), "use_reentrant: got True"),
        (lambda: checkpoint(torch.sin, torch.ones(1), store="here"), "store: got 'here'; needs a CheckpointStore"),
        (lambda: checkpoint_modules(3), "model: got int; needs a torch.nn.Module"),
        (lambda: checkpoint_modules(small_gpt2(), every=0), "every: got 0; needs a whole number of at least 1"),
        (lambda: checkpoint_modules(small_gpt2(), every=True), "every: got True"),
        (lambda: checkpoint_modules(small_gpt2(), [3]), r"modules: got \[3\]; needs module classes"),
        (lambda: checkpoint_modules(small_gpt2(), nn.Conv2d), "modules: nothing in GPT2 fits <class"),
        (lambda: checkpoint_modules(nn.Linear(1, 1)), "modules: nothing in Linear is a list of blocks of one class"),
        (lambda: checkpoint_modules(small_gpt2(), store=3), "store: got 3"),
        (lambda: checkpoint_modules(small_gpt2(), evry=3), "options: got evry; needs any of context_fn, "),
        (lambda: CheckpointStore(group=3), "group: got 3; needs a collectives.Communicator"),
        (lambda: CheckpointStore(offload=True), "offload: got True; needs a directory, 'cpu' or None"),
        (lambda: CheckpointStore(offload="/nowhere/at/all"), "offload: got '/nowhere/at/all', where no file can"),
        (lambda: CheckpointStore(smallest=0), "smallest: got 0; needs a number of bytes of at least 1"),
        (lambda: CheckpointStore(offload=".", buffer_mb=0), r"buffer_mb: got 0; needs a size from 2\^-20 to below"),
        (
            lambda: checkpoint(torch.sin, torch.ones(999, requires_grad=True), store=CheckpointStore(offload="cpu")),
            "offload: got 'cpu' for activations that are in the CPU's memory",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()
