"""The operations as data: which arrays they have, in which forms they come, and what their links carry.

Sizes as in nccl-tests: "whole" is the array of n elements that all ranks' parts make up, or that each rank reduces or
sends; a part has n / ranks. An operation has a whole array, and with it another whole one or a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PLACES = ("out", "in")


def _twice(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _once(ranks: int) -> float:
    return (ranks - 1) / ranks


def _all(ranks: int) -> float:
    return 1.0


@dataclass(frozen=True)
class BenchOperation:
    """One operation.

    bus: from the number of ranks, the bytes that a link carries for a byte of the whole array: busbw is algbw times it
        (nccl-tests, doc/PERFORMANCE.md).
    parts: the second array is a part, else another whole one.
    reduces: it has an operator.
    rooted: it has a root.
    places: the forms that it comes in, "out" of place and "in" place.
    usual: the form in which `Communicator` copies nothing more than it has to.
    """

    name: str
    bus: Callable[[int], float]
    usual: str
    parts: bool = False
    reduces: bool = False
    rooted: bool = False
    places: tuple[str, ...] = PLACES

    @property
    def in_place_alone(self) -> bool:
        """Returns whether `Communicator` has it in place only, so that out of place a copy comes first."""
        return not self.parts and self.usual == "in"

    def count(self, whole: int, ranks: int) -> int:
        """Elements that nccl-tests calls the count: what a call is given, of a rank's part where there are parts."""
        return whole // ranks if self.parts or self.name == "all_to_all" else whole


OPERATIONS = {
    operation.name: operation
    for operation in (
        BenchOperation("all_reduce", _twice, "in", reduces=True),
        BenchOperation("reduce_scatter", _once, "out", parts=True, reduces=True),
        BenchOperation("all_gather", _once, "out", parts=True),
        BenchOperation("all_to_all", _once, "out", places=("out",)),
        BenchOperation("broadcast", _all, "in", rooted=True, places=("in",)),
        BenchOperation("reduce", _all, "in", reduces=True, rooted=True),
        BenchOperation("gather", _once, "out", parts=True, rooted=True),
        BenchOperation("scatter", _once, "out", parts=True, rooted=True),
        BenchOperation("scan", _all, "in", reduces=True),
        BenchOperation("exscan", _all, "in", reduces=True),
    )
}
USUAL_OPERATIONS = tuple(OPERATIONS)[:4]
OPERATORS = ("sum", "prod", "min", "max", "avg")
# nccl-tests' own names for some.
TYPES = {"float": "float32", "double": "float64", "half": "float16"}
DATATYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")


@dataclass(frozen=True)
class Case:
    """A case that all sides run: an operation on elements of a type.

    op: the operator, or "none".
    root: a rank, or -1.
    size: bytes of the whole array, to be cut down to equal parts for all ranks.
    """

    operation: BenchOperation
    dtype: str
    op: str
    root: int
    size: int


def has_average(dtype: str) -> bool:
    """Returns whether an average of such elements is one."""
    return "float" in dtype


def bus_bandwidth(operation: BenchOperation, nbytes: int, seconds: float, ranks: int) -> float:
    """Gigabytes (10^9) a second of the busiest link. nbytes: of the whole array."""
    return nbytes / seconds / 1e9 * operation.bus(ranks)
