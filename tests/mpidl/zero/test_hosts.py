"""Stage 3 over two test hosts: what goes over the link, counted at its interface, and the same training as anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.on_hosts import on_hosts

JOB = Path(__file__).with_name("job_hosts.py")
PEAK = Path(__file__).with_name("job_peak.py")
STEPS = 3


def run(number: int, ranks: int, *arguments: str, timeout: float = 100, **variables: str) -> str:
    """Runs a Python program on so many hosts with so many ranks each, and returns its output."""
    settings = {"PYTHONPATH": str(launch.ROOT), **variables}
    done = on_hosts(*arguments, number=number, ranks=ranks, timeout=timeout, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def over_hosts(*arguments: str) -> list[dict]:
    """Each host's report of a training."""
    return reports(JOB, str(STEPS), *arguments)


@pytest.fixture(scope="module")
def trainings() -> dict[str, list[dict]]:
    """Each host's reports of these, which one job trains in turn."""
    runs = {"plain": [], "int8": ["--compress-parameters", "int8"], "compared": ["--compare"]}
    arguments = [word for options in runs.values() for word in ("--", str(STEPS), *options)]
    found = reports(JOB, *arguments[1:])
    return {name: [each for each in found if each["number"] == number] for number, name in enumerate(runs)}


def reports(job: Path, *arguments: str, **variables: str) -> list[dict]:
    """Reports of the ranks of two hosts with two ranks each."""
    printed, text = [], run(2, 2, str(job), *arguments, **variables).strip()  # ranks' lines may stand on one
    while text:
        report, end = json.JSONDecoder().raw_decode(text)
        printed.append(report)
        text = text[end:].lstrip()
    return printed


@pytest.mark.limit(120)
def test_a_host_gets_each_unit_once_and_each_gradient_once(trainings: dict[str, list[dict]]) -> None:
    """A host has half of a unit: forward and backward it gets the other one, and gives or gets half the gradient.

    The last two blocks stay whole from forward to backward, and the model's own through both.
    """
    reports = trainings["plain"]
    assert len(reports) == 2
    for report in reports:
        blocks, own = report["block_bytes"], report["own_bytes"]
        gathers = 2 * sum(blocks) - sum(blocks[-2:]) + own
        reductions = sum(blocks) + own
        expected = STEPS * (gathers + reductions) / 2
        assert report["received"] == pytest.approx(expected, rel=0.05)
        assert report["sent"] == pytest.approx(expected, rel=0.05)
        assert report["gathered_bytes"] == STEPS * gathers


@pytest.mark.limit(120)
def test_a_host_gets_each_unit_in_a_quarter_of_its_bytes(trainings: dict[str, list[dict]]) -> None:
    """Codes of 8 bits and a scale for each block of 256 of them; gradients are not compressed."""
    reports = trainings["int8"]
    assert len(reports) == 2
    for report in reports:
        blocks, own = report["block_bytes"], report["own_bytes"]
        gathers = (2 * sum(blocks) - sum(blocks[-2:]) + own) * 260 / 1024
        expected = STEPS * (gathers + sum(blocks) + own) / 2
        assert report["received"] == pytest.approx(expected, rel=0.05)
        assert report["sent"] == pytest.approx(expected, rel=0.05)
        assert report["gathered_bytes"] == pytest.approx(STEPS * gathers, rel=0.01)  # with padding
        assert report["losses"] == reports[0]["losses"]


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_shards_inside_hosts_send_gradients_alone() -> None:
    """Every host has all parameters: only the sum of gradients is sent, and gets back."""
    for report in over_hosts("--shard-group", "node"):
        expected = STEPS * (sum(report["block_bytes"]) + report["own_bytes"])
        assert report["received"] == pytest.approx(expected, rel=0.05)
        assert report["sent"] == pytest.approx(expected, rel=0.05)


@pytest.mark.limit(120)
def test_losses_are_those_of_one_process(trainings: dict[str, list[dict]]) -> None:
    reports = trainings["compared"]
    assert len(reports) == 2
    for report in reports:
        assert report["losses"] == pytest.approx(report["expected"], rel=1e-5)


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_losses_are_those_of_one_process_with_shards_inside_hosts() -> None:
    for report in over_hosts("--compare", "--shard-group", "node"):
        assert report["losses"] == pytest.approx(report["expected"], rel=1e-5)


@pytest.mark.thorough
@pytest.mark.limit(120)
@pytest.mark.parametrize("group", ["world", "node"])
def test_a_checkpoint_of_offloaded_state_goes_on_over_hosts(group: str, tmp_path: Path) -> None:
    """A checkpoint by the ranks of one host, if the hosts hold the same, is loaded on all."""
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


@pytest.mark.thorough
@pytest.mark.limit(120)
def test_three_units_are_whole_at_a_time() -> None:
    """A host's shared memory: its ranks' shards, three units, and of each rank buffers for three units' gradients.

    Where units stay whole from forward to backward it is all of them, as the same look shows. A rank's own memory is
    that of its reduced gradients, with what operations use and, of one weight, the gradient that autograd makes.
    """
    ranks, per_host = 4, 2
    found = reports(PEAK, MALLOC_MMAP_THRESHOLD_="65536")
    assert len(found) == ranks
    for report in found:
        unit, units = report["unit"], report["units"]
        shards = units * unit / ranks
        built = per_host * (shards + 3 * unit)
        for name, whole in (("reshards", 3), ("keeps", units)):
            peaks = report[name]
            assert peaks["built"]["shared"] == pytest.approx(built, abs=1), name
            assert peaks["evaluation"]["shared"] == pytest.approx(built + 3 * unit, abs=1), name
            assert peaks["training"]["shared"] == pytest.approx(built + whole * unit, abs=1), name
            assert peaks["evaluation"]["own"] < unit, name
            assert peaks["training"]["own"] < shards + 1.5 * unit, name


@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.parametrize("layout", ["3 hosts of 1", "2 hosts of 2"])
def test_engines_give_the_same_bits_over_hosts(layout: str) -> None:
    number, _, _, ranks = layout.split()
    bits = Path(__file__).with_name("test_bits.py")
    options = ("-q", "--only-mpi", "-k", "test_every_engine and (AdamW or SGD)")
    assert " passed" in run(int(number), int(ranks), "-m", "pytest", *options, str(bits), timeout=280)
