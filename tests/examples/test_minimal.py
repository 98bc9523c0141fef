"""The shortest example trains, and README shows it whole."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.launch import ROOT

SOURCE = (ROOT / "examples" / "minimal.py").read_text()


def test_the_loss_falls(mpirun: Callable[..., Any], tmp_path: Path, brief: bool) -> None:
    """With --brief in the first half of the epochs."""
    epochs, program = 5 if brief else 10, tmp_path / "minimal.py"
    assert "range(10)" in SOURCE
    program.write_text(SOURCE.replace("range(10)", f"range({epochs})"))
    done = mpirun(2, program)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    assert [re.sub(r"[\d.]+$", "", line) for line in lines] == [
        f"epoch {n:2d} of 10  loss " for n in range(1, epochs + 1)
    ]
    assert losses[4] < losses[0] / 2
    assert brief or losses[-1] < losses[4]


def test_readme_shows_it_whole() -> None:
    assert len(SOURCE.splitlines()) < 60
    assert f"\n```python\n{SOURCE}```\n" in (ROOT / "README.md").read_text()
