"""Facts that each rank sees: versions, cores, threads, shared memory, GPUs, and what its launcher said."""

from __future__ import annotations

import os
import platform
import shutil
from typing import Any

import torch

from collectives import Communicator
from collectives.diagnostics import about_mpi, directories, is_compiled, usable

from ..job.control_group import cpu_quota, memory_limit

# Variables in which launchers give the number of processes that they have started.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


def facts_of_rank(comm: Communicator) -> dict[str, Any]:
    """Collects this rank's facts. Collective, as it allocates symmetric memory."""
    node = comm.split(comm.node_ranks[0])  # a group over nodes shares memory on all of them or on none
    assert node is not None
    symmetric = node.is_shared(node.shared(1 << 18, torch.float32))
    node.close()
    directory = next(iter(directories()))
    try:
        disk = shutil.disk_usage(directory)
        shared = {"directory": directory, "bytes": disk.total, "free": disk.free}
    except OSError:
        shared = {"directory": directory, "bytes": 0, "free": 0}
    return {
        "rank": comm.rank,
        "host": platform.node(),
        "local_rank": comm.local_rank,
        "local_size": comm.local_size,
        "nodes": comm.nodes,
        "started": launched_processes(os.environ),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mpi": about_mpi()["library"],
        },
        "mpi": about_mpi(),
        "compiled": is_compiled(),
        "cores": sorted(usable()),
        "cores_of_machine": os.cpu_count() or 1,
        "quota": cpu_quota(),
        "threads": torch.get_num_threads(),
        "shared_memory": shared,
        "symmetric": comm.local_size == 1 or symmetric,
        "memory": memory_bytes(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }


def launched_processes(environment: Any) -> int:
    """The number of processes that the launcher started for this job, at least; 1 if it does not say."""
    return max((int(environment[name]) for name in _SIZES if environment.get(name, "").isdigit()), default=1)


def memory_bytes() -> int:
    """Memory of the machine, or of the control group if that may use less; 0 if it is not known."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        whole = 0
    limit = memory_limit() or whole
    return min(whole or limit, limit)
