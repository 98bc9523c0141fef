"""The doctor finds what is wrong in facts that are made up, and looks at a real job."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from mpidl.doctor.__main__ import lines
from mpidl.doctor.advice import findings
from mpidl.doctor.facts import launched_processes
from mpidl.doctor.mesh import findings as of_mesh
from mpidl.doctor.mesh import picture, sizes
from mpidl.mesh import Layout

GIB = 1 << 30


def rank(number: int, **changes: Any) -> dict[str, Any]:
    """One of four ranks with two cores each on one host of eight."""
    return {
        "rank": number,
        "host": "a",
        "local_rank": number,
        "local_size": 4,
        "nodes": 1,
        "started": 4,
        "versions": {"python": "3.11", "torch": "2.13", "mpi": "MPICH"},
        "compiled": True,
        "mpi": {"library": "MPICH", "standard": "4.1", "threads": "multiple", "cuda_aware": None},
        "cores": list(range(8)),
        "cores_of_machine": 8,
        "quota": None,
        "threads": 2,
        "shared_memory": {"directory": "/dev/shm", "bytes": 8 * GIB, "free": 8 * GIB},
        "symmetric": True,
        "memory": 16 * GIB,
        "gpus": [],
        **changes,
    }


FAST = {"copy": 10e9, "all_reduce_on_a_node": 5e9, "all_reduce_over_nodes": None, "links": {}}
LINK = {"bytes_per_second": 1e9, "latency": 1e-5}


def told(facts: list[dict[str, Any]], **speed: Any) -> list[tuple[bool, str]]:
    return [(finding.problem, finding.what) for finding in findings(facts, {**FAST, **speed})]


def test_a_machine_that_is_well_has_no_findings() -> None:
    assert told([rank(n) for n in range(4)]) == []
    assert told([rank(n, cores=[2 * n, 2 * n + 1]) for n in range(4)]) == []  # bound to cores of their own


@pytest.mark.parametrize(
    ("changes", "problem", "what"),
    [
        ({"started": 16}, True, "has started 16 processes, but MPI knows of 4"),
        ({"mpi": {**rank(0)["mpi"], "threads": "single"}}, True, "gives threads the level 'single'"),
        ({"symmetric": False}, True, "the ranks of a cannot share memory"),
        ({"shared_memory": {"directory": "/dev/shm", "bytes": GIB, "free": 64 << 20}}, True, "of a has 64 MiB free"),
        ({"threads": 8}, True, "a: 4 ranks of 8 threads each on 8 cores"),
        ({"cores": [0, 1], "threads": 1}, True, "a: 4 ranks of 1 thread each on 2 cores"),
        ({"threads": 1}, False, "a: 4 ranks of 1 thread each on 8 cores: 4 cores would be idle"),
        ({"quota": 4.0}, True, "a: 4 ranks of 2 threads each on 4 cores"),
        ({"compiled": False}, False, "the part of mpidl in C is not used on rank 0"),
        ({"gpus": ["H100"]}, False, "a has 1 of H100"),
    ],
)
def test_what_is_wrong_is_told(changes: dict[str, Any], problem: bool, what: str) -> None:
    found = told([rank(n, **changes) for n in range(4)])
    assert any(is_problem == problem and what in text for is_problem, text in found), found


def test_ranks_that_are_unlike_are_told() -> None:
    facts = [rank(n) for n in range(4)]
    facts[3] |= {"versions": {**facts[3]["versions"], "torch": "2.4"}, "host": "b"}
    assert (True, "torch is 2.13 on rank 0 and 2.4 on rank 3 (b)") in told(facts)


def test_ranks_that_are_bound_to_the_same_core_are_told() -> None:
    facts = [rank(n, cores=[2 * n, 2 * n + 1]) for n in range(4)]
    facts[2]["cores"] = [1, 5]
    assert (True, "a: ranks 0 and 2 are bound to the same core 1") in told(facts)
    facts = [rank(n, cores=[n], threads=2) for n in range(4)]
    assert (True, "a: rank 0 has 2 threads on the 1 core that it is bound to") in told(facts)


def test_slow_ways_are_told() -> None:
    facts = [rank(n) for n in range(4)]
    assert told(facts, all_reduce_on_a_node=1e9) == [
        (True, "all-reduce on a node: 954 MiB/s is low; at least 1.16 GiB/s is to be expected (1/8 of a copy)")
    ]
    slow = {"bytes_per_second": 1e8, "latency": 1e-3}
    assert told(facts, links={"b": LINK}) == []
    assert told(facts, links={"b": slow}) == [
        (
            True,
            "link a - b: 95.4 MiB/s is low; at least 191 MiB/s is to be expected (1/50 of a copy); "
            "a message takes 1000 us",
        )
    ]
    assert told(facts, links={"b": LINK, "c": slow}) == [
        (
            True,
            "link a - c: 95.4 MiB/s is low; at least 318 MiB/s is to be expected (1/3 of the best link); "
            "a message takes 1000 us",
        )
    ]
    assert told(facts, links={"b": LINK}, all_reduce_over_nodes=3e8) == []
    assert told(facts, links={"b": LINK}, all_reduce_over_nodes=2e8) == [
        (
            False,
            "all-reduce over all nodes: 191 MiB/s is low; at least 238 MiB/s is to be expected "
            "(1/4 of what the links let through)",
        )
    ]


def test_problems_come_before_remarks() -> None:
    found = told([rank(n, gpus=["H100"], symmetric=False) for n in range(4)])
    assert [problem for problem, _ in found] == [True, False]


def test_of_each_speed_the_report_says_whether_it_is_what_is_to_be_expected() -> None:
    facts = [rank(n, cores=list(range(4)), cores_of_machine=4, threads=1) for n in range(4)]
    speed = {**FAST, "all_reduce_over_nodes": 1e8, "links": {"b": LINK}}
    text = lines(facts, speed, findings(facts, speed))
    begin = next(n for n, line in enumerate(text) if line.startswith("speed"))
    assert text[begin : begin + 4] == [
        "speed     each rank copies memory at 9.31 GiB/s, all at once; the rest is measured by that",
        "          all-reduce on a node: 4.66 GiB/s, good (expected: about 9.31 GiB/s, at least 1.16 GiB/s, "
        "1/8 of a copy)",
        "          all-reduce over all nodes: 95.4 MiB/s, low (expected: about 954 MiB/s, at least 238 MiB/s, "
        "1/4 of what the links let through)",
        "          link a - b: 954 MiB/s, good (expected: at least 318 MiB/s, 1/3 of the best link)",
    ]


def test_one_is_told_as_one() -> None:
    alone = rank(0, cores=[0, 1], cores_of_machine=2, threads=1, started=1, local_size=1)
    (finding,) = findings([alone], {**FAST, "all_reduce_on_a_node": None})
    assert finding.what == "a: 1 rank of 1 thread each on 2 cores: 1 core would be idle"


def test_what_launchers_say_of_their_number_of_processes() -> None:
    assert launched_processes({}) == 1
    assert launched_processes({"PMI_SIZE": "3"}) == 3
    assert launched_processes({"OMPI_COMM_WORLD_SIZE": "5", "PMIX_SIZE": ""}) == 5


def test_a_mesh_is_drawn_node_by_node() -> None:
    layout = Layout.of([0, 0, 0, 1, 1, 1], tp=2)
    assert picture(layout, ["node1"] * 3 + ["node2"] * 3) == [
        "mesh      pp=1, dp=3, cp=1, tp=2 on 6 ranks; rank (dp, tp):",
        "node1     0 (0, 0)  1 (0, 1)  2 (1, 0)",
        "node2     3 (2, 0)  4 (2, 1)  5 (1, 1)",
        "dp        3 ranks each, across nodes: 0 2 3, 1 5 4",
        "tp        2 ranks each, 1 across nodes: 0 1, 2 5, 3 4",
    ]
    (finding,) = of_mesh(layout)
    assert not finding.problem
    assert finding.what.startswith("1 of 3 tp groups cross nodes, the first of ranks 2, 5;")
    assert of_mesh(Layout.of([0, 0, 1, 1], tp=2)) == []
    assert picture(Layout.of([0]), ["node1"]) == ["mesh      pp=1, dp=1, cp=1, tp=1 on 1 rank", "node1     0"]
    assert picture(Layout.of([0] * 4, ep=2), ["a"] * 4)[:2] == [
        "mesh      pp=1, dp=4, cp=1, tp=1, edp=2, ep=2 on 4 ranks; rank (dp, edp, ep):",
        "a         0 (0, 0, 0)  1 (1, 0, 1)  2 (2, 1, 0)  3 (3, 1, 1)",
    ]
    assert picture(Layout.of([0] * 20, tp=2), ["a"] * 20)[-1].endswith("14 15 and 2 more")


def test_sizes_of_a_mesh_are_read_from_the_command_line() -> None:
    assert sizes("dp=-1,tp=2") == {"dp": -1, "tp": 2}
    for text in ("", "tp", "xp=2", "tp=2,tp=2", "edp=2", "tp=two", "tp=2,"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"got '.*'; needs"):
            sizes(text)


def test_it_looks_at_a_job(mpirun) -> None:
    done = mpirun(2, "-m", "mpidl.doctor", "--json", "--mesh", "tp=2")
    told = json.loads(done.stdout)
    assert told["mesh"]["coordinates"][1] == {"pp": 0, "dp": 0, "cp": 0, "tp": 1, "edp": 0, "ep": 0}
    assert done.returncode == any(finding["problem"] for finding in told["findings"]), done.stderr
    assert [fact["rank"] for fact in told["ranks"]] == [0, 1]
    assert all(fact["symmetric"] and fact["mpi"]["threads"] == "multiple" for fact in told["ranks"])
    assert told["speed"]["copy"] > 0
    assert told["speed"]["all_reduce_on_a_node"] > 0
    assert told["speed"]["links"] == {}


@pytest.mark.thorough
def test_a_mesh_that_does_not_fit_is_one_line(mpirun) -> None:
    done = mpirun(1, "-m", "mpidl.doctor", "--mesh", "dp=2,tp=2")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: Mesh: got pp=1, dp=2, cp=1, tp=2, ep=1 on 1 ranks; ")
