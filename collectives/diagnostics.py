"""Positions of ranks and traces of jobs, for programs and launchers built on `collectives`.

about_mpi, usable, directories      the MPI library, the cores of this process, directories of shared memory
label, is_debugging                 names for torch.profiler; whether MPIDL_DEBUG asks for checks
Position, listing, deadlocked       the operations that ranks are in, and who waits for whom in a circle
describe_program                    what the watchdog's reports say of the program besides
Witness, witnessed, tell            what a launcher sees of its ranks, and what a rank tells it
JOB, mapped, exit_status            what a job leaves behind, and the status that a rank is about to exit with
"""

from . import exit_status as exit_status
from .about import about_mpi
from .backends.checks import is_debugging
from .cores import usable
from .deadlock import deadlocked
from .labels import label
from .leftovers import mapped
from .memory.shared_memory import JOB, directories
from .positions import Position, listing
from .program import describe_program
from .witness import Witness, tell, witnessed

__all__ = [
    "JOB",
    "Position",
    "Witness",
    "about_mpi",
    "deadlocked",
    "describe_program",
    "directories",
    "exit_status",
    "is_debugging",
    "label",
    "listing",
    "mapped",
    "tell",
    "usable",
    "witnessed",
]
