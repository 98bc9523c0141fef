"""Hybrid sharding with offload, with models without values, and with weights from files: as without, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mpidl
from mpidl import Offload
from mpidl.job.objects import broadcast_object
from mpidl.zero import Safetensors
from tests.mpidl.small_models import Mixture, sequences, small_gpt2
from tests.mpidl.zero.construction.test_construction import BF16, assert_same, seeded
from tests.mpidl.zero.offload.test_offload import PRECISIONS, differences, everything, zero
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi
SMALL = Offload("disk", buffer_mb=0.02)
LATE = {to: Offload(to, delayed_update=True, delay_from=1) for to in ("cpu", "disk")}


def group_of(comm):
    """Two pairs of neighbours; each rank alone, where there are fewer than four."""
    return comm.split(comm.rank // 2 if comm.size % 4 == 0 else comm.rank)


@pytest.mark.parametrize(
    ("way", "precision"),
    [
        ("stage 1", "bf16"),
        ("stage 2", "bf16 reduced"),
        ("stage 3", "bf16"),
        ("stage 3 gathered", "bf16"),
        ("stage 2", "fp32"),
    ],
)
def test_offload_keeps_the_bits_of_hybrid_sharding(comm, way: str, precision: str) -> None:
    settings = {"shard_group": group_of(comm), "precision": PRECISIONS[precision]}
    losses, expected, _ = everything(comm, way, **settings)
    for offload in ("cpu", SMALL):
        found_losses, found, _ = everything(comm, way, offload=offload, **settings)
        assert found_losses == losses
        assert differences(expected, found) == []
    delayed = [everything(comm, way, offload=offload, **settings) for offload in LATE.values()]
    assert delayed[0][0] == delayed[1][0] != losses
    assert differences(delayed[0][1], delayed[1][1]) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("make", "offload"), [(small_gpt2, None), (Mixture, None), (small_gpt2, SMALL)])
def test_models_without_values(comm, way: str, make: Any, offload: Any) -> None:
    def built(model: torch.nn.Module, **more: Any) -> Any:
        settings = {"precision": BF16, "offload": offload, "shard_group": group_of(comm), **WAYS[way], **more}
        return mpidl.ZeroOptimizer(model, torch.optim.AdamW, process_group=comm, lr=0.1, **settings)

    ordinary = seeded(7, make)
    expected = {n: t.clone() for n, t in ordinary.state_dict().items()}
    optimizer = built(seeded(7 + comm.rank, lambda: mpidl.deferred_init(make)))
    found = optimizer.model_state_dict()
    trained = {n for n, p in ordinary.named_parameters(remove_duplicate=False) if p.requires_grad}
    if comm.rank == 0:
        assert [n for n in trained if not torch.equal(found[n], expected[n])] == []
    whole = built(ordinary)
    assert_same(optimizer.model_state_dict(), whole.model_state_dict(), comm)
    assert_same(optimizer.model_state_dict(masters=False), whole.model_state_dict(masters=False), comm)
    assert_the_same_everywhere(comm, optimizer)


def assert_the_same_everywhere(comm, optimizer: Any) -> None:
    """Rank 0 has told of its own group alone."""
    with optimizer.gathered(writable=False):
        own = torch.stack([p.double().sum() for p in optimizer.model.parameters()])
    low, high = own.clone(), own.clone()
    comm.all_reduce(low, "min")
    comm.all_reduce(high, "max")
    assert torch.equal(low, high)


@pytest.mark.parametrize("way", WAYS)
def test_weights_from_files(comm, tmp_path: Path, way: str) -> None:
    """At construction and later, with masters on a disk and an update under way, which they replace."""
    safetensors = pytest.importorskip("safetensors.torch")
    saved = {n: t.clone() for n, t in seeded(3, small_gpt2).state_dict().items()}
    path = Path(broadcast_object(comm, str(tmp_path))) / "model.safetensors"
    if comm.rank == 0:
        safetensors.save_file({n: t for n, t in saved.items() if n != "lm_head.weight"}, path)
    comm.barrier()
    settings = {"precision": BF16, "shard_group": group_of(comm)}
    optimizer = mpidl.ZeroOptimizer(
        mpidl.deferred_init(small_gpt2),
        torch.optim.AdamW,
        process_group=comm,
        weights=Safetensors(path),
        **settings,
        **WAYS[way],
    )
    expected = optimizer.model_state_dict()
    rounded = optimizer.model_state_dict(masters=False)
    assert_same(expected, saved, comm)
    assert_the_same_everywhere(comm, optimizer)
    for offload in (SMALL, LATE["cpu"], LATE["disk"]):
        model = seeded(5, small_gpt2)
        late = zero(comm, model, way, params=None, offload=offload, **settings)
        for step in range(3):
            model(*sequences(step, 0)).backward()
            late.step()
            late.zero_grad()
        late.load_safetensors(path)
        assert_same(late.model_state_dict(masters=False), rounded, comm)
        assert_same(late.model_state_dict(), expected, comm)
        assert_the_same_everywhere(comm, late)
