"""The section of a bucket that a rank reduces with its peers on other nodes, and the mean's way back.

    bucket, 2 nodes of 2 ranks            [    block 0    |    block 1    ]
    inside each node, in full precision   [ local 0 | local 1 | local 0 | local 1 ]     reduce-scatter of each block
    section of local rank 0               [ piece 0 ][ piece 1 ]                        reduced by the compressor
    owners among its peers                  node 0     node 1

Without a node (`inside` of one rank) the section is the whole bucket, and the pieces are those of all ranks. Under ZeRO
the pieces are the shards, so that the owner of a piece is the owner of the shard. With hybrid sharding, and for
compressors of whole parameters, there is one block; what a rank has of it is cut into pieces over its peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .blockwise import BLOCK


@dataclass(frozen=True)
class NodeBlock:
    """Elements of a bucket that are reduce-scattered inside a node.

    start: the first.
    counts: of each local rank.
    """

    start: int
    counts: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The end of the last."""
        return self.start + sum(self.counts)

    def part(self, rank: int) -> tuple[int, int]:
        """(start, stop) in the bucket of a local rank's elements."""
        start = self.start + sum(self.counts[:rank])
        return start, start + self.counts[rank]


@dataclass(frozen=True)
class SectionLayout:
    """The places of the elements of this rank's section.

    elements: of the bucket.
    blocks: of it; the section is this rank's part of each, one behind the other.
    local_rank: among the ranks inside.
    pieces: (start, stop) in the section, one for each peer.
    needs_all: every peer needs the mean of the whole section.
    gathers_whole: every rank inside needs the whole bucket.
    """

    elements: int
    blocks: tuple[NodeBlock, ...]
    local_rank: int
    pieces: tuple[tuple[int, int], ...]
    needs_all: bool
    gathers_whole: bool

    @property
    def size(self) -> int:
        """Elements of the section."""
        return sum(block.counts[self.local_rank] for block in self.blocks)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(start in the section, start in the bucket, stop in the bucket) of this rank's part of each block."""
        at = 0
        for block in self.blocks:
            start, stop = block.part(self.local_rank)
            yield at, start, stop
            at += stop - start


def by_pieces(elements: int, shard: int | None, inside: tuple[int, int], peers: int) -> SectionLayout:
    """The layout in which a bucket has a piece for every rank.

    shard: elements of each rank's under ZeRO; None: all ranks need the mean of all elements.
    inside: (rank, size).
    """
    local_rank, local = inside
    size = shard or _blocks_of(elements, peers * local)
    edges = [min(number * size, elements) for number in range(peers * local + 1)]
    counts = [stop - start for start, stop in pairwise(edges)]
    blocks = tuple(
        NodeBlock(edges[node * local], tuple(counts[node * local : (node + 1) * local])) for node in range(peers)
    )
    own = [block.counts[local_rank] for block in blocks]
    return SectionLayout(
        elements, blocks, local_rank, _runs(own), needs_all=shard is None, gathers_whole=shard is None and local > 1
    )


def of_replicas(elements: int, shard: int, inside: tuple[int, int], peers: int) -> SectionLayout:
    """The layout of hybrid sharding: a section is a rank's shard, which all peers hold."""
    local_rank, local = inside
    blocks = (NodeBlock(0, (shard,) * local),)
    return SectionLayout(elements, blocks, local_rank, pieces_of(shard, peers), needs_all=True, gathers_whole=False)


def of_whole_parameters(elements: int, starts: Sequence[int], inside: tuple[int, int], peers: int) -> SectionLayout:
    """The layout in which a section has whole parameters: those that begin in this local rank's even part.

    starts: the first element of each parameter in the bucket, ascending.
    """
    local_rank, local = inside
    edges = [0]
    for number in range(1, local):
        even = number * elements // local
        edges.append(max(edges[-1], min((start for start in starts if start >= even), default=elements)))
    edges.append(elements)
    blocks = (NodeBlock(0, tuple(stop - start for start, stop in pairwise(edges))),)
    own = blocks[0].counts[local_rank]
    return SectionLayout(elements, blocks, local_rank, pieces_of(own, peers), needs_all=True, gathers_whole=local > 1)


def _blocks_of(elements: int, ranks: int) -> int:
    """Elements of a piece, whole blocks of a compressor where there are enough."""
    even = -(-elements // ranks)
    return -(-even // BLOCK) * BLOCK


def pieces_of(elements: int, peers: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of each peer's piece of a section, whole blocks of a compressor except the last."""
    size = _blocks_of(elements, peers)
    edges = [min(number * size, elements) for number in range(peers + 1)]
    return tuple(pairwise(edges))


def _runs(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise([0, *accumulate(counts)]))
