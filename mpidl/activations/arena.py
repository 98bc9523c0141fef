"""Arena: one piece of memory for all checkpoints, against fragmentation by the tensors that live shorter.

The first step tells how much there is at a time: its checkpoints lie wherever there is memory, and once all have been
given back a piece is allocated for as many. A later step that needs more gets the rest elsewhere, and the next one
a larger piece. Source: Rajbhandari et al. 2020 (ZeRO), section 6.3, memory defragmentation.
"""

from __future__ import annotations

from collections import deque

import torch

from .first_fit import Space, aligned


class Arena:
    """Memory of a device, or of the host where a device reaches it (pinned).

    used: bytes of the checkpoints that are held now.
    peak: the most at a time.
    reserved: bytes of the one piece.
    """

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self._device, self._pinned = device, pinned
        self._memory = self._allocate(0)
        self._space = Space(0)
        self._given_back: deque[tuple[int | None, int]] = deque()  # by finalizers, which may run at any time
        self._used = self.peak = 0

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned and nbytes > 0)

    def put(self, part: torch.Tensor) -> ArenaSlot:
        """Copies a contiguous tensor of one dimension here."""
        nbytes = part.numel() * part.element_size()
        size = aligned(nbytes)
        if self.used == 0 and self.peak > self._space.capacity:
            self._memory = self._allocate(self.peak)
            self._space = Space(self.peak)
        start = self._space.take(nbytes)
        place = self._allocate(nbytes) if start is None else self._memory[start : start + nbytes]
        self._used += size
        self.peak = max(self.peak, self._used)
        # On the same stream as what follows, so that no stream has to wait for it.
        flat = place.view(part.dtype).copy_(part, non_blocking=self._pinned)
        return ArenaSlot(self._given_back, start, size, flat)

    @property
    def used(self) -> int:
        """Bytes of the checkpoints that are held now, in whole cache lines."""
        while self._given_back:
            start, size = self._given_back.popleft()
            self._used -= size
            if start is not None:
                self._space.give_back(start)
        return self._used

    @property
    def reserved(self) -> int:
        """Bytes of the one piece of memory."""
        return self._memory.numel()


class ArenaSlot:
    """A checkpoint's slot in the arena, held as long as this object lives."""

    def __init__(
        self, given_back: deque[tuple[int | None, int]], start: int | None, size: int, flat: torch.Tensor
    ) -> None:
        self._given_back, self._start, self._size, self._flat = given_back, start, size, flat

    def load_ahead(self) -> None:
        """Does nothing: the arena is in memory."""

    def fetch(self) -> torch.Tensor:
        """The bytes themselves, to be copied from before the slot goes."""
        return self._flat

    fetches_copies = False

    def __del__(self) -> None:
        self._given_back.append((self._start, self._size))
