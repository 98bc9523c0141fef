"""Every algorithm is proved for 1 to 64 ranks, and the checker refuses what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest

from collectives import ScheduleError
from collectives.schedules.algorithms import ALGORITHMS, PIPELINED, ROOTED, double_tree, schedule
from collectives.schedules.proof import verify
from collectives.schedules.schedule import Chunks, Kind, Role, Round, Schedule, chunk, copy, finish, recv, reduce, send


class RankTraffic(NamedTuple):
    """The traffic of a rank in a schedule: rounds with messages, messages sent, chunks sent."""

    rounds: int
    messages: int
    chunks: int


def traffic(schedule: Schedule, rank: int) -> RankTraffic:
    """Counts one rank's rounds, messages and chunks; bytes are chunks * n / schedule.chunks."""
    sends = [[s for s in r if s.kind is Kind.SEND] for r in schedule.program(rank)]
    talking = [r for r in schedule.program(rank) if any(s.peer >= 0 for s in r)]
    moved = sum(s.target.stop - s.target.start for r in sends for s in r)
    return RankTraffic(len(talking), sum(map(len, sends)), moved)


ALL = [(operation, name) for operation, family in ALGORITHMS.items() for name in family]


@pytest.mark.thorough(*(f"25 to 64-{operation}-{name}" for operation, name in ALL))
@pytest.mark.parametrize(("operation", "name"), ALL)
@pytest.mark.parametrize("sizes", [range(1, 25), range(25, 65)], ids=["1 to 24", "25 to 64"])
def test_algorithm_is_right_for_1_to_64_ranks(sizes: range, operation: str, name: str) -> None:
    for ranks in sizes:
        roots = {0, 1 % ranks, ranks // 2, ranks - 1} if operation in ROOTED else {0}
        for root in roots:
            verify(schedule(operation, name, ranks, root))


REDUCTIONS = [pair for pair in ALL if pair[0] in ("all_reduce", "reduce_scatter", "reduce", "scan", "exscan")]


@pytest.mark.parametrize(("operation", "name"), REDUCTIONS)
def test_reductions_in_place_are_right(operation: str, name: str) -> None:
    for ranks in range(1, 33):
        verify(schedule(operation, name, ranks), in_place=True)


@pytest.mark.parametrize(("operation", "name"), [pair for pair in ALL if pair[1] in PIPELINED])
def test_pipelined_algorithms_are_right_in_any_number_of_pieces(operation: str, name: str) -> None:
    make = ALGORITHMS[operation][name]
    for ranks in [*range(1, 18), 31, 32, 33, 64]:
        for cut in (2, 3, 16):
            for root in {0, ranks // 2, ranks - 1} if operation in ROOTED else {0}:
                made = make(ranks, cut=cut, **({"root": root} if operation in ROOTED else {}))
                verify(made)
                if operation != "broadcast":
                    verify(made, in_place=True)


def test_pieces_grow_with_the_message_up_to_a_limit() -> None:
    assert [double_tree.pieces(n) for n in (0, 1, 1 << 20, 4 << 20, 1 << 30)] == [1, 1, 1, 4, 16]
    assert schedule("broadcast", "double_tree", 4, nbytes=4 << 20).chunks == 8
    assert schedule("broadcast", "tree", 4, nbytes=4 << 20).chunks == 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16, 64])
def test_ring_sends_the_fewest_bytes_in_twice_p_minus_1_rounds(ranks: int) -> None:
    for rank in range(ranks):
        whole = traffic(schedule("all_reduce", "ring", ranks), rank)
        assert (whole.rounds, whole.chunks) == (2 * (ranks - 1), 2 * (ranks - 1))  # chunks of n / p bytes
        for half in ("reduce_scatter", "all_gather"):
            assert traffic(schedule(half, "ring", ranks), rank).chunks == ranks - 1


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_tree_takes_twice_log2_p_rounds(ranks: int) -> None:
    most = max(traffic(schedule("all_reduce", "tree", ranks), rank).rounds for rank in range(ranks))
    assert most == 2 * math.log2(ranks)


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_pairwise_sends_every_foreign_chunk_once(ranks: int) -> None:
    assert traffic(schedule("all_to_all", "pairwise", ranks), 1).chunks == ranks - 1


