"""Distributed data parallel: the whole model on every rank, gradients averaged while backward goes on.

wrapper            DistributedDataParallel, what a user calls
plain_model        the model inside the wrapper and inside torch.compile's
reducer            gradients -> buckets -> their means; the buckets' order; what a pass did not reach
arguments          checks of the constructor's arguments
bucket_memory      the memory in which the buckets lie side by side
linear             computes weight gradients of linear layers in the buckets
sparse             gradients of sparse embeddings
several_backwards  several backward passes of one forward pass
first_pass         the first pass of a wrapper that was copied, such as by deepcopy
module_changes     detects parameters that were replaced or resized
shared_parameters  finds parameters that another wrapper averages as well
forward_signature  `forward` with the signature of the module inside
join_hook          what a rank without batches does in a Join; joined_passes: what the reducer keeps for it
backward_steps     steps within the backward pass: step_in_backward
optimizer_class    which optimizers can make these steps
used_gradient      what these steps leave in `.grad`
"""

from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
