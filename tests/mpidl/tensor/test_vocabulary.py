"""Embeddings, logits and cross-entropy of parts of the vocabulary, judged by torch on the whole ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from collectives import Communicator
from mpidl import Mesh, TrainingError
from mpidl.mesh import placement
from mpidl.tensor import VocabLogits, VocabParallelEmbedding, cross_entropy
from mpidl.tensor.communication import TensorGroup
from mpidl.tensor.sizes import run_of
from mpidl.tensor.vocab_logits import HANDLERS

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


def logits_of(
    comm: Communicator, whole: torch.Tensor, group: TensorGroup | None = None
) -> tuple[torch.Tensor, VocabLogits]:
    """This rank's part of logits, which trains, and what a model makes of it. group: of comm's ranks."""
    start, stop = run_of(whole.shape[-1], comm.size, comm.rank)
    part = whole.detach()[..., start:stop].clone().requires_grad_(whole.requires_grad)
    return part, VocabLogits.of(part * 1, group or TensorGroup(comm), whole.shape[-1])


def random_logits(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> torch.Tensor:
    """The same on every rank."""
    random = torch.Generator().manual_seed(0)
    return (scale * torch.randn(*shape, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()


def part_of_gradient(comm: Communicator, whole: torch.Tensor) -> torch.Tensor:
    assert whole.grad is not None
    start, stop = run_of(whole.shape[-1], comm.size, comm.rank)
    return whole.grad[..., start:stop]


# ---- cross-entropy -------------------------------------------------------------------------------------------------

TARGETS = torch.tensor([0, 12, 5, -100, 3, 7, -100, 12])
WEIGHT = torch.linspace(0.0, 2.0, 13, dtype=torch.float64)

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "an index in the vocabulary is ignored": {"ignore_index": 12, "target": TARGETS.clamp(0)},
    "none ignored": {"target": TARGETS.clamp(0)},
    "all ignored": {"target": torch.full((8,), -100)},
    "weights": {"weight": WEIGHT},
    "smooth": {"label_smoothing": 0.1},
    "all smooth": {"label_smoothing": 1.0},
    "smooth with weights": {"label_smoothing": 0.3, "weight": WEIGHT},
    "smooth, an index in the vocabulary is ignored": {"label_smoothing": 0.3, "ignore_index": 5},
    "smooth, all ignored": {"label_smoothing": 0.1, "target": torch.full((8,), -100)},
}


@pytest.mark.each("name")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_cross_entropy_and_its_gradient_are_torchs(comm: Communicator, name: str, reduction: str) -> None:
    given = {"target": TARGETS, **ARGUMENTS[name], "reduction": reduction}
    if given.get("ignore_index", -100) != -100:
        given["target"] = given["target"].clamp(0)
    whole = random_logits(8, 13)
    part, logits = logits_of(comm, whole)
    expected, found = F.cross_entropy(whole, **given), F.cross_entropy(logits, **given)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13, equal_nan=True)
    outer = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64) if reduction == "none" else torch.tensor(1.7).double()
    expected.backward(outer)
    found.backward(outer)
    torch.testing.assert_close(part.grad, part_of_gradient(comm, whole), rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)])
def test_the_vocabulary_may_lie_in_dimension_1(comm: Communicator, shape: tuple[int, ...], reduction: str) -> None:
    """As torch wants it of several dimensions of tokens. Nothing is gathered."""
    whole = random_logits(*shape, 13)
    part, logits = logits_of(comm, whole)
    given = {"target": TARGETS.view(shape), "reduction": reduction, "label_smoothing": 0.1}
    expected = F.cross_entropy(whole.movedim(-1, 1), **given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VocabLogits, "whole", lambda self: pytest.fail("gathered"))
        found = F.cross_entropy(logits.movedim(-1, 1), **given)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(part.grad, part_of_gradient(comm, whole))


@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
def test_vocabularies_that_the_ranks_do_not_divide(comm: Communicator, tokens: int) -> None:
    """Also ranks without any token."""
    whole = random_logits(6, tokens)
    target = torch.arange(6) % tokens
    part, logits = logits_of(comm, whole)
    expected, found = (F.cross_entropy(each, target, label_smoothing=0.1) for each in (whole, logits))
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(part.grad, part_of_gradient(comm, whole))


def test_logits_of_one_token_and_of_none(comm: Communicator) -> None:
    whole = random_logits(13)
    part, logits = logits_of(comm, whole)
    for each in (whole, logits):
        F.cross_entropy(each, torch.tensor(7)).backward()
    torch.testing.assert_close(part.grad, part_of_gradient(comm, whole))
    empty, none = random_logits(0, 13), torch.zeros(0, dtype=torch.int64)
    _, logits = logits_of(comm, empty)
    for reduction in ("sum", "mean", "none"):
        torch.testing.assert_close(
            F.cross_entropy(logits, none, reduction=reduction),
            F.cross_entropy(empty, none, reduction=reduction),
            equal_nan=True,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_have_the_loss_of_their_values(comm: Communicator, dtype: torch.dtype) -> None:
    """Judged in float64: the loss is rounded once, the gradient as well."""
    whole = random_logits(8, 13, dtype=dtype, scale=8.0)
    wide = whole.detach().double().requires_grad_()
    part, logits = logits_of(comm, whole)
    expected, found = (
        F.cross_entropy(wide, TARGETS, reduction="none"),
        F.cross_entropy(logits, TARGETS, reduction="none"),
    )
    assert found.dtype == dtype
    accuracy = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=accuracy, atol=1e-6)
    expected.sum().backward()
    found.sum().backward()
    assert part.grad is not None
    torch.testing.assert_close(part.grad.double(), part_of_gradient(comm, wide), rtol=accuracy, atol=accuracy / 10)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.cross_entropy(logits, TARGETS).dtype == F.cross_entropy(whole, TARGETS).dtype == torch.float32


def test_large_and_masked_logits_neither_overflow_nor_count(comm: Communicator) -> None:
    whole = random_logits(8, 13).detach()
    whole[:, 1::3] = -torch.inf
    whole[2] += 1e4
    whole[5] -= 1e4
    whole.requires_grad_()
    target = torch.tensor([0, 2, 3, 5, 6, 8, 9, 12])
    part, logits = logits_of(comm, whole)
    expected, found = F.cross_entropy(whole, target), F.cross_entropy(logits, target)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    torch.testing.assert_close(part.grad, part_of_gradient(comm, whole))
    assert bool(torch.isfinite(found))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_has_two_all_reduces_forward_and_none_backward(
    comm: Communicator, label_smoothing: float
) -> None:
    group = TensorGroup(comm)
    _, logits = logits_of(comm, random_logits(8, 13), group)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            plain = getattr(Communicator, name)
            patch.setattr(
                Communicator,
                name,
                lambda *args, name=name, plain=plain, **given: (calls.append(name), plain(*args, **given))[1],
            )
        loss = F.cross_entropy(logits, TARGETS, label_smoothing=label_smoothing)
        assert calls == ["all_reduce"] * 2
        loss.backward()
    assert calls == ["all_reduce"] * 2
    assert group.traffic.reduced == 8 * (4 if label_smoothing else 3)


@pytest.mark.parametrize("wrong", [13, -1, -99])
def test_a_target_out_of_range_is_one_error_on_every_rank(comm: Communicator, wrong: int) -> None:
    _, logits = logits_of(comm, random_logits(8, 13))
    target = TARGETS.clone()
    target[4] = wrong
    with pytest.raises(TrainingError, match=f"target {wrong} with a vocabulary of 13.*ignore_index=-100"):
        F.cross_entropy(logits, target)
    comm.barrier()


def test_gradients_of_a_small_case_are_the_numerical_ones(comm: Communicator) -> None:
    whole = random_logits(2, 5)
    target = torch.tensor([4, 1])

    def loss(x: torch.Tensor) -> torch.Tensor:
        start, stop = run_of(5, comm.size, comm.rank)
        return F.cross_entropy(VocabLogits.of(x[:, start:stop], group, 5), target, label_smoothing=0.2)

    group = TensorGroup(comm)
    loss(whole).backward()
    for row in range(2):
        for token in range(5):
            step = torch.zeros(2, 5, dtype=torch.float64)
            step[row, token] = 1e-6
            slope = (loss(whole.detach() + step) - loss(whole.detach() - step)) / 2e-6
            start, stop = run_of(5, comm.size, comm.rank)
            expected = slope if start <= token < stop else 0.0
            assert float(whole.grad[row, token]) == pytest.approx(float(expected), abs=1e-8)  # type: ignore[index]


@pytest.mark.parametrize(
    "given",
    [
        {"target": torch.full((8, 13), 1 / 13, dtype=torch.float64)},  # probabilities
        {"target": TARGETS, "reduce": False},
        {"target": TARGETS, "size_average": False},
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_other_losses_are_those_of_gathered_logits(comm: Communicator, given: dict[str, Any]) -> None:
    whole = random_logits(8, 13)
    part, logits = logits_of(comm, whole)
    expected, found = F.cross_entropy(whole, **given).sum(), F.cross_entropy(logits, **given).sum()
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    torch.testing.assert_close(part.grad, part_of_gradient(comm, whole))


@pytest.mark.parametrize(
    "given",
    [
        {"reduction": "men"},
        {"label_smoothing": 1.5},
        {"weight": torch.ones(12, dtype=torch.float64)},
        {"target": torch.zeros(7, dtype=torch.int64)},
        {"target": torch.zeros(8, dtype=torch.int32)},
    ],
)
def test_arguments_that_torch_refuses_are_refused(comm: Communicator, given: dict[str, Any]) -> None:
    _, logits = logits_of(comm, random_logits(8, 13))
    for function in (F.cross_entropy, cross_entropy):
        with pytest.raises((ValueError, RuntimeError)):
            function(logits, **{"target": TARGETS, **given})


def test_plain_logits_have_torchs_loss(comm: Communicator) -> None:
    whole = random_logits(8, 13)
    assert torch.equal(cross_entropy(whole, TARGETS, WEIGHT), F.cross_entropy(whole, TARGETS, WEIGHT))
    _, logits = logits_of(comm, whole)
    torch.testing.assert_close(
        F.cross_entropy(input=logits, target=TARGETS, weight=WEIGHT), F.cross_entropy(whole, TARGETS, WEIGHT)
    )


# ---- logits --------------------------------------------------------------------------------------------------------

T = torch.Tensor
_NOTES = (T.dim, T.is_floating_point, T.element_size, T.is_contiguous)
_PROPERTIES = ("dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda", "is_nested", "is_sparse",
               "is_quantized", "is_meta")  # fmt: skip
_BY_NUMBERS = {f: lambda x, f=f: f(x, 2.5) for f in (
    T.mul, T.__mul__, T.__rmul__, torch.mul, T.div, T.__truediv__, torch.div, T.add, T.__add__, T.__radd__, T.sub,
    T.__sub__,
)}  # fmt: skip

# An operation for each entry of the table that has a tensor or a size as its result.
ON_PARTS: dict[Any, list[Callable[[torch.Tensor], Any]]] = {
    T.shape.__get__: [lambda x: x.shape],  # type: ignore[attr-defined]
    T.size: [lambda x: x.size(), lambda x: x.size(-1), lambda x: x.size(dim=0)],
    T.__len__: [len],
    T.numel: [lambda x: x.numel()],
    T.view: [
        lambda x: x.view(-1, 13),
        lambda x: x.view(2, 4, -1),
        lambda x: x.view((8, 13)),
        lambda x: x.view([8, -1]),
    ],
    T.reshape: [lambda x: x.reshape(2, -1, 13), lambda x: x.reshape(8, 13)],
    T.flatten: [lambda x: x.flatten(0, 1), lambda x: x.flatten(start_dim=0, end_dim=-2)],
    torch.flatten: [lambda x: torch.flatten(x, 0, 1)],
    T.__getitem__: [
        lambda x: x[0],
        lambda x: x[..., :-1, :],
        lambda x: x[:, -1],
        lambda x: x[:, -1, :],
        lambda x: x[torch.tensor([1, 0, 1])],
        lambda x: x[:, torch.tensor([True, False, True, True])],
    ],
    T.float: [lambda x: x.float()],
    T.double: [lambda x: x.double()],
    T.half: [lambda x: x.half()],
    T.bfloat16: [lambda x: x.bfloat16()],
    T.to: [lambda x: x.to(torch.float32), lambda x: x.to("cpu"), lambda x: x.to(copy=True, dtype=torch.float32)],
    T.type: [lambda x: x.type(torch.float32), lambda x: x.type()],
    T.contiguous: [lambda x: x.contiguous()],
    T.clone: [lambda x: x.clone()],
    T.detach: [lambda x: x.detach()],
    T.cpu: [lambda x: x.cpu()],
    T.tanh: [lambda x: x.tanh()],
    torch.tanh: [torch.tanh],
    T.neg: [lambda x: x.neg()],
    T.__neg__: [lambda x: -x],
    T.transpose: [lambda x: x.transpose(1, 2), lambda x: x.transpose(0, 1), lambda x: x.transpose(-1, 1).float()],
    torch.transpose: [lambda x: torch.transpose(x, dim0=1, dim1=-1)],
    T.swapaxes: [lambda x: x.swapaxes(1, 2)],
    torch.swapaxes: [lambda x: torch.swapaxes(x, 1, 2)],
    T.swapdims: [lambda x: x.swapdims(1, 2)],
    torch.swapdims: [lambda x: torch.swapdims(x, 1, 2)],
    T.permute: [lambda x: x.permute(0, 2, 1), lambda x: x.permute((1, 0, 2)), lambda x: x.permute(0, 2, 1) * 2.0],
    torch.permute: [lambda x: torch.permute(x, (0, 2, 1)), lambda x: torch.permute(x, (0, 2, 1)).permute(2, 0, 1)],
    T.movedim: [lambda x: x.movedim(-1, 1), lambda x: x.movedim((0, 1), (1, 0))],
    torch.movedim: [lambda x: torch.movedim(x, 2, 1)],
    T.moveaxis: [lambda x: x.moveaxis(-1, 1)],
    torch.moveaxis: [lambda x: torch.moveaxis(x, -1, 1)],
    T.mT.__get__: [lambda x: x.mT, lambda x: x.mT.contiguous().mT],  # type: ignore[attr-defined]
    **{f: [call, lambda x, f=f: f(x, torch.tensor(0.5))] for f, call in _BY_NUMBERS.items()},
    **{f: [f] for f in _NOTES},
    **{getattr(T, name).__get__: [lambda x, name=name: getattr(x, name)] for name in _PROPERTIES},
    T.requires_grad_: [lambda x: x.detach().requires_grad_().requires_grad],
    T.grad_fn.__get__: [lambda x: x.grad_fn is not None],  # type: ignore[attr-defined]
}
# Tested below.
_OTHERS = {F.cross_entropy, T.__repr__, T.register_hook, T.retain_grad, T.grad.__get__}  # type: ignore[attr-defined]

GATHERING: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.softmax(-1),
    lambda x: F.log_softmax(x, -1),
    lambda x: x.argmax(-1),
    lambda x: torch.topk(x, 3).values,
    lambda x: x.sum(),
    lambda x: x + x,
    lambda x: x * torch.arange(13.0),
    lambda x: torch.mul(x, other=torch.arange(13.0)),
    lambda x: torch.cat([x, x]),
    lambda x: x[..., 5],
    lambda x: x[..., 2:7],
    lambda x: x[x > 0],
    lambda x: x.view(-1),
    lambda x: x.view(4, 26),
    lambda x: x.view(torch.int64) if x.dtype == torch.float64 else x,
    lambda x: x.flatten(),
    lambda x: x.flatten(1),
    lambda x: x.transpose(0, 2),
    lambda x: x.transpose(1, 2).flatten(0, 1),
    lambda x: x.transpose(1, 2)[0],
    lambda x: x.transpose(1, 2).reshape(-1, 4),
    lambda x: x.transpose(1, 2).softmax(1),
    lambda x: 2.0 - x,
    lambda x: x > 0.5,
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.tolist(),
    lambda x: x.detach().numpy().sum(),
    lambda x: x[0, 0, 0].item(),
]


def _compare(found: Any, expected: Any) -> None:
    whole = found.whole() if isinstance(found, VocabLogits) else found
    assert type(whole) is type(expected)
    if torch.is_tensor(expected):
        torch.testing.assert_close(whole, expected)
    else:
        assert whole == expected


def test_every_operation_on_parts_gives_the_part_of_the_whole_one(comm: Communicator) -> None:
    assert ON_PARTS.keys() | _OTHERS == HANDLERS.keys()
    whole = random_logits(2, 4, 13)
    _, logits = logits_of(comm, whole)
    for calls in ON_PARTS.values():
        for call in calls:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(VocabLogits, "whole", lambda self: pytest.fail("gathered"))
                found = call(logits)
            _compare(found, call(whole * 1))
            if torch.is_tensor(found) and found.requires_grad:
                assert isinstance(found, VocabLogits)
                assert found.shape == call(whole).shape


@pytest.mark.parametrize("tokens", [2, 13])
def test_parts_of_no_tokens_have_the_same_shapes(comm: Communicator, tokens: int) -> None:
    whole = random_logits(2, 4, tokens)
    _, logits = logits_of(comm, whole)
    for call in (lambda x: x.view(-1, tokens), lambda x: x.reshape(4, -1, tokens), lambda x: x.flatten(0, 1)):
        _compare(call(logits), call(whole))
        assert isinstance(call(logits), VocabLogits)


def test_other_operations_gather_and_their_gradients_come_back(comm: Communicator) -> None:
    for call in GATHERING:
        whole = random_logits(2, 4, 13)
        part, logits = logits_of(comm, whole)
        found, expected = call(logits), call(whole)
        assert not isinstance(found, VocabLogits)
        _compare(found, expected)
        if torch.is_tensor(expected) and expected.requires_grad:
            expected.square().sum().backward()
            found.square().sum().backward()
            torch.testing.assert_close(part.grad, part_of_gradient(comm, whole))


def test_a_factor_that_trains_has_its_whole_gradient(comm: Communicator) -> None:
    """As a learned temperature; the part's alone would differ between the ranks."""
    factors = [torch.tensor(0.7, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    whole = random_logits(8, 13)
    _, logits = logits_of(comm, whole)
    for factor, each in zip(factors, (whole, logits), strict=True):
        F.cross_entropy(each * factor, TARGETS).backward()
    torch.testing.assert_close(factors[1].grad, factors[0].grad)


def test_gradients_of_logits_are_those_of_the_parts(comm: Communicator) -> None:
    whole = random_logits(8, 13)
    inner = whole * 1
    _, logits = logits_of(comm, whole)
    seen: list[torch.Size] = []
    for each in (inner, logits):
        each.retain_grad()
    logits.register_hook(lambda g: seen.append(g.shape))
    (found,), (expected,) = (torch.autograd.grad(F.cross_entropy(each, TARGETS), each) for each in (logits, inner))
    _compare(found, expected)
    F.cross_entropy(logits, TARGETS).backward()
    F.cross_entropy(inner, TARGETS).backward()
    _compare(logits.grad, inner.grad)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "change",
    [lambda x: x.div_(2.0), lambda x: x.masked_fill_(x > 0, 0.0), lambda x: x.__setitem__((0, 0), 1.0)],
)
def test_changes_in_place_are_refused(comm: Communicator, change: Callable[[torch.Tensor], Any]) -> None:
    """They would change gathered logits, which are gone afterwards."""
    _, logits = logits_of(comm, random_logits(8, 13).detach())
    with pytest.raises(TrainingError, match="in place"):
        change(logits)


@pytest.mark.ranks(2, 3, 4)
def test_one_rank_may_print_and_copy_logits(comm: Communicator) -> None:
    _, logits = logits_of(comm, random_logits(8, 13))
    if comm.rank == 0:
        assert "shape=(8, 13)" in repr(logits)
        assert f"{logits.detach()}".startswith("VocabLogits")
        assert str(logits.shape) == "torch.Size([8, 13])"
        copied = copy.deepcopy(logits.detach())
        assert isinstance(copied, VocabLogits)
        assert torch.equal(copied.local, logits.local)
        with pytest.raises(TrainingError, match="whole"):
            pickle.dumps(logits.detach())
    comm.barrier()
    assert pickle.loads(pickle.dumps(logits.detach().whole())).shape == (8, 13)


# ---- embeddings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2, 13])
@pytest.mark.parametrize("padding_idx", [None, 0, -1, 1])
def test_an_embedding_is_that_of_one_process(comm: Communicator, tokens: int, padding_idx: int | None) -> None:
    torch.manual_seed(3)
    whole = torch.nn.Embedding(tokens, 4, padding_idx=padding_idx, dtype=torch.float64)
    x = torch.arange(24).view(2, 3, 4) % tokens
    with Mesh(tp=comm.size, comm=comm) as mesh:
        torch.manual_seed(3)
        model = VocabParallelEmbedding(tokens, 4, mesh=mesh, padding_idx=padding_idx, dtype=torch.float64)
        cut = placement(model.weight).cut
        assert cut is not None
        assert torch.equal(model.weight, cut.of(whole.weight.detach()))
        for each in (whole, model):
            (each(x) * torch.arange(24.0).view(2, 3, 4, 1)).sum().backward()
        assert torch.equal(model(x), whole(x))
        assert whole.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, cut.of(whole.weight.grad))
        with torch.no_grad():
            assert torch.equal(model(x[0, 0]), whole(x[0, 0]))
            assert model(x[:0]).shape == (0, 3, 4, 4)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("wrong", [13, -1])
def test_a_token_out_of_range_is_one_error_on_every_rank(comm: Communicator, wrong: int) -> None:
    with Mesh(tp=comm.size, comm=comm) as mesh:
        model = VocabParallelEmbedding(13, 4, mesh=mesh)
        with pytest.raises(TrainingError, match=f"token {wrong} with a vocabulary of 13"):
            model(torch.tensor([3, wrong]))
        comm.barrier()
