"""The trial of what plan="auto" cuts: what it finds, where, and that it leaves no trace."""

from __future__ import annotations

import math
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh
from mpidl.mesh import placement
from mpidl.tensor.trial import Trials
from mpidl.tensor.trial_copies import BlockCopies
from tests.mpidl.tensor.reference import largest_difference, part_of

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4), pytest.mark.filterwarnings("ignore:Mesh")]

WIDTH, HEADS = 48, 12  # 12 heads for 2, 3 and 4 ranks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, y: torch.Tensor) -> torch.Tensor:
        return y.view(y.shape[0], -1, self.heads, self.head_dim).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 60), nn.Linear(60, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def alibi_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads, length = q.shape[1], q.shape[2]
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=q.dtype) / heads)
    at = torch.arange(length)
    return F.scaled_dot_product_attention(q, k, v, (at[None] - at[:, None]) * slopes[:, None, None])


def topk_relu(h: torch.Tensor) -> torch.Tensor:
    return h * (h >= h.topk(4, -1).values[..., -1:])


class FunctionInAttribute(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.attend = alibi_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.out_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class WithoutTranspose(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).reshape(x.shape[0], x.shape[1], -1))


class ScaleOfProperty(Attention):
    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q_proj.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = (q @ k.transpose(-2, -1)) * self.scale
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ActInAttribute(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.act = topk_relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class TimesInput(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)) * x.mean(-1, keepdim=True).sigmoid())


class ParentTakesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(x) + self.ff.up.weight.mean()


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = FeedForward()
        self.ff.up.register_forward_hook(lambda module, args, output: output - output.mean(-1, keepdim=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(x)


class Model(nn.Module):
    """Blocks of a kind between what is always right, so that a plan has something to cut."""

    def __init__(self, kind: Callable[[], nn.Module], count: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.plain = FeedForward()
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        x = self.plain(self.first(x))
        for block in self.blocks:
            x = x + block(x, *others)
        return x


def made(kind: Callable[[], nn.Module], count: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(kind, count).double()


def some(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(model: nn.Module, whole: nn.Module, *inputs: torch.Tensor) -> None:
    for each in (model, whole):
        each(*inputs).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-9, atol=1e-10)


WRONG = [
    FunctionInAttribute,
    WithoutTranspose,
    ScaleOfProperty,
    ActInAttribute,
    TimesInput,
    ParentTakesWeight,
    Hooked,
]


@pytest.mark.parametrize("kind", WRONG)
def test_what_would_compute_something_else_stays_whole(comm: Communicator, kind: Any, capsys: Any) -> None:
    model, whole = made(kind), made(kind)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        said = capsys.readouterr().out
        assert ("cut, it computes something else: " in said) == (comm.rank == 0)
        assert all(placement(p).cut is None for p in model.blocks.parameters())
        assert placement(model.plain.up.weight).cut is not None
        assert_same_gradients(model, whole, some(2, 5, WIDTH))


@pytest.mark.parametrize("kind", [Attention, FeedForward])
def test_what_computes_the_same_is_cut(comm: Communicator, kind: Any) -> None:
    model, whole = made(kind), made(kind)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        assert any(placement(p).cut is not None for p in model.blocks.parameters())
        assert_same_gradients(model, whole, some(2, 5, WIDTH))


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ff = Attention(), ActInAttribute()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(x + self.attn(x))


def test_of_a_block_only_what_differs_stays_whole(comm: Communicator) -> None:
    model, whole = made(OneOfTwo), made(OneOfTwo)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        block: Any = model.blocks[1]
        assert placement(block.attn.q_proj.weight).cut is not None
        assert placement(block.ff.up.weight).cut is None
        assert_same_gradients(model, whole, some(2, 5, WIDTH))


class WithBias(Attention):
    """It adds biases to scores, of all heads."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("around", ["", "no_grad", "autocast", "re-entrant", "not re-entrant"])
def test_a_first_call_that_differs_is_an_error_on_all_ranks(comm: Communicator, around: str) -> None:
    """Whatever it runs in. One bias for all heads is right; one for each would be cut from all of them."""
    dtype = torch.float32 if around == "autocast" else torch.float64
    x, bias = some(2, 5, WIDTH).to(dtype).requires_grad_(), some(1, 1, 5, 5, seed=2).to(dtype)
    for heads in (1, HEADS):
        model = made(WithBias, 1).to(x.dtype)
        given = bias.expand(1, heads, 5, 5)

        def call(model: nn.Module = model, given: torch.Tensor = given) -> torch.Tensor:
            if "re-entrant" in around:
                return checkpoint(model, x, given, use_reentrant=around == "re-entrant")  # type: ignore[no-any-return]
            with torch.autocast("cpu", torch.bfloat16, enabled=around == "autocast"):
                return model(x, given)

        with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
            mpidl.parallelize(model, mesh, "auto")
            with torch.set_grad_enabled(around != "no_grad"):
                if heads == 1:
                    call()
                    continue
                for _ in range(2):
                    with pytest.raises(ConfigurationError, match=r"blocks\.0, cut over \d ranks: it fails"):
                        call()


def test_what_leave_whole_names_is_not_cut(comm: Communicator) -> None:
    model, whole = made(WithBias), made(WithBias)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto", leave_whole=["blocks.*"])
        assert all(placement(p).cut is None for p in model.blocks.parameters())
        assert_same_gradients(model, whole, some(2, 5, WIDTH), some(1, HEADS, 5, 5, seed=2))
        with pytest.raises(ConfigurationError, match="leave_whole: got names without plan='auto'"):
            mpidl.parallelize(made(Attention), mesh, {"plain": []}, leave_whole=["blocks.*"])
        with pytest.raises(ConfigurationError, match="leave_whole: got 'blocks'; needs a list of names"):
            mpidl.parallelize(made(Attention), mesh, "auto", leave_whole="blocks")
        with pytest.raises(ConfigurationError, match=r"'none\.\*' names no module"):
            mpidl.parallelize(made(Attention), mesh, "auto", leave_whole=["none.*"])


class Crossing(Attention):
    """An attention whose keys and values come from a memory."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(memory))
        v = self.split(self.v_proj(memory))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Twice(Crossing):
    """One that adds its memory to what it returns."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(memory)), self.split(self.v_proj(memory))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out_proj(y) + memory.mean(1, keepdim=True)


@pytest.mark.parametrize("kind", [Crossing, Twice])
def test_gradients_of_other_arguments_are_compared_too(comm: Communicator, kind: Any) -> None:
    model, whole = made(kind, 1), made(kind, 1)
    x, memory = some(2, 5, WIDTH), some(2, 4, WIDTH, seed=3).requires_grad_()
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        if kind is Twice:
            with pytest.raises(ConfigurationError, match="the gradient of another argument differs"):
                model(x, memory)
            return
        found = torch.autograd.grad(model(x, memory).square().sum(), memory)[0]
        expected = torch.autograd.grad(whole(x, memory).square().sum(), memory)[0]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


class ScaledByList(FeedForward):
    """Its scale is a parameter of which each rank would have a part of the gradient, with the right output."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu() * self.scales[0])


class WithFunction(FeedForward):
    """Blocks of one class that differ in a function that they keep."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.act = (F.relu, topk_relu)[WithFunction.made % 2]
        WithFunction.made += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class InEvaluation(FeedForward):
    """One that does something else in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu() if self.training else self.act(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.act = topk_relu


class SecondBlock(nn.Module):
    """A block that looks at its own number."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx, self.act = SecondBlock.made % 2, topk_relu
        self.ff = FeedForward()
        SecondBlock.made += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ff.up(x)
        return self.ff.down(self.act(h) if self.layer_idx == 1 else h.relu())


@pytest.mark.parametrize("kind", [ScaledByList, WithFunction, InEvaluation, SecondBlock])
@pytest.mark.parametrize("training", [True, False])
def test_parameters_gradients_both_modes_and_every_kind_of_block(comm: Communicator, kind: Any, training: bool) -> None:
    WithFunction.made = SecondBlock.made = 0
    model = made(kind).train(training)
    WithFunction.made = SecondBlock.made = 0
    whole = made(kind).train(training)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        assert_same_gradients(model, whole, some(2, 5, WIDTH))
        cut = [any(placement(p).cut is not None for p in block.parameters()) for block in model.blocks]
        assert cut == ([True, False] if kind in (WithFunction, SecondBlock) else [False, False])


class Settings:
    dropout = 0.5


class WithSettings(FeedForward):
    """Its rate lies in a class that no copy copies; a hook reads a parameter of the program's."""

    config = Settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(self.up(x).relu(), self.config.dropout, self.training))


def test_the_program_s_own_objects_are_left_as_they_were(comm: Communicator) -> None:
    model, outside = made(WithSettings), nn.Parameter(torch.ones((), dtype=torch.float64))
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: output * outside)
    random.seed(comm.rank)
    before = random.getstate()
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        assert Settings.dropout == 0.5
        assert outside.grad is None
        assert random.getstate() == before
        assert placement(model.plain.up.weight).cut is not None


class GivesCacheFirst(Attention):
    """Its first output is the keys, of this rank's heads, and its last one a mask with -inf."""

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        y = self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return {"cache": k, "y": y, "mask": x.new_full((x.shape[1], x.shape[1]), -math.inf).triu(1)}


def test_outputs_of_this_rank_s_heads_and_masks_are_no_difference(comm: Communicator) -> None:
    model = nn.ModuleDict({"h": nn.ModuleList([GivesCacheFirst(), GivesCacheFirst()])}).double()
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        assert placement(model.get_parameter("h.1.q_proj.weight")).cut is not None


class Uneven(torch.autograd.Function):
    """Backward that fails for an odd number of features."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.odd = x.shape[-1] % 2
        return x.relu()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if ctx.odd:
            raise ValueError("an odd number of features")
        return gradient


class FailsInBackward(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 61), nn.Linear(61, WIDTH)
        self.act = Uneven.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)[..., :]))


def test_a_backward_that_fails_on_some_ranks_keeps_none_waiting(comm: Communicator) -> None:
    model = made(FailsInBackward)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        model(some(2, 5, WIDTH))


def test_pieces_of_sequences_are_tried_too(comm: Communicator) -> None:
    class Block(nn.Module):
        def __init__(self, act: Any) -> None:
            super().__init__()
            self.norm, self.attn, self.act = nn.LayerNorm(WIDTH), Attention(), act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x + self.attn(self.norm(x)))

    def centred_relu(x: torch.Tensor) -> torch.Tensor:
        return x.relu() - x.mean(1, keepdim=True)

    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        model = nn.ModuleDict({"h": nn.Sequential(Block(F.relu), Block(F.relu))}).double()
        mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)
        model = nn.ModuleDict({"h": nn.Sequential(Block(centred_relu), Block(centred_relu))}).double()
        with pytest.raises(ConfigurationError, match=r"sequence_parallel: plan='auto': h\.0\.attn: cut, it computes"):
            mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)


class Draws(Attention):
    """With dropout, and with roundings to bf16 inside, which are no difference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        rounded = [each.to(torch.bfloat16).to(x.dtype) for each in (q, k, v)]
        y = F.scaled_dot_product_attention(*rounded, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_and_roundings_are_no_difference_and_nothing_is_touched(comm: Communicator, dtype: torch.dtype) -> None:
    model = made(Draws).to(dtype)
    values = [p.detach().clone() for p in model.parameters()]
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh, warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(comm.rank)
        before = torch.get_rng_state()
        mpidl.parallelize(model, mesh, "auto")
        assert torch.equal(torch.get_rng_state(), before)
        assert placement(model.blocks[0].get_parameter("q_proj.weight")).cut is not None
        for p, value in zip(model.parameters(), values, strict=True):
            assert torch.equal(p, part_of(value, p))
            assert p.grad is None
        torch.manual_seed(0)
        model(some(2, 5, WIDTH).to(dtype)).float().sum().backward()


class RefusesTrial(Attention):
    """It does not run with the trial's values."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "mpidl-trial":
            raise RuntimeError("it wants its own weights")
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


def test_a_block_that_does_not_run_by_itself_is_warned_of(comm: Communicator) -> None:
    model = made(RefusesTrial)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model(some(2, 5, WIDTH), some(5, 5))
        told = [str(each.message) for each in seen if "could not be tried" in str(each.message)]
        assert len(told) == (comm.rank == 0)
        assert all("blocks.* could not be tried by itself (RuntimeError: it wants its own weights)" in t for t in told)


class InPairs(Attention):
    """An attention whose heads go in pairs, which an odd number of them does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        b, h, t, d = q.shape
        pairs = [each.view(b, h // 2, 2, t, d) for each in (q, k, v)]
        return self.out_proj(F.scaled_dot_product_attention(*pairs).view(b, h, t, d).transpose(1, 2).flatten(2))


@pytest.mark.ranks(4, exactly=True)
def test_what_fails_on_some_ranks_alone_stays_whole_on_all(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six heads on four ranks are two, two, one and one."""
    monkeypatch.setitem(globals(), "HEADS", 6)
    model = made(InPairs)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        assert all(placement(p).cut is None for p in model.blocks.parameters())
        model(some(2, 5, WIDTH))


def test_gradients_that_differ_on_one_rank_alone_are_told_on_all(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(BlockCopies, "_compare_gradients", lambda *_: "deliberate")
    with (
        Mesh(tp=comm.size, dp=1, comm=comm) as mesh,
        pytest.raises(ConfigurationError, match="computes something else: deliberate"),
    ):
        mpidl.parallelize(made(Attention), mesh, "auto")


def test_blocks_that_are_alike_are_tried_once(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    run_trial = Trials.run_trial

    def counted(self: Trials, kind: Any, *args: Any, **kwargs: Any) -> Any:
        tried.extend(kind.patterns)
        return run_trial(self, kind, *args, **kwargs)

    monkeypatch.setattr(Trials, "run_trial", counted)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        model = mpidl.parallelize(made(Attention, 4), mesh, "auto")
        for _ in range(2):
            model(some(2, 5, WIDTH))
        assert tried == 2 * ["plain", "blocks.*"]  # with a made up input, and in the first call
        whole = made(Attention, 4)
        mpidl.unparallelize(model)
        assert largest_difference(model, whole) == 0.0
        assert not any(module._forward_pre_hooks for module in model.modules())
