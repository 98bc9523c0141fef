"""Schedules of hierarchical operations: proved on any nodes, of one message between two nodes, and with a price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives import ScheduleError
from collectives.price import Cluster, Pricing, price
from collectives.schedules.algorithms import hierarchical, schedule
from collectives.schedules.proof import verify
from collectives.schedules.schedule import Kind, Schedule

Nodes = hierarchical.Nodes
OPERATIONS = ("all_to_all", "gather", "scatter", "reduce")


def regular(nodes: int, local: int) -> Nodes:
    return tuple(tuple(range(node * local, (node + 1) * local)) for node in range(nodes))


LAYOUTS: dict[str, Nodes] = {
    "one rank": ((0,),),
    "one node": ((0, 1, 2),),
    "two and two": regular(2, 2),
    "three and one": ((0, 1, 2), (3,)),
    "one and three": ((0,), (1, 2, 3)),
    "of one rank each": regular(5, 1),
    "by turns": ((0, 3, 6), (1, 4), (2, 5)),
    "no order": ((0, 3, 4), (1,), (2, 5, 6, 7)),
    "more nodes than ranks a node": regular(7, 2),
    "five of four": regular(5, 4),
}
THOROUGH = ("five of four", "more nodes than ranks a node")


def made(operation: str, nodes: Nodes, root: int = 0) -> Schedule:
    if operation == "reduce":
        return hierarchical.reduce(nodes, root)
    return hierarchical.movement(operation, nodes, root)


def roots(operation: str, nodes: Nodes) -> list[int]:
    ranks = sum(map(len, nodes))
    return [0] if operation == "all_to_all" else sorted({*range(min(ranks, 8)), ranks // 2, ranks - 1})


@pytest.mark.thorough(*(f"{layout}-{operation}" for layout in THOROUGH for operation in OPERATIONS))
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_are_right_on_any_nodes_with_any_root(layout: str, operation: str) -> None:
    for root in roots(operation, LAYOUTS[layout]):
        verify(made(operation, LAYOUTS[layout], root))
        if operation == "reduce":
            verify(made(operation, LAYOUTS[layout], root), in_place=True)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_message_goes_from_a_node_to_another(layout: str, operation: str) -> None:
    nodes = LAYOUTS[layout]
    home = {rank: number for number, members in enumerate(nodes) for rank in members}
    for root in roots(operation, nodes):
        found = made(operation, nodes, root)
        sent = [
            (home[rank], home[step.peer])
            for rank in home
            for steps in found.program(rank)
            for step in steps
            if step.kind is Kind.SEND and home[rank] != home[step.peer]
        ]
        others = [number for number in range(len(nodes)) if number != home[root]]
        wanted = {
            "all_to_all": [(a, b) for a in range(len(nodes)) for b in range(len(nodes)) if a != b],
            "scatter": [(home[root], node) for node in others],
        }.get(operation, [(node, home[root]) for node in others])
        assert sorted(sent) == sorted(wanted)


def test_the_ranks_of_a_node_share_the_messages_to_other_nodes() -> None:
    for local in (1, 2, 3, 4):
        found = list(hierarchical.channels("all_to_all", regular(9, local)))
        for rank in range(9 * local):
            for one in ("sender", "receiver"):
                held = sum(getattr(c, one) == rank for c in found if not c.is_local)
                assert held in (8 // local, -(-8 // local))


def test_what_lies_in_order_leaves_the_input_and_arrives_in_the_output() -> None:
    assert all(not c.is_got for c in hierarchical.channels("gather", regular(3, 2), 5) if not c.is_local)
    assert all(not c.is_put for c in hierarchical.channels("scatter", regular(3, 2), 5) if not c.is_local)
    assert not any(c.is_put or c.is_got for c in hierarchical.channels("all_to_all", regular(4, 1)))
    mixed = [c for c in hierarchical.channels("gather", LAYOUTS["by turns"], 0) if not c.is_local]
    assert all(c.is_put and c.is_got for c in mixed)


def test_a_channel_that_is_missing_or_in_another_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = LAYOUTS["three and one"]
    right = list(hierarchical.channels("gather", nodes))
    swapped = [
        replace(c, parts=c.parts[::-1], is_put=True, is_got=False) for c in hierarchical.channels("scatter", nodes)
    ]
    for operation, wrong in (("gather", right[1:]), ("gather", right[:-1]), ("scatter", swapped)):
        monkeypatch.setattr(hierarchical, "channels", lambda *_, wrong=wrong: iter(wrong))
        hierarchical.movement.cache_clear()
        with pytest.raises(ScheduleError):
            verify(hierarchical.movement(operation, nodes))
    monkeypatch.undo()
    hierarchical.movement.cache_clear()
    verify(hierarchical.movement("gather", nodes))


# ---- prices ---------------------------------------------------------------------------------------------------------

ALPHA, BETA, GAMMA = 1e-6, 1 / 10e9, 1 / 40e9
FAR_ALPHA, FAR_BETA = 50e-6, 1 / 125e6  # 1 Gbit/s
N = 1 << 20


def cluster(local: int, **changes: float) -> Cluster:
    return replace(Cluster(local, ALPHA, 1 / BETA, FAR_ALPHA, 1 / FAR_BETA, GAMMA), **changes)


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (4, 2), (3, 4), (4, 1)])
def test_between_nodes_a_price_is_one_latency_and_all_bytes_of_a_port(nodes: int, local: int) -> None:
    """The puts and the gets inside nodes come on top of it."""
    free = cluster(local, intra_latency=0, intra_bandwidth=1e30, gamma=0)
    ranks, layout = nodes * local, regular(nodes, local)
    away = (nodes - 1) / nodes * N
    bytes_of_port = {"all_to_all": local * away, "gather": away, "scatter": away, "reduce": (nodes - 1) * N}
    for operation in OPERATIONS:
        expected = FAR_ALPHA + bytes_of_port[operation] * FAR_BETA
        assert price(made(operation, layout), N, free) == pytest.approx(expected), operation
        assert price(made(operation, layout), N, cluster(local)) >= expected
        assert ranks == made(operation, layout).ranks


def test_small_parts_are_cheaper_than_by_pairs_and_large_ones_cost_as_many_bytes() -> None:
    for nodes, local in ((2, 2), (4, 4)):
        ours, flat = made("all_to_all", regular(nodes, local)), schedule("all_to_all", "pairwise", nodes * local)
        assert price(ours, 1 << 10, cluster(local)) < price(flat, 1 << 10, cluster(local))
        large = price(ours, 256 << 20, cluster(local)) / price(flat, 256 << 20, cluster(local))
        assert 0.5 < large < 1.1


def test_nodes_of_any_ranks_have_a_price() -> None:
    """The port of the node of three carries all that its ranks have for the other one."""
    nodes = LAYOUTS["three and one"]
    free = cluster(4, intra_latency=0, intra_bandwidth=1e30, gamma=0)
    for operation, parts in (("all_to_all", 3), ("gather", 1), ("scatter", 1), ("reduce", 4)):
        seconds = Pricing(made(operation, nodes), free, nodes=nodes).seconds(N)
        assert seconds == pytest.approx(FAR_ALPHA + parts * N / 4 * FAR_BETA), operation
    pairwise = schedule("all_to_all", "pairwise", 4)
    by_turns = [
        Pricing(pairwise, free, nodes=((0, 2), (1, 3))).seconds(N),
        price(pairwise, N, replace(free, ranks_per_node=2)),
    ]
    assert Pricing(pairwise, free, nodes=((0, 1), (2, 3))).seconds(N) == by_turns[1]
    assert by_turns[0] != by_turns[1]
