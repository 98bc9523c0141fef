"""Attentions that can be cut, and others that only look like them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Crossing(nn.Module):
    """An attention to a context, or to its own input; a statement says which."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 4, 2
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        if context is None:
            context = x
        shape = (x.shape[0], -1, self.heads, self.head_dim)
        q = self.to_q(x).view(shape).transpose(1, 2)
        k, v = self.to_k(context).view(shape).transpose(1, 2), self.to_v(context).view(shape).transpose(1, 2)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Separate(nn.Module):
    """Two linear layers of fitting sizes, of which neither gets what the other has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up(x), self.down(y)


class OtherNames(nn.Module):
    """An attention whose number of heads is an attribute of a name that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.d_model, self.d_k, self.h = 8, 2, 4
        self.q_linear, self.k_linear, self.v_linear, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_linear(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2)
        k = self.k_linear(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2)
        v = self.v_linear(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(len(x), -1, self.d_model))


def by_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[batch, time, heads * any] -> [batch, heads, time, any], as einops writes it."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class FusedByHeads(nn.Module):
    """An attention whose fused weight another function lays out by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = by_heads(self.qkv(x), self.heads).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LaidOutAnew(FusedByHeads):
    """One that keeps the result under the same name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        qkv = by_heads(qkv, self.heads)
        q, k, v = qkv.chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FusedInARow(FusedByHeads):
    """One whose queries, keys and values lie in a row, under one name after another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        qkv = qkv.reshape(x.shape[0], x.shape[1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WithHeads(nn.Module):
    """An attention of 4 heads, with methods that split and merge them; derived ones do something else besides."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def split(self, part: torch.Tensor) -> torch.Tensor:
        return part.view(part.shape[0], part.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.transpose(1, 2).flatten(2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q @ k.transpose(-1, -2)) / self.head_dim**0.5).softmax(-1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.out_proj(self.merge(self.attend(q, k, v)))


class Normalised(WithHeads):
    """One whose queries are normalised over all heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.split(F.normalize(self.q_proj(x), dim=-1))
        return self.out_proj(self.merge(self.attend(q, self.split(self.k_proj(x)), self.split(self.v_proj(x)))))


class NormBehind(WithHeads):
    """One with a norm without parameters over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        return self.norm(heads.transpose(1, 2).flatten(2))


class NormOfHeads(NormBehind):
    """One with such a norm over each head: no reason to leave it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2, elementwise_affine=False)

    def merge(self, heads: torch.Tensor) -> torch.Tensor:
        return self.norm(heads).transpose(1, 2).flatten(2)


class OverHeads(WithHeads):
    """One whose heads compete for the keys."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.softmax(q @ k.transpose(-1, -2), dim=1) @ v


class ByPart(WithHeads):
    """One with a module inside that has the number of heads as well."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 4

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.view(part.shape[0], part.shape[1], self.heads, -1).transpose(1, 2) for part in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.part(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class SharedQueries(nn.Module):
    """An attention whose queries are its keys: three square layers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qk, self.v, self.out = 4, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, v = (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in (self.qk(x), self.v(x)))
        return self.out(F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2))


class Heads(nn.Module):
    """An attention of 4 heads in one method; derived ones go by numbers of which a rank has others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.embed_dim = 4, 2, 8
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, heads = x.shape[0], x.shape[1], self.num_heads
        shape = (b, t, heads, self.embed_dim // self.num_heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.num_heads != self.num_heads)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, self.embed_dim))


class Slopes(Heads):
    """One whose scores are lowered by distances, at each head by another slope."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        place = torch.arange(x.shape[1])
        mask = -(place[None, :] - place[:, None]).abs() * slopes[:, None, None]
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Root(Heads):
    """One whose scores are divided by the root of the width of all heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        y = (q @ k.mT / math.sqrt(self.embed_dim)).softmax(-1) @ v
        return self.out_proj(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.embed_dim))


class RootOfResult(Heads):
    """One that asks what a layer returns for that width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        queries = self.q_proj(x)
        q = queries.view(shape).transpose(1, 2) * queries.shape[-1] ** -0.5
        k, v = (part.view(shape).transpose(1, 2) for part in (self.k_proj(x), self.v_proj(x)))
        return self.out_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class WrittenOut(Heads):
    """One whose number of heads is no attribute, but is written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.view(x.shape[0], x.shape[1], 4, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class WrittenBeside(Heads):
    """One where it is, next to the width of a head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], -1, 4, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Attends(Heads):
    """One with a method for the products, which derived ones have in another way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        return self.out_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ByShape(Attends):
    """One that takes the number of heads from a shape, for slopes as those of `Slopes`."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        h = q.shape[1]
        slopes = 2.0 ** (-8.0 * torch.arange(1, h + 1) / h)
        return ((q @ k.mT) * slopes[:, None, None]).softmax(-1) @ v


class ByUnpackedShape(Attends):
    """One that takes it from the whole shape."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, h, t, d = q.shape
        return F.scaled_dot_product_attention(q / h, k, v.view(b, h, t, d))


class TwoKinds(Attends):
    """One in which half of the heads look at what was before alone."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (q1, q2), (k1, k2), (v1, v2) = q.chunk(2, dim=1), k.chunk(2, dim=1), v.chunk(2, dim=1)
        first = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True)
        return torch.cat([first, F.scaled_dot_product_attention(q2, k2, v2)], dim=1)


class FirstHeads(Attends):
    """One in which the first half of the heads has no scores of its own."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v)
        y[:, : self.num_heads // 2] = 0.0
        return y * y[:, : self.num_heads // 2].mean()


def slope_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes an attention whose scores go by the number of heads."""
    return (q @ k.mT / q.shape[1]).softmax(-1) @ v


def root_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes an attention whose scores go by the width of a head."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class ByNamedAttention(Attends):
    """One that calls a function of the program, whose name says that it is an attention."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return slope_attention(q, k, v)


class ByOwnAttention(Attends):
    """One that calls a function of the program which acts on single heads: no reason to leave it whole."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return root_attention(q, k, v)


class DropsBetween(Heads):
    """One that drops elements of its keys' input, behind its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.num_heads, self.head_dim)
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(self.drop(x)).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tiled(Heads):
    """One whose key/value heads serve every second query head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_key_value_heads = self.n_rep = 2
        self.k_proj, self.v_proj = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(*x.shape[:2], self.num_key_value_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(*x.shape[:2], self.num_key_value_heads, self.head_dim).transpose(1, 2)
        k, v = k.repeat(1, self.n_rep, 1, 1), v.repeat(1, self.n_rep, 1, 1)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WidthFirst(Heads):
    """One whose features are all heads of one place of a head, then of the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1], self.head_dim, self.num_heads)
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.view(shape).permute(0, 3, 1, 2) for part in parts)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ShapeFirst(OtherNames):
    """An attention with a number of heads that is not known, in a shape that it makes beforehand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (len(x), -1, self.h, self.d_k)
        q, k = self.q_linear(x).view(shape).transpose(1, 2), self.k_linear(x).view(shape).transpose(1, 2)
        v = self.v_linear(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(len(x), -1, self.d_model))


class Square(OtherNames):
    """Heads as many as each is wide, under known names; the input's width is compared alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = self.num_heads = 3
        del self.d_k, self.h
        self.d_model = 9
        self.q_linear, self.k_linear, self.v_linear, self.out = (nn.Linear(9, 9) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        if c != 9:
            raise ValueError("the width")
        q = self.q_linear(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_linear(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_linear(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, self.d_model))
