"""Cross-entropy of logits of which each rank has a part, judged by torch on the whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from collectives import Communicator
from mpidl import TrainingError
from mpidl.tensor import VocabLogits, cross_entropy
from mpidl.tensor.communication import TensorGroup
from mpidl.tensor.sizes import run_of
from tests.mpidl.tensor.vocabulary_parts import TARGETS, logits_of, part_of_gradient, random_logits

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]
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
    """Torch wants it there of several dimensions of tokens. Nothing is gathered."""
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


@pytest.mark.parametrize("tokens", [1, 2, 3, 13, 50257])
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
