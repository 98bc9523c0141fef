"""Collectives over several nodes: shared memory inside each node, messages between nodes.

    hierarchy        composes the levels
all_reduce, reduce_scatter
                 pipelines through both, with messages of every local rank at once
    movements        all_to_all, gather and scatter, and `reduce`: one message from a node to another, over any nodes;
                     `algorithms.hierarchical` has their schedules
    contributions    how the nodes' sums are added
"""
