"""Stage 3 over two test hosts: what goes over the link, counted at its interface, and the same training as anywhere."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests import hosts
from tests.harness import launch

JOB = Path(__file__).with_name("job_zero_hosts.py")
STEPS = 3


def over_hosts(*arguments: str) -> list[dict]:
    """Each host's report."""
    obstacle = hosts.obstacle()
    if obstacle:
        pytest.skip(f"no test hosts: {obstacle}")
    command = [sys.executable, hosts.__file__, "--hosts", "2", "--ranks-per-host", "2", "--", "python", str(JOB)]
    environment = launch.environment(PYTHONPATH=str(launch.ROOT))
    done = launch.run([*command, str(STEPS), *arguments], 100, launch.ROOT, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(report) for report in re.findall(r"{[^{}]*}", done.stdout)]


@pytest.mark.limit(120)
def test_a_host_gets_each_unit_once_and_each_gradient_once() -> None:
    """Of a unit, a host has a half: forward and backward it gets the other one, and gives or gets half the gradient.

    The last block stays whole from forward to backward, and the model's own through both.
    """
    reports = over_hosts()
    assert len(reports) == 2
    for report in reports:
        blocks, own = report["block_bytes"], report["own_bytes"]
        gathers = 2 * sum(blocks) - blocks[-1] + own
        reductions = sum(blocks) + own
        expected = STEPS * (gathers + reductions) / 2
        assert report["received"] == pytest.approx(expected, rel=0.05)
        assert report["sent"] == pytest.approx(expected, rel=0.05)
        assert report["gathered_bytes"] == STEPS * gathers


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_shards_inside_hosts_send_gradients_alone() -> None:
    """Every host has all parameters: only the sum of gradients is sent, and gets back."""
    for report in over_hosts("--shard-group", "node"):
        expected = STEPS * (sum(report["block_bytes"]) + report["own_bytes"])
        assert report["received"] == pytest.approx(expected, rel=0.05)
        assert report["sent"] == pytest.approx(expected, rel=0.05)


@pytest.mark.thorough("node")
@pytest.mark.limit(120)
@pytest.mark.parametrize("group", ["world", "node"])
def test_losses_are_those_of_one_process(group: str) -> None:
    for report in over_hosts("--compare", "--shard-group", group):
        assert report["losses"] == pytest.approx(report["expected"], rel=1e-5)


@pytest.mark.thorough
@pytest.mark.limit(120)
@pytest.mark.parametrize("group", ["world", "node"])
def test_a_checkpoint_of_offloaded_state_goes_on_over_hosts(group: str, tmp_path: Path) -> None:
    """What the ranks of one host have saved, if the hosts hold the same, is loaded on all."""
    reports = over_hosts("--compare", "--shard-group", group, "--checkpoint", str(tmp_path))
    assert len(reports) == 2
    for report in reports:
        assert len(report["losses"]) == 2 * STEPS
        assert report["losses"] == pytest.approx(report["expected"], rel=1e-5)
    saved = sorted(path.name[:9] for path in tmp_path.glob("step-*/*.safetensors"))
    assert saved == [f"rank{rank:05d}" for rank in range(4)]
    total = sum(path.stat().st_size for path in tmp_path.glob("step-*/*.safetensors"))
    values = sum(reports[0]["block_bytes"]) + reports[0]["own_bytes"]
    assert total == pytest.approx(3 * values, rel=0.02)  # with Adam's states: nothing twice
