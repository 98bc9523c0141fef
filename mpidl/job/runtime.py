"""Starts the job: the world Communicator, threads per rank, and an end of the job when a rank fails.

    comm = mpidl.init()

An uncaught exception on one rank would leave the others waiting for ever. After `init` it ends the whole
job, with that rank's traceback on standard error and a status that is not zero (`ending`).
"""

from __future__ import annotations

import os
import platform

import torch

from collectives import Communicator
from collectives.devices import select_gpu, unusable_reason
from collectives.diagnostics import has_launcher, send_processes, usable

from ..errors import TrainingError, UsageError
from .ending import end_job_with_any_rank
from .pickled import gather_pickled

_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WORKER = "MPIDL_WORKER"  # set in the environment of processes that load data and are no ranks
_default: Communicator | None = None


def init(*, export_ranks: bool = False) -> Communicator:
    """Joins the job and returns the Communicator over all its ranks.

    Collective on the first call; later calls return the same Communicator.

    - Divides the node's cores among its ranks, for torch and OpenMP, unless OMP_NUM_THREADS or MKL_NUM_THREADS is
      set.
    - Sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in the environment if `export_ranks`, for programs that
      read them. By default it leaves them alone: a framework that finds them, such as Accelerate, makes a process
      group of torch.distributed, which needs MASTER_ADDR too. A later call with `export_ranks` sets them as well.
    - Tells `mpidl.launch`, if that has started the job, which process is which rank.
    - From here on the job ends when an exception is not caught on any rank, in any thread, and when it is interrupted
      (Ctrl-C); where ranks wait for one that has called `sys.exit(status)`, with that status.
    """
    global _default
    if _default is None:
        if os.environ.get(WORKER):
            raise TrainingError(
                "mpidl.init: this process loads data for a rank and is none itself; a program that uses workers must "
                "do all that it does under `if __name__ == '__main__':`, because they import its main file"
            )
        comm = Communicator()
        end_job_with_any_rank(comm)
        ranks = gather_pickled(comm, (platform.node(), os.getpid(), sorted(usable())))
        if comm.local_rank == 0 and has_launcher():
            send_processes([(node, process) for node, process, _ in ranks])
        _divide_cores(comm, [cores for node, _, cores in ranks if node == platform.node()])
        _default = comm
    if export_ranks:
        os.environ.update(
            RANK=str(_default.rank),
            WORLD_SIZE=str(_default.size),
            LOCAL_RANK=str(_default.local_rank),
            LOCAL_WORLD_SIZE=str(_default.local_size),
        )
    return _default


def pick_device(comm: Communicator, kind: str = "cuda") -> torch.device:
    """Picks the device that this rank trains on: "cpu", or with "cuda" a GPU, which becomes torch's current one.

    The ranks of a node take its GPUs in turn, by their local rank; several may share one. A launcher that shows each
    rank a GPU of its own has chosen already. Raises UsageError where no GPU can be used: call it in `agree_or_exit`.
    """
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"device: got {kind!r}; needs cpu or cuda")
    if kind == "cpu":
        return torch.device("cpu")
    why = unusable_reason()
    if why:
        raise UsageError(f"device cuda: no GPU can be used here: {why}")
    return select_gpu(comm.local_rank)


def default_communicator(given: Communicator | None) -> Communicator:
    """`given`, or the world's."""
    return init() if given is None else given


def _divide_cores(comm: Communicator, bound: list[list[int]]) -> None:
    """Gives each rank as many threads as the node has cores for it, at least one.

    A launcher may bind every rank to cores of its own or leave all of them to all: either way the node's cores are
    those that any of its ranks may use.

    bound: these, of each.
    """
    if any(os.environ.get(setting) for setting in _THREAD_SETTINGS):
        return
    threads = max(1, len(set().union(*bound)) // comm.local_size)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
