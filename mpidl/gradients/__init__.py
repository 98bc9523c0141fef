"""Gradients from autograd to the step, for every engine: backward passes, buckets, hooks, clipping, loss scaling."""
