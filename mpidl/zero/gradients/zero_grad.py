"""Makes `model.zero_grad()` clear the gradient shards of the model's optimizer too."""

from __future__ import annotations

import weakref

import torch

from .sharded_gradient import ShardedGradient


def install_zero_grad(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes the model's `zero_grad` clear the optimizer's gradients too, as long as the optimizer lives."""
    model_ref, optimizer_ref = weakref.ref(model), weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        """Clears as torch.nn.Module.zero_grad; the optimizer clears the gradients that are cut over the ranks."""
        model, optimizer = model_ref(), optimizer_ref()
        cut: dict[torch.nn.Parameter, torch.Tensor] = {}
        if model is not None and optimizer is not None:
            cut = {p: p.grad for p in model.parameters() if isinstance(p.grad, ShardedGradient)}
        for p in cut:
            p.grad = None
        if model is not None:
            type(model).zero_grad(model, set_to_none)
        for p, gradient in cut.items():
            p.grad = gradient
        if optimizer is not None:
            optimizer.zero_grad(set_to_none)

    model.zero_grad = zero_grad  # type: ignore[method-assign]


def restore_zero_grad(model: torch.nn.Module) -> None:
    """Gives the model its own `zero_grad` back."""
    model.__dict__.pop("zero_grad", None)
