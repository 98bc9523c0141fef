"""States of optimizers that a checkpoint brings to a model of another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpidl.checkpoint import load, save
from tests.mpidl.small_models import fresh

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("optimizer", "settings"), [(torch.optim.Adafactor, {"lr": 0.1}), (torch.optim.LBFGS, {})])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_states_of_other_shapes_are_converted_too(
    comm, shared: Path, optimizer: Any, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).square().sum()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        optimizer.step(closure)

    def dtypes(value: Any) -> set[torch.dtype]:
        if isinstance(value, dict | list):
            return set().union(*map(dtypes, value.values() if isinstance(value, dict) else value))
        return {value.dtype} if torch.is_tensor(value) and value.dim() else set()

    model = fresh(lambda: nn.Linear(6, 3))
    trained = optimizer(model.parameters(), **settings)
    step(model, trained)
    save(shared, model, trained, process_group=comm)
    other = fresh(lambda: nn.Linear(6, 3)).to(dtype)
    here = optimizer(other.parameters(), **settings)
    load(shared, other, here, process_group=comm)
    assert dtypes(dict(here.state)) == {dtype}
    step(other, here)
    assert all(p.isfinite().all() for p in other.parameters())


def test_counts_of_steps_stay_as_they_are(comm, shared: Path) -> None:
    """A fused optimizer has them on the device; in bf16 they would not count on past 256."""

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = fresh(lambda: nn.Linear(6, 3))
    trained = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, trained)
    for entry in trained.state.values():
        entry["step"].fill_(300.0)
    save(shared, model, trained, process_group=comm)
    other = fresh(lambda: nn.Linear(6, 3)).bfloat16()
    here = torch.optim.AdamW(other.parameters(), fused=True)
    load(shared, other, here, process_group=comm)
    step(other, here)
    assert {(entry["step"].dtype, entry["step"].item()) for entry in here.state.values()} == {(torch.float32, 301.0)}