LOG_ROUNDS = [
    ("all_reduce", "halving_doubling", 2),
    ("reduce_scatter", "halving_doubling", 1),
    ("all_gather", "recursive_doubling", 1),
    ("all_gather", "bruck", 1),
]


@pytest.mark.parametrize(("operation", "name", "phases"), LOG_ROUNDS)
def test_doubling_sends_the_fewest_bytes_in_log2_p_rounds_for_any_p(operation: str, name: str, phases: int) -> None:
    for ranks in range(2, 65):
        for rank in range(ranks):
            found = traffic(schedule(operation, name, ranks), rank)
            assert (found.rounds, found.chunks) == (phases * log2_up(ranks), phases * (ranks - 1))


def test_recursive_doubling_takes_the_fewest_rounds() -> None:
    for ranks in range(2, 65):
        rounds = [traffic(schedule("all_reduce", "recursive_doubling", ranks), rank).rounds for rank in range(ranks)]
        assert max(rounds) == int(math.log2(ranks)) + 2 * (ranks & ranks - 1 > 0)


def test_bruck_all_to_all_takes_log2_p_messages_of_at_most_half_the_data() -> None:
    for ranks in range(2, 65):
        found = traffic(schedule("all_to_all", "bruck", ranks), ranks - 1)
        assert found.messages == found.rounds == log2_up(ranks)
        assert found.chunks <= ranks / 2 * log2_up(ranks)


def test_bidirectional_ring_sends_as_much_to_either_side() -> None:
    for ranks in (3, 4, 7, 16):
        made = schedule("all_reduce", "ring_bidirectional", ranks)
        sends = [step for steps in made.program(0) for step in steps if step.kind is Kind.SEND]
        for side in (1, ranks - 1):
            assert sum(s.target.stop - s.target.start for s in sends if s.peer == side) == 2 * (ranks - 1)


@pytest.mark.parametrize(("operation", "more"), [("scan", 0), ("exscan", 1)])
def test_prefixes_take_at_most_twice_log2_p_rounds(operation: str, more: int) -> None:
    for ranks in range(2, 65):
        for rank in range(ranks):
            found = traffic(schedule(operation, "tree", ranks), rank)
            assert found.rounds <= 2 * log2_up(ranks) + more
            assert found.chunks <= log2_up(ranks) + more


def test_no_rank_of_a_double_tree_sends_or_receives_more_than_the_data() -> None:
    cut = 4
    for ranks in range(2, 65):
        for operation in ("broadcast", "reduce"):
            made = ALGORITHMS[operation]["double_tree"](ranks, cut=cut)
            for rank in range(ranks):
                assert traffic(made, rank).chunks <= made.chunks
                assert traffic(made, rank).rounds <= cut + log2_up(ranks) - 1
        made = ALGORITHMS["all_reduce"]["double_tree"](ranks, cut=cut)
        assert max(traffic(made, rank).rounds for rank in range(ranks)) == cut + 2 * log2_up(ranks) - 1


def log2_up(number: int) -> int:
    return (number - 1).bit_length()


def of_two_ranks(operation: str, rounds_of: Callable[[int], list[Round]], chunks: int = 1) -> Schedule:
    return Schedule("wrong", operation, 2, chunks, rounds_of)


def swap(rank: int) -> list[Round]:
    """A right all-reduce of one chunk over two ranks: each sends what it had to the other."""
    other = 1 - rank
    return [
        (copy(chunk(Role.WORK, 0), chunk(Role.OUT, 0)),),
        (send(chunk(Role.OUT, 0), other), reduce(0, 1, other)),
        (finish(0, 1),),
    ]


