"""A slice: the part of one parameter in a rank's shard, or its fp32 master, on which the inner optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gradients.buckets import Piece
from ..partial_steps import bring_back
from .parameter_shard import ParameterShard

HALVES = (torch.bfloat16, torch.float16)  # parameters of these are stepped on in fp32 masters


@dataclass(frozen=True)
class ShardedStateSpec:
    """Stands, in an outline of an optimizer's state, for a tensor of the parameter's shape that is cut like it."""

    dtype: torch.dtype


class Slice:
    """The part of one parameter that this rank's shard holds.

    shard: of the group that the parameter is in.
    number: of the shard, among those that train.
    piece: the part, and its place in the shard.
    values: the tensor on which the inner optimizer steps.
    is_master: whether it is an fp32 copy of 16-bit parameters.
    """

    def __init__(self, shard: ParameterShard, number: int, piece: Piece) -> None:
        self.shard, self.number, self.piece = shard, number, piece
        own = self.view_in(shard.values)
        self.is_master = own.dtype in HALVES
        if self.is_master:
            own = own.float()
        self.values = torch.nn.Parameter(own)

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This slice's place in a shard of parameters or of gradients."""
        return self.piece.view_in(flat)

    def counts(self, parameter: torch.nn.Parameter, ranks: int) -> list[int]:
        """Elements of the parameter in each rank's shard, by rank."""
        index = next(i for i, p in enumerate(self.shard.parameters) if p is parameter)
        pieces = [self.shard.layout.piece(index, rank) for rank in range(ranks)]
        return [piece.stop - piece.start for piece in pieces]

    def attach(self, gradient: torch.Tensor | None) -> None:
        """Points the slice's `.grad` to its part of the bucket's reduced gradient."""
        part = None if gradient is None else self.view_in(gradient)
        self.values.grad = part if part is None or part.dtype == self.values.dtype else part.to(self.values.dtype)

    def write_back(self) -> None:
        """Rounds a master into the parameters' shard, and gives its fp32 gradient up.

        Values that the optimizer has put elsewhere, as `p.data = ...` does, come back to the shard.
        """
        if self.is_master:
            self.view_in(self.shard.values).copy_(self.values.detach())
            self.values.grad = None
            return
        shard = self.shard.values
        place = shard.data_ptr() + self.piece.offset * shard.element_size()
        if self.values.data_ptr() != place and self.piece.stop > self.piece.start:
            bring_back(self.values, self.view_in(shard))

    def publish_values(self) -> None:
        """Writes values that were set otherwise than by a step into the parameters' shard."""
        self.write_back()

    def update_master_from_param(self) -> None:
        """Updates the master where the parameters' shard was changed; elsewhere it is finer and stays."""
        if self.is_master:
            own, master = self.view_in(self.shard.values), self.values.detach()
            master.copy_(torch.where(own == master.to(own.dtype), master, own.float()))
