"""Models that are cut over tp under torch.compile, with synchronised batch norms, averages and states of parts."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh
from mpidl.tensor import FeedForwardParallel
from tests.mpidl.tensor.engines import MESHES, Recipe, engine_of
from tests.mpidl.tensor.reference import all_in_float64, build, largest_difference, loss_of, part_of, tokens, train
from tests.mpidl.zero.ways import WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh"), pytest.mark.filterwarnings("ignore:units")]

GPT2, LLAMA = "gpt2", "llama, two key heads"


@pytest.mark.limit(300)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "sequence_parallel"), [(GPT2, True), (LLAMA, False), (LLAMA, True)])
def test_compiled_blocks(comm: Communicator, name: str, sequence_parallel: bool) -> None:
    """Graphs break where ranks communicate."""
    losses, gradients = [], []
    with Mesh(tp=comm.size, comm=comm) as mesh:
        for compiled in (False, True):
            model: Any = mpidl.parallelize(build(name, torch.float32), mesh, sequence_parallel=sequence_parallel)
            if compiled:
                torch._dynamo.reset()
                for block in model.transformer["h"] if name == GPT2 else model.model.layers:
                    block.compile(backend="aot_eager")
            for step in range(2):
                loss = loss_of(model, tokens(step))
                loss.backward()
                losses.append(loss.item())
            gradients.append([p.grad for p in model.parameters()])
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-5)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Normalised(nn.Module):
    """A network with batch normalization, and another one that is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.inner, self.outer = nn.Linear(6, 7), nn.Linear(7, 6)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.outer(torch.tanh(self.inner(x))) + x


@pytest.mark.at_most(4)
def test_synchronised_batch_norm_in_a_model_that_is_cut_elsewhere(comm: Communicator) -> None:
    """Its statistics are over dp: the ranks of tp have the same samples."""
    plan = {"*": FeedForwardParallel(inputs=("inner",), output="outer", input="x")}
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = nn.Sequential(Normalised())
    whole(x).square().mean().backward()
    for dp, tp in MESHES[comm.size]:
        with Mesh(dp=dp, tp=tp, comm=comm) as mesh:
            model: Any = nn.Sequential(Normalised())
            mpidl.parallelize(model, mesh, plan)
            model = mpidl.SyncBatchNorm.convert_sync_batchnorm(model, mesh=mesh)
            ddp = mpidl.DistributedDataParallel(model, mesh=mesh)
            ddp(x.chunk(dp)[mesh.rank("dp")]).square().mean().backward()
            for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.grad, part_of(q.grad, p), rtol=1e-10, atol=1e-12)
            for name, value in whole.named_buffers():
                torch.testing.assert_close(dict(model.named_buffers())[name], value)


@pytest.mark.at_most(4)
@pytest.mark.parametrize("engine", ["torch", "ddp", *WAYS])
def test_an_average_of_the_weights(comm: Communicator, engine: str) -> None:
    """Each rank averages its parts; shown, they are those of one process's average."""
    with all_in_float64():
        whole = build(GPT2)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
        average = mpidl.optim.EMA(whole, decay=0.5)
        for step in range(3):
            loss_of(whole, tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        for dp, tp in MESHES[comm.size]:
            if engine == "torch" and dp > 1:
                continue
            with Mesh(dp=dp, tp=tp, comm=comm) as mesh, average.averaged():
                model = mpidl.parallelize(build(GPT2), mesh, sequence_parallel=True)
                with engine_of(engine, model, mesh, Recipe(settings={"lr": 1e-2})) as (call, trainer):
                    mine = mpidl.optim.EMA(call, decay=0.5)
                    for step in range(3):
                        loss_of(call, tokens(step)).backward()
                        trainer.step()
                        trainer.zero_grad()
                        mine.update()
                    with mine.averaged(), torch.no_grad():
                        model.eval()
                        assert loss_of(call, tokens(9)).item() == pytest.approx(
                            loss_of(whole.eval(), tokens(9)).item(), abs=1e-10
                        )
                        model.train()
                        whole.train()


def test_states_of_parts(comm: Communicator) -> None:
    """state_dict gives this rank's parts, which another model with the same cuts takes, also through a file."""
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        whole, model, other = build(LLAMA), build(LLAMA), build(LLAMA)
        for each in (model, other):
            mpidl.parallelize(each, mesh, sequence_parallel=True)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, model, other)]
        for each, optimizer in zip((whole, model), optimizers, strict=False):
            train(each, 3, optimizer)
        file = io.BytesIO()
        torch.save((dict(model.state_dict()), optimizers[1].state_dict()), file)
        file.seek(0)
        states, of_optimizer = torch.load(file)
        other.load_state_dict(states)
        optimizers[2].load_state_dict(of_optimizer)
        copied = copy.deepcopy(other)
        assert train(other, 3, optimizers[2]) == pytest.approx(train(whole, 3, optimizers[0]), abs=1e-10)
        assert largest_difference(other, whole) < 1e-10
        assert largest_difference(copied, mpidl.unparallelize(model)) == 0
