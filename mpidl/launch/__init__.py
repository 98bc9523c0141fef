"""A job that is started again when it fails: `python -m mpidl.launch --checkpoint DIR -- mpirun -n 4 python train.py`.

    job           one run of the command: its processes, its signals, what it leaves behind
    streams       passes on what it says
    report        why it ended: which rank did first, what it was in, what was said
    command       the number of ranks in a command line
    supervise     runs it again, or gives up

It is one process that initialises no MPI. What goes on from the checkpoint is the command itself.
"""
