"""Gathers shards of parameters as messages of a compressor, so that fewer bytes are sent.

    shard of rank r    blocks of 256 values -> message r: fp32 scales, int8 codes      each rank, of its own shard
    all-gather         [ message 0 | message 1 | ... ]      into one buffer, which all units use in turn
    whole              [ values 0  | values 1  | ... ]      from all messages, also its own

All ranks compute with what the messages say, the owner of a shard too, so they have the same bits, in forward and
backward. The shards stay in full precision: the optimizer steps on them, and states and checkpoints are made of them.
A parameter begins with a block of the compressor, and no shard's edge cuts one, so a value is rounded to the same on
any number of ranks.

Who runs what: all of it runs inside a round (`gather_rounds`), in that Communicator's progress thread. The ranks of
a node that share the whole unit share the messages too: each decompresses some of them, and a barrier follows.

Source: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", section 3.1.
"""

from __future__ import annotations

import torch

from collectives import Communicator

from ...gradients.compression import OwnedCompressor


class CompressedGather:
    """Gathers whole units of compressed shards. Construction is collective.

    comm: the ranks that have shards.
    largest: elements of the largest shard.
    shared: the ranks of a node share whole units.
    device: as torch has it, of the shards.

    messages: uint8; all ranks' messages of one flat group; the node's, where it shares them.
    """

    def __init__(
        self, compressor: OwnedCompressor, comm: Communicator, largest: int, shared: bool, device: torch.device
    ) -> None:
        self._compressor, self._comm = compressor, comm
        allocate = comm.shared if shared else comm.empty
        self.messages: torch.Tensor = allocate(
            compressor.message_bytes(largest) * comm.size, torch.uint8, device=device
        )
        node = comm.node_ranks
        self._needs_barrier = shared and len(node) > 1
        self._ranks_to_decompress = range(node.index(comm.rank), comm.size, len(node)) if shared else range(comm.size)

    def gather(self, whole: torch.Tensor, shard: torch.Tensor) -> int:
        """Makes `whole`, all ranks' shards, of their messages. Collective. Returns the bytes of the messages."""
        comm, size = self._comm, shard.numel()
        nbytes = self._compressor.message_bytes(size)
        used = self.messages[: nbytes * comm.size]
        own = used[nbytes * comm.rank : nbytes * (comm.rank + 1)]
        self._compressor.compress(shard.float(), own, None)
        comm.all_gather(used, own)
        wide = None if whole.dtype == torch.float32 else shard.new_empty(size, dtype=torch.float32)
        for rank in self._ranks_to_decompress:
            message, values = used[nbytes * rank : nbytes * (rank + 1)], whole[size * rank : size * (rank + 1)]
            self._compressor.decompress(message, values if wide is None else wide)
            if wide is not None:
                values.copy_(wide)
        if self._needs_barrier:
            comm.barrier()
        return nbytes * comm.size
