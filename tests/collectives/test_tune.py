"""The tuner measures, writes a table, and `auto` reads it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from collectives import ArgumentError, Communicator, OperationError
from collectives.backends import tables
from collectives.backends.backend import Backend
from collectives.backends.dispatch import Dispatch
from collectives.backends.hierarchical.hierarchy import Hierarchy
from collectives.backends.mpi import Library
from collectives.backends.schedule_backend import ScheduleBackend
from collectives.backends.selection import Selection
from collectives.backends.symmetric.backend import Symmetric
from collectives.backends.symmetric_or_mpi import SymmetricOrLibrary
from collectives.backends.tables import NO_LIMIT, default_tables, library, read_tables, tuning_path, write_tables
from collectives.base.buffers import describe
from collectives.calibration import cache_path, table_of
from collectives.group import setup
from collectives.process.topology import Topology

TUNE = ("-m", "collectives.tune")
FLOAT = describe("float32")


def backends(*kinds: type[Backend]) -> dict[str, Backend]:
    """Makes backends of these kinds, and schedules, without a group."""
    made: dict[str, Backend] = {kind.name: object.__new__(kind) for kind in (Library, *kinds)}
    if Symmetric in kinds:
        made[SymmetricOrLibrary.name] = SymmetricOrLibrary(object.__new__(Symmetric), object.__new__(Library))
    for name in ("ring", "tree"):
        made[name] = object.__new__(ScheduleBackend)
        made[name].name = name
    return made


def test_a_table_changes_where_times_meet_and_only_for_a_clear_gain() -> None:
    measured = [
        (1000, {"mpi": 1.0, "ring": 2.0}),
        (4000, {"mpi": 2.0, "ring": 1.99}),  # not clearly faster
        (16000, {"mpi": 8.0, "ring": 4.0}),
        (64000, {"mpi": 16.0, "ring": 5.0}),
    ]
    ((limit, first), last) = table_of(measured)
    assert (first, last) == ("mpi", (NO_LIMIT, "ring"))
    assert limit == pytest.approx(4000, rel=0.03), "the two are nearly equal there"
    measured[1] = (4000, {"mpi": 2.0, "ring": 4.0})
    assert table_of(measured) == ((8000, "mpi"), (NO_LIMIT, "ring")), "as far from equal at both sizes"


def test_the_tuner_writes_what_auto_reads(mpirun: Callable, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "tuning.json"
    options = ("--ops", "all_reduce,all_gather", "--max-bytes", "65536", "--factor", "8", "--iters", "3")
    done = mpirun(2, *TUNE, *options, MPIDL_TUNING=str(path))
    assert done.returncode == 0, done.stderr
    assert f"# written to {path}" in done.stdout
    assert done.stdout.count("auto: ") == 2
    tables = json.loads(path.read_text())["tables"][library()]
    assert set(tables) == {"1x2"}
    assert set(tables["1x2"]) == {"all_reduce", "all_gather"}
    assert all(rows[-1][0] is None for rows in tables["1x2"].values())
    assert set(read_tables(path, library(), "1x2")) == {"all_reduce", "all_gather"}
    assert read_tables(path, library(), "1x3") == read_tables(path, "another MPI 1", "1x2") == {}


def test_what_is_measured_for_other_layouts_and_libraries_stays(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write_tables(path, "an MPI 1", "1x2", {"all_reduce": [(100, "tree"), (NO_LIMIT, "ring")]})
    write_tables(path, "an MPI 1", "2x2", {"all_reduce": [(NO_LIMIT, "mpi")]})
    write_tables(path, "an MPI 2", "1x2", {"all_reduce": [(NO_LIMIT, "mpi")]})
    chosen = Selection(backends(Symmetric), read_tables(path, "an MPI 1", "1x2")).choose
    assert [chosen("all_reduce", "auto", FLOAT, nbytes) for nbytes in (100, 101)] == ["tree", "ring"]
    assert chosen("all_gather", "auto", FLOAT, 1 << 30) == "symmetric", "the default where nothing was measured"
    chosen = Selection(backends(Hierarchy), read_tables(path, "an MPI 1", "2x2")).choose
    assert chosen("all_reduce", "auto", FLOAT, 1 << 30) == "mpi"


def test_defaults_go_by_the_library_and_whether_ranks_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(mpi: str, ranks: int, nbytes: int, *, oversubscribed: bool) -> str:
        defaults = default_tables(mpi, 1, ranks, oversubscribed)
        return Selection(backends(Symmetric), {}, defaults).choose("all_gather", "auto", FLOAT, nbytes)

    monkeypatch.setattr(tables, "is_compiled", lambda: True)
    assert chosen("MPICH 5", 2, 1 << 10, oversubscribed=False) == "symmetric"
    assert chosen("MPICH 5", 4, 1 << 20, oversubscribed=True) == "symmetric_or_mpi"
    assert chosen("MPICH 5", 2, 256 << 10, oversubscribed=False) == "symmetric"
    assert chosen("Open MPI 5", 2, 256 << 10, oversubscribed=False) == "symmetric_or_mpi"
    assert chosen("Open MPI 5", 4, 256 << 10, oversubscribed=True) == "symmetric"
    assert chosen("another 1", 4, 64 << 10, oversubscribed=True) == "mpi"
    assert default_tables("MPICH 4", 1, 2, False) is default_tables("MPICH 5", 1, 8, False) is None
    assert default_tables("MPICH 5", 2, 2, False) is None
    monkeypatch.setattr(tables, "is_compiled", lambda: False)
    assert default_tables("MPICH 5", 1, 2, False) is None, "measured with the part in C"


@pytest.mark.thorough
def test_wrong_options_and_files_are_one_line_on_one_rank(mpirun: Callable, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    for options, words in [(("--ops", "all_red"), "got 'all_red'"), (("--output", other), "holds something else")]:
        done = mpirun(2, *TUNE, *options)
        assert done.returncode == 2
        assert done.stderr.count(words) == 1, done.stderr


DEEP = "[" * 100_000
HUGE = '{"tables": {"an MPI 1": {"1x2": {"all_reduce": [[1%s, "mpi"]]}}}}' % ("0" * 400)


@pytest.mark.parametrize("text", ["{}", "[]", '{"tables": {"an MPI 1": {"1x2": {"all_reduce": 1}}}}', DEEP, HUGE])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="is no table of"):
        read_tables(path, "an MPI 1", "1x2")


def test_a_user_without_a_home_directory_has_tables_in_the_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fails)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPIDL_TUNING", "/a/tuning.json")
    assert tuning_path() == Path("/a/tuning.json")
    monkeypatch.delenv("MPIDL_TUNING")
    for path in (tuning_path(), cache_path()):
        assert Path(tempfile.gettempdir()) in path.parents


@pytest.mark.mpi
def test_a_communicator_reads_the_table(comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = comm.mpi.bcast(str(tmp_path / "tuning.json"))
    if comm.rank == 0:
        write_tables(Path(path), library(), comm.layout, {"broadcast": [(10, "mpi"), (NO_LIMIT, "tree")]})
    monkeypatch.setenv("MPIDL_TUNING", path)
    made = Communicator()
    assert list(made.tables["broadcast"])[:2] == [(10, "mpi"), (NO_LIMIT, "tree")]
    made.close()


@pytest.mark.mpi
@pytest.mark.limit(60)
@pytest.mark.parametrize("error", [PermissionError, MemoryError])
def test_a_table_that_rank_0_cannot_read_is_an_error_on_every_rank(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    plain = Path.read_text

    def fails(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "tuning.json":
            raise error("no")
        return plain(path, *args, **options)

    (tmp_path / "tuning.json").write_text(DEEP)
    monkeypatch.setenv("MPIDL_TUNING", str(tmp_path / "tuning.json"))
    with pytest.raises(ArgumentError, match="is no table of"):
        Communicator()
    monkeypatch.setattr(Path, "read_text", fails)
    at_hand = error is MemoryError and comm.rank == 0
    wanted = ArgumentError if error is PermissionError else error if at_hand else OperationError
    with pytest.raises(wanted, match="cannot be read: no" if error is PermissionError else "no"):
        Communicator()


@pytest.mark.mpi
def test_a_group_that_cannot_be_made_leaves_no_communicators_of_mpi(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI has a limited number of them."""
    made: list[Any] = []
    discover, split = setup.discover, Dispatch.split

    def watched_discover(of_mpi: MPI.Intracomm, owned_comms: list[MPI.Intracomm]) -> Topology:
        made.append(owned_comms)
        return discover(of_mpi, owned_comms)

    def watched_split(*arguments: Any) -> Any:
        made.append([split(*arguments)])
        return made[-1][0]

    monkeypatch.setattr(setup, "discover", watched_discover)
    monkeypatch.setattr(Dispatch, "split", watched_split)
    (tmp_path / "tuning.json").write_text("[]")
    monkeypatch.setenv("MPIDL_TUNING", str(tmp_path / "tuning.json"))
    for make in (Communicator, lambda: comm.split(0)):
        with pytest.raises(ArgumentError, match="is no table of"):
            make()
    assert len(made) == 3
    assert all(of_mpi == MPI.COMM_NULL for group in made for of_mpi in group)
