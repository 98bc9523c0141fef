"""Runs a Python program over test hosts; the test is skipped where there can be none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import hosts

from . import launch


def on_hosts(
    *arguments: str, number: int = 2, ranks: int = 2, timeout: float = 50, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program on so many hosts with so many ranks each. timeout: seconds. variables: of its environment."""
    obstacle = hosts.obstacle()
    if obstacle:
        pytest.skip(f"no test hosts: {obstacle}")
    layout = ["--hosts", str(number), "--ranks-per-host", str(ranks)]
    command = [sys.executable, hosts.__file__, *layout, "--", "python", *arguments]
    return launch.run(command, timeout, launch.ROOT, launch.environment(**variables))
