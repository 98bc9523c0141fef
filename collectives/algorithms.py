"""Public names of the schedules, for programs that print or price them; `schedules.algorithms` has the algorithms.

ALGORITHMS, schedule    by operation and name; the schedule of one for a number of ranks
hierarchical            those of nodes whose ranks share memory
"""

from .schedules.algorithms import ALGORITHMS, hierarchical, schedule

__all__ = ["ALGORITHMS", "hierarchical", "schedule"]