WORK, OUT, IN = (chunk(role, 0) for role in (Role.WORK, Role.OUT, Role.IN))
WRONG: dict[str, tuple[str, str, Callable[[int], list[Round]]]] = {
    "each waits for the other": (
        "waiting for ever",
        "broadcast",
        lambda rank: [(recv(OUT, 1 - rank),), (send(OUT, 1 - rank),)],
    ),
    "each sends first": (
        "waiting for ever",
        "all_reduce",
        lambda rank: [(send(WORK, 1 - rank),), (reduce(0, 1, 1 - rank),)],
    ),
    "a rank is counted twice": (
        "cannot combine",
        "all_reduce",
        lambda rank: [*swap(rank)[:2], (send(OUT, 1 - rank), reduce(0, 1, 1 - rank))],
    ),
    "nothing is sent": ("was asked for", "all_reduce", lambda rank: [(finish(0, 1),)]),
    "unwritten chunks are sent": (
        "holds nothing yet",
        "broadcast",
        lambda rank: [(send(OUT, 0),)] if rank else [(recv(OUT, 1),)],
    ),
    "a message that no rank receives": (
        "waiting for ever",
        "broadcast",
        lambda rank: [] if rank else [(send(OUT, 1),)],
    ),
    "a chunk is read and written in one round": (
        "in one round",
        "all_reduce",
        lambda rank: [(send(WORK, 1 - rank), recv(WORK, 1 - rank))],
    ),
    "a partial result leaves twice and is reduced": (
        "no answer",
        "all_reduce",
        lambda rank: [(send(WORK, 1 - rank), send(WORK, 1 - rank), reduce(0, 1, 1 - rank))],
    ),
    "runs of different lengths": (
        "different lengths",
        "all_reduce",
        lambda rank: [(copy(IN, Chunks(Role.WORK, 0, 2)),)],
    ),
    "a message of another length": (
        "meets a message of 1 chunks",
        "gather",
        lambda rank: [(send(chunk(Role.IN, 1), 0),)] if rank else [(recv(Chunks(Role.OUT, 0, 2), 1),)],
    ),
    "the input is written": ("writes the input", "all_reduce", lambda rank: [(recv(IN, 1 - rank),)]),
    "a prefix with a later rank's contribution": (
        "was asked for",
        "scan",
        lambda rank: [(send(WORK, 1 - rank), reduce(0, 1, 1 - rank)), (finish(0, 1),)],
    ),
    "an exclusive prefix with a rank's own": ("was asked for", "exscan", lambda rank: [(finish(0, 1),)]),
    "a chunk is finished twice": (
        "finishes a chunk twice",
        "all_reduce",
        lambda rank: [(finish(0, 1),), (copy(OUT, WORK),), (finish(0, 1),)],
    ),
}


def test_the_pattern_for_wrong_schedules_is_right_itself() -> None:
    verify(of_two_ranks("all_reduce", swap))


@pytest.mark.parametrize("what", WRONG)
def test_checker_refuses(what: str) -> None:
    message, operation, rounds_of = WRONG[what]
    with pytest.raises(ScheduleError, match=message):
        verify(of_two_ranks(operation, rounds_of, 2 if operation == "gather" else 1))


def test_checker_refuses_a_schedule_that_is_only_right_out_of_place() -> None:
    verify(of_two_ranks("all_reduce", swap), in_place=False)
    with pytest.raises(ScheduleError):
        verify(of_two_ranks("all_reduce", lambda rank: [swap(rank)[0], *swap(rank)[1:], (reduce(0, 1, 0),)]), True)


def test_checker_refuses_reductions_of_one_round_that_wait_for_each_other() -> None:
    """Rank 0 takes turns between 1 and 2, so 1 is not done before 2 begins, and 2 begins when 1 is done."""
    programs: list[list[Round]] = [
        [(reduce(0, 1, 1), reduce(0, 1, 2)), (finish(0, 1),)],
        [(send(WORK, 0),), (send(WORK, 2),)],
        [(recv(OUT, 1),), (send(WORK, 0),)],
    ]
    with pytest.raises(ScheduleError, match="waiting for ever"):
        verify(Schedule("wrong", "reduce", 3, 1, lambda rank: programs[rank]))
    programs[1].reverse()
    verify(Schedule("right", "reduce", 3, 1, lambda rank: programs[rank]))


def test_an_exchange_of_partial_results_is_allowed() -> None:
    exchange = of_two_ranks(
        "all_reduce", lambda rank: [(send(WORK, 1 - rank), reduce(0, 1, 1 - rank)), (finish(0, 1),)]
    )
    verify(exchange)
    verify(exchange, in_place=True)
