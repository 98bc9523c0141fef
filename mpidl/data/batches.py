"""Batches of a text: the sequences that a rank trains on in each step.

The global batch of a step is some sequences that begin at random tokens, which depend on the seed and the step alone.
Rank r takes the r-th share of it, micro-step by micro-step, so that any number of ranks trains on the same global
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from collectives import Communicator

from ..errors import UsageError

Batch = tuple[torch.Tensor, torch.Tensor]


def shares(total: int, ranks: int, most: int) -> tuple[int, int]:
    """Divides `total` sequences a step among the ranks: (sequences a micro-step, micro-steps) of each.

    most: sequences a micro-step. So a job goes on with the same global batches on fewer ranks. Raises UsageError if the
    ranks' shares would be unequal.
    """
    each, rest = divmod(total, ranks)
    if rest:
        raise UsageError(f"a global batch of {total} sequences is no equal share for each of {ranks} ranks")
    batch = max(size for size in range(1, min(most, each) + 1) if each % size == 0)
    return batch, each // batch


class TokenBatches:
    """Sequences of one text, cut into a part to train on and a part to validate with.

    tokens: integers [n] of any type.
    block: tokens a sequence.
    batch: sequences a rank a micro-step.
    micro_steps: of a step.
    held_out: the share of the text, at its end, that is for validation.
    """

    def __init__(
        self,
        tokens: np.ndarray[Any, np.dtype[Any]],
        comm: Communicator,
        block: int,
        batch: int,
        micro_steps: int = 1,
        seed: int = 0,
        held_out: float = 0.1,
    ) -> None:
        cut = round(len(tokens) * (1 - held_out))
        self.train, self.validation = torch.from_numpy(tokens[:cut]), torch.from_numpy(tokens[cut:])
        shortest = min(len(self.train), len(self.validation))
        if shortest < block + 1:
            raise UsageError(
                f"the text is too short: {len(tokens)} tokens leave {shortest} for the smaller part, "
                f"and a sequence of {block} needs {block + 1}"
            )
        self._comm, self._seed = comm, seed
        self.block, self.batch, self.micro_steps = block, batch, micro_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in a step."""
        return self._comm.size * self.micro_steps * self.batch * self.block

    def step(self, number: int) -> Iterator[Batch]:
        """This rank's micro-batches of a step: inputs and targets, int64 [batch, block] each."""
        random = np.random.default_rng((self._seed, number))
        shape = (self._comm.size, self.micro_steps, self.batch)
        starts = random.integers(0, len(self.train) - self.block, shape)
        for own in starts[self._comm.rank]:
            yield self._sequences(self.train, own)

    def validate(self, most: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """This rank's share of the validation text: inputs, targets, and how many of their tokens count.

        most: sequences of all ranks together (0: all that there are), spread evenly over the text and the
        same ones whatever the number of ranks. Every rank gets equally many batches, as sharded models must
        run the same batches: a rank that has run out of sequences gets one of which no token counts.
        """
        available = (len(self.validation) - 1) // self.block
        count = min(most, available) if most else available
        starts = np.linspace(0, available - 1, count).astype(np.int64) * self.block
        largest_share = -(-count // self._comm.size)
        own = starts[self._comm.rank :: self._comm.size]
        for i in range(0, largest_share, self.batch):
            part = own[i : i + self.batch]
            x, y = self._sequences(self.validation, part if len(part) else starts[:1])
            yield x, y, len(part) * self.block

    def _sequences(self, text: torch.Tensor, starts: np.ndarray[Any, Any]) -> Batch:
        windows = torch.stack([text[s : s + self.block + 1] for s in starts]).long()
        return windows[:, :-1], windows[:, 1:]
