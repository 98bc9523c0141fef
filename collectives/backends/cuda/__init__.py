"""Collectives on arrays in GPU memory: cupy arrays and torch CUDA tensors.

    arrays      a GPU array -> a DeviceBuffer, without a copy
    memory      GPU memory that the ranks of a node map, each by the others' IPC handles
    task        an operation from its issue to its end, in the order of the caller's stream
    backend     one rank's operations, as Tasks; `host`: what it asks of the group's side on the host
    group       what the ranks of one group set up for their GPUs, and the transport that an operation takes
    transports  the interface of a transport, and which one serves a pair of ranks: ipc, aware, staged
    probe       tries the transports, each by a transfer
    staged      through pinned host memory, in chunks (`chunks`), with the collectives of the host in between
    barrier     where ranks meet on their streams, without a host that waits for a GPU
    symmetric   ipc: GPU memory that the ranks of a node map, for the one-copy collectives
    aware       device addresses to an MPI library that takes them
    levels      ipc inside islands of GPUs, messages between them
    messages    between two ranks, from and to GPU memory
    copies      to and from the host, concurrently with the streams' work; `pages`: memory without pages as yet
    device      all that is asked of a GPU's driver; `driver` is CUDA through cupy, `kernels` what runs there

To add a transport: a file here with a class that follows `transports.Transport`, its name in `transports.TRANSPORTS`,
its trial in `probe.discover`, and its construction in `group.GpuGroup`. CONTRIBUTING.md names the tests.

Nothing here imports cupy before an array on a GPU shows up.
"""

from ...base.buffers import register
from . import arrays

register(arrays)
