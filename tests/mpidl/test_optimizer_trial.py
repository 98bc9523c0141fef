"""Needs of an optimizer's step: declared by its class, known of torch's, or tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpidl.optim import LAMB, DiLoCo, Dion, OneBitAdam, PostLocalSGDOptimizer
from mpidl.optimizer_trial import StepNeeds, Trial, exchanges_gradients, needs_of

TRIED = Trial(wholes=False, noted=frozenset({"lr"}))


def needs(optimizer_class: type[torch.optim.Optimizer], **settings: Any) -> StepNeeds:
    return needs_of(optimizer_class, lambda: TRIED, **settings)


class Derived(LAMB):
    """May change what the class that it derives from declares."""


class Declares(torch.optim.Muon):
    """Declares what no Muon needs."""

    step_needs = StepNeeds(wholes=False, block=3)


class Muon(torch.optim.Optimizer):
    """Has the name of one of torch's."""


class OfBlocks(torch.optim.LBFGS):
    """Derives from one of torch's."""


class OneBitKind(OneBitAdam):
    """Averages as the class that it derives from does."""


@pytest.mark.parametrize(
    ("optimizer_class", "expected"),
    [
        (torch.optim.AdamW, StepNeeds(wholes=False)),
        (torch.optim.Muon, StepNeeds(wholes=True)),
        (torch.optim.Adafactor, StepNeeds(wholes=True)),
        (torch.optim.LBFGS, StepNeeds(wholes=False, dependent=True)),
        (LAMB, LAMB.step_needs),
        (Dion, Dion.step_needs),
        (Declares, Declares.step_needs),
        (Derived, TRIED),
        (OneBitKind, OneBitAdam.step_needs),
        (DiLoCo, PostLocalSGDOptimizer.step_needs),
    ],
)
@pytest.mark.parametrize("by_name", [True, False])
def test_only_a_class_of_which_nothing_is_known_is_tried(
    optimizer_class: type[torch.optim.Optimizer], expected: StepNeeds, by_name: bool
) -> None:
    assert needs(optimizer_class, by_name=by_name) == expected


def test_a_class_named_as_one_of_torch_or_derived_from_it_needs_what_that_does() -> None:
    assert needs(Muon) == StepNeeds(wholes=True)
    assert needs(OfBlocks).dependent
    for kind in (Muon, OfBlocks):
        assert needs(kind, by_name=False) is TRIED


def test_what_a_step_exchanges_is_known_of_derived_classes_too() -> None:
    assert exchanges_gradients(OneBitKind)
    assert not exchanges_gradients(DiLoCo)
    assert not exchanges_gradients(Dion)
