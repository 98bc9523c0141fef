"""`compress="auto"`: the decision from given figures, and that all ranks make it once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression import auto
from mpidl.gradients.compression.auto import NONE, PASSES, Figure, bytes_ratio, decide
from mpidl.gradients.compression.hook import CompressedReduction
from mpidl.job.objects import all_gather_object
from tests.mpidl.gradients.compression.test_engines import Training, check_equal_on_all_ranks, engines


class Clock:
    """Seconds that go on by `step` whenever they are asked for."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 1.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


BF16 = Figure("bf16", total=0.42, computed=0.05)
INT8 = Figure("int8", total=0.25, computed=0.12)


@pytest.mark.parametrize(
    ("plain", "backward", "figures", "expected"),
    [
        (0.81, 0.1, [BF16], "bf16"),  # the wire is what takes time
        (0.81, 0.1, [BF16, INT8], "int8"),
        (0.81, 0.45, [BF16, INT8], "bf16"),  # backward hides bf16's messages, and int8 computes more
        (0.81, 2.0, [BF16, INT8], NONE),  # backward hides all of them
        (0.02, 0.1, [Figure("bf16", 0.03, 0.02)], NONE),  # a fast network
        (0.425, 0.1, [BF16], NONE),  # less than measuring can tell
        (0.81, 0.1, [], NONE),
    ],
)
def test_the_reduction_that_is_over_first_is_chosen(
    plain: float, backward: float, figures: list[Figure], expected: str
) -> None:
    assert decide(plain, backward, figures) == expected


@pytest.mark.parametrize(
    ("method", "ranks", "needs_all", "expected"),
    [
        ("bf16", 2, True, 1 / 2),
        ("int8", 8, False, 0.25 + 1 / 256),
        ("topk:0.1", 4, True, 0.1 * 8 * 4 / 8),  # to all ranks
        ("topk:0.1", 16, True, (0.8 + 4) / 8),  # to owners, and dense sums back
        ("topk:0.6", 2, True, 1.1),  # more than without
        ("powersgd:2", 4, True, (20 * 2 + 20) / 120),  # a matrix of 10 x 10, and 20 others
    ],
)
def test_bytes_are_a_part_of_those_of_fp32(method: str, ranks: int, needs_all: bool, expected: float) -> None:
    shapes = [torch.Size([10, 10]), torch.Size([20])]
    elements = 120 if method.startswith("powersgd") else 1 << 20
    found = bytes_ratio(Compression(method).compressor(), elements, ranks, needs_all, shapes)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "int8", "allow": ("int4",)}, "allow: got .*; needs 'auto'"),
        ({"method": "auto", "allow": "int8"}, "allow: got 'int8'; needs names of methods, in a tuple or list"),
        ({"method": "auto", "allow": 3}, "allow: got 3; needs names of methods, in a tuple or list"),
        ({"method": "auto", "allow": None}, "allow: got None; needs names"),
        ({"method": "auto", "allow": {"int8"}}, "allow: got {'int8'}; needs names"),  # in another order on each rank
        ({"method": "auto", "allow": ("int8", 4)}, r"allow: got \('int8', 4\); needs names"),
        ({"method": "int8", "allow": 0}, "allow: got 0; needs names"),
        ({"method": "auto", "allow": ("auto",)}, "allow: got 'auto'"),
        ({"method": "auto", "allow": ("int9",)}, "got 'int9'; needs one of"),
    ],
)
def test_wrong_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(mpidl.ConfigurationError, match=message):
        Compression(**given)


@pytest.mark.mpi
@engines
def test_one_choice_for_all_ranks(comm: Communicator, engine: str) -> None:
    """On one node none, from the begin; over several it is made once, after passes in full precision."""
    training = Training(comm, engine, Compression("auto", allow=("int8",)))
    state = torch.get_rng_state()
    if comm.nodes == 1:
        assert training.compressed.chosen == NONE
    else:
        assert training.compressed.chosen is None
    plain = Training(comm, engine)
    assert training.run(PASSES) == plain.run(PASSES)
    training.run(PASSES + 1, first=PASSES)
    chosen = training.compressed.chosen
    assert chosen in ((NONE,) if comm.nodes == 1 else (NONE, "bf16", "int8"))
    assert training.compressed.compressor.name == chosen
    assert set(all_gather_object(comm, chosen)) == {chosen}
    check_equal_on_all_ranks(comm, training.weights())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.mpi
