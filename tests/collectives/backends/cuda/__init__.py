"""Collectives on GPU memory: the logic on a stand-in for a GPU, the kernels on the host, and what needs a GPU."""
