"""Dion against the paper's formula in float64 numpy; over DDP, where factors alone travel, and ZeRO."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpidl
from mpidl.errors import ConfigurationError, TrainingError
from mpidl.job.objects import broadcast_object
from mpidl.optim import Dion, DionState, dion_hook
from mpidl.optim.dion import initial_state
from tests.mpidl.optim.test_post_local import equal_on_all
from tests.mpidl.small_models import MODELS, fresh, sequences
from tests.mpidl.zero.ways import ENGINES, WAYS

SHAPES = ((12, 7), (5, 9), (6, 6))


class NumpyDion:
    def __init__(self, shape: tuple[int, int], lr: float, mu: float, fraction: float, decay: float) -> None:
        self.lr, self.mu, self.decay = lr, mu, decay
        self.scale = np.sqrt(shape[0] / shape[1])
        self.m = np.zeros(shape)
        self.q = initial_state(torch.zeros(shape, dtype=torch.float64), fraction)["q"].numpy().copy()

    def step(self, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.m = self.m + g
        p = np.linalg.qr(self.m @ self.q)[0]
        r = self.m.T @ p
        self.m = self.m - (1 - self.mu) * p @ r.T
        self.q = r / np.linalg.norm(r, axis=0)
        return (1 - self.lr * self.decay) * x - self.lr * self.scale * p @ self.q.T


def gradient(step: int, shape: tuple[int, ...], rank: int = 0) -> np.ndarray:
    return np.random.default_rng([step, rank, *shape]).normal(size=shape)


def start() -> list[nn.Parameter]:
    return [nn.Parameter(torch.from_numpy(gradient(99, shape))) for shape in SHAPES]


@pytest.mark.parametrize(("mu", "fraction", "decay"), [(0.95, 0.25, 0.0), (0.5, 1.0, 0.1)])
def test_weights_follow_the_formula(mu: float, fraction: float, decay: float) -> None:
    own = start()
    optimizer = Dion(own, lr=0.05, mu=mu, rank_fraction=fraction, weight_decay=decay)
    expected = [p.detach().numpy().copy() for p in own]
    methods = [NumpyDion(shape, 0.05, mu, fraction, decay) for shape in SHAPES]
    for step in range(10):
        for n, (p, shape) in enumerate(zip(own, SHAPES, strict=True)):
            p.grad = None if step % 3 == 1 and n == 0 else torch.from_numpy(gradient(step, shape))
            if p.grad is not None:
                expected[n] = methods[n].step(expected[n], gradient(step, shape))
        optimizer.step()
    for p, weights in zip(own, expected, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), weights, rtol=1e-9, atol=1e-11)
        q = optimizer.state[p]["q"]
        assert q.shape == (p.shape[1], max(1, round(fraction * min(p.shape))))


def test_others_are_stepped_on_by_adamw() -> None:
    both = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizers = [
        Dion([{"params": both[:1], "rule": "adamw"}], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2),
        torch.optim.AdamW(both[1:], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2),
    ]
    for step in range(4):
        for p, optimizer in zip(both, optimizers, strict=True):
            p.grad = torch.from_numpy(gradient(step, (4, 3))).float()
            optimizer.step()
    torch.testing.assert_close(*both)


def groups(model: nn.Module, fraction: float = 0.5) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() == 2], "lr": 0.02, "rank_fraction": fraction},
        {"params": [p for p in trained if p.dim() != 2], "rule": "adamw", "lr": 1e-3, "eps": 1e-6},
    ]


def steps(call: nn.Module, optimizer: Any, rank: int, ranks: int, first: int, last: int) -> None:
    for step in range(first, last):
        call(*(part.chunk(ranks)[rank] for part in sequences(step, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()


def over_ddp(comm: Any, rank: int = 0) -> tuple[nn.Module, Any, Dion]:
    model = fresh(MODELS["gpt2"], rank)
    call = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=0.01)
    optimizer = Dion(groups(model), process_group=comm)
    call.register_comm_hook(DionState(optimizer), dion_hook)
    return model, call, optimizer


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_follow_a_single_process(comm, engine: str) -> None:
    expected = fresh(MODELS["gpt2"])
    reference = Dion(groups(expected))
    steps(expected, reference, 0, 1, 0, 5)
    if engine == "ddp":
        model, call, optimizer = over_ddp(comm, comm.rank)
    else:
        model = call = fresh(MODELS["gpt2"], comm.rank)
        optimizer = mpidl.ZeroOptimizer(model, Dion, params=groups(model), process_group=comm, **WAYS[engine])
    steps(call, optimizer, comm.rank, comm.size, 0, 5)
    whole = dict(model.state_dict()) if engine == "ddp" else optimizer.model_state_dict()
    if engine == "ddp":
        optimizer.average_momenta()
    state = optimizer.state_dict()
    if engine == "ddp":
        assert all(equal_on_all(comm, p) for p in model.parameters())
        assert all(equal_on_all(comm, v) for entry in state["state"].values() for v in entry.values() if v.dim())
    if engine == "ddp" or comm.rank == 0:
        for name, p in expected.named_parameters():
            torch.testing.assert_close(whole[name], p.detach(), rtol=0, atol=2e-4, msg=name)
        wanted = reference.state_dict()["state"]
        assert state["state"].keys() == wanted.keys()
        for number, entry in wanted.items():
            if "momentum" in entry:
                torch.testing.assert_close(state["state"][number]["momentum"], entry["momentum"], rtol=0, atol=1e-4)


@pytest.mark.mpi
def test_factors_and_small_parameters_alone_travel(comm) -> None:
    """The mean of what the ranks keep of their own gradients is one process's momentum; the gradients stay theirs."""
    _, call, optimizer = over_ddp(comm)
    call(*(part.chunk(comm.size)[comm.rank] for part in sequences(0, 0))).backward()
    for p in optimizer.param_groups[0]["params"]:
        assert comm.size == 1 or not equal_on_all(comm, p.grad)
    for p in optimizer.param_groups[1]["params"]:
        assert equal_on_all(comm, p.grad)
    sent: list[int] = []
    group = optimizer.process_group

    class Counting:
        size = group.size

        def all_reduce(self, x: Any, op: str) -> None:
            sent.append(x.numel() if torch.is_tensor(x) else 0)
            group.all_reduce(x, op)

    optimizer.process_group = Counting()
    optimizer.step()
    optimizer.process_group = group
    each = [(p.shape, optimizer.state[p]["q"].shape[1]) for p in optimizer.param_groups[0]["params"]]
    assert sent == [0, sum(shape[0] * r for shape, r in each), sum(shape[1] * r for shape, r in each)]