def test_methods_of_every_kind_are_measured_but_those_of_too_many_bytes(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(comm, "nodes", 2)
        how = Compression("auto", where="everywhere", allow=("powersgd:2", "topk:0.9", "randomk:0.1"))
        choice = Training(comm, "ddp", how).compressed.choice
    if comm.size > 1:
        assert [figure.method for figure in choice.figures] == ["bf16", "powersgd:2", "randomk:0.1"]
        assert choice.left_out == ["topk:0.9"]


@pytest.mark.mpi
@pytest.mark.parametrize("engine", ["ddp", "stage 2"])
def test_gradients_of_16_bits_are_measured_as_such(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """By bf16 they would take as many bytes as without it."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(comm, "nodes", 2)
        how = Compression("auto", where="everywhere", allow=("int8",))
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        if engine == "ddp":
            made: Any = mpidl.DistributedDataParallel(model.bfloat16(), process_group=comm, compress=how)
        else:
            precision = mpidl.Precision(param_dtype=torch.bfloat16)
            settings: dict[str, Any] = {"stage": 2, "precision": precision, "lr": 0.1}
            made = mpidl.ZeroOptimizer(model, torch.optim.SGD, compress=how, process_group=comm, **settings)
        choice = made.compressed.choice
    if comm.size > 1:
        assert [figure.method for figure in choice.figures] == ["int8"]
        assert choice.left_out == ["bf16"]


@pytest.mark.mpi
@pytest.mark.parametrize("start_step", [0, PASSES + 1])
@pytest.mark.parametrize("pays", [True, False])
def test_what_figures_call_for_is_tried_and_kept_if_steps_become_shorter(
    comm: Communicator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pays: bool,
    start_step: int,
) -> None:
    """Where it does not pay, what the trial has not sent is sent in full precision."""
    clock = Clock()

    def measured(self: Any, *_: Any) -> None:
        self.plain_seconds = 10.0
        self.figures = [Figure("bf16", 5.0, 0.0), Figure("int8", 1.0, 0.0)]

    monkeypatch.setattr(auto.AutoChoice, "_measure", measured)
    monkeypatch.setattr(auto, "now", clock)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(comm, "nodes", 2)
        how = Compression("auto", where="everywhere", allow=("int8",), start_step=start_step)
        training = Training(comm, "ddp", how)
    if comm.size == 1:
        assert training.compressed.chosen == NONE
        return
    training.run(start_step)
    training.run(PASSES, first=start_step)
    assert training.compressed.chosen is None
    clock.step = 0.5 if pays else 2.0
    training.run(PASSES, first=start_step + PASSES)
    kept = training.compressed.state_dict()["remainders"]
    assert any(mean.any() for mean in kept.values())
    training.run(1, first=start_step + 2 * PASSES)
    assert training.compressed.chosen == ("int8" if pays else NONE)
    assert bool(training.compressed.state_dict()["remainders"]) == pays
    told = [line for line in capsys.readouterr().out.splitlines() if "auto chose" in line]
    assert len(told) == (comm.rank == 0)
    assert all(f"auto chose {'int8 everywhere' if pays else 'none'}" in line for line in told)
    check_equal_on_all_ranks(comm, training.weights())


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("best", ["bf16", "powersgd:2"])
def test_a_method_on_trial_has_the_start_and_the_buckets_that_it_has_by_itself(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, best: str
) -> None:
    def measured(self: Any, *_: Any) -> None:
        self.plain_seconds = 10.0
        self.figures = [Figure(name, 1.0 if name == best else 5.0, 0.0) for name in ("bf16", "powersgd:2")]

    def called(self: Any, state: Any, bucket: Any) -> Any:
        if bucket.index() == 0:
            passes.append(0)
        passes[-1] += 1
        return reduce(self, state, bucket)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(600, 600, bias=False) for _ in range(6)])

    passes: list[int] = []
    reduce = CompressedReduction.__call__
    monkeypatch.setattr(CompressedReduction, "__call__", called)
    monkeypatch.setattr(auto.AutoChoice, "_measure", measured)
    alone = mpidl.DistributedDataParallel(model(), process_group=comm, compress=Compression(best, where="everywhere"))
    for _ in range(2):
        alone(torch.ones(1, 600)).sum().backward()
    by_itself = passes[-1]
    passes.clear()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(comm, "nodes", 2)
        how = Compression("auto", where="everywhere", allow=("powersgd:2",))
        wrapped = mpidl.DistributedDataParallel(model(), process_group=comm, compress=how)
    compressed = wrapped.compressed
    assert compressed is not None
    for step in range(12):
        wrapped(torch.ones(1, 600)).sum().backward()
        assert compressed.compressor.name == (best if step >= 10 else NONE)
    assert passes[-1] == by_itself
    assert (passes[-1] == passes[1]) == (best != "bf16")


@pytest.mark.mpi
@pytest.mark.one_node
def test_on_one_node_ddp_is_as_without_it(comm: Communicator) -> None:
    plain = mpidl.DistributedDataParallel(torch.nn.Linear(3, 3), process_group=comm)
    made = mpidl.DistributedDataParallel(torch.nn.Linear(3, 3), process_group=comm, compress="auto")
    assert made.compressed is not None
    assert made.compressed.chosen == NONE
    assert made.bucket_bytes_cap == plain.bucket_bytes_cap

    def hook(state: None, bucket: mpidl.GradBucket) -> Any:
        return bucket.reduce(process_group=comm)

    made.register_comm_hook(None, hook)  # there is no other
    for each in (made, copy.deepcopy(made)):
        each(torch.ones(1, 3)).sum().backward()
        assert each.comm_hook == (None, hook)
