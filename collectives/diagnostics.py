"""Functions for launchers, reports and engines: positions of ranks, names in profiles, what a job leaves.

about_mpi, usable, directories      the MPI library, the cores of this process, directories of shared memory
is_compiled                         whether the part in C is used
label, is_debugging                 names for torch.profiler; whether MPIDL_DEBUG asks for checks
Position, listing, deadlocked       the operations that ranks are in, and who waits for whom in a circle
describe_program                    what the watchdog's reports say of the program besides
calls_of_main_thread                where the program is, for other threads
print_to_stderr, PASS_ON_S          writes to the error output, after what the program has written; seconds until a
                                    launcher has passed it on
Witness, has_launcher               what a launcher sees of its ranks, and whether there is one
send_processes                      tells it which process is which rank
JOB, mapped, exit_status            what a job leaves behind, and the status that a rank is about to exit with
"""

from .backends.checks import is_debugging
from .group.deadlock import deadlocked
from .memory.leftovers import mapped
from .memory.shared_memory import JOB, directories
from .native import is_compiled
from .process import exit_status as exit_status
from .process.about import about_mpi
from .process.cores import usable
from .process.labels import label
from .runtime.positions import Position, listing
from .runtime.program import describe_program
from .runtime.stack import calls_of_main_thread
from .runtime.watchdog import PASS_ON_S, print_to_stderr
from .runtime.witness import Witness, has_launcher, send_processes

__all__ = [
    "JOB",
    "PASS_ON_S",
    "Position",
    "Witness",
    "about_mpi",
    "calls_of_main_thread",
    "deadlocked",
    "describe_program",
    "directories",
    "exit_status",
    "has_launcher",
    "is_compiled",
    "is_debugging",
    "label",
    "listing",
    "mapped",
    "print_to_stderr",
    "send_processes",
    "usable",
]
