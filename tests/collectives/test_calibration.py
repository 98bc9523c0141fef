"""A group that no table covers measures its algorithms once, and later ones read what it found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from collectives import Communicator, OperationError, calibration
from collectives.backends import tables
from collectives.backends.tables import NO_LIMIT, write_tables

pytestmark = pytest.mark.mpi


@pytest.fixture
def cache(comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of calibrations, of which there is none yet; the same on all ranks. No library has defaults."""
    folder = comm.mpi.bcast(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv(calibration.CALIBRATE, "1")
    monkeypatch.setattr(tables, "DEFAULTS", {})
    monkeypatch.setattr(calibration, "known_tables", {})
    monkeypatch.setattr(calibration, "SIZES", {4096: 2, 32768: 2})
    return calibration.cache_path()


@pytest.mark.ranks(2, 3, 4)
def test_the_first_group_measures_and_all_ranks_have_its_tables(comm: Communicator, cache: Path) -> None:
    with Communicator() as made:
        assert len(set(made.mpi.allgather(repr(made.tables)))) == 1
        made.barrier()  # rank 0 has written
        kept = json.loads(cache.read_text())["tables"][calibration.machine()][made.layout]
        have_a_choice = {o for o, table in made.tables.items() if len({name for _, name in table}) > 1}
        assert {"all_reduce", "reduce_scatter"} <= set(kept) <= set(made.tables)
        assert {"broadcast", "reduce"} & have_a_choice <= set(kept)
        for operation, rows in kept.items():
            assert made.tables[operation][: len(rows)] == tuple((limit or NO_LIMIT, name) for limit, name in rows)
            assert {name for _, name in rows} <= set(made.algorithms(operation))
        x = np.full(100_000, made.rank + 1.0)
        made.all_reduce(x)
        assert (x == sum(range(1, made.size + 1))).all()
        with Communicator() as another:
            assert another.tables == made.tables


@pytest.mark.ranks(2, 3, 4)
def test_a_later_job_reads_the_file(comm: Communicator, cache: Path) -> None:
    if comm.rank == 0:
        write_tables(cache, calibration.machine(), comm.layout, {"broadcast": [(NO_LIMIT, "tree")]})
    comm.barrier()
    with Communicator() as made:
        assert made.tables["broadcast"][0] == (NO_LIMIT, "tree")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("text", ["", "[]", '{"tables": 1}', "[" * 100_000])
def test_a_file_of_something_else_is_replaced(comm: Communicator, cache: Path, text: str) -> None:
    if comm.rank == 0:
        cache.parent.mkdir(parents=True)
        cache.write_text(text)
    comm.barrier()
    with Communicator() as made:
        made.barrier()  # rank 0 has written
        assert made.layout in json.loads(cache.read_text())["tables"][calibration.machine()]


@pytest.mark.ranks(2)
def test_a_folder_that_cannot_be_made_is_no_error(comm: Communicator, cache: Path) -> None:
    if comm.rank == 0:
        cache.parent.write_text("a file in its place")
    comm.barrier()
    with Communicator() as made, Communicator() as another:
        assert made.tables == another.tables


@pytest.mark.ranks(2)
@pytest.mark.limit(60)
def test_an_error_of_rank_0_that_looks_for_the_file_is_one_on_every_rank(
    comm: Communicator, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(layout: str) -> None:
        raise MemoryError("no")

    monkeypatch.setattr(calibration, "known", fails)
    with pytest.raises(OperationError if comm.rank else MemoryError, match="no"):
        Communicator()


@pytest.mark.ranks(2)
def test_turned_off_the_fallback_holds(comm: Communicator, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.CALIBRATE, "0")
    with Communicator() as made:
        assert not cache.exists()
        assert made.tables["all_reduce"][-1] == (NO_LIMIT, "mpi")
