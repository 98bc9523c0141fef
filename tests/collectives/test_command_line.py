"""Options that rank 0 reads are those of every rank, and no error of one rank leaves the others waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from collectives import Communicator
from collectives.command_line import Refused, parse_together

pytestmark = [pytest.mark.mpi, pytest.mark.limit(60)]


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises the error."""

    def fails(*options: Any) -> NoReturn:
        raise error

    return fails


def test_every_rank_has_the_options_of_rank_0(comm: Communicator) -> None:
    assert parse_together(comm, lambda: f"of rank {comm.rank}") == "of rank 0"


@pytest.mark.parametrize(
    ("error", "status"),
    [(Refused("no"), 2), (SystemExit(3), 3), (SystemExit(), 0), (SystemExit("words"), 1), (PermissionError("no"), 1)],
    ids=repr,
)
def test_an_error_of_parse_ends_every_rank(comm: Communicator, error: BaseException, status: int) -> None:
    """Rank 0 raises what it does not know, and exits with words if it was to."""
    as_it_is = comm.rank == 0 and (isinstance(error, OSError) or error.args == ("words",))
    with pytest.raises(type(error) if as_it_is else SystemExit) as raised:
        parse_together(comm, raising(error))
    if as_it_is:
        assert raised.value is error
    else:
        assert (raised.value.code or 0) == status  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [Refused("no"), PermissionError("no")], ids=repr)
def test_an_error_of_check_on_one_rank_ends_every_rank(comm: Communicator, error: Exception) -> None:
    last = comm.rank == comm.size - 1
    expected = PermissionError if last and isinstance(error, OSError) else SystemExit
    with pytest.raises(expected) as raised:
        parse_together(comm, lambda: 1, raising(error) if last else lambda options: None)
    if expected is SystemExit:
        assert raised.value.code == (2 if isinstance(error, Refused) else 1)  # type: ignore[attr-defined]
