"""Distributed data parallel: the whole model on every rank, gradients averaged while backward goes on.

wrapper        DistributedDataParallel, what a user calls
reducer        gradients -> buckets -> their means; the buckets' order; what a pass did not reach
bucket_memory  the memory in which the buckets lie side by side
linear         computes weight gradients of linear layers in the buckets
incomplete     several backward passes of one forward pass
contents       notices parameters that were replaced or resized
shown_forward  `forward` with the signature of the module inside
sparse         gradients of sparse embeddings
join_hook      ranks with fewer batches than others; joined_passes: what the reducer keeps of them
backward_steps steps within the backward pass
steppable      which optimizers can make them
used_gradient  what they leave in `.grad`
first_pass     where a copy of a wrapper begins
"""

from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
