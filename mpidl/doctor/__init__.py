"""Looks at a machine, and at a job's place on it, before a training does: `mpirun -n 4 python -m mpidl.doctor`.

facts      what each rank sees
speed      how fast memory is copied, and how fast the collectives are beside that
expected   how fast they should be, by what was measured beside them
mesh       which rank lies where on a mesh, drawn
advice     what is wrong, and what to do about it, in words
"""
