"""Collectives for deep learning over MPI, on numpy arrays and torch tensors.

Read `communicator` first, then `backends`, `schedule` and `algorithms`. A new algorithm of messages goes into
`algorithms`, another way to carry out collectives into `backends`, whose docstring says how.

Public are the names in `__all__` here, in `devices` (the memory that tensors lie in) and in `diagnostics` (where ranks
are, and how a job ends); all else is private.
"""

from . import find_mpi as find_mpi  # before anything else imports mpi4py

# isort: split
from .communicator import Communicator
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectivesError,
    MismatchError,
    OperationError,
    ScheduleError,
    WorkTimeout,
)
from .partition import even_counts
from .partitioned import PartitionedAllReduce
from .progress import Work
from .reduction import PremulSum

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CollectivesError",
    "Communicator",
    "MismatchError",
    "OperationError",
    "PartitionedAllReduce",
    "PremulSum",
    "ScheduleError",
    "Work",
    "WorkTimeout",
    "even_counts",
]
