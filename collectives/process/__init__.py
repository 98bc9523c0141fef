"""One process of the job: its MPI library, its node and cores, how its threads wait, and how it ends.

find_mpi        a clear error where no MPI library is found; about: its name and version
topology        the ranks of a node; cores: those that a process may use
idle_wait       gives the core to others while a thread waits
labels          names for torch.profiler
forked          a forked child is no rank
exit_status     the status with which the process is about to exit
"""
