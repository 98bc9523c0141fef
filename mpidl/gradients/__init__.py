"""Gradients from autograd to the step, for every engine: backward passes, buckets, clipping, loss scaling.

backward         begin and end of a backward pass, and the phases that an engine runs in it
buckets          parameters -> flat storage of their gradients, and its cuts over the ranks
bucket_queue     fills buckets and launches them, in their order on every rank
clip, loss       clipping by norm or value; means over the samples of all ranks
amp              loss scaling, whose decisions all ranks take together
nonfinite        the parameter and the rank of a gradient that is infinite or no number
nonfinite_guard  stops the job for it, or skips the step; `kept_buffers` puts the model's buffers back
foreign_steps    notices steps that something else makes during the pass
scalars          reads many numbers out of tensors at once

Communication hooks and compression are in `mpidl.comm_hooks`, steps on some parameters within a pass in
`mpidl.partial_steps`.
"""
