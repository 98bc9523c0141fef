"""1-bit Adam against float64 numpy that simulates all ranks; states and clipping of all optimizers of one bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mpidl
from collectives import ArgumentError, Communicator
from mpidl.job.objects import broadcast_object
from tests.mpidl.optim import one_bit_reference as reference
from tests.mpidl.optim.one_bit_training import (
    CLASSES,
    ENGINES,
    SHAPES,
    Slopes,
    Training,
    check_against,
    classes,
    engines,
    nodes_of,
    slopes,
    start,
)


@pytest.mark.mpi
@engines
@pytest.mark.parametrize("where", ["everywhere", "between_nodes"])
def test_adam_follows_the_papers_formulas(comm: Communicator, engine: str, where: str) -> None:
    nodes = nodes_of(comm, where)
    expected = reference.Adam(start(), reference.Exchange(SHAPES, comm.size, nodes), freeze_step=6, lr=0.01, wd=0.1)
    settings = {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 6, "where": where}
    check_against(Training(comm, engine, mpidl.optim.OneBitAdam, Slopes(), **settings), expected, 16, nodes)


@pytest.mark.mpi
def test_the_warm_up_is_adam(comm: Communicator) -> None:
    ours = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), lr=0.01, weight_decay=0.1, freeze_step=100)
    ours.run(0, 5)
    plain = Slopes()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        for n, p in enumerate(plain.parameters()):
            p.grad = torch.stack([slopes(step, rank)[n].float() for rank in range(comm.size)]).mean(0)
        adam.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(ours.weights(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.mpi
def test_v_is_frozen_when_it_is_steady_after_the_warm_up_of_the_rate(comm: Communicator) -> None:
    """D = 1 / (1 - 0.8) = 5 steps. Gradients shrink by 0.9 a step, so that v does by 0.81, until step 12."""
    training = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), betas=(0.9, 0.8), lr_warmup_steps=3)
    found = None
    sizes = [0.9 ** min(step, 12) for step in range(60)]
    norms: list[float] = []
    v = 0.0
    for step, size in enumerate(sizes, 1):
        v = 0.8 * v + 0.2 * size**2
        norms.append(v / (1 - 0.8**step))
        if found is None and step > 5 and norms[-1] >= 0.96 * norms[-6]:
            found = step
        training.step([torch.full(shape, size) for shape in SHAPES])
        assert training.inner.progress["frozen_at"] == found, step  # type: ignore[attr-defined]
    assert found is not None
    late = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), betas=(0.9, 0.8), lr_warmup_steps=found + 3)
    for size in sizes[: found + 4]:
        late.step([torch.full(shape, size) for shape in SHAPES])
    assert late.inner.progress["frozen_at"] == found + 4


@pytest.mark.mpi
@classes
def test_a_parameter_that_never_had_a_gradient_stays(comm: Communicator, name: str) -> None:
    training = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.01, **{"weight_decay": 0.0, **CLASSES[name][1]})
    before = training.model.weights[3][4].detach().clone()
    training.run(0, 12)
    assert torch.equal(training.model.weights[3][4], before)


@pytest.mark.mpi
@classes
def test_ddp_and_stage_1_train_the_same(comm: Communicator, name: str) -> None:
    """Accumulated under no_sync, and with a pass that communicates before the last one."""
    found = []
    for engine in ENGINES:
        training = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
        owner = training.called if engine == "ddp" else training.optimizer
        for step in range(12):
            inputs = [g.float() for g in slopes(step, comm.rank)]
            with owner.no_sync():
                training.called(inputs).backward()
            training.called(inputs).backward()
            training.step(inputs, scale=0.5)
        training.check_equal_on_all_ranks()
        found.append(training.weights())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.mpi
@engines
@classes
def test_another_default_dtype_of_torch_changes_no_bit(comm: Communicator, engine: str, name: str) -> None:
    models, found = [Slopes(), Slopes()], []
    for model, dtype in zip(models, (torch.float32, torch.float64), strict=True):
        torch.set_default_dtype(dtype)
        try:
            training = Training(comm, engine, CLASSES[name][0], model, lr=0.01, **CLASSES[name][1])
            training.run(0, 12)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(training.weights())
    assert torch.equal(*found)


@pytest.mark.mpi
@classes
def test_passes_under_no_sync_may_leave_out_buckets(comm: Communicator, name: str) -> None:
    """Each bucket has one parameter. A pass that leaves some out gives the bits of one with zeros for them."""

    class Some(Slopes):
        def forward(self, slopes: list[torch.Tensor | None]) -> torch.Tensor:
            return torch.stack([(self.weights[n] * g).sum() for n, g in enumerate(slopes) if g is not None]).sum()

    found = []
    for leaves_out in (False, True):
        model = Some()
        optimizer_class, settings = CLASSES[name]
        optimizer = mpidl.ZeroOptimizer(
            model, optimizer_class, stage=1, process_group=comm, bucket_cap_mb=1e-5, lr=0.01, **settings
        )
        for step in range(12):
            first, second, third = ([g.float() for g in slopes(3 * step + n, comm.rank)] for n in range(3))
            model(first).backward()
            with optimizer.no_sync():
                model([g if n % 2 else None if leaves_out else 0 * g for n, g in enumerate(second)]).backward()
            model(third).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.mpi
@classes
def test_over_a_static_graph_it_trains_the_same(comm: Communicator, name: str) -> None:
    """Before the freeze and after it, in several passes a step."""
    found = []
    for settings in ({}, {"static_graph": True}):
        model = Slopes()
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-4, **settings)
        optimizer = CLASSES[name][0](model.parameters(), process_group=comm, lr=0.01, **CLASSES[name][1])
        wrapped.register_comm_hook(optimizer, mpidl.optim.one_bit_hook)
        for step in range(12):
            inputs = [g.float() for g in slopes(step, comm.rank)]
            if step % 2:
                with wrapped.no_sync():
                    wrapped(inputs).backward()
            wrapped(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        theirs = found[-1].clone()
        comm.broadcast(theirs)
        assert torch.equal(theirs, found[-1])
    assert torch.equal(*found)


@pytest.mark.mpi
@engines
@classes
@pytest.mark.parametrize("clip", ["own", "torch", "mpidl"])
def test_clipping_and_loss_scaling_are_of_the_ranks_own_gradients(
    comm: Communicator, engine: str, name: str, clip: str
) -> None:
    """After the freeze a rank clips what it has, over several nodes their means; an overflow on one rank skips the step
    on all, without a trace."""
    together = comm.node_ranks if comm.nodes > 1 else (comm.rank,)
    made = [Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1]) for _ in range(2)]
    scaler = mpidl.GradScaler(init_scale=4.0, process_group=comm)
    for step in range(10):
        inputs = [g.float() for g in slopes(step, comm.rank)]
        held = [torch.stack(same).mean(0) for same in zip(*(slopes(step, rank) for rank in together), strict=True)]
        size = torch.cat([g.float().flatten() for g in held]).norm()
        clipped = step > 6
        made[0].step([g / max(1.0, float(size) / 50.0) for g in inputs] if clipped else inputs)
        for wrong in [True, False] if step == 8 else [False]:
            loss = made[1].called(inputs)
            scaler.scale(loss * float("inf") if wrong and comm.rank == 0 else loss).backward()
            scaler.unscale_(made[1].optimizer)
            if clipped and clip == "mpidl":
                mpidl.clip_grad_norm_(made[1].model.parameters(), 50.0)
            elif clipped and clip == "torch":
                torch.nn.utils.clip_grad_norm_(made[1].model.parameters(), 50.0)
            elif clipped and engine == "ddp":
                mpidl.clip_grad_norm_(made[1].model, 50.0)
            elif clipped:
                made[1].optimizer.clip_grad_norm_(50.0)
            scaler.step(made[1].optimizer)
            scaler.update(4.0)
            made[1].optimizer.zero_grad()
    assert scaler.skipped_steps == 1
    made[1].check_equal_on_all_ranks()
    torch.testing.assert_close(made[1].weights(), made[0].weights(), rtol=1e-4, atol=1e-4)


@pytest.mark.mpi
@engines
@classes
def test_training_goes_on_from_a_state(comm: Communicator, engine: str, name: str) -> None:
    """With the mean of the errors, in either engine, which a new state tells again."""
    first = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
    first.run(0, 9)
    state = first.state()
    again = first.state()
    if comm.rank == 0:
        assert all(torch.equal(state["state"][0][key], again["state"][0][key]) for key in state["state"][0])
        assert comm.size == 1 or any(entry["error"].any() for entry in state["state"].values())
    weights = first.weights()
    for other in ENGINES:
        model = Slopes()
        with torch.no_grad():
            for p, q in zip(model.parameters(), first.model.parameters(), strict=True):
                p.copy_(q)
        second = Training(comm, other, CLASSES[name][0], model, lr=0.01, **CLASSES[name][1])
        given = state
        if other == "ddp" and engine == "stage 1":
            given = broadcast_object(comm, state)
        second.optimizer.load_state_dict(given)
        assert torch.equal(second.weights(), weights)
        told = second.state()
        if comm.rank == 0:
            for number, entry in state["state"].items():
                for key, value in entry.items():
                    torch.testing.assert_close(told["state"][number][key], value, rtol=1e-6, atol=1e-7)
        second.run(9, 3)
        second.check_equal_on_all_ranks()


@pytest.mark.mpi
@classes
def test_a_state_of_errors_that_differ_is_refused_on_one_rank_alone(comm: Communicator, name: str) -> None:
    """So that rank 0 alone may ask, as programs that save on it do."""
    training = Training(comm, "ddp", CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
    training.run(0, 1)
    training.optimizer.state_dict()  # no bits were sent yet
    training.run(1, 8)
    for again in (False, True):
        if comm.rank == 0 and comm.size > 1:
            with pytest.raises(mpidl.TrainingError, match=r"errors of its own; needs gather_errors\(\) on every rank"):
                training.optimizer.state_dict()
        training.inner.gather_errors()
        if comm.rank == 0:
            assert "error" in training.optimizer.state_dict()["state"][0]
        if not again:
            training.run(9, 1)
    training.check_equal_on_all_ranks()


@pytest.mark.mpi
@engines
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"betas": (0.9,)}, r"betas: got \(0\.9,\); needs two numbers"),
        ({"eps": 0}, "eps: got 0; needs a number above 0"),
        ({"lr": -1.0}, "lr: got -1.0; needs a number of at least 0"),
        ({"freeze_step": 0}, "freeze_step: got 0; needs an integer of at least 1"),
        ({"freeze_ratio": 1.5}, "freeze_ratio: got 1.5; needs a number above 0 and at most 1"),
        ({"lr_warmup_steps": -1}, "lr_warmup_steps: got -1"),
        ({"where": "here"}, "where: got 'here'; needs one of between_nodes, everywhere, or None"),
        ({"error_feedback": 1}, "error_feedback: got 1; needs True or False"),
    ],
)
def test_wrong_settings_are_one_error_on_every_rank(
    comm: Communicator, engine: str, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        Training(comm, engine, mpidl.optim.OneBitAdam, Slopes(), **wrong)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2}, "stage: got 2 with OneBitAdam, which needs each rank's own gradients whole"),
        ({"stage": 3}, "stage: got 3 with OneBitAdam"),
        ({"stage": 1, "offload": "cpu"}, "offload: OneBitAdam keeps whole fp32 states"),
        ({"stage": 1, "compress": "int8"}, "compress: OneBitAdam"),
        ({"stage": 1, "step_in_backward": True}, "step_in_backward: OneBitAdam exchanges all gradients at once"),
        ({"stage": 1, "precision": mpidl.zero.Precision(torch.bfloat16)}, "precision: OneBitAdam"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(comm: Communicator, options: dict[str, Any], message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        mpidl.ZeroOptimizer(Slopes(), mpidl.optim.OneBitAdam, process_group=comm, **options)


@pytest.mark.mpi
def test_nodes_that_do_not_fit_are_refused_before_the_model_changes(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split_by_node(_: Communicator) -> None:
        raise ArgumentError("split_by_node: needs as many ranks on every node")

    model = Slopes()
    with monkeypatch.context() as patched:
        patched.setattr(Communicator, "split_by_node", split_by_node)
        with pytest.raises(mpidl.ConfigurationError, match="where='between_nodes': needs as many ranks on every node"):
            Training(comm, "stage 1", mpidl.optim.OneBitAdam, model, where="between_nodes")
    training = Training(comm, "stage 1", mpidl.optim.OneBitAdam, model, freeze_step=1)
    training.run(0, 3)
    training.check_equal_on_all_ranks()


@pytest.mark.mpi
def test_an_engine_without_the_hook_and_ranks_with_other_settings_are_refused(comm: Communicator) -> None:
    if comm.size == 1:
        return
    model = Slopes()
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    optimizer = mpidl.optim.OneBitAdam(model.parameters(), process_group=comm)
    wrapped([g.float() for g in slopes(0, comm.rank)]).backward()
    with pytest.raises(mpidl.TrainingError, match="OneBitAdam: no engine calls its hook"):
        optimizer.step()
    with pytest.raises(mpidl.ConfigurationError, match="step_in_backward"):
        wrapped.step_in_backward(optimizer)
    other = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes(), eps=1e-8 * (1 + comm.rank))
    with pytest.raises(mpidl.errors.ModelMismatch, match="OneBitAdam: rank 0 has eps=1e-08, rank 1 has eps=2e-08"):
        other.run(0, 1)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *[(name, setting) for name in ("OneBitAdam", "OneBitLamb") for setting in ("freeze_step", "lr_warmup_steps")],
        *[("ZeroOneAdam", setting) for setting in ("renewals", "local_after", "local_interval_steps")],
        ("ZeroOneAdam", "max_local_interval"),
    ],
)
def test_ranks_that_would_switch_at_other_steps_are_refused(comm: Communicator, name: str, setting: str) -> None:
    """They would wait for each other for ever."""
    if comm.size == 1:
        return
    training = Training(comm, "ddp", getattr(mpidl.optim, name), Slopes(), **{setting: 4 + comm.rank})
    with pytest.raises(mpidl.errors.ModelMismatch, match=f"{name}: rank 0 has {setting}=4, rank 1 has {setting}=5"):
        training.run(0, 1)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb"])
def test_ranks_that_would_find_v_steady_at_other_ratios_are_refused(comm: Communicator, name: str) -> None:
    if comm.size == 1:
        return
    training = Training(comm, "ddp", getattr(mpidl.optim, name), Slopes(), freeze_ratio=1 / (1 + comm.rank))
    with pytest.raises(mpidl.errors.ModelMismatch, match=r"rank 0 has freeze_ratio=1\.0, rank 1 has freeze_ratio=0\.5"):
        training.run(0, 1)


@pytest.mark.mpi
def test_a_wrapper_over_other_ranks_is_refused(comm: Communicator) -> None:
    if comm.size == 1:
        return
    model = Slopes()
    with comm.split(comm.rank) as alone:
        wrapped = mpidl.DistributedDataParallel(model, process_group=alone)
        optimizer = mpidl.optim.OneBitAdam(model.parameters(), process_group=comm)
        wrapped.register_comm_hook(optimizer, mpidl.optim.one_bit_hook)
        message = r"OneBitAdam: its process_group has ranks 0, 1.* of the world, the wrapper's has \d; needs the"
        with pytest.raises(mpidl.ConfigurationError, match=message):
            wrapped([g.float() for g in slopes(0, comm.rank)]).backward()


@pytest.mark.mpi
def test_ranks_without_batches_are_refused(comm: Communicator) -> None:
    training = Training(comm, "ddp", mpidl.optim.OneBitAdam, Slopes())
    with pytest.raises(mpidl.ConfigurationError, match="join: got a hook with OneBitAdam, which needs all ranks"):
        training.called.join().__enter__()


@pytest.mark.mpi
@classes
def test_checkpoints_keep_states_and_the_mean_errors(comm: Communicator, name: str, tmp_path: Path) -> None:
    """Saved by either engine, loaded by the other one, which then steps as one that has loaded the state_dict."""
    folder = Path(broadcast_object(comm, str(tmp_path)))
    for engine, other in (ENGINES, ENGINES[::-1]):
        first = Training(comm, engine, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
        first.run(0, 9)
        path = folder / engine
        mpidl.checkpoint.save(path, first.called, first.optimizer, step=9)
        state = broadcast_object(comm, first.state())
        made = []
        for way in ("checkpoint", "state"):
            second = Training(comm, other, CLASSES[name][0], Slopes(), lr=0.01, **CLASSES[name][1])
            if way == "checkpoint":
                mpidl.checkpoint.load(path, second.called, second.optimizer)
            else:
                with torch.no_grad():
                    for p, q in zip(second.model.parameters(), first.model.parameters(), strict=True):
                        p.copy_(q)
                second.optimizer.load_state_dict(state)
            second.run(9, 3)
            second.check_equal_on_all_ranks()
            made.append(second.weights())
        assert torch.equal(*made)
