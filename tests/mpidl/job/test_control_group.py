"""Limits of a control group, read from folders that are made up, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidl.job import control_group

GIB = 1 << 30
OWN = {1: "5:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n1:name=systemd:/\n", 2: "0::/slurm/job_7\n"}
LIMITED = {
    1: {
        "cpu,cpuacct/slurm/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/slurm/job_7/memory.limit_in_bytes": f"{GIB}\n",
        "memory/slurm/job_7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    },
    2: {
        "slurm/cpu.max": "150000 100000\n",
        "slurm/job_7/cpu.max": "max 100000\n",
        "slurm/memory.max": "max\n",
        "slurm/job_7/memory.max": f"{GIB}\n",
        "slurm/job_7/memory.events": "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\n",
    },
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`files(own, contents)` puts them where the system has its own."""
    monkeypatch.setattr(control_group, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(control_group, "ROOT", tmp_path / "root")

    def write(own: str, contents: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in contents.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_the_group_and_of_those_above_it_hold(files, version: int) -> None:
    files(OWN[version], LIMITED[version])
    assert control_group.cpu_quota() == 1.5
    assert control_group.memory_limit() == GIB
    assert control_group.killed_for_memory() == 3


def test_in_a_container_the_group_is_the_root(files) -> None:
    files("0::/\n", {"cpu.max": "200000 100000\n", "memory.max": "max\n", "memory.events": "oom_kill 1\n"})
    assert control_group.cpu_quota() == 2
    assert control_group.memory_limit() is None
    assert control_group.killed_for_memory() == 1


@pytest.mark.parametrize("own", ["", "0::/\n", "0::/gone\n", *OWN.values()])
def test_where_nothing_is_said_there_is_no_limit(files, own: str) -> None:
    files(own, {})
    assert (control_group.cpu_quota(), control_group.memory_limit(), control_group.killed_for_memory()) == (
        None,
        None,
        0,
    )


def test_both_versions_at_once(files) -> None:
    """Systemd may keep version 2 for itself."""
    files(OWN[1] + "0::/\n", {**LIMITED[1], "unified/cgroup.procs": ""})
    assert control_group.memory_limit() == GIB
    assert control_group.killed_for_memory() == 3
