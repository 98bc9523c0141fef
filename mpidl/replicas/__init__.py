"""State that all ranks hold: made equal to rank 0's, and compared before the first step.

broadcast    sends rank 0's parameters and buffers to all
start_check  compares models and settings before the first step, and names what differs
checksums    8 bytes of a tensor, by which it is compared
"""
