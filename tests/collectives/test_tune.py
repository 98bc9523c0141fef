"""The tuner measures, writes a table, and `auto` reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collectives import ArgumentError, Communicator
from collectives.backends import selection
from collectives.backends.backend import Backend
from collectives.backends.hierarchical.hierarchy import Hierarchy
from collectives.backends.mpi import Library
from collectives.backends.schedule_backend import ScheduleBackend
from collectives.backends.selection import Selection, read_tables
from collectives.backends.symmetric.backend import Symmetric
from collectives.buffers import describe
from collectives.tune import table, write

TUNE = ("-m", "collectives.tune")
FLOAT = describe("float32")


def backends(*kinds: type[Backend]) -> dict[str, Backend]:
    """Makes backends of these kinds, and schedules, without a group."""
    made = {kind.name: object.__new__(kind) for kind in (Library, *kinds)}
    for name in ("ring", "tree"):
        made[name] = object.__new__(ScheduleBackend)
        made[name].name = name
    return made


def test_a_table_changes_half_way_between_sizes_and_only_for_a_clear_gain() -> None:
    measured = [
        (1000, {"mpi": 1.0, "ring": 2.0}),
        (4000, {"mpi": 2.0, "ring": 1.99}),  # not clearly faster
        (16000, {"mpi": 4.0, "ring": 2.0}),
        (64000, {"mpi": 8.0, "ring": 5.0}),
    ]
    assert table(measured) == [(8000, "mpi"), (None, "ring")]


def test_the_tuner_writes_what_auto_reads(mpirun: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new folder" / "tuning.json"
    options = ("--ops", "all_reduce,all_gather", "--max-bytes", "65536", "--factor", "8", "--iters", "3")
    done = mpirun(2, *TUNE, *options, MPIDL_TUNING=str(path))
    assert done.returncode == 0, done.stderr
    assert f"# written to {path}" in done.stdout
    assert done.stdout.count("auto: ") == 2
    tables = json.loads(path.read_text())["tables"]
    assert set(tables) == {"1x2"}
    assert set(tables["1x2"]) == {"all_reduce", "all_gather"}
    assert all(rows[-1][0] is None for rows in tables["1x2"].values())
    monkeypatch.setenv("MPIDL_TUNING", str(path))
    assert set(read_tables(1, 2)) == {"all_reduce", "all_gather"}
    assert read_tables(1, 3) == {}


def test_what_is_measured_for_other_layouts_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.json"
    write(path, "1x2", {"all_reduce": [(100, "tree"), (None, "ring")]}, "an MPI")
    write(path, "2x2", {"all_reduce": [(None, "mpi")]}, "an MPI")
    monkeypatch.setenv("MPIDL_TUNING", str(path))
    chosen = Selection(backends(Symmetric), read_tables(1, 2)).choose
    assert [chosen("all_reduce", "auto", FLOAT, nbytes) for nbytes in (100, 101)] == ["tree", "ring"]
    assert chosen("all_gather", "auto", FLOAT, 1 << 30) == "symmetric", "the default where nothing was measured"
    assert Selection(backends(Hierarchy), read_tables(2, 2)).choose("all_reduce", "auto", FLOAT, 1 << 30) == "mpi"


def test_defaults_go_by_the_library_and_whether_ranks_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(library: str, ranks: int, nbytes: int, *, crowded: bool) -> str:
        monkeypatch.setattr(selection, "MPI", SimpleNamespace(get_vendor=lambda: (library, (1, 0, 0))))
        place: Any = SimpleNamespace(local_size=ranks, crowded=crowded)
        return Selection(backends(Symmetric), {}, place).choose("all_gather", "auto", FLOAT, nbytes)

    assert chosen("MPICH", 2, 1 << 10, crowded=False) == "mpi"
    assert chosen("MPICH", 4, 1 << 10, crowded=True) == "symmetric"
    assert chosen("MPICH", 2, 64 << 10, crowded=False) == "symmetric"
    assert chosen("Intel MPI", 2, 64 << 10, crowded=False) == "mpi"
    assert chosen("MPICH", 1, 64 << 10, crowded=False) == "mpi"
    assert chosen("another", 4, 64 << 10, crowded=True) == "mpi"


@pytest.mark.thorough
def test_wrong_options_and_files_are_one_line_on_one_rank(mpirun: Callable, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    for options, words in [(("--ops", "all_red"), "got 'all_red'"), (("--output", other), "holds something else")]:
        done = mpirun(2, *TUNE, *options)
        assert done.returncode == 2
        assert done.stderr.count(words) == 1, done.stderr


def test_a_file_that_is_no_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("{}")
    monkeypatch.setenv("MPIDL_TUNING", str(path))
    with pytest.raises(ArgumentError, match="is no table of"):
        read_tables(1, 2)


@pytest.mark.mpi
def test_a_communicator_reads_the_table(comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = comm.mpi.bcast(str(tmp_path / "tuning.json"))
    if comm.rank == 0:
        layout = f"{comm.nodes}x{comm.local_size}"
        write(Path(path), layout, {"broadcast": [(10, "mpi"), (None, "tree")]}, "an MPI")
    monkeypatch.setenv("MPIDL_TUNING", path)
    made = Communicator()
    assert [made._choose("broadcast", "auto", FLOAT, nbytes) for nbytes in (10, 11)] == ["mpi", "tree"]
    made.close()
