"""A Mesh gives each axis a Communicator of the ranks that its layout says."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import mpidl
from collectives import Communicator
from mpidl import Mesh, UsageError

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]

SHAPES: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}],
    3: [{}, {"tp": 3}, {"ep": 3}],
    4: [
        {},
        {"tp": 2},
        {"pp": 2, "tp": 2},
        {"cp": 2, "tp": 2},
        {"cp": 2, "ep": 2},
        {"cp": 2, "ep": 4},
        {"pp": 2, "ep": 2},
    ],
}


@pytest.mark.every_size
def test_each_axis_has_the_communicator_of_its_ranks(comm: Communicator) -> None:
    for sizes in SHAPES.get(comm.size, [{}]):
        with Mesh(**sizes, comm=comm) as mesh:
            for axes in [(axis,) for axis in mesh] + [("dp", "cp"), ("dp", "tp"), ("pp", "tp"), ("edp", "ep")]:
                group = mesh.along(*axes)
                assert (group.rank, group.size) == (mesh.rank(*axes), mesh.size(*axes))
                ranks = np.empty(group.size, np.int64)
                group.all_gather(ranks, np.array([comm.rank]))
                assert tuple(ranks.tolist()) == mesh.ranks(*axes)
            assert {axis: mesh.rank(axis) for axis in mesh} == mesh.coordinates
            assert mesh["tp"] is mesh.along("tp")


@pytest.mark.ranks(4)
@pytest.mark.one_node
def test_groups_are_made_once_and_those_of_data_parallelism_ahead(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(cp=2, tp=2, comm=comm)
    tp_pp = mesh.along("pp", "tp")
    assert (tp_pp.name, mesh["cp"].name) == (f"tp at cp={mesh.rank('cp')}", f"cp at tp={mesh.rank('tp')}")
    with monkeypatch.context() as patch:
        patch.setattr(comm, "split", None)  # nothing is made from here on
        assert mesh.along("cp", "dp") is mesh.along("dp", "cp") is mesh["cp"]
        assert mesh.along("tp", "pp") is tp_pp is mesh["tp"]
        assert mesh.along("cp", "tp") is comm
        assert mesh["pp"].size == mesh["dp"].size == 1
    mesh.close()


@pytest.mark.ranks(1, 3)
def test_what_is_the_whole_world_is_its_communicator_and_what_is_one_rank_costs_nothing(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "split", None)
    mesh = Mesh(comm=comm)
    assert mesh["dp"] is mesh.along("dp", "cp") is mesh.along("dp", "tp") is comm
    assert mesh["tp"] is mesh.along("pp", "tp")
    assert mesh["tp"].size == 1
    mesh.close()
    mesh.close()
    comm.barrier()  # is not the mesh's to close
    with pytest.raises(UsageError, match="Mesh: is closed"):
        mesh["dp"]


def test_a_closed_mesh_gives_no_communicator_of_a_part_of_an_axis(comm: Communicator) -> None:
    mesh = Mesh(comm=comm)
    half = mesh.split_axis("dp", "halves", comm.rank % 2)
    assert mesh.split_axis("dp", "halves", comm.rank % 2) is half
    assert half.size == len(range(comm.rank % 2, comm.size, 2))
    mesh.close()
    with pytest.raises(UsageError, match="Mesh: is closed"):
        mesh.split_axis("dp", "halves", comm.rank % 2)


def test_by_default_it_orders_the_world() -> None:
    with Mesh() as mesh:
        assert mesh.comm is mpidl.init()
        assert mesh["dp"] is mesh.comm


@pytest.mark.ranks(2, 4)
def test_wrong_sizes_are_one_error_on_every_rank(comm: Communicator) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tp": comm.size + 1}, "needs the others to divide"),
        ({"tp": "x" if comm.rank == 0 else 1}, "got tp='x' on rank 0 and tp=1 on rank 1"),
        ({"tp": 1 + comm.rank}, "got tp=1 on rank 0 and tp=2 on rank 1"),
    ]
    for sizes, message in wrong:
        with pytest.raises(UsageError, match=message) as caught:
            Mesh(**sizes, comm=comm)
        assert len(set(mpidl.all_gather_object(comm, str(caught.value)))) == 1


@pytest.mark.ranks(4)
@pytest.mark.one_node
def test_tp_groups_over_nodes_are_told_by_rank_0(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "node_ranks", (0, 1, 2) if comm.rank < 3 else (3,))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mesh = Mesh(tp=2, comm=comm)
    assert [str(w.message) for w in told if "tp groups cross nodes" in str(w.message)] == [
        "Mesh: 1 of 2 tp groups cross nodes, the first of ranks 2, 3; tensor parallelism communicates in every layer: "
        "start as many ranks on each node as tp=2 divides, or choose a smaller tp"
    ] * (comm.rank == 0)
    mesh.close()


@pytest.mark.ranks(4)
@pytest.mark.one_node
def test_it_prints_where_a_rank_is(comm: Communicator) -> None:
    with Mesh(tp=2, comm=comm) as mesh:
        dp, tp = divmod(comm.rank, 2)
        assert repr(mesh) == f"Mesh(pp=1, dp=2, cp=1, tp=2; rank {comm.rank} of 4 at dp={dp}, tp={tp})"
        assert list(mesh) == ["pp", "dp", "cp", "tp", "edp", "ep"]
        assert mesh.axes["dp"] == 2
    with Mesh(ep=2, comm=comm) as mesh:
        assert repr(mesh).startswith("Mesh(pp=1, dp=4, cp=1, tp=1, edp=2, ep=2; rank")


def test_axes_and_communicators_that_are_none_are_refused(comm: Communicator) -> None:
    with Mesh(comm=comm) as mesh:
        for ask in (mesh.__getitem__, mesh.rank, mesh.size, mesh.ranks, mesh.along):
            with pytest.raises(UsageError, match=r"Mesh: got axis 'xp'; needs one of pp, dp, cp, tp, ep, edp"):
                ask("xp")
    with pytest.raises(UsageError, match=r"comm: got str; needs a collectives.Communicator"):
        Mesh(comm="world")  # type: ignore[arg-type]
