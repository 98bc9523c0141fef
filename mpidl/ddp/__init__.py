"""Distributed data parallel: the whole model on every rank, gradients averaged while backward goes on.

What a user calls:

    wrapper             DistributedDataParallel; plain_model: the model inside it and inside torch.compile's
    arguments           checks of the constructor's arguments
    module_states       the parameters and buffers of the module inside, without those to ignore
    forward_signature   `forward` with the signature of the module inside
    first_pass          the first pass of a wrapper that was copied, such as by deepcopy
    retirement          what becomes of hooks and Communicator when a wrapper is freed

A backward pass:

    reducer             moves gradients into the buckets, and their means back to `.grad`
    trained_parameters  what trains, on which all ranks agree as a pass begins
    module_changes      detects parameters that were replaced or resized
    shared_parameters   finds parameters that another wrapper averages as well
    unused_parameters   what a pass will not reach, as its graph tells
    reached_parameters  what the passes of all ranks have reached, and what a rank has missed
    bucket_order        which parameters are in which bucket, in the order of arrival
    bucket_means        reduces the buckets; bucket_memory: the memory in which they lie side by side
    linear              computes weight gradients of linear layers in the buckets
    sparse              gradients of sparse embeddings

Other passes:

    uneven_inputs       `mpidl.Join`: ranks with fewer batches than others
    join_hook           what a rank without batches does in a Join; joined_passes: what the reducer keeps for it
    backward_steps      steps within the backward pass: step_in_backward
    optimizer_class     which optimizers can make these steps
    used_gradient       what these steps leave in `.grad`
"""

from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
