"""DistributedDataParallel follows single-process training on the whole batch, model by model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from tests.mpidl.small_models import (
    Branching,
    Gaps,
    Images,
    Mixture,
    Perceptron,
    Recipe,
    Recurrent,
    SmoothImages,
    fresh,
    largest_difference,
    small_gpt2,
    train,
)

pytestmark = pytest.mark.mpi


UNUSED = {"find_unused_parameters": True}
SGD = {"optimizer": torch.optim.SGD, "settings": {"lr": 0.05, "momentum": 0.9}}
# Every second one is short, as `each` has 3 or 4 ranks run it.
CASES: dict[str, tuple[Callable[[], nn.Module], dict, dict]] = {
    "resnet": (Images, {}, SGD),
    "lstm": (Recurrent, {"static_graph": True}, SGD),
    "resnet-fp32": (partial(Images, torch.float32), {}, {"optimizer": torch.optim.SGD, "settings": {"lr": 1e-4}}),
    "bert": (Gaps, {}, SGD),
    "gpt2": (small_gpt2, {}, {}),
    "tied-and-frozen": (Mixture, UNUSED, SGD),
    "smooth-images": (SmoothImages, {}, SGD),
    "branches": (Branching, UNUSED, SGD),
    "perceptron": (Perceptron, {}, SGD),
}


@pytest.mark.each("case")
@pytest.mark.parametrize("micro", [1, 2], ids=["", "accumulated"])
@pytest.mark.parametrize("case", CASES)
def test_training_equals_that_on_the_whole_batch(comm, case: str, micro: int, fewer: Callable[[int], int]) -> None:
    make, settings, training = CASES[case]
    recipe = Recipe(
        steps=fewer(30), micro=micro, sync_each=False, engine={"bucket_cap_mb": 0.002, **settings}, **training
    )
    expected = train(fresh(make), recipe)
    moved = [
        float((p - q).abs().max()) for p, q in zip(expected.model.parameters(), fresh(make).parameters(), strict=True)
    ]
    assert max(moved) > (0.003 if case != "resnet-fp32" else 3e-5)  # it does train
    model = mpidl.SyncBatchNorm.convert_sync_batchnorm(fresh(make, comm.rank), comm)
    trained = train(model, recipe, "ddp", comm)
    np.testing.assert_allclose(trained.losses, expected.losses, rtol=1e-5 if case != "resnet" else 1e-9)
    difference = largest_difference(expected.weights, trained.weights)
    assert difference < 1e-5 * max(float(p.abs().max()) for p in expected.model.parameters())
