"""Weights of a model on the meta device that is cut over tp, by `ZeroOptimizer(weights=)`: slices of parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh, broadcast_object
from tests.mpidl.tensor.reference import MODELS, all_in_float64, build, largest_difference, loss_of, tokens
from tests.mpidl.tensor.test_loading import written

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


@pytest.fixture
def folder(comm: Communicator, tmp_path: Path) -> Iterator[Path]:
    """A folder of rank 0's, the same on every rank."""
    yield Path(broadcast_object(comm, str(tmp_path)))
    comm.barrier()


@pytest.mark.ranks(2, 4, exactly=True)
@pytest.mark.each("name")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2", "hf gpt2", "qwen2, tied", "llama, one key head"])
def test_a_cut_model_on_the_meta_device_reads_its_slices(
    comm: Communicator, name: str, stage: int, folder: Path
) -> None:
    whole = build(name)
    path = written(comm, whole, folder, max_shard_size="20KB")
    model = mpidl.deferred_init(lambda: MODELS[name]().double())
    with all_in_float64(), Mesh(tp=2, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, mesh=mesh, weights=path, lr=1e-2)
        reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
        with optimizer.gathered(writable=False):
            assert largest_difference(model, whole) == 0.0
        ranks, rank = mesh.size("dp"), mesh.rank("dp")
        for step in range(3):
            x = tokens(step, 2 * ranks)
            loss_of(whole, x).backward()
            loss_of(model, x[2 * rank : 2 * rank + 2]).backward()
            for each in (reference, optimizer):
                each.step()
                each.zero_grad()
        with optimizer.gathered(writable=False):
            assert largest_difference(model, whole) < 1e-10


@pytest.mark.ranks(2, exactly=True)
def test_files_of_other_shapes_are_refused_with_the_whole_ones(comm: Communicator, folder: Path) -> None:
    if comm.rank == 0:
        states = {name: t.clone() for name, t in build("gpt2").state_dict().items()}
        states["transformer.h.0.attn.c_attn.weight"] = torch.zeros(28, 83)
        safetensors.torch.save_file(states, folder / "model.safetensors")
    comm.barrier()
    model = mpidl.deferred_init(lambda: MODELS["gpt2"]().double())
    with Mesh(tp=2, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        with pytest.raises(ConfigurationError, match=r"c_attn\.weight \(has \(28, 83\), needs \(28, 84\)\)"):
            mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=2, mesh=mesh, weights=folder)
