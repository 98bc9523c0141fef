"""Strategies for where the parameters live between steps, and the guards over them.

    strategy            the interface of the three, and the order of its calls; read it first
    replicated          stages 1 and 2: whole on every rank
    node_shared         stage 3 on one node, on CPUs or on one GPU: one copy in shared memory
    sharded             stage 3 elsewhere: units are gathered while they compute

    units               cuts a model into units

Of `sharded`:

    unit_hooks          hooks of the model by which units are gathered before a use, and released after it
    unit_call           a forward pass through a unit, followed into its backward pass
    forward_passes      the forward passes that run now
    held_units          what this rank holds now: gathered before a use and ahead of it, released after it
    forecast            the units that are used next
    gathered_unit       one unit: its shards, its whole, and its states
    gather_rounds       agreement of the ranks on which units to gather next
    round_waits         waits for a round; an error where the others wait for this rank
    compressed_gather   the gather with `compress_parameters=`
    released_parameter  a parameter without memory, gathered before an operator reads it
    read_hook           the tensor subclass that calls back before a parameter is read; of `replicated` too

    gathered_block      `with optimizer.gathered(...)`: whole parameters for the program; private_copy: this rank's copy
    weight_guard        refuses changes of weights of which the optimizer does not know
"""
