"""Predicted times agree with the textbooks' formulas, and one node stands for all only where all run the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from collectives import ArgumentError, ScheduleError
from collectives.price import Cluster, Pricing, price
from collectives.schedules.algorithms import ALGORITHMS, schedule
from collectives.schedules.schedule import Chunks, Role, Round, Schedule, chunk, copy, recv, reduce, send

ALL = [(operation, name) for operation, family in ALGORITHMS.items() for name in family]

ALPHA, BETA, GAMMA = 3e-6, 1 / 10e9, 1 / 40e9
FAR_ALPHA, FAR_BETA = 20e-6, 1 / 2e9
N = 10_000_019  # bytes
CLUSTER = Cluster(4, ALPHA, 1 / BETA, FAR_ALPHA, 1 / FAR_BETA, GAMMA)
ONE_NODE = replace(CLUSTER, ranks_per_node=1 << 20)
SPREAD = replace(CLUSTER, ranks_per_node=1)


def seconds(operation: str, name: str, ranks: int, cluster: Cluster, nbytes: float = N) -> float:
    return price(schedule(operation, name, ranks), nbytes, cluster)


@pytest.mark.parametrize(("cluster", "alpha", "beta"), [(ONE_NODE, ALPHA, BETA), (SPREAD, FAR_ALPHA, FAR_BETA)])
@pytest.mark.parametrize("p", [1, 2, 3, 8, 13, 64])
def test_ring_and_pairwise(p: int, cluster: Cluster, alpha: float, beta: float) -> None:
    part = N * (p - 1) / p
    once = (p - 1) * alpha + part * beta
    assert seconds("all_gather", "ring", p, cluster) == pytest.approx(once)
    assert seconds("all_to_all", "pairwise", p, cluster) == pytest.approx(once)
    assert seconds("reduce_scatter", "ring", p, cluster) == pytest.approx(once + part * GAMMA)
    assert seconds("all_reduce", "ring", p, cluster) == pytest.approx(
        2 * (p - 1) * alpha + 2 * part * beta + part * GAMMA
    )


@pytest.mark.parametrize(("cluster", "alpha", "beta"), [(ONE_NODE, ALPHA, BETA), (SPREAD, FAR_ALPHA, FAR_BETA)])
@pytest.mark.parametrize("log2_p", [0, 1, 2, 3, 6])
def test_binomial_tree(log2_p: int, cluster: Cluster, alpha: float, beta: float) -> None:
    p = 1 << log2_p
    message = alpha + N * beta
    assert seconds("broadcast", "tree", p, cluster) == pytest.approx(log2_p * message)
    assert seconds("reduce", "tree", p, cluster) == pytest.approx(log2_p * (message + N * GAMMA))
    assert seconds("all_reduce", "tree", p, cluster) == pytest.approx(log2_p * (2 * message + N * GAMMA))
    for operation in ("gather", "scatter"):
        assert seconds(operation, "tree", p, cluster) == pytest.approx(log2_p * alpha + N * (p - 1) / p * beta)


@pytest.mark.parametrize("p", [3, 5, 6, 11, 100])
def test_binomial_tree_of_any_size_takes_log2_p_rounded_up(p: int) -> None:
    assert seconds("broadcast", "tree", p, ONE_NODE) == pytest.approx(math.ceil(math.log2(p)) * (ALPHA + N * BETA))


@pytest.mark.parametrize("p", [8, 12, 64])
def test_a_flat_ring_over_nodes_goes_at_the_pace_of_the_link_between_them(p: int) -> None:
    part = N * (p - 1) / p
    everywhere = 2 * (p - 1) * FAR_ALPHA + 2 * part * FAR_BETA + part * GAMMA
    assert seconds("all_reduce", "ring", p, CLUSTER) == pytest.approx(everywhere)


def test_ranks_of_a_node_share_its_network_port() -> None:
    """All-to-all on 2 nodes of 4: each node has 4 * 4 parts of n / 8 bytes to send through what ports it has."""
    times = {
        ports: seconds("all_to_all", "pairwise", 8, replace(CLUSTER, ports=ports, inter_latency=0, intra_latency=0))
        for ports in (1, 2, 4)
    }
    for ports, time in times.items():
        assert time >= 16 / ports * N / 8 * FAR_BETA * (1 - 1e-9)
    assert times[1] > 1.5 * times[2] > 2 * times[4]
    assert times[1] < 1.2 * 16 * N / 8 * FAR_BETA


def test_tree_between_nodes_takes_far_links_only_where_it_must() -> None:
    """8 ranks on 2 nodes: one of the three rounds is between nodes."""
    near, far = ALPHA + N * BETA, FAR_ALPHA + N * FAR_BETA
    assert seconds("broadcast", "tree", 8, CLUSTER) == pytest.approx(2 * near + far)


def test_time_grows_in_proportion_without_latency_and_is_latency_without_bytes() -> None:
    fluid = replace(CLUSTER, intra_latency=0, inter_latency=0)
    for operation, name in ALL:
        plan = Pricing(schedule(operation, name, 12), fluid)
        assert plan.seconds(8 * N) == 8 * plan.seconds(N)  # a power of two: no rounding
    for operation, name in ALL:
        plan, twice = (
            Pricing(schedule(operation, name, 12), replace(CLUSTER, intra_latency=k * ALPHA, inter_latency=k * ALPHA))
            for k in (1, 2)
        )
        rounds = plan.seconds(0) / ALPHA
        assert rounds == pytest.approx(round(rounds))
        assert rounds >= math.log2(12)
        assert twice.seconds(0) == pytest.approx(2 * plan.seconds(0))


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_one_node_stands_for_all_without_a_difference(operation: str, name: str) -> None:
    for p in (1, 4, 5, 8, 16, 18):
        for node in (1, 2, 3, 4, 64):
            for ports in (1, 2):
                cluster = replace(CLUSTER, ranks_per_node=node, ports=ports)
                short, full = (Pricing(schedule(operation, name, p), cluster, symmetry=s) for s in (True, False))
                assert full.simulated_ranks == p
                assert short.seconds(N) == full.seconds(N), (p, cluster)


@pytest.mark.parametrize("ports", [1, 2])
@pytest.mark.parametrize("node", [2, 3, 6])
def test_one_node_stands_for_all_where_many_messages_come_to_a_port_at_once(node: int, ports: int) -> None:
    def rounds(rank: int) -> list[Round]:
        """Everything in one round, to every other rank, more to the farther ones."""
        steps = []
        for k in range(1, 12):
            steps.append(send(Chunks(Role.WORK, 0, k), (rank + k) % 12))
            steps.append(reduce(0, k, (rank - k) % 12))
        return [tuple(steps)]

    made, cluster = Schedule("flood", "all_reduce", 12, 11, rounds), replace(CLUSTER, ranks_per_node=node, ports=ports)
    short, full = (Pricing(made, cluster, symmetry=s) for s in (True, False))
    assert (short.simulated_ranks, full.simulated_ranks) == (node, 12)
    assert short.seconds(N) == full.seconds(N)


@pytest.mark.parametrize(("operation", "name"), [("all_reduce", "ring"), ("all_to_all", "pairwise")])
def test_equal_nodes_are_simulated_on_one_node_only(operation: str, name: str) -> None:
    made = schedule(operation, name, 32)
    assert [Pricing(made, replace(CLUSTER, ranks_per_node=n)).simulated_ranks for n in (1, 4, 32, 64)] == [1, 4, 1, 1]
    assert Pricing(made, replace(CLUSTER, ranks_per_node=5)).simulated_ranks == 32  # the last node is not full


def exchanges(rank: int) -> list[Round]:
    """Recursive doubling on 16 ranks: each peer is the rank with one bit changed."""
    whole = chunk(Role.WORK, 0)
    return [(send(whole, rank ^ bit), reduce(0, 1, rank ^ bit)) for bit in (1, 2, 4, 8)]


def test_nodes_are_equal_by_exclusive_or() -> None:
    made = Schedule("exchanges", "all_reduce", 16, 1, exchanges)
    short, full = (Pricing(made, CLUSTER, symmetry=s) for s in (True, False))
    assert (short.simulated_ranks, full.simulated_ranks) == (4, 16)
    assert short.seconds(N) == full.seconds(N)
    # In each of the two far rounds the four ranks of a node send through its one port.
    near, far = ALPHA + N * (BETA + GAMMA), FAR_ALPHA + N * (FAR_BETA + GAMMA)
    assert 2 * (near + far) < short.seconds(N) <= 2 * (near + far + 3 * N * FAR_BETA)
    assert price(made, N, replace(CLUSTER, ports=4)) == pytest.approx(2 * (near + far))


def test_one_rank_that_differs_is_seen() -> None:
    def rounds(rank: int) -> list[Round]:
        program = exchanges(rank)
        return [*program[:3], program[3][::-1]] if rank == 11 else program

    assert Pricing(Schedule("exchanges", "all_reduce", 16, 1, rounds), CLUSTER).simulated_ranks == 16


@pytest.mark.parametrize("p", [512, 4096])
def test_thousands_of_ranks(p: int) -> None:
    part = N * (p - 1) / p
    expected = 2 * (p - 1) * FAR_ALPHA + 2 * part * FAR_BETA + part * GAMMA
    assert seconds("all_reduce", "ring", p, SPREAD) == pytest.approx(expected)
    log2_p = int(math.log2(p))
    message = FAR_ALPHA + N * FAR_BETA
    assert seconds("all_reduce", "tree", p, SPREAD) == pytest.approx(log2_p * (2 * message + N * GAMMA))


# ---- schedules by hand, two or three ranks ----------------------------------------------------------------------


def by_hand(chunks: int, *programs: list[Round]) -> Schedule:
    return Schedule("by hand", "broadcast", len(programs), chunks, lambda rank: programs[rank])


def test_messages_of_one_round_add_up_their_bytes_and_overlap_their_latencies() -> None:
    out = [chunk(Role.OUT, c) for c in range(2)]
    fan_out = by_hand(2, [(send(out[0], 1), send(out[1], 2))], [(recv(out[0], 0),)], [(recv(out[1], 0),)])
    fan_in = by_hand(2, [(recv(out[0], 1), recv(out[1], 2))], [(send(out[0], 0),)], [(send(out[1], 0),)])
    both_ways = by_hand(2, [(send(out[0], 1), recv(out[1], 1))], [(send(out[1], 0), recv(out[0], 0))])
    assert price(fan_out, N, ONE_NODE) == pytest.approx(ALPHA + N * BETA)
    assert price(fan_in, N, ONE_NODE) == pytest.approx(ALPHA + N * BETA)
    assert price(both_ways, N, ONE_NODE) == pytest.approx(ALPHA + N / 2 * BETA)


def test_a_message_waits_for_the_later_side_and_reductions_for_each_other() -> None:
    work = chunk(Role.WORK, 0)
    late = by_hand(1, [(recv(work, 2),), (send(work, 1),)], [(recv(work, 0),)], [(send(work, 0),)])
    assert price(late, N, ONE_NODE) == pytest.approx(2 * (ALPHA + N * BETA))
    two = by_hand(1, [(reduce(0, 1, 1), reduce(0, 1, 2))], [(send(work, 0),)], [(send(work, 0),)])
    slow = replace(ONE_NODE, gamma=10 * BETA)
    assert price(two, N, slow) == pytest.approx(ALPHA + N * BETA + 2 * N * slow.gamma)


def test_copies_cost_what_the_cluster_says() -> None:
    moved = by_hand(4, [(copy(Chunks(Role.IN, 0, 3), Chunks(Role.OUT, 0, 3)),)])
    assert price(moved, 4 * N, ONE_NODE) == 0
    assert price(moved, 4 * N, replace(ONE_NODE, copy=1e-9)) == pytest.approx(3 * N * 1e-9)


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    out = chunk(Role.OUT, 0)
    stuck = by_hand(1, [(recv(out, 1),), (send(out, 1),)], [(recv(out, 0),), (send(out, 0),)])
    with pytest.raises(ScheduleError, match="wait for ever"):
        price(stuck, N, ONE_NODE)


def test_too_much_to_follow_is_refused_at_once() -> None:
    with pytest.raises(ArgumentError, match="fills the nodes of 4"):
        Pricing(schedule("all_reduce", "ring", 4095), CLUSTER)


@pytest.mark.parametrize(
    "make",
    [
        lambda: replace(CLUSTER, ranks_per_node=0),
        lambda: replace(CLUSTER, ports=0),
        lambda: replace(CLUSTER, inter_bandwidth=0),
        lambda: replace(CLUSTER, intra_bandwidth=float("nan")),
        lambda: replace(CLUSTER, gamma=-1),
        lambda: price(schedule("broadcast", "tree", 2), -1, CLUSTER),
    ],
)
def test_clusters_and_sizes_that_cannot_be_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError, match="needs"):
        make()
