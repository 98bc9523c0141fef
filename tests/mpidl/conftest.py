"""Small models stand for large ones; with --brief one case of a test for all."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before cases are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Most of them train a model, so that each case takes long."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("once")


@pytest.fixture(autouse=True)
def _no_weight_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of all linear layers can go the way of those that are worth it."""
    from mpidl.ddp import linear

    monkeypatch.setattr(linear, "_SMALLEST", 0)
