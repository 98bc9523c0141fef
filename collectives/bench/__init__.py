"""Times the collectives, and the MPI library's own, gloo and NCCL in turn, in the form of nccl-tests.

    mpirun -n 4 python -m collectives.bench all_reduce -b 1K -e 64M --compare mpi,gloo

    __main__       measures, prints, writes
    options        what a command line asks for
    operations     each operation's arrays and its bus bandwidth, as data
    buffers        arrays of a call: one set that stays in the caches, or many that the calls rotate through
    caches         the last cache's size; fresh: speeds of copies between cores
    sides          the call to time: by this package, by the MPI library, a plain copy
    peers          the same by torch.distributed; imported only where a peer is asked for
    reference      inputs, and what has to come out of them
    device         the CPU or a GPU, and its clock; gpu_limits: the memory's limit there
    measurement    checks and times all sides of one operation and size
    report, plot   the table, its last lines; the picture

`docs/benchmarks.md` explains every column.
"""
