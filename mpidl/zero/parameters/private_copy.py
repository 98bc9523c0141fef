"""This rank's copy of whole parameters, which the program may change inside `gathered`; nested blocks share one."""

from __future__ import annotations

import torch

from ..parameter_shard import ParameterShard


class PrivateCopy:
    """A copy of the parameters of which `shard` is this rank's part. rank: among those over which they are cut."""

    def __init__(self, shard: ParameterShard, rank: int) -> None:
        self._shard, self._rank = shard, rank
        self._values: torch.Tensor | None = None
        self._blocks = 0  # that have it

    @property
    def is_open(self) -> bool:
        """Tells if any block has the copy."""
        return self._blocks > 0

    def open(self, whole: torch.Tensor) -> list[torch.Tensor] | None:
        """Counts one block more. For the outermost, copies `whole` and returns views, of the parameters' shapes."""
        self._blocks += 1
        if self._values is not None:
            return None
        self._values = whole.clone()
        return self._shard.layout.views(self._values, [p.shape for p in self._shard.parameters])

    def follow(self, whole: torch.Tensor) -> None:
        """Updates the copy, if there is one, from `whole`."""
        if self._values is not None:
            self._values.copy_(whole)

    def close(self) -> bool:
        """Writes the copy's part into the shard as a block ends; True for the outermost, which gives the copy up."""
        assert self._values is not None
        self._shard.values.copy_(self._shard.layout.shard(self._values, self._rank))
        self._blocks -= 1
        if not self._blocks:
            self._values = None
        return not self._blocks
