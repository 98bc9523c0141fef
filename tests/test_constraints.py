"""The pinned versions install on every Python that the project promises."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]

_OF_GPU_BUILDS = ("nvidia-", "cuda-", "triton")  # torch asks for them where it is built for GPUs
_ONLY_AS_SOURCE = "deepspeed"  # has no builds to install


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def _pythons() -> list[str]:
    classifiers = _setup()["metadata"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)", classifiers)


def _requirements() -> list[str]:
    """The names that setup.cfg asks for, those of the extras too."""
    setup = _setup()
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return sorted({line for text in lists for line in text.split() if line})


def _pinned(python: str) -> set[str]:
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    return {
        canonicalize_name(pin.name) for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": python})
    }


@pytest.mark.thorough(*(f"python{version}" for version in _pythons()[:-1]))
@pytest.mark.parametrize("python", [pytest.param(version, id=f"python{version}") for version in _pythons()])
def test_pinned_versions_have_builds_and_need_nothing_else(python: str) -> None:
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-config", "--no-header"]
    command += ["--no-annotate", "--constraint", "constraints.txt", "--python-version", python]
    command += ["--python-platform", "x86_64-unknown-linux-gnu"]
    command += ["--only-binary", ":all:", "--no-binary", _ONLY_AS_SOURCE]
    ran = subprocess.run(
        command, cwd=ROOT, input="\n".join(_requirements()), capture_output=True, text=True, timeout=300
    )
    if "error sending request" in ran.stderr or "dns error" in ran.stderr:
        pytest.skip("the package index cannot be reached")
    assert ran.returncode == 0, ran.stderr
    resolved = {canonicalize_name(Requirement(line).name) for line in ran.stdout.splitlines() if line}
    assert {canonicalize_name(Requirement(line).name) for line in _requirements()} <= resolved
    unpinned = sorted(name for name in resolved - _pinned(python) if not name.startswith(_OF_GPU_BUILDS))
    assert not unpinned


def test_the_readme_promises_the_pythons_of_the_classifiers() -> None:
    pythons = _pythons()
    readme = (ROOT / "README.md").read_text()
    assert f"Python {pythons[0]} to {pythons[-1]}" in readme
    assert _setup()["options"]["python_requires"] == f">={pythons[0]}"
