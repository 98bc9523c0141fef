"""Ranks that reduce a section together, with a Communicator of its own for each phase.

compresses         inside, in full precision     exchange, compressed
everywhere         -                             all ranks
between nodes      the ranks of this node        the ranks with this one's local rank on all nodes
hybrid sharding    the shards of a bucket        the replicas of this rank's shard
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from collectives import ArgumentError, Communicator

from ...errors import ConfigurationError
from ...job import communicator_pool
from .compressor import Compressor, Exchange
from .settings import Compression


class Ranks:
    """The ranks of a compressor's sections. Collective; the Communicators go back to the pool with this object.

    where: "between_nodes" or "everywhere".
    exchange: with a Communicator for each phase of the compressor, if it has something to reduce (`compresses`).
    peers: how many ranks exchange.
    is_hybrid: they are replicas of a shard.
    reduce_scatter_comm, all_gather_comm: of the ranks that share a bucket, each with a section of it; None: a section
        is the whole bucket.
    is_over_network: more than one node exchanges.

    Raises ConfigurationError on every rank where the nodes do not fit.
    """

    def __init__(
        self,
        settings: Compression,
        compressor: Compressor,
        world: Communicator,
        shards: Communicator | None,
        replicas: Communicator | None,
    ) -> None:
        self.is_hybrid = replicas is not None
        inside, exchanging, self.where = _split(settings, world, shards, replicas)
        self.peers = exchanging.size
        is_all_inside = self.where == "between_nodes" and world.nodes == 1 and not self.is_hybrid
        if compressor.arrays and is_all_inside:
            raise ConfigurationError(
                f"compress: {compressor.name}: got where='between_nodes' on one node, where nothing is compressed "
                f"and its {compressor.arrays[0]} would be left out; needs where='everywhere'"
            )
        exchanges = (self.peers > 1 or bool(compressor.arrays)) and not is_all_inside
        self.is_over_network = world.nodes > 1 and self.peers > 1 and not is_all_inside
        self.compresses = exchanges and compressor.phases > 0
        pooled = [communicator_pool.take(exchanging) for _ in range(compressor.phases if self.compresses else 0)]
        self.exchange = Exchange([each.comm for each in pooled])
        self.reduce_scatter_comm: Communicator | None = None
        self.all_gather_comm: Communicator | None = None
        if self.compresses and inside is not None and inside.size > 1:
            of_node = [communicator_pool.take(inside) for _ in range(2)]
            self.reduce_scatter_comm, self.all_gather_comm = (each.comm for each in of_node)
            pooled += of_node
        for each in pooled:
            weakref.finalize(self, each.give_back).atexit = False


@dataclass
class ReductionMethod:
    """A compressor, the ranks that it reduces over, and whether what it does not send is fed back."""

    compressor: Compressor
    ranks: Ranks
    feeds_back: bool


def _split(
    settings: Compression, world: Communicator, shards: Communicator | None, replicas: Communicator | None
) -> tuple[Communicator | None, Communicator, str]:
    """The ranks inside, if there are such, those that exchange, and where that is."""
    if replicas is not None:
        if settings.where == "everywhere":
            raise ConfigurationError(
                "compress: where='everywhere', but with shard_group= gradients are compressed between the groups "
                "alone; leave where= out"
            )
        return shards, replicas, "between_nodes"
    if world.nodes == 1 or settings.where == "everywhere":
        return None, world, settings.where or "everywhere"
    nodes = split_by_node(world, settings.where, "compress: ")
    return (None, world, "everywhere") if nodes is None else (*nodes, "between_nodes")


def split_by_node(
    world: Communicator, where: str | None, argument: str = ""
) -> tuple[Communicator, Communicator] | None:
    """The ranks of this node, and those with this local rank on all nodes; None where nodes do not fit. Collective.

    where: as it was given.
    argument: "compress: " where `where` is a part of that argument, for the message.

    Raises ConfigurationError on every rank where nodes do not fit, but `where` asks for them.
    """
    try:
        return world.split_by_node()
    except ArgumentError as error:
        if where is not None:
            raise ConfigurationError(f"{argument}where={where!r}: {str(error).partition(':')[2].strip()}") from None
        return None
