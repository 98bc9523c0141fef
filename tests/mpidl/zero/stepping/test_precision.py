"""Mixed precision: working copies, masters, dtypes of the reduction, and states."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Precision
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.stepping import precision_reference
from tests.mpidl.zero.ways import WAYS, every_way, zero

pytestmark = pytest.mark.mpi

STEPS = 4


@cache
def by_hand(dtype: torch.dtype, reduce: torch.dtype, wide: bool, ranks: int) -> tuple[list[float], dict[str, Any]]:
    """One process, as of `precision_reference`, on GPT-2."""
    return precision_reference.by_hand(MODELS["gpt2"], dtype, reduce, wide, ranks, STEPS)


def trained(comm: Communicator, way: str, precision: Precision) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    return precision_reference.trained_with(comm, MODELS["gpt2"], way, precision, STEPS)


# With norms in fp32 and reduce_dtype None, their gradients would be reduced in another dtype than the others'.
# All ways give the same bits (below), so each policy takes two of them.
@pytest.mark.parametrize(
    ("dtype", "reduce", "wide", "ways"),
    [
        (torch.bfloat16, torch.float32, True, ("stage 1", "stage 3 gathered")),
        (torch.float16, torch.float32, True, ("stage 2", "stage 3")),
        (torch.bfloat16, torch.float32, False, ("stage 2", "stage 3 gathered")),
        (torch.bfloat16, None, False, ("stage 1", "stage 3")),
        (torch.float16, None, False, ("stage 2", "stage 3 gathered")),
    ],
    ids=str,
)
def test_training_follows_the_policy_written_by_hand(
    comm, dtype: torch.dtype, reduce: Any, wide: bool, ways: tuple[str, ...]
) -> None:
    expected, masters = by_hand(dtype, reduce or dtype, wide, comm.size)
    assert expected[-1] < expected[0]
    precision = Precision(dtype, reduce, keep_fp32=[nn.LayerNorm] if wide else ())
    for way in ways:
        losses, weights = trained(comm, way, precision)
        # A sum of three or more in another order changes last bits, and so now and then the rounding of a weight.
        np.testing.assert_allclose(losses, expected, rtol=1e-5 if reduce else 1e-4, err_msg=way)
        if comm.rank:
            continue
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        wrong = torch.cat([(weights[name] - master).abs().flatten() for name, master in masters.items()])
        assert wrong.mean() < (1e-5 if reduce else 1e-4), way
        assert wrong.max() < (1e-3 if reduce else 4e-3), way


@pytest.mark.parametrize("reduce", [torch.float32, None], ids=str)
def test_all_stages_train_the_same_bits(comm, reduce: Any) -> None:
    precision = Precision(torch.bfloat16, reduce, keep_fp32=[nn.LayerNorm])
    runs = [trained(comm, way, precision) for way in WAYS]
    for losses, weights in runs[1:]:
        assert losses.tolist() == runs[0][0].tolist()
        assert comm.rank or all(torch.equal(runs[0][1][name], tensor) for name, tensor in weights.items())


class Floats(nn.Module):
    """Notes the dtypes that pass through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(6, 8),
            nn.Sequential(nn.BatchNorm1d(8), nn.Identity()),
            nn.Linear(8, 3),
        )
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, extra: dict[str, Any]) -> dict[str, Any]:
        self.seen = [x.dtype, extra["shift"].dtype, extra["which"].dtype]
        h = self.norm(self.first(x + extra["shift"]))
        extra["mutable"].append(1)
        self.seen.append(h.dtype)
        return {"out": self.last(h), "which": extra["which"]}


