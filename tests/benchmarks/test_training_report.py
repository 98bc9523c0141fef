"""The report of steps: ratios of the same turns, and bounds kept or missed."""

from __future__ import annotations

import numpy as np


def test_a_step_is_compared_with_the_one_without_communication() -> None:
    import training_report

    for step, verdict in ((108.0, "kept"), (111.0, "MISSED")):
        times = {"single": np.array([0.1]), "zero3": np.array([step / 1000])}
        lines: list[str] = []
        training_report.compare(times, lines.append, bounded=True)
        assert lines[-1] == f"# zero3: {step / 100:.3f} of single (at most 1.1: {verdict})"
        training_report.compare(times, lines.append)
        assert lines[-1] == f"# zero3: {step / 100:.3f} of single"


def test_a_ratio_is_of_the_same_turns() -> None:
    """The machine is half as fast in the second turn; so are both."""
    import training_report

    times = {"single": np.array([0.1, 0.2, 0.1]), "ddp": np.array([0.11, 0.24, 0.13])}
    lines: list[str] = []
    training_report.compare(times, lines.append)
    assert lines == ["# ddp: 1.200 of single"]
    times |= {"all-reduce": np.array([0.01, 0.04, 0.03]), "zero1": np.array([0.1, 0.1, 0.1])}
    lines.clear()
    training_report.compare(times, lines.append)
    assert lines == [
        "# ddp: 1.200 of single",
        "# zero1: 1.000 of single, 0.769 of ddp",
        "# ddp: 1.000 of single + all-reduce",
    ]
    launches = {"single": np.array([[0.1, 0.2], [0.1, 0.1]]), "ddp": np.array([[0.11, 0.24], [0.13, 0.12]])}
    lines.clear()
    training_report.compare(launches, lines.append)
    assert lines == ["# ddp: 1.200 (1.150 to 1.250) of single"]
