"""Small models stand for large ones; with --brief one case of a test for all."""

from pathlib import Path
from typing import Any

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

    monkeypatch.setattr(linear, "SMALLEST_WEIGHT", 0)


@pytest.fixture
def duplicated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the name of a Communicator for each duplicate that is made of it in this test."""
    from collectives import Communicator

    names: list[str] = []
    duplicate = Communicator.duplicate
    monkeypatch.setattr(Communicator, "duplicate", lambda comm: (names.append(comm.name), duplicate(comm))[1])
    return names


@pytest.fixture
def pages_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets what `Communicator.pages` returns in this test."""
    from collectives import Communicator

    made: list[Any] = []
    pages = Communicator.pages
    monkeypatch.setattr(Communicator, "pages", lambda *given, **named: made.append(pages(*given, **named)) or made[-1])
    return made
