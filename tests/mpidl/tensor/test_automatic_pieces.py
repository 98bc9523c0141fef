"""The automatic plan with sequences in pieces: blocks that look at other tokens are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from collectives import Communicator
from mpidl import ConfigurationError
from mpidl.tensor.automatic import automatic_plan
from tests.mpidl.tensor.automatic_checks import assert_cut_as_whole, random_input
from tests.mpidl.tensor.small_attentions import WithHeads

pytestmark = pytest.mark.filterwarnings("ignore:Mesh")


class Block(nn.Module):
    """An attention and a feed-forward network with their norms; derived ones look at other tokens as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn, self.up, self.down = WithHeads(), nn.Linear(8, 11), nn.Linear(11, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.features(self.norm_2(x))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class LooksBack(Block):
    """One that adds to each token the one before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return x + self.features(self.norm_2(x + before))


class TakesMean(Block):
    """One whose network takes the mean of all tokens off, before its first layer."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x - x.mean(1, keepdim=True))))


class Shift(nn.Module):
    """Moves tokens by one place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, 1, dims=1)


class HasModule(Block):
    """One with a module without parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.features(self.module(self.norm_2(x)))


class Behind(WithHeads):
    """An attention that looks at other tokens behind its last layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        y = self.out_proj(self.merge(self.attend(q, k, v)))
        return y / y.shape[1]


class HasBehind(Block):
    """One with such an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Behind()


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.at_most(4)
@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
def test_blocks_that_compute_each_token_by_itself_are_cut_in_pieces(comm: Communicator) -> None:
    torch.manual_seed(0)
    stack = Stack(Block(), Block()).double()
    assert_cut_as_whole(comm, stack, random_input(2, 5, 8), sequence_parallel=True)


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (LooksBack(), r"x\[:, :1\]"),
        (TakesMean(), "features"),
        (HasModule(Shift()), "module"),
        (HasModule(nn.AvgPool1d(1)), "module"),
        (HasModule(nn.BatchNorm1d(5, affine=False)), "module"),
        (HasBehind(), r"y\.shape\[1\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_blocks_that_look_at_other_tokens_are_refused_in_pieces(block: nn.Module, what: str) -> None:
    model = Stack(Block(), block)
    assert "blocks.1.attn" in automatic_plan(model, 2, sequence_parallel=False).plan
    with pytest.raises(ConfigurationError, match=rf"^sequence_parallel: plan='auto': blocks\.1\S*: {what} may look at"):
        automatic_plan(model, 2, sequence_parallel=True)
