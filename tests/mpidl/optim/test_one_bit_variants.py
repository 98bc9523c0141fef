"""0/1 Adam and 1-bit LAMB, against float64 numpy that simulates all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpidl
from collectives import Communicator
from tests.mpidl.optim import one_bit_reference as reference
from tests.mpidl.optim.one_bit_training import (
    SHAPES,
    Slopes,
    Training,
    check_against,
    engines,
    nodes_of,
    of_nodes,
    slopes,
    start,
)

# ---- 0/1 Adam ------------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@engines
@pytest.mark.parametrize("where", ["everywhere", "between_nodes"])
def test_zero_one_adam_follows_the_papers_formulas(comm: Communicator, engine: str, where: str) -> None:
    """Every interval of v up to 4, then local steps of 1, 2 and 4; weights are compared where they are the same."""
    nodes = nodes_of(comm, where)
    schedule = {"renewals": 2, "local_after": 12, "local_interval_steps": 2, "max_local_interval": 4}
    exchange = reference.Exchange(SHAPES, comm.size, nodes)
    expected = reference.ZeroOne(start(), exchange, 0.01, 0.1, *schedule.values())
    settings = {"lr": 0.01, "weight_decay": 0.1, "where": where, **schedule}
    training = Training(comm, engine, mpidl.optim.ZeroOneAdam, Slopes(), **settings)
    exchanged = 0
    for step in range(26):
        training.run(step, 1)
        expected.step(of_nodes(step, comm.size, nodes))
        own = comm.rank // (comm.size // nodes)
        for p, w in zip(training.model.parameters(), expected.of_nodes[own], strict=True):
            np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=5e-4, atol=5e-4)
        assert training.inner.is_synchronised == (expected.since == 0)  # type: ignore[attr-defined]
        if training.inner.is_synchronised:  # type: ignore[attr-defined]
            exchanged += 1
            training.check_equal_on_all_ranks()
    assert exchanged == 12 + 2 + 1 + 2


@pytest.mark.mpi
@engines
def test_zero_one_adam_gives_no_state_between_exchanges(comm: Communicator, engine: str) -> None:
    settings = {"local_after": 2, "local_interval_steps": 1, "max_local_interval": 4}
    training = Training(comm, engine, mpidl.optim.ZeroOneAdam, Slopes(), **settings)
    training.run(0, 4)  # an exchange at step 3, the next one at step 5
    with pytest.raises(mpidl.TrainingError, match="after step 4 each rank has its own weights; needs"):
        training.optimizer.state_dict()
    training.run(4, 1)
    training.state()


# ---- 1-bit LAMB ----------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@engines
@pytest.mark.parametrize("where", ["everywhere", "between_nodes"])
def test_lamb_follows_the_papers_formulas(comm: Communicator, engine: str, where: str) -> None:
    nodes = nodes_of(comm, where)
    expected = reference.Lamb(start(), reference.Exchange(SHAPES, comm.size, nodes), freeze_step=6, lr=0.01, wd=0.1)
    settings = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 6, "where": where}
    check_against(Training(comm, engine, mpidl.optim.OneBitLamb, Slopes(), **settings), expected, 16, nodes)


@pytest.mark.mpi
def test_lamb_corrects_the_trust_ratio_by_the_steps_that_gave_one(comm: Communicator) -> None:
    """Before the freeze the first parameter has no gradient, the second one in the first step alone."""

    class Some(Slopes):
        def forward(self, slopes: list[torch.Tensor], reached: list[int]) -> torch.Tensor:  # type: ignore[override]
            return torch.stack([(self.weights[n] * slopes[n]).sum() for n in reached]).sum()

    model, lr, decay, eps = Some(), 0.01, 0.1, 1e-6
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, find_unused_parameters=True)
    own = mpidl.optim.OneBitLamb(
        model.parameters(), lr=lr, weight_decay=decay, eps=eps, freeze_step=3, process_group=comm
    )
    wrapped.register_comm_hook(own, mpidl.optim.one_bit_hook)
    never, once = list(model.parameters())[:2]
    former, first = never.detach().clone(), once.detach().clone()
    for step, reached in enumerate([[1, 2, 3], [2, 3], [2, 3], [1, 2, 3]]):
        before = once.detach().clone()
        wrapped([g.float() for g in slopes(step, comm.rank)], reached).backward()
        own.step()
        own.zero_grad()
    torch.testing.assert_close(never.detach(), (1 - lr * decay) * former, rtol=1e-5, atol=1e-6)
    mean = torch.stack([slopes(0, rank)[1].float() for rank in range(comm.size)]).mean(0)
    measured = first.norm() / (mean / (mean.abs() + eps) + decay * first).norm()
    m, v = (own.state[once][key] for key in ("exp_avg", "exp_avg_sq"))
    update = m / (1 - 0.9**4) / ((v / (1 - 0.999**3)).sqrt() + eps) + decay * before
    found = (before - once.detach()).norm() / (lr * update.norm())
    assert found.item() == pytest.approx(measured.item() * own.progress["factors"][1], rel=1e-2)


@pytest.mark.mpi
def test_the_warm_up_is_lamb(comm: Communicator) -> None:
    ours = Training(comm, "ddp", mpidl.optim.OneBitLamb, Slopes(), lr=0.01, freeze_step=100)
    ours.run(0, 5)
    plain = Slopes()
    lamb = mpidl.optim.LAMB(plain.parameters(), lr=0.01)
    for step in range(5):
        for n, p in enumerate(plain.parameters()):
            p.grad = torch.stack([slopes(step, rank)[n].float() for rank in range(comm.size)]).mean(0)
        lamb.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(ours.weights(), expected, rtol=1e-5, atol=1e-5)
