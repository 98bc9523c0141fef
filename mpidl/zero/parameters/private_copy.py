"""This rank's copies of whole parameters, which the program may change inside `gathered`; nested blocks share one.

A block opens the copies of all its flat groups or of none, and closes all, also where an exception comes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from ..parameter_shard import ParameterShard


class PrivateCopy:
    """A copy of the parameters of which `shard` is this rank's part. rank: among those over which they are cut.

    show: a function that makes the parameters the tensors that it is given.
    hide: one that makes them what they are without a copy.
    """

    def __init__(self, shard: ParameterShard, rank: int) -> None:
        self._shard, self._rank = shard, rank
        self._values: torch.Tensor | None = None
        self._blocks = 0  # that have it

    @property
    def is_open(self) -> bool:
        """Tells if any block has the copy."""
        return self._blocks > 0

    def open(
        self, whole: torch.Tensor, show: Callable[[Sequence[torch.Tensor]], None], hide: Callable[[], None]
    ) -> None:
        """Counts one block more. For the outermost, copies `whole`; the parameters become views of the copy."""
        if self._values is None:
            values = whole.clone()
            try:
                show(self._shard.layout.views(values, [p.shape for p in self._shard.parameters]))
            except BaseException:
                hide()
                raise
            self._values = values
        self._blocks += 1

    def follow(self, whole: torch.Tensor) -> None:
        """Updates the copy, if there is one, from `whole`."""
        if self._values is not None:
            self._values.copy_(whole)

    def close(self, hide: Callable[[], None]) -> None:
        """Writes the copy's part into the shard as a block ends; the end of the outermost gives the copy up."""
        assert self._values is not None
        try:
            self._shard.values.copy_(self._shard.layout.shard(self._values, self._rank))
        finally:
            self.discard(hide)

    def discard(self, hide: Callable[[], None]) -> None:
        """Ends a block as `close` does, but leaves the shard as it is."""
        self._blocks -= 1
        if not self._blocks:
            self._values = None
            hide()


class Copied(Protocol):
    """A flat group of parameters that has a PrivateCopy."""

    def copy(self) -> None:
        """Opens its copy; what an exception cuts short is undone."""

    def keep_changes(self) -> None:
        """Closes its copy."""

    def discard_copy(self) -> None:
        """Discards its copy."""


def open_copies(flats: Sequence[Copied]) -> None:
    """Opens the copies of all; of none if an exception keeps one from being made."""
    opened: list[Copied] = []
    try:
        for flat in flats:
            flat.copy()
            opened.append(flat)
    except BaseException:
        discard_copies(opened)
        raise


def close_copies(flats: Sequence[Copied]) -> None:
    """Closes the copies of all, also after an exception of one."""
    with ExitStack() as closing:
        for flat in flats:
            closing.callback(flat.keep_changes)


def discard_copies(flats: Sequence[Copied]) -> None:
    """Ends a block without its changes."""
    for flat in flats:
        flat.discard_copy()