@every_way
def test_inputs_and_outputs_are_cast_where_the_policy_says(comm, way: str) -> None:
    model, inside = Floats(), []
    model.norm[1].register_forward_hook(lambda _, inputs, __: inside.append(inputs[0].dtype))
    precision = Precision(torch.bfloat16, keep_fp32=lambda name, _: name == "norm", output_dtype=torch.float32)
    optimizer = zero(model, comm, way, precision=precision)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"norm.0.weight", "norm.0.bias"}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    extra = {"shift": torch.ones(6, dtype=torch.float64), "which": torch.tensor([1]), "mutable": []}
    out = model(torch.randn(4, 6), extra=extra)
    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16]
    assert inside == [torch.float32]
    assert (out["out"].dtype, out["which"].dtype) == (torch.float32, torch.int64)
    assert extra["shift"].dtype == torch.float64
    assert model.norm[0].running_mean.dtype == torch.float32
    out["out"].sum().backward()
    optimizer.step()


def test_what_needs_no_cast_is_passed_on_itself(comm) -> None:
    """GPT-2 extends the lists of keys and values that it is given."""
    model = fresh(MODELS["gpt2"])
    zero(model, comm, "stage 3", precision=Precision(torch.bfloat16))
    tokens = model.generate(torch.zeros(1, 1, dtype=torch.int64), 5)
    assert tokens.shape == (1, 6)
    pasts: list[Any] = [[] for _ in range(3)]
    model(tokens, pasts=pasts)
    assert all(len(past) == 2 for past in pasts)


@pytest.mark.parametrize("sync_each", [True, False])
@every_way
def test_small_gradients_of_many_passes_add_up_in_fp32(comm, way: str, sync_each: bool) -> None:
    """In bf16, 1 + 1 / 512 is 1."""
    model = nn.Linear(4, 2, bias=False)
    precision = Precision(torch.bfloat16, None if sync_each else torch.float32)
    optimizer = zero(model, comm, way, torch.optim.SGD, lr=1.0, precision=precision)
    before = optimizer.model_state_dict()
    x = torch.ones(1, 4)
    for number in range(9):
        factor = 1.0 if number == 0 else 1 / 512
        if sync_each or number == 8:
            (model(x).float().sum() * factor).backward()
        else:
            with optimizer.no_sync():
                (model(x).float().sum() * factor).backward()
    optimizer.step()
    after = optimizer.model_state_dict()
    if comm.rank == 0:
        torch.testing.assert_close(before["weight"] - after["weight"], torch.full((2, 4), 1 + 8 / 512))


@every_way
def test_clipping_is_in_fp32(comm, way: str) -> None:
    """A third is no bf16 number."""
    model = nn.Linear(9, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = zero(model, comm, way, torch.optim.SGD, lr=1.0, precision=Precision(torch.bfloat16))
    model(torch.ones(1, 9)).sum().backward()
    assert optimizer.clip_grad_norm_(1.0) == pytest.approx(3.0)
    optimizer.step()
    optimizer.zero_grad()
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        torch.testing.assert_close(weights["weight"], torch.full((1, 9), -1 / 3))
    model(torch.ones(1, 9)).sum().backward()
    optimizer.clip_grad_value_(0.1)
    optimizer.step()
    weights = optimizer.model_state_dict()
    if comm.rank == 0:
        torch.testing.assert_close(weights["weight"], torch.full((1, 9), -1 / 3 - 0.1))


# ---- states -----------------------------------------------------------------------------------------------------


@every_way
def test_masters_begin_with_the_values_before_rounding(comm, way: str) -> None:
    model = fresh(MODELS["gpt2"])
    plain = fresh(MODELS["gpt2"]).state_dict()
    optimizer = zero(model, comm, way, precision=Precision(torch.bfloat16))
    with optimizer.gathered():
        pass  # values without a change stay unrounded
    masters, rounded = optimizer.model_state_dict(), optimizer.model_state_dict(masters=False)
    if comm.rank == 0:
        assert all(torch.equal(masters[name], value) for name, value in plain.items())
        assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in plain.items())
    with optimizer.gathered(), torch.no_grad():
        model.lm_head.weight[0] = 0.5
    masters = optimizer.model_state_dict()
    if comm.rank == 0:
        assert (masters["lm_head.weight"][0] == 0.5).all()
        assert torch.equal(masters["lm_head.weight"][1:], plain["lm_head.weight"][1:])


