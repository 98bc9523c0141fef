"""Expected speeds of the collectives on this machine, computed from measured speeds of its memory and its links.

No figure here is of a particular machine: the measure is a copy of memory that all ranks make at once, and between
nodes the link that was measured.

    all-reduce on a node        reads and writes as much as a copy: about as fast where each rank has a core of its
                                own, half as fast where ranks wait for each other's core; low below an eighth
    all-reduce over k nodes     2 (k - 1) / k bytes cross a link for each of the array: about what that lets through,
                                low below a quarter, if it is not held up on the nodes
    link between two nodes      anything may be right; low below a fiftieth of a copy, as the slower one of two networks
                                often is, and below a third of the best link
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ON_A_NODE = 1 / 8
_OVER_NODES = 1 / 4
_LINK = 1 / 50
_OF_BEST_LINK = 1 / 3


@dataclass(frozen=True)
class Speed:
    """A measured speed and its bounds, in bytes a second.

    typical: None if it is not known.
    why: where `lowest_good` comes from.
    """

    what: str
    measured: float
    typical: float | None
    lowest_good: float
    why: str

    @property
    def is_low(self) -> bool:
        """Tells whether the measured speed is below `lowest_good`."""
        return self.measured < self.lowest_good


def speed_on_a_node(speed: dict[str, Any]) -> Speed | None:
    """Returns the all-reduce speed on a node; None where a node has one rank. speed: see `speed.measure`."""
    rate, copy = speed["all_reduce_on_a_node"], speed["copy"]
    return None if rate is None else Speed("all-reduce on a node", rate, copy, copy * _ON_A_NODE, "1/8 of a copy")


def speed_over_nodes(speed: dict[str, Any]) -> Speed | None:
    """The all-reduce of all ranks; None on one node."""
    rate = speed["all_reduce_over_nodes"]
    if rate is None:
        return None
    nodes = 1 + len(speed["links"])
    slowest = min(link["bytes_per_second"] for link in speed["links"].values())
    through = slowest * nodes / (2 * (nodes - 1))
    lowest_good, why = min(
        (through * _OVER_NODES, "1/4 of what the links let through"), (speed["copy"] * _ON_A_NODE, "1/8 of a copy")
    )
    return Speed("all-reduce over all nodes", rate, min(through, speed["copy"]), lowest_good, why)


def links(speed: dict[str, Any], first: str) -> dict[str, Speed]:
    """The link from the first node, by host."""
    rates = {host: link["bytes_per_second"] for host, link in speed["links"].items()}
    best = max(rates.values(), default=0.0)
    lowest_good, why = max((speed["copy"] * _LINK, "1/50 of a copy"), (best * _OF_BEST_LINK, "1/3 of the best link"))
    return {host: Speed(f"link {first} - {host}", rate, None, lowest_good, why) for host, rate in rates.items()}
