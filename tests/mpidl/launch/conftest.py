"""Fixtures of the launcher's tests, whose jobs write to the tests' own names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

_CAPTURES = {"capfd", "capfdbinary"}
_OUTPUTS = (1, 2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Keeps what goes to the descriptors, and shows it of a test that fails."""
    if _CAPTURES & set(getattr(item, "fixturenames", ())):
        return (yield)
    with tempfile.TemporaryFile() as kept:
        before = [os.dup(number) for number in _OUTPUTS]
        try:
            for number in _OUTPUTS:
                os.dup2(kept.fileno(), number)
            result: Any = yield
            return result
        finally:
            for number, former in zip(_OUTPUTS, before, strict=True):
                os.dup2(former, number)
                os.close(former)
            kept.seek(0)
            item.add_report_section("call", "of jobs", kept.read().decode(errors="replace"))
