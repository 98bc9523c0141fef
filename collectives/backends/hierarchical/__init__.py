"""Collectives over several nodes: one copy inside each node, messages between nodes over every local rank at once.

`hierarchy` composes the levels; `all_reduce` and `reduce_scatter` are pipelines through both.
"""