@pytest.mark.mpi
def test_a_state_of_momenta_that_differ_is_refused_on_one_rank_alone(comm) -> None:
    """So that rank 0 alone may ask, as programs that save on it do."""
    _, call, optimizer = over_ddp(comm)
    optimizer.state_dict()
    steps(call, optimizer, comm.rank, comm.size, 0, 2)
    if comm.rank == 0 and comm.size > 1:
        with pytest.raises(TrainingError, match=r"momenta of its own; needs average_momenta\(\) on every rank after"):
            optimizer.state_dict()
    optimizer.average_momenta()
    if comm.rank == 0:
        state = optimizer.state_dict()
        assert {"momentum", "q"} == state["state"][0].keys()


@pytest.mark.mpi
def test_gradients_that_are_clipped_by_a_norm_of_each_rank_are_refused_on_all(comm) -> None:
    """The norm counts gradients of matrices, each rank's own; that of the other parameters is the same everywhere."""
    model, call, optimizer = over_ddp(comm)
    for step in range(3):
        call(*(part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))).backward()
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[1]["params"], 1e-3)
        assert norm > 1e-3
        optimizer.step()
        optimizer.zero_grad()
    assert all(equal_on_all(comm, p) for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    call(*(part.chunk(comm.size)[comm.rank] for part in sequences(3, 0))).backward()
    torch.nn.utils.clip_grad_norm_(call.parameters(), 1e-3)
    if comm.size > 1:
        with pytest.raises(TrainingError, match=rf"rule='adamw' differ between the {comm.size} ranks, as after"):
            optimizer.step()
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.mpi
def test_a_state_goes_on_over_ddp_and_zero(comm, tmp_path: Path) -> None:
    path = Path(broadcast_object(comm, str(tmp_path)))
    model, call, optimizer = over_ddp(comm)
    steps(call, optimizer, comm.rank, comm.size, 0, 3)
    p = optimizer.param_groups[0]["params"][0]
    assert comm.size == 1 or not equal_on_all(comm, optimizer.state[p]["momentum"])
    mpidl.checkpoint.save(path, call, optimizer)
    assert equal_on_all(comm, optimizer.state[p]["momentum"])
    state = copy.deepcopy(optimizer.state_dict())
    steps(call, optimizer, comm.rank, comm.size, 3, 5)

    again, call_again, other = over_ddp(comm, rank=1)
    mpidl.checkpoint.load(path, call_again, other)
    other.load_state_dict(state)
    steps(call_again, other, comm.rank, comm.size, 3, 5)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    sharded = fresh(MODELS["gpt2"], 1)
    zero = mpidl.ZeroOptimizer(sharded, Dion, 2, groups(sharded), comm)
    mpidl.checkpoint.load(path, sharded, zero)
    steps(sharded, zero, comm.rank, comm.size, 3, 5)
    whole = zero.model_state_dict()
    if comm.rank == 0:
        for name, p in model.named_parameters():
            torch.testing.assert_close(whole[name], p.detach(), rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: got -1.0; needs a number of at least 0"),
        ({"mu": 1.5}, "mu: got 1.5; needs a number from 0 to 1"),
        ({"rank_fraction": 0.0}, "rank_fraction: got 0.0; needs a number above 0, at most 1"),
        ({"rule": "muon"}, "rule: got 'muon'; needs 'dion' or 'adamw'"),
        ({"betas": (0.9, 1.0)}, "betas: got"),
        ({"process_group": 3}, "process_group: got 3; needs None or a Communicator"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Dion([nn.Parameter(torch.ones(2, 2))], **settings)


@pytest.mark.mpi
def test_steps_by_buckets_and_ranks_without_batches_are_refused(comm) -> None:
    model = fresh(MODELS["gpt2"])
    call = mpidl.DistributedDataParallel(model, process_group=comm)
    optimizer = Dion(groups(model), process_group=comm)
    call.register_comm_hook(DionState(optimizer), dion_hook)
    with pytest.raises(ConfigurationError, match="Dion with process_group= averages factors of all matrices at once"):
        call.step_in_backward(optimizer)
    with pytest.raises(ConfigurationError, match="Named with process_group= averages factors of all matrices at once"):
        call.step_in_backward(type("Named", (Dion,), {})(groups(model), process_group=comm))
    with pytest.raises(ConfigurationError, match="join: got a hook with DionState, which needs all ranks"):
        call.join().__enter__()


@pytest.mark.mpi
def test_a_wrong_setting_on_one_rank_is_an_error_on_every_rank(comm) -> None:
    wrong = {"mu": 1.5} if comm.rank == comm.size - 1 else {}
    with pytest.raises(ConfigurationError, match=r"mu: got 1\.5; needs a number from 0 to 1"):
        Dion([nn.Parameter(torch.ones(2, 2))], process_group=comm, **wrong)


@pytest.mark.mpi
def test_ranks_with_other_settings_shapes_or_groups_are_refused(comm) -> None:
    if comm.size == 1:
        return
    p = nn.Parameter(torch.ones(2, 2))
    for name, values in {"mu": (0.9, 0.8), "rank_fraction": (0.5, 0.25), "eps": (0.1, 0.2)}.items():
        with pytest.raises(mpidl.ModelMismatch, match=f"rank 0 has {name} of group 0={values[0]}, rank 1 has"):
            Dion([p], process_group=comm, **{name: values[min(comm.rank, 1)]})
    unlike = nn.Parameter(torch.ones(2, 2 + comm.rank))
    with pytest.raises(mpidl.ModelMismatch, match=r"Dion: rank 0 has shapes of group 0=\[\(\(2, 2\).*, rank 1 has"):
        Dion([unlike], process_group=comm)
    optimizer = Dion([nn.Parameter(torch.ones(2, 2))], process_group=comm)
    optimizer.step()
    rule = {"rule": "adamw"} if comm.rank else {}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], **rule})
    with pytest.raises(mpidl.ModelMismatch, match="Dion: rank 0 has rule of group 1='dion', rank 1 has rule of group"):
        optimizer.step()


