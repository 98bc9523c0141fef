"""Training in 16 bits follows one process with the same precision policy, model by model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from mpidl import Precision
from tests.mpidl.small_models import MODELS, Gaps, Recurrent, fresh
from tests.mpidl.zero.stepping.precision_reference import Make, by_hand, trained_with
from tests.mpidl.zero.test_models import adapted_gpt2, hf_bert, hf_llama

pytestmark = pytest.mark.mpi

STEPS = 30
BF16, FP16 = torch.bfloat16, torch.float16
# The model, the dtype of parameters, whether norms are kept in fp32, and the way: each stage with each dtype.
CASES: dict[str, tuple[Make, torch.dtype, bool, str]] = {
    "gpt2, bf16": (MODELS["gpt2"], BF16, True, "stage 1"),
    "gpt2, fp16": (MODELS["gpt2"], FP16, True, "stage 3 gathered"),
    "mixture, bf16": (MODELS["mixture"], BF16, False, "stage 3 gathered"),
    "mixture, fp16": (MODELS["mixture"], FP16, False, "stage 2"),
    "bert, bf16": (Gaps, BF16, True, "stage 2"),
    "lstm, bf16": (Recurrent, BF16, False, "stage 3"),
    "adapters, bf16": (adapted_gpt2, BF16, True, "stage 3"),
    "transformers-bert, bf16": (hf_bert, BF16, True, "stage 1"),
    "transformers-llama, bf16": (hf_llama, BF16, False, "stage 3 gathered"),
}


@pytest.mark.parametrize("case", CASES)
def test_training_follows_the_policy_written_by_hand(comm, case: str, fewer: Callable[[int], int]) -> None:
    make, dtype, wide, way = CASES[case]
    steps = fewer(STEPS)
    start = {name: p.detach() for name, p in fresh(make).named_parameters()}
    expected, masters = by_hand(make, dtype, torch.float32, wide, comm.size, steps)
    assert max(float((start[name] - master).abs().max()) for name, master in masters.items()) > 0.005  # it does train
    precision = Precision(dtype, torch.float32, keep_fp32=[nn.LayerNorm] if wide else ())
    losses, weights = trained_with(comm, make, way, precision, steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    if comm.rank == 0:
        found = torch.cat([weights[name].flatten() for name in masters])
        wanted = torch.cat([master.flatten() for master in masters.values()])
        assert (found - wanted).abs().mean() < 1e-5 * wanted.abs().mean()
