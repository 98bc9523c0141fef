"""The ranks over which state is cut, and those that hold the same shard: hybrid sharding.

    4 ranks on 2 nodes, shards inside nodes           node 0     node 1
        shards      cut over these                    0 <-> 1    2 <-> 3     gathers, reduce-scatters
        replicas    hold the same shard               0 <------> 2           all-reduce of reduced gradients
                                                         1 <------> 3

A bucket's all-reduce over the replicas follows its reduce-scatter at once, in one operation. Without replicas the
shards are cut over all ranks.

The agreements of a pass and of a step are over all ranks, those of all shard groups.

Operations of a backward pass run on duplicates that this engine alone has: the buckets of several engines in one pass
may fill in another order on each rank. One duplicate is over all ranks: on it the operations are queued, in its
progress thread. With replicas, an operation there uses one over the shards and one over the replicas, which queue
nothing. Each engine has its own queue, with one order on every rank, so engines that fill in different orders do not
wait for each other.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.2.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from collectives import ArgumentError, Communicator, Work

from ..errors import ConfigurationError
from ..job import communicator_pool
from ..job.agreement import check_everywhere
from ..replicas.start_check import check_settings_agree

_by_node: weakref.WeakKeyDictionary[Communicator, tuple[Communicator, Communicator]] = weakref.WeakKeyDictionary()


class ShardGroup:
    """The ranks of an engine.

    world: all of them.
    shard_comm: those over which state is cut.
    replica_comm: those with this rank's shard, None if alone.
    rank, size: among `shard_comm`.
    is_root: whether this is rank 0 of all, which gets whole states.
    backward_comm: all ranks, for operations of backward passes.
    backward_shard_comm: those of `shard_comm`, likewise.
    """

    def __init__(self, world: Communicator, shards: Communicator, replicas: Communicator | None) -> None:
        self.world, self.shard_comm, self.replica_comm = world, shards, replicas
        self.rank, self.size = shards.rank, shards.size
        self.is_root = world.rank == 0
        self.backward_comm = self._taken(world)
        self.backward_shard_comm = self.backward_comm if shards is world else self._taken(shards)
        self._backward_replica_comm = None if replicas is None else self._taken(replicas)

    def _taken(self, comm: Communicator) -> Communicator:
        """A duplicate of `comm` that this engine alone has. Collective."""
        pooled = communicator_pool.take(comm)
        weakref.finalize(self, pooled.give_back).atexit = False
        return pooled.comm

    @classmethod
    def from_argument(cls, world: Communicator, given: Communicator | str | None) -> ShardGroup:
        """Makes the group from ZeroOptimizer's argument `shard_group`. Collective."""
        check_everywhere(world, lambda: _check_kind(given))
        check_settings_agree(world, "shard_group", {"kind": given if isinstance(given, str) else type(given).__name__})
        if given is None:
            return cls(world, world, None)
        if isinstance(given, Communicator):
            _check_sizes(world, given)  # before any operation on groups that may not fit together
            leader = np.array([world.rank])
            given.broadcast(leader)
            shards, same_rank_comm = given, world.split(given.rank, int(leader[0]))
            assert same_rank_comm is not None
            replicas = same_rank_comm
            check_everywhere(world, lambda: _check_split(world, given, same_rank_comm))
        else:
            try:
                found = _by_node.get(world) or world.split_by_node()
            except ArgumentError as error:
                raise ConfigurationError(f"shard_group: 'node' {str(error).partition(':')[2].strip()}") from None
            shards, replicas = _by_node.setdefault(world, found)
        return cls(world, shards, replicas if replicas.size > 1 else None)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, algorithm: str) -> Work:
        """Starts the reduction of all ranks' `whole` to its mean, of which `own` becomes this rank's shard."""
        shards, replicas = self.backward_shard_comm, self._backward_replica_comm
        if replicas is None:
            work = shards.reduce_scatter(own, whole, "avg", algorithm=algorithm, async_op=True)
        else:

            def both() -> None:
                shards.reduce_scatter(own, whole, "avg", algorithm=algorithm)
                replicas.all_reduce(own, "avg")

            name = "reduce_scatter and all_reduce over replicas"
            work = self.backward_comm.compound(name, both, async_op=True, device=whole.device)
        assert work is not None
        return work

    def gather(self, out: torch.Tensor | None, x: torch.Tensor, counts: list[int]) -> None:
        """Gathers all shards into rank 0's `out`, one behind the other. Collective."""
        if self.has_root:
            self.shard_comm.gather(out, x, counts=counts)

    def scatter(self, out: torch.Tensor, x: torch.Tensor | None, counts: list[int]) -> None:
        """Scatters rank 0's `x`; `out` becomes this rank's part. Collective."""
        if self.has_root:
            self.shard_comm.scatter(out, x, counts=counts)
        if self.replica_comm is not None:
            self.replica_comm.broadcast(out)

    @property
    def has_root(self) -> bool:
        """Tells if rank 0 of all is among the ranks that have shards with this one."""
        return self.replica_comm is None or self.replica_comm.rank == 0


def _check_kind(given: Any) -> None:
    if not (given is None or given == "node" or isinstance(given, Communicator)):
        raise ConfigurationError(f"shard_group: got {given!r}; needs 'node', a Communicator made by split, or None")


def _check_sizes(world: Communicator, shards: Communicator) -> None:
    sizes = np.empty(world.size, np.int64)
    world.all_gather(sizes, np.array([shards.size]))
    if len(set(sizes.tolist())) > 1:
        raise ConfigurationError(f"shard_group: got groups of unlike sizes, {sizes.tolist()} by rank; needs equal ones")


def _check_split(world: Communicator, shards: Communicator, replicas: Communicator) -> None:
    if shards.size * replicas.size != world.size:
        raise ConfigurationError(
            f"shard_group: got groups of unlike sizes ({shards.size} ranks here); needs ones that cut the "
            f"{world.size} ranks evenly"
        )
    if world.rank == 0 and shards.rank != 0:
        raise ConfigurationError("shard_group: rank 0 of all ranks must be rank 0 of its group")
