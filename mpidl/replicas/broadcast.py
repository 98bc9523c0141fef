"""Broadcasts parameters and buffers from rank 0, or from another root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from collectives import Communicator

# 32 MiB: malloc returns a buffer of this size to the system when it is freed; it may keep smaller ones.
TOGETHER_BYTES = 2**25


def broadcast_states(comm: Communicator, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Overwrites every tensor with the root's. Collective.

    Those of a dtype go together, by way of a buffer of at most 32 MiB; a larger one goes by itself, without a copy if
    it is contiguous. Written past autograd, so that a graph which has saved a buffer stays valid.

    tensors: on every rank the same number, shapes and dtypes, in the same order; of any layout in memory.
    """
    by_dtype: dict[tuple[torch.dtype, str], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault((tensor.dtype, tensor.device.type), []).append(tensor.data)
    for group in by_dtype.values():
        chunks = _chunks(group)
        sizes = [sum(t.numel() for t in chunk) for chunk in chunks if len(chunk) > 1]
        buffer = group[0].new_empty(min(sum(sizes), TOGETHER_BYTES // group[0].itemsize))
        for chunk in chunks:
            _broadcast(comm, chunk, buffer, root)


def _chunks(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors by sizes alone, so that they are the same on every rank."""
    alone: list[list[torch.Tensor]] = []
    together: list[list[torch.Tensor]] = []
    filled = 0
    for tensor in tensors:
        if tensor.nbytes > TOGETHER_BYTES:
            alone.append([tensor])
            continue
        filled += tensor.nbytes
        if filled > TOGETHER_BYTES or not together:
            together.append([])
            filled = tensor.nbytes
        together[-1].append(tensor)
    return alone + together


def _broadcast(comm: Communicator, chunk: Sequence[torch.Tensor], buffer: torch.Tensor, root: int) -> None:
    if len(chunk) == 1:
        whole = chunk[0].contiguous()
        comm.broadcast(whole, root)
        if whole is not chunk[0]:
            chunk[0].copy_(whole)
        return
    flat = buffer[: sum(t.numel() for t in chunk)]
    torch.cat([tensor.reshape(-1) for tensor in chunk], out=flat)
    comm.broadcast(flat, root)
    for tensor, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
        tensor.copy_(part.view(tensor.shape))
