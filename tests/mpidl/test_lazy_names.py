"""Rooms that few programs need are imported when they are first used, and are there like any others."""

from __future__ import annotations

import sys

import pytest

import mpidl
from tests.harness.launch import ROOT, environment, run

LATER = ("activations", "checkpoint", "data", "memory", "tensor")


def outcome(program: str) -> str:
    """Output of a program of its own."""
    done = run([sys.executable, "-c", program], 60, ROOT, environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rooms_are_imported_when_they_are_used() -> None:
    program = f"""
import sys, mpidl
names = [f"mpidl.{{name}}" for name in {LATER}] + ["mpidl.optim.ema", "mpidl.models"]
assert not [name for name in names if name in sys.modules]
assert mpidl.checkpoint.save is sys.modules["mpidl.checkpoint"].save
assert mpidl.optim.EMA.__module__ == "mpidl.optim.ema"
assert [name for name in names if name in sys.modules] == ["mpidl.checkpoint", "mpidl.optim.ema", "mpidl.models"]
from mpidl import parallelize, tensor
assert parallelize is tensor.parallelize is vars(mpidl)["parallelize"]
print("as it should be")
"""
    assert outcome(program) == "as it should be"


def test_every_public_name_is_there_by_each_way_in() -> None:
    program = """
import mpidl, mpidl.optim
for package in (mpidl, mpidl.optim):
    assert set(package.__all__) <= set(dir(package)), package
exec("from mpidl import *; from mpidl.optim import *", into := {})
for package in (mpidl, mpidl.optim):
    assert all(into[name] is getattr(package, name) for name in package.__all__), package
print("as it should be")
"""
    assert outcome(program) == "as it should be"


@pytest.mark.parametrize("package", [mpidl, mpidl.optim], ids=["mpidl", "mpidl.optim"])
def test_a_name_that_is_not_there_is_an_attribute_error(package) -> None:
    assert not hasattr(package, "parallelise")
    with pytest.raises(AttributeError, match=rf"module '{package.__name__}' has no attribute 'parallelise'"):
        _ = package.parallelise
    with pytest.raises(ImportError):
        exec(f"from {package.__name__} import parallelise")
