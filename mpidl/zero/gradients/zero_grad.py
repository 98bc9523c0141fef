"""Makes `model.zero_grad()` clear the gradient shards of the model's optimizer too."""

from __future__ import annotations

import weakref

import torch


def clears_with(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Lets the model's own `zero_grad` forget the gradients that the optimizer holds, as long as that is there."""
    of, by = weakref.ref(model), weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        """Forgets the gradients that the optimizer holds, and those of torch.nn.Module.zero_grad."""
        model, optimizer = of(), by()
        if optimizer is not None:
            optimizer.zero_grad()
        if model is not None:
            type(model).zero_grad(model, set_to_none)
        if optimizer is not None and not set_to_none:
            optimizer.zero_grad(set_to_none=False)

    model.zero_grad = zero_grad  # type: ignore[method-assign]


def clears_alone(model: torch.nn.Module) -> None:
    """Gives the model its own `zero_grad` back."""
    model.__dict__.pop("zero_grad", None)