def steps_of(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(*sequences(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


@every_way
def test_training_goes_on_from_states_to_the_bit(comm, way: str) -> None:
    precision = Precision(torch.bfloat16, torch.float32, [nn.LayerNorm])
    model, other = fresh(MODELS["mixture"]), fresh(MODELS["mixture"], rank=1)
    optimizer, resumed = (zero(m, comm, way, precision=precision) for m in (model, other))
    steps_of(model, optimizer, range(3))
    resumed.load_model_state_dict(optimizer.model_state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for m, o in ((model, optimizer), (other, resumed)):
        steps_of(m, o, range(3, 6))
    expected, found = optimizer.model_state_dict(), resumed.model_state_dict()
    assert comm.rank or all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    # Those of 16 bits are taken as well.
    resumed.load_model_state_dict(optimizer.model_state_dict(masters=False))
    found = resumed.model_state_dict()
    assert comm.rank or all(
        torch.equal(found[name], tensor.to(torch.bfloat16).to(found[name].dtype)) for name, tensor in expected.items()
    )


# ---- wrong use --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"param_dtype": torch.int8}, r"param_dtype: got torch\.int8; needs None, torch\.bfloat16, torch\.float16"),
        ({"reduce_dtype": "fp32"}, "reduce_dtype: got 'fp32'"),
        ({"output_dtype": torch.int64}, "output_dtype"),
        ({"param_dtype": torch.bfloat16, "keep_fp32": [3]}, "needs module classes, or a function"),
        ({"keep_fp32": nn.LayerNorm}, "needs a param_dtype"),
    ],
)
def test_wrong_settings_are_refused(comm, settings: dict, message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match="explain_after: got 0"):
        mpidl.GradScaler(process_group=comm, explain_after=0)
    with pytest.raises(mpidl.ConfigurationError, match=r"device: got 8.0; needs the name"):
        mpidl.GradScaler(8.0, process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match="init_scale: got 0"):
        mpidl.GradScaler("cpu", 0, process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match=message):
        Precision(**settings)


def test_policies_that_do_not_fit_the_model_are_refused_and_change_nothing(comm) -> None:
    half = torch.bfloat16
    for precision, message in (
        (Precision(half, keep_fp32=nn.Embedding), r"shares lm_head\.weight, but not 'lm_head' too"),
        (Precision(half, keep_fp32=lambda name, _: name == ""), "chooses the whole model"),
        (half, "needs an mpidl.Precision"),
    ):
        model = fresh(MODELS["gpt2"])
        with pytest.raises(mpidl.ConfigurationError, match=message):
            zero(model, comm, "stage 3", precision=precision)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    if comm.size > 1:
        differing = Precision(half) if comm.rank else None
        with pytest.raises(mpidl.ModelMismatch, match="param_dtype"):
            zero(fresh(MODELS["gpt2"]), comm, "stage 1", precision=differing)


def test_batch_normalizations_whose_statistics_have_another_dtype_are_refused(comm) -> None:
    def model(dtype: torch.dtype = torch.float32) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).to(dtype), nn.BatchNorm1d(4, track_running_stats=False))

    half = torch.bfloat16
    with pytest.raises(mpidl.ConfigurationError, match=r"1, a BatchNorm1d, .*float32.*keep_fp32"):
        zero(model(), comm, "stage 3", precision=Precision(half))
    synchronised = mpidl.SyncBatchNorm.convert_sync_batchnorm(model(), comm)
    for m, keep in ((model(), [nn.BatchNorm1d]), (model(half), []), (synchronised, [])):
        optimizer = zero(m, comm, "stage 3", precision=Precision(half, keep_fp32=keep))
        m(torch.ones(2, 3)).float().square().sum().backward()
        optimizer.step()
        m[:2].eval()
        with torch.no_grad():
            assert m(torch.ones(2, 3)).isfinite().all()
