"""Models on a device, trained by the recipes of the tests on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def placed(model: nn.Module, device: Any) -> nn.Module:
    """The model on a device, to which what it is called with is moved; tied parameters stay tied."""
    device, moved = torch.device(device), {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, t in tensors.items():
                if t is None:
                    continue
                if t not in moved:
                    there = t.detach().to(device)
                    moved[t] = nn.Parameter(there, t.requires_grad) if isinstance(t, nn.Parameter) else there
                tensors[name] = moved[t]
    model.register_forward_pre_hook(lambda _, args: tuple(a.to(device) for a in args), prepend=True)
    return model
