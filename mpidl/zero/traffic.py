"""Counts the parameters and gradients that the collectives of a ZeroOptimizer send."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ZeroTraffic:
    """Counts since construction. What moves no bytes, as gathering in memory that a node shares, is not counted.

    gathers, gathered_bytes: units or buckets of parameters that were gathered, and the bytes of all ranks' parts.
    reductions, reduced_bytes: buckets of gradients that were reduce-scattered, and their bytes, whole.
    rounds: how often the ranks agreed on what to gather.
    ahead: this rank's uses of a unit that was already asked for.
    peak_bytes: the most bytes, at a time, of the units that are whole on at least one rank.
    """

    gathers: int = 0
    gathered_bytes: int = 0
    reductions: int = 0
    reduced_bytes: int = 0
    rounds: int = 0
    ahead: int = 0
    peak_bytes: int = 0

    def sent_bytes(self, ranks: int) -> float:
        """Bytes that a rank sends for all this by algorithms that send the least, such as a ring."""
        return (self.gathered_bytes + self.reduced_bytes) * (ranks - 1) / ranks
