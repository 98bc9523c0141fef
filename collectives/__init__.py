"""Collectives for deep learning over MPI, on numpy arrays and torch tensors.

Read `communicator` first, then `backends`, `schedule` and `algorithms`. A new algorithm of messages goes into
`algorithms`, another way to carry out collectives into `backends`, whose docstring says how.

    what is called      communicator (the operations), over group_objects (pickled), over group_messages, over
                        group_memory (arrays that ranks share), over ordered_group (set-up, issue, failure, end);
                        partitioned (an all-reduce in parts), prepared (one that is checked ahead); messages, channels
                        (their order), message_work
    its checks          arguments, errors; coalesced (lists of arrays); details (words about an operation, for reports)
    arrays              buffers (a view of any array's memory), partition (n elements over p ranks), devices
    arithmetic          reduction (operators, kernels), float_errors (neither raises nor warns)
    how it is carried out
                        backends/ (one interface for every way), schedule and algorithms/ (steps as data), scratch
    proofs, prediction  simulate, layout, price
    measuring           timing; bench/ (the benchmark), tune (tables for "auto"), command_line (of both, and of mpidl)
    memory              memory/ (shared by the ranks of a node)
    when                progress (asynchronous operations), idle_wait (leaves the core to others while it waits), cores
    who is late         positions (what each rank is in), watchdog (ends the job), deadlock, labels (for profilers)
    the job's launcher  diagnostics (public), witness (sends it the page of positions), inbox (receives it), exit_status
    groups, their end   topology (the ranks of a node), dropped (frees what was garbage on all ranks),
                        lifetime (keeps memory that MPI may still write), leftovers (names of shared memory that a
                        killed job would leave), forked (a forked child is no rank)
    the MPI library     find_mpi (a clear error where it is missing), about (its name and version)

Public are the names in `__all__` here, in `devices` (the memory that tensors lie in), in `diagnostics` (where ranks
are, and how a job ends) and in `command_line`; all else is private.
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
    OperationTimeout,
    ScheduleError,
    WorkTimeout,
)
from .messages import Envelope, P2POp
from .partition import even_counts
from .partitioned import PartitionedAllReduce
from .prepared import PreparedOperation
from .progress import Work
from .reduction import PremulSum

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