@pytest.mark.mpi
def test_a_wrapper_over_other_ranks_is_refused(comm) -> None:
    if comm.size == 1:
        return
    model = fresh(MODELS["gpt2"])
    with comm.split(comm.rank) as alone:
        call = mpidl.DistributedDataParallel(model, process_group=alone)
        optimizer = Dion(groups(model), process_group=comm)
        call.register_comm_hook(DionState(optimizer), dion_hook)
        with pytest.raises(ConfigurationError, match=r"Dion: its process_group has ranks 0, 1.* the wrapper's has \d;"):
            call(*sequences(0, comm.rank)).backward()


@pytest.mark.mpi
def test_what_is_no_matrix_is_refused_on_every_rank(comm) -> None:
    with pytest.raises(ConfigurationError, match=r"parameter of shape \(3,\); needs matrices, and others in a group"):
        Dion([nn.Parameter(torch.ones(3))])
    model = fresh(MODELS["gpt2"])
    with pytest.raises(ConfigurationError, match="needs matrices, and others in a group with rule='adamw'"):
        mpidl.ZeroOptimizer(model, Dion, 2, process_group=comm)
    matrices = groups(model)
    with pytest.raises(ConfigurationError, match="optimizer: got 'Dion'; needs a Dion with process_group="):
        DionState(Dion(matrices))
    with pytest.raises(ConfigurationError, match="offload: a step of Dion needs whole parameters"):
        mpidl.ZeroOptimizer(model, Dion, 2, matrices, comm, offload="cpu")
