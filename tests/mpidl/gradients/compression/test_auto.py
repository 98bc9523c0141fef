"""`compress="auto"`: the decision from given figures, and that all ranks make it once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpidl
from collectives import Communicator
from mpidl import Compression
from mpidl.gradients.compression import auto
from mpidl.gradients.compression.auto import NONE, PASSES, Figure, decide
from mpidl.job.objects import all_gather_object
from tests.mpidl.gradients.compression.test_engines import Training, check_equal_on_all_ranks, engines

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
    ("given", "message"),
    [
        ({"method": "int8", "allow": ("int4",)}, "allow: got .*; needs 'auto'"),
        ({"method": "auto", "allow": "int8"}, "allow: got 'int8'; needs names"),
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
    training.run(2, first=PASSES)
    chosen = training.compressed.chosen
    assert chosen in ((NONE,) if comm.nodes == 1 else (NONE, "bf16", "int8"))
    assert training.compressed.compressor.name == chosen
    assert set(all_gather_object(comm, chosen)) == {chosen}
    check_equal_on_all_ranks(comm, training.weights())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.mpi
def test_the_measurements_take_the_choice_that_they_call_for(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow network, as figures tell: every rank adopts the method, whose remainders then come from real steps."""

    def measured(self: Any, *_: Any) -> None:
        self.plain = 10.0
        self.figures = [Figure("bf16", 5.0, 0.0), Figure("int8", 1.0, 0.0)]

    monkeypatch.setattr(auto.AutoChoice, "_measure", measured)
    monkeypatch.setattr(comm, "nodes", 2)
    training = Training(comm, "ddp", Compression("auto", where="everywhere", allow=("int8",)))
    monkeypatch.undo()
    if comm.size == 1:
        assert training.compressed.chosen == NONE
        return
    assert training.compressed.chosen is None
    training.run(PASSES + 2)
    assert training.compressed.chosen == "int8"
    assert any(mean.any() for mean in training.compressed.state_dict()["remainders"].values())
    told = [line for line in capsys.readouterr().out.splitlines() if "auto chose" in line]
    assert len(told) == (comm.rank == 0)
    assert all("auto chose int8 everywhere" in line for line in told)
