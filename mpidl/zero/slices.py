"""What a rank's shard holds of one parameter, and the fp32 master of it: what the inner optimizer steps on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..buckets import Piece
from .shards import ParameterShard


@dataclass(frozen=True)
class Cut:
    """Stands for a state of a parameter's shape, of which every rank has the part that its slice has of that."""

    dtype: torch.dtype


class Slice:
    """What this rank's shard holds of one parameter. values: the tensor on which the inner optimizer steps."""

    def __init__(self, shard: ParameterShard, number: int, piece: Piece) -> None:
        self.shard, self.number, self.piece = shard, number, piece
        own = self.of(shard.values)
        self.is_master = own.dtype in (torch.float16, torch.bfloat16)
        if self.is_master:
            own = own.float()
        self.values = torch.nn.Parameter(own)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This slice's place in a shard of parameters or of gradients."""
        return flat[self.piece.offset : self.piece.offset + self.piece.stop - self.piece.start]

    def counts(self, parameter: torch.nn.Parameter, ranks: int) -> list[int]:
        """How many elements of the parameter, of which this is a slice, each rank's shard holds."""
        index = next(i for i, p in enumerate(self.shard.parameters) if p is parameter)
        pieces = [self.shard.layout.piece(index, rank) for rank in range(ranks)]
        return [piece.stop - piece.start for piece in pieces]

    def attach(self, gradient: torch.Tensor | None) -> None:
        """Points the slice's `.grad` to its part of the bucket's reduced gradient."""
        self.values.grad = None if gradient is None else self.of(gradient).to(self.values.dtype)

    def write_back(self) -> None:
        """Rounds a master into the parameters' shard, and gives its fp32 gradient up.

        Values that the optimizer has put elsewhere, as `p.data = ...` does, come back to the shard.
        """
        if self.is_master:
            self.of(self.shard.values).copy_(self.values.detach())
            self.values.grad = None
            return
        own = self.of(self.shard.values)
        if self.values.data_ptr() != own.data_ptr():
            own.copy_(self.values.detach())
            self.values.data = own

    def show(self) -> None:
        """Makes the values, that somebody else than a step has written, the parameters'."""
        self.write_back()

    def read_back(self) -> None:
        """Takes what somebody has changed in the parameters' shard; elsewhere a master is finer and stays."""
        if self.is_master:
            own, master = self.of(self.shard.values), self.values.detach()
            master.copy_(torch.where(own == master.to(own.dtype), master, own.float()))
