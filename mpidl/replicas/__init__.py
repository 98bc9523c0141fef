"""State that all ranks hold: sent from rank 0, and compared.

broadcast    sends rank 0's parameters and buffers to all
start_check  compares models and settings, and names what differs
checksums    8 bytes of a tensor, by which it is compared
"""
