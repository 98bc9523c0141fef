"""Making all ranks' states equal to rank 0's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from collectives import Communicator


def broadcast_states(comm: Communicator, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Overwrites every tensor with the root's; one broadcast a dtype. Collective.

    Written past autograd, so that a graph which has saved a buffer stays valid.

    tensors: on every rank the same number, shapes and dtypes, in the same order; of any layout in memory.
    """
    alike: dict[tuple[torch.dtype, str], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device.type), []).append(tensor.data)
    for group in alike.values():
        if len(group) == 1 and group[0].is_contiguous():
            comm.broadcast(group[0], root)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        comm.broadcast(flat, root)
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))
