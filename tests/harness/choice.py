"""Choice of cases, so that the suite is run often. `--brief`: two cases of a test on two numbers of ranks, or one.

    cases of a test     a  b  c  d  e  f  g        a  b        a  b        a
    two of them         a           e              a  b        a  b        a
    on ranks            3           2              2  4           2        3    each test begins elsewhere in
    and on 1 rank       1                                                       2 3 2 2 2 4 2 2

Where both would run on 2 ranks, one of them does, the other one in every other test. On 1 rank runs every other one of
those that run on 3.

Marked `once`, as all that train are, a test runs one of its cases, which is another one in each test, so that together
they still go over all engines and stages.

Marked `each`, a test runs a case of every value of the parameter that the mark names, not two in all. The round
begins with the first value, so that those that take long may stand where 2 ranks run them:

    values of "model"   gpt2  bert  resnet  lstm  llama  t5   ...
    cases of the value  a b   a b   a b     a b   a b    a b        the next ones in the next round
    one of them         a     b     a       b     a      b
    on ranks            2     3     2       2     2      4
    and on 1 rank             1

Marked `ranks`, each runs on one of these numbers. Marked `brief_on`, the one of a test that is chosen runs on that one,
as on more ranks it would take long for what it imports or repeats. On more ranks, which there are only over several
hosts, those of 4 run. Marked `every_size`, all cases of a test run on all numbers. Marked `thorough`, a test, or those
of its cases that the mark names, is left out: another one says nearly the same in less time.

`--twice`: every case, thorough or not, on 2 ranks and on one of 1, 3 and 4. Without either all run on all numbers.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any
from zlib import crc32

import pytest

_CASES = 2
_ROUND = (2, 3, 2, 2, 2, 4, 2, 2)  # more ranks than cores take two and four times as long
_WITH_1 = _ROUND.index(3)  # 1 rank runs this turn of every other round: a world of one shows little beyond the others
_OTHERS = (1, 3, 4)  # in addition to 2, with --twice


def left_out_of_twice(items: Iterable[pytest.Item], ranks: int) -> list[pytest.Item]:
    """Chooses the tests that a run with `--twice` leaves out; see `left_out`."""
    if ranks in (0, 2):
        return []
    here = min(ranks, max(_OTHERS))
    free = (item for item in items if not any(map(item.get_closest_marker, ("ranks", "every_size"))))
    return [item for item in free if _OTHERS[crc32(item.nodeid.encode()) % len(_OTHERS)] != here]


def left_out(items: Iterable[pytest.Item], ranks: int) -> list[pytest.Item]:
    """Chooses the tests that a run on so many ranks leaves out; 0 for one without MPI. The same in every process."""
    left: list[pytest.Item] = []
    for test, cases in groupby(items, _test):
        chosen: list[pytest.Item] = []
        for item in cases:
            (left if _is_thorough(item) else chosen).append(item)
        if ranks and chosen and not chosen[0].get_closest_marker("every_size"):
            left += _elsewhere(chosen, min(ranks, max(_ROUND)), crc32(test.encode()))
    return left


def _elsewhere(cases: list[pytest.Item], ranks: int, begin: int) -> list[pytest.Item]:
    """Lists the cases of a test that do not run on this number of ranks."""
    chosen = cases[:: -(-len(cases) // _CASES)]
    by_turns = begin // len(_ROUND)
    if cases[0].get_closest_marker("once"):
        chosen = [cases[by_turns % len(cases)]]
    elif len({_number_for(case, begin + number) for number, case in enumerate(chosen)}) < len(chosen):
        chosen = [chosen[by_turns % len(chosen)]]
    turns = {case: begin + number for number, case in enumerate(chosen)}
    if mark := cases[0].get_closest_marker("each"):
        turns = {case: number for number, case in enumerate(_one_of_each(cases, mark.args[0]))}

    def is_here(case: pytest.Item) -> bool:
        turn = turns[case]
        if (mark := case.get_closest_marker("ranks")) and ranks not in mark.args:  # only over several hosts
            return True
        if ranks == 1 and not any(map(case.get_closest_marker, ("ranks", "brief_on"))):
            return turn % (2 * len(_ROUND)) == _WITH_1
        return _number_for(case, turn) == ranks

    return [case for case in cases if case not in turns or not is_here(case)]


def _number_for(case: pytest.Item, turn: int) -> int:
    """The number of ranks on which a case runs in this turn."""
    if mark := case.get_closest_marker("brief_on"):
        return mark.args[0]
    numbers = mark.args if (mark := case.get_closest_marker("ranks")) else _ROUND
    return numbers[turn % len(numbers)]


def _one_of_each(cases: list[pytest.Item], parameter: str) -> list[pytest.Item]:
    """A case for every value of the parameter, so dealt that each number of ranks meets all values of the others."""
    of_value: dict[Any, list[pytest.Item]] = {}
    for case in cases:
        assert isinstance(case, pytest.Function)
        of_value.setdefault(case.callspec.params[parameter], []).append(case)
    return [same[(n + n // len(_ROUND)) % len(same)] for n, same in enumerate(of_value.values())]


def _is_thorough(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("thorough")
    return mark is not None and (not mark.args or item.nodeid.partition("[")[2][:-1] in mark.args)


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
