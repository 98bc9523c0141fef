"""Parameters that exchanges leave out, as they do not train: which these are, and their states.

A parameter with requires_grad=False keeps its place in the arrays, so that it may train again. Its elements are masked:
messages tell nothing of them, an exchange makes zeros of them, and its errors are forgotten. A step then gives its
states back. Those that never trained have no states, and are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .flat import FlatBucket


class LeftOutParameters:
    """The parameters of some buckets that are left out, as last noted.

    flags: of each bucket, one for each parameter.
    """

    def __init__(self) -> None:
        self.flags: dict[FlatBucket, list[bool]] = {}
        self._with_state: dict[FlatBucket, list[int]] = {}  # the numbers of those among them that have one

    def clear(self) -> None:
        """Forgets all, as other states were loaded."""
        self.flags.clear()
        self._with_state.clear()

    def update(self, bucket: FlatBucket, flags: list[bool], keys: Sequence[str]) -> bool:
        """Notes which of a bucket's parameters are left out; tells if that has changed. keys: of the states."""
        if flags == self.flags.get(bucket):
            return False
        found = [n for n, flag in enumerate(flags) if flag and any(bucket.views[key][n].any() for key in keys)]
        self.flags[bucket], self._with_state[bucket] = flags, found
        return True

    @contextmanager
    def states_kept(self, *keys: str) -> Iterator[None]:
        """Gives these states back to those that are left out, once the block has changed whole arrays."""
        views = [bucket.views[key][n] for bucket, found in self._with_state.items() for n in found for key in keys]
        kept = [view.clone() for view in views]
        yield
        if views:
            torch._foreach_copy_(views, kept)
