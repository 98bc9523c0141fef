"""Gradients from autograd to the step, for every engine: backward passes, buckets, clipping, search for NaN.

    backward         begin and end of a backward pass, and the phases that an engine runs in it
    buckets          layout of gradients in flat memory, and its cuts over the ranks
    bucket_queue     fills buckets and launches their reductions, in one order on every rank
    grad_bucket      a bucket as communication hooks see it, and the handles that they return; hook_check refuses others
    compression/     compressors of gradients: what `compress=` names
    clip             clipping by norm or value
    global_mean      the mean of a loss over the samples of all ranks
    nonfinite        finds the parameter and the rank of a gradient that is infinite or NaN
    foreign_steps    detects an optimizer's step during the pass that the engine did not make
    scalars          reads many numbers out of tensors at once

Communication hooks are in `mpidl.comm_hooks`, steps on some parameters in `mpidl.partial_steps`.
"""
