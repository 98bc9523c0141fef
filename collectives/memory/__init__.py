"""Memory that the ranks of a node share, or reach of each other, and what they count in it.

shared_memory   mappings that all ranks of a node have, with memory for each of them; finds the allocation that an array
                lies in
peer_memory     the kernel's copies from and to the private memory of the node's other ranks
pages           memory whose pages come and go, while its addresses stay
counters        numbers and barriers in shared memory, by which ranks wait for each other
lifetime        keeps memory that MPI may still write
leftovers       names of shared memory that a killed job would leave
"""
