"""Restarts a job that fails: `python -m mpidl.launch --checkpoint DIR -- mpirun -n 4 python train.py`.

    job           one run of the command: its processes, its signals, the files that it leaves behind
    streams       passes on its output
    report        the cause of its end: the rank that ended first, its operation, its last words
    command       the number of ranks in a command line
    supervise     runs the command again, or gives up

It is one process that does not initialise MPI. The command itself goes on from its checkpoint.
"""
