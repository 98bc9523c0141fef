"""Operations on logits of which each rank has a part, those that gather among them, judged by torch on the whole."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from collectives import Communicator
from mpidl import TrainingError
from mpidl.tensor import VocabLogits
from mpidl.tensor.communication import TensorGroup
from mpidl.tensor.vocab_logits import HANDLERS
from tests.mpidl.tensor.vocabulary_parts import TARGETS, logits_of, part_of_gradient, random_logits

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


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
        lambda x: x[np.array([1, 0, 1])],
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
    """A learned temperature is one; the part's gradient alone would differ between the ranks."""
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
    [
        lambda x: x.div_(2.0),
        lambda x: x.masked_fill_(x > 0, 0.0),
        lambda x: x.__setitem__((0, 0), 1.0),
        lambda x: operator.itruediv(x, 2.0),
        lambda x: operator.iadd(x, torch.ones(13)),
    ],
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


def test_without_gradients_several_operations_gather_once(comm: Communicator) -> None:
    group = TensorGroup(comm)
    whole = random_logits(3, 13)
    _, logits = logits_of(comm, whole, group)
    with torch.no_grad():
        least = torch.topk(logits, 2).values[..., -1:]
        kept = logits.masked_fill(logits < least, -torch.inf)
    assert group.traffic.all_gathers == 1
    assert torch.equal(kept, whole.masked_fill(whole < least, -torch.inf))
    assert logits.softmax(-1).requires_grad  # what was gathered without gradients is not used with them
    assert group.traffic.all_gathers == 2
