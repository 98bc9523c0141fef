"""A job that is started again when it fails: `python -m mpidl.launch --checkpoint DIR -- mpirun -n 4 python train.py`.

    job           one run of the command: its processes, its signals, what it leaves behind
    streams       passes on what it says
    roll          which process is which rank
    deaths        which of them ended first
    last_seen     what it was in
    causes        why it ended, from its status and what it said
    command       the number of ranks in a command line
    supervise     runs it again, or gives up

It is one process that initialises no MPI. What goes on from the checkpoint is the command itself.
"""
