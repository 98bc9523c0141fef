"""Backends: the implementations of each collective in one group, and the choice among them.

    backend     the interface: the operations, each as a call that can be made again and again; what a backend serves
    mpi         "mpi": the MPI library's own; mpi_functions: its functions, called from C
    schedule_backend
                "ring", "tree", ...: a schedule of messages (`collectives.schedules.algorithms`), run by `executor`
    meeting     where the ranks of a node write what they are about to do, and wait for each other
    symmetric/  "symmetric": one copy, inside a node
    symmetric_or_mpi
                "symmetric_or_mpi": symmetric if the arrays of all ranks are symmetric, else mpi
    hierarchical/
                "hierarchical": symmetric inside nodes, a schedule between them
    cuda/       all operations on GPU arrays; their work on the host uses the other backends
    registry    makes the backends of a group, by the names that `algorithm=` takes
    selection   "auto": which of them serves an operation of so many bytes
    tables      by which "auto" chooses: tuned, the defaults of an MPI library, or calibrated
    dispatch    one rank's view of a group: its backends, its memory, and the way to its GPUs (`cuda.backend`)
    checks      that view with MPIDL_DEBUG=1: before each operation the ranks compare what they are about to do

A new backend is a file with a subclass of `Backend`, its line in `registry.MAKERS` and its line above; a new schedule
is a file in `collectives.schedules.algorithms` and its name in `NAMES` and `ALGORITHMS` there. A new operation is
declared in `Backend` and defined in every backend that has it. Other files name a backend; `grep` finds them when you
rename one: `tables`, by which "auto" chooses; `mpidl.gradients.buckets.rank_order_algorithm`, which asks by name for
the one that adds in the order of ranks; `collectives.bench`. CONTRIBUTING.md has the names, the steps and the tests.
"""
