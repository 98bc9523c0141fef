"""Feed-forward networks that can be cut, and others that only look like them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class GatedPost(nn.Module):
    """A gated feed-forward network with a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 11), nn.Linear(6, 11), nn.Linear(11, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(F.silu(self.gate(x)) * self.up(x)))


class Repeated(nn.Module):
    """A gated feed-forward network that runs twice, the second time on its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 11), nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.down(F.silu(self.gate(x)) * self.up(x))
        return x


class Shifted(Repeated):
    """One that adds a parameter to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.shift
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixing(nn.Module):
    """Two linear layers between which features are normalised: not to be cut by features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.softmax(self.up(x), -1))


class ByWidth(nn.Module):
    """An attention that computes the heads' width from that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.query, self.key, self.value, self.proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q = self.query(x).view(b, t, self.n_head, -1).transpose(1, 2)
        k = self.key(x).view(b, t, self.n_head, -1).transpose(1, 2)
        v = self.value(x).view(b, t, self.n_head, -1).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) / (c // self.n_head) ** 0.5
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class OwnParameter(nn.Module):
    """A network with a parameter that acts on all features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.beta = nn.Linear(6, 8), nn.Linear(8, 6), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * torch.sigmoid(self.beta * h))


class Deviation(Mixing):
    """One whose features are divided by their deviation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h / h.std(-1, keepdim=True))


class Halves(Mixing):
    """One that puts halves of the features together anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(torch.cat([a * b.sigmoid(), b * a.sigmoid()], -1))


class KeepsALoss(Mixing):
    """One that keeps the mean of its features, as for a loss that makes them sparse."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        self.sparsity = h.abs().mean()
        return self.down(h)


class ReturnsALoss(Mixing):
    """One that returns such a mean."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.relu(self.up(x))
        y = self.down(h)
        return y, h.mean()


class Gates(Mixing):
    """One whose output is weighed by all features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        y = self.down(h)
        if self.training:
            y = y * h.amax(-1, keepdim=True)
        return y


class Largest(Mixing):
    """One that keeps the largest of the features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * (h >= h.kthvalue(3, -1, keepdim=True).values))


def squash(h: torch.Tensor) -> torch.Tensor:
    """Divides features by their norm."""
    return h / (1 + h.norm(dim=-1, keepdim=True))


class Squash(nn.Module):
    """A module that does what `squash` does."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return squash(h)


class Cube(nn.Module):
    """An activation that is of no library."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.square(h).clamp(max=4.0)


class WithFunction(Mixing):
    """A network with a function of the program's own between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(squash(self.up(x)))


class WithMethod(Mixing):
    """One with a method of its own there."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h - h.mean(-1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class ByModule(Mixing):
    """One with a module, or a function in an attribute, there."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class ByFirst(Mixing):
    """One whose features are weighed by the first of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * h[..., :1])


class ByProduct(Mixing):
    """One whose features are weighed by their product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h * h.prod(-1, keepdim=True))


class Activates(Mixing):
    """One with a method of its own that acts on single features: no reason to leave it whole."""

    def activate(self, h: torch.Tensor) -> torch.Tensor:
        return F.silu(h) if self.training else torch.where(h > 0, h, 0.1 * h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activate(self.up(x)))


class Beside(nn.Module):
    """A network of layers `dense`, of which the first lies in a module with `between`."""

    class First(nn.Module):
        def __init__(self, between: nn.Module) -> None:
            super().__init__()
            self.dense, self.between = nn.Linear(6, 8), between

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.between(self.dense(x))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(8, 6)

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.dense(h) + x

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.intermediate, self.output = self.First(between), self.Last()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.intermediate(x), x)


def topk_relu(h: torch.Tensor) -> torch.Tensor:
    """Keeps the largest features."""
    return h * (h >= h.topk(2, -1).values[..., -1:])


def clip(h: torch.Tensor) -> torch.Tensor:
    """Bounds the norm of all features."""
    return h / h.norm(dim=-1, keepdim=True).clamp(min=1)


class ByNamedActivation(Mixing):
    """A network with a function of the program that has the name of an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(topk_relu(self.up(x)))


class ByNamedClip(Mixing):
    """One with a function that has the name of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(clip(self.up(x)))


def soft(h: torch.Tensor) -> torch.Tensor:
    """Computes each feature by itself."""
    return h * torch.sigmoid(h)


class ByFunction(Mixing):
    """One with a function that acts on single features: no reason to leave it whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(soft(self.up(x)))


class ByOutFeatures(Mixing):
    """A network that divides by the root of the number of its features, as its layer has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)) / math.sqrt(self.up.out_features))


class ByLastSize(Mixing):
    """One that has the number from its features themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h / h.shape[-1] ** 0.5)


class BySize(Mixing):
    """One that has it from them by a method."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h / h.size(-1))


class ByWidths(Mixing):
    """One that goes by its input's width, and by the number of its sequences: no reasons to leave it whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x) / x.shape[-1] ** 0.5
        return self.down(h / h.shape[0])


class Chain(nn.Module):
    """Three layers of one size, of which each gets what the one before gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class Backwards(nn.Sequential):
    """One whose modules run in the opposite order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in reversed(self):
            x = module(x)
        return x


class SlowButExact(Mixing):
    """One with another way to compute, which its settings rule out: no reason to leave it whole."""

    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.pieces = pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        if self.pieces > 1:
            y = self.down.bias + F.linear(h[..., :4], self.down.weight[:, :4])
            y = y + F.linear(h[..., 4:], self.down.weight[:, 4:])
        else:
            y = self.down(h)
        return y


class InPlace(Mixing):
    """One that changes its features in place, and checks them: no reasons to leave it whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h.relu_()
        torch._assert(h.dim() > 1, "one sequence")
        return self.down(h)


class Branches(Mixing):
    """One that goes another way where a feature is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.up(x))
        y = self.down(h)
        if h.amax() > 3:
            y = 2 * y
        return y


class Scaled(Mixing):
    """One whose output is scaled by a parameter of its own, which is no reason to leave it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gamma * self.down(F.relu(self.up(x)))


def parametrized() -> nn.Module:
    """Layers whose weights are computed from other parameters."""
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(6, 8, bias=False)), nn.ReLU(), norm(nn.Linear(8, 6, bias=False)))
