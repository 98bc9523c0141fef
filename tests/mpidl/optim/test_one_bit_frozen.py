"""1-bit optimizers over parameters with requires_grad=False, which no step changes, against float64 numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives import Communicator
from tests.mpidl.optim.one_bit_training import (
    CLASSES,
    Slopes,
    Training,
    classes,
    of_nodes,
    with_reference,
)

pytestmark = pytest.mark.mpi

# The parameters that do not train, by steps. v is frozen after 6 steps, or renewed for the last time in the 8th; in the
# 13th and 17th local steps begin of which the fourth exchanges, so that 3 is frozen, and 1 thawed, between exchanges.
STILL = {0: {0}, 3: {0, 1}, 5: {1}, 7: {1, 3}, 9: {1}, 13: {1, 2}, 14: {3}, 18: {3, 2}, 20: set()}


def set_still(training: Training, still: set[int]) -> None:
    for n, p in enumerate(training.model.weights):  # type: ignore[arg-type]
        p.requires_grad_(n not in still)


@pytest.mark.every_size
@classes
@pytest.mark.parametrize("where", ["everywhere", "between_nodes"])
@pytest.mark.parametrize("engine", ["ddp", "stage 1"])
def test_parameters_may_be_frozen_and_thawed_before_and_after_the_freeze_of_v(
    comm: Communicator, engine: str, name: str, where: str
) -> None:
    training, expected, nodes = with_reference(comm, engine, name, where)
    own = comm.rank // (comm.size // nodes)
    for step in range(26):
        if step in STILL:
            expected.still = STILL[step]
            set_still(training, STILL[step])
        training.run(step, 1)
        expected.step(of_nodes(step, comm.size, nodes))
        found = expected.of_nodes[own] if name == "zero_one" else expected.w
        for p, w in zip(training.model.parameters(), found, strict=True):
            np.testing.assert_allclose(p.detach().double().numpy(), w, rtol=1e-3, atol=1e-3)
        if name != "zero_one" or training.inner.is_synchronised:  # type: ignore[attr-defined]
            training.check_equal_on_all_ranks()


@pytest.mark.every_size
@classes
@pytest.mark.parametrize("since", [0, 3, 9])
@pytest.mark.parametrize("cap", [25.0, 1e-6], ids=["", "alone in its bucket"])
def test_a_frozen_parameter_and_its_state_stay_to_the_bit(
    comm: Communicator, name: str, since: int, cap: float
) -> None:
    """From the first step on, before the freeze and after it, also where a gradient of before is left."""
    settings = {"weight_decay": 0.1, "bucket_cap_mb": cap, **CLASSES[name][1]}
    training = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.1, **settings)
    training.run(0, since)
    p, others = training.model.weights[1], training.weights()  # type: ignore[index]
    p.requires_grad_(False)
    value, state = p.detach().clone(), {key: each.clone() for key, each in training.inner.state[p].items()}
    for step in range(since, since + 6):
        p.grad = torch.ones_like(p) if step % 2 else None
        training.run(step, 1)
        assert torch.equal(p.detach(), value), step
        for key, each in state.items():
            # LAMB begins a second v at the freeze.
            assert key == "exp_avg_sq_fresh" or torch.equal(training.inner.state[p][key], each), (step, key)
    assert not torch.equal(training.weights(), others)
    training.check_equal_on_all_ranks()


@classes
def test_a_state_with_frozen_parameters_is_loaded_into_what_has_stepped_and_what_has_not(
    comm: Communicator, name: str
) -> None:
    """Some of these have frozen other parameters. The loaded ones stay, and train on once they are thawed."""
    settings = {"weight_decay": 0.1, **CLASSES[name][1]}
    first = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.01, **settings)
    first.run(0, 5)
    set_still(first, {1, 3})
    first.run(5, 4)
    state, results = first.state(), []
    for steps, still in ((0, set()), (14, {0}), (14, {1})):
        second = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.01, **settings)
        second.run(0, steps // 2)
        set_still(second, still)
        second.run(steps // 2, steps - steps // 2)
        with torch.no_grad():
            for p, q in zip(second.model.parameters(), first.model.parameters(), strict=True):
                p.copy_(q)
        second.optimizer.load_state_dict(state)
        set_still(second, {1, 3})
        second.run(9, 3)
        for n in (1, 3):
            assert torch.equal(second.model.weights[n], first.model.weights[n])  # type: ignore[index]
            moment = second.inner.state[second.model.weights[n]]["exp_avg"]  # type: ignore[index]
            assert torch.equal(moment, state["state"][n]["exp_avg"])
        set_still(second, set())
        second.run(12, 3)
        second.check_equal_on_all_ranks()
        assert not torch.equal(second.model.weights[1], first.model.weights[1])  # type: ignore[index]
        results.append(second.weights())
    assert all(torch.equal(each, results[0]) for each in results)
