"""Gradients reduced to shards, and the `.grad` that shows them; in the order in which a gradient meets them.

shard_reducer      reduce-scatters buckets as backward fills them; names every kind of tensor here
buffer_pool        the memory of buckets while they fill: a few buffers that buckets take in turn
bucket_gradient    state of one bucket's gradient, from the first gradient to this rank's shard of the mean
hooked_reduction   a communication hook instead of the reduce-scatter
stepper            interface of what steps within the backward pass (`stepping.backward_steps`)
reduced_gradients  gradients between passes: this rank's shards, what was reached, and how they are forgotten
grad_attribute     sets the parameters' `.grad`, and takes in what the program does to it
sharded_gradient   the tensor class in `.grad`: reads this rank's shard
zero_grad          `model.zero_grad()`, which clears the shards too
same_gradients     compares gradients that must be equal over tp, as a step begins
"""
