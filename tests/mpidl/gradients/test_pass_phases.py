"""The phases through which a backward pass leads an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from mpidl.gradients.backward import BackwardWatch, PassPhases
from mpidl.gradients.bucket_queue import BucketQueue
from mpidl.gradients.buckets import GradientBucket

IN_ORDER = ["begun", "reached", "take", "reached", "take", "filled", "launch", "finish", "drained", "finished"]


class Engine:
    """Two parameters in one bucket that launches at the end of a pass; notes what runs."""

    def __init__(self, fails_in: tuple[str, ...] = (), error: type[BaseException] = KeyError) -> None:
        self.model, self.watch = nn.Linear(2, 2), BackwardWatch()
        self.seen: list[str] = []
        self.fails_in, self.error = fails_in, error

        def noted(name: str) -> Any:
            def call(*_: object) -> None:
                self.seen.append(name)
                if name in self.fails_in:
                    raise self.error(name)

            return call

        bucket = GradientBucket(list(self.model.parameters()))
        self.queue = BucketQueue(
            [bucket],
            self.watch,
            take=noted("take"),
            launch=noted("launch"),
            finish=noted("finish"),
            missing=lambda *_: None,
        )
        self.queue.defer_launch_to_end = True
        self.watch.phases = PassPhases(
            begun=(noted("begun"),),
            reached=(noted("reached"), self.queue.arrive),
            filled=(noted("filled"),),
            reduced=(self.queue.launch_rest, self.queue.finish, noted("drained")),
            finished=(self.queue.end, noted("finished")),
            abandoned=(self.queue.reset, noted("abandoned")),
            communicates=lambda: self.queue.synchronise,
        )
        self.watch.attach(self.model)

    def backward(self) -> list[str]:
        """Runs one pass."""
        self.seen = []
        self.model(torch.ones(1, 2)).sum().backward()
        return self.seen


def test_phases_run_in_their_order() -> None:
    engine = Engine()
    assert engine.backward() == IN_ORDER
    assert engine.backward() == IN_ORDER


def test_a_pass_under_no_sync_reduces_nothing_and_is_remembered() -> None:
    engine = Engine()
    with engine.queue.no_sync():
        seen = engine.backward()
    assert seen == [name for name in IN_ORDER if name not in ("launch", "finish", "drained")]
    assert engine.queue.has_unreduced_gradients
    assert engine.backward() == IN_ORDER
    assert not engine.queue.has_unreduced_gradients


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("phase", ["begun", "filled", "launch", "finish", "drained", "finished"])
def test_a_phase_that_fails_abandons_the_pass(phase: str, error: type[BaseException]) -> None:
    engine = Engine(fails_in=(phase,), error=error)
    with pytest.raises(error, match=phase):
        engine.backward()
    assert engine.seen == [*IN_ORDER[: IN_ORDER.index(phase) + 1], "abandoned"]
    engine.fails_in = ()
    assert engine.backward() == IN_ORDER


def test_a_pass_that_an_exception_cuts_short_is_abandoned_before_the_next_forward_pass() -> None:
    engine = Engine(fails_in=("take",))
    with pytest.raises(KeyError, match="take"):
        engine.backward()
    assert engine.seen == ["begun", "reached", "take"]
    engine.fails_in = ()
    assert engine.backward() == ["abandoned", *IN_ORDER]


def test_what_an_interrupt_left_of_a_pass_is_abandoned_before_the_next_one() -> None:
    engine = Engine(fails_in=("drained", "abandoned"), error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt, match="abandoned"):
        engine.backward()
    engine.fails_in = ()
    assert engine.backward() == ["abandoned", *IN_ORDER]
    assert engine.backward() == IN_ORDER


def test_a_pass_that_fails_as_it_begins_is_abandoned_while_its_error_is_handled() -> None:
    engine = Engine(fails_in=("begun",))
    try:
        engine.backward()
    except KeyError:
        engine.fails_in = ()
        assert engine.backward() == IN_ORDER


def both(first: Engine, second: Engine) -> None:
    """Runs a backward pass through both; that of `second` begins first."""
    first.seen, second.seen = [], []
    x = torch.ones(1, 2)
    (first.model(x).sum() + second.model(x).sum()).backward()


@pytest.mark.parametrize("turned", [False, True])
def test_passes_of_several_engines_end_in_the_order_in_which_these_were_made(turned: bool) -> None:
    engines = [Engine(), Engine()]
    ended: list[int] = []
    for number, engine in enumerate(engines):
        phases = engine.watch.phases
        engine.watch.phases = replace(phases, finished=(*phases.finished, lambda n=number: ended.append(n)))
    both(*(reversed(engines) if turned else engines))
    assert ended == [0, 1]
    assert [engine.seen for engine in engines] == [IN_ORDER, IN_ORDER]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_pass_that_fails_at_its_end_leaves_those_of_other_engines_to_be_abandoned(failing: int) -> None:
    engines = [Engine(), Engine()]
    engines[failing].fails_in = ("launch",) if failing else ("filled",)
    with pytest.raises(KeyError) as kept:
        both(*engines)
    engines[failing].fails_in = ()
    assert not any(engine.watch.is_running for engine in engines)
    both(*engines)
    assert engines[0].seen == IN_ORDER
    assert engines[1].seen == (IN_ORDER if failing else ["abandoned", *IN_ORDER])
    del kept
