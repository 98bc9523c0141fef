"""Collectives for deep learning over MPI, on numpy arrays and torch tensors.

Read `communicator` first, then `backends` and `schedules`. A new algorithm of messages goes into
`schedules.algorithms`, another way to carry out collectives into `backends`, whose docstring says how.

    communicator        the operations, over group/ (set-up, issue, refusal, end; memory, messages, objects)
    partitioned         an all-reduce of arrays handed in one by one
    messages/           from one rank to another
    backends/           one interface for every way to carry out a collective: registry, selection ("auto"), dispatch
    schedules/          steps as data, and their proof; algorithms: its public names; price: predicts what one costs
    runtime/            the progress thread, the watchdog, which operation each rank is executing
    memory/             shared by the ranks of a node
    process/            this process: its MPI library, node and cores, how threads wait, how it ends
    base/               arrays, reductions, the checks of arguments; errors
    native/             the part in C that every operation passes through, where it could be compiled
    devices             the memory that tensors lie in
    diagnostics         where ranks are, and how a job ends; draining: operations that some ranks join later than others
    bench/, tune        the benchmark, and tables for "auto"; timing, command_line (of both, and of mpidl)
    calibration         measures for "auto" in two seconds, where no table is

Public are the names in `__all__` here, in `algorithms`, `command_line`, `devices`, `diagnostics`, `draining` and
`price`; all else is private.
"""

from .process import find_mpi as find_mpi  # before anything else imports mpi4py

# isort: split
from .base.partition import even_counts
from .base.reduction import PremulSum
from .communicator import Communicator
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectivesError,
    MismatchError,
    OperationError,
    OperationTimeout,
    ScheduleError,
    WorkTimeout,
)
from .group.prepared import PreparedOperation
from .messages.messages import Envelope, P2POp
from .partitioned import PartitionedAllReduce
from .runtime.progress import Work

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CollectivesError",
    "Communicator",
    "Envelope",
    "MismatchError",
    "OperationError",
    "OperationTimeout",
    "P2POp",
    "PartitionedAllReduce",
    "PremulSum",
    "PreparedOperation",
    "ScheduleError",
    "Work",
    "WorkTimeout",
    "even_counts",
]
