"""Checks a machine, and how a job's ranks lie on it, before training: `mpirun -n 4 python -m mpidl.doctor`.

facts      what each rank sees
speed      speeds of memory copies and of the collectives
expected   the speeds that the collectives should have, by those of the copies
mesh       which rank lies where on a mesh, drawn
advice     what is wrong, and what to do about it, in words
"""
