"""Masks tokens for BERT: the model sees a text with gaps, the labels are what stood there.

    tokens   [CLS]  to   be   or   not  to   be  [SEP]
    inputs   [CLS]  to   be  [MASK] not to  what [SEP]     15 % are chosen; of those 80 % become [MASK], 10 % any token,
    labels     -    -    -    or    -   -    be    -       10 % stay as they are

Masks are drawn anew for every step ("dynamic masking") and belong to a sequence's number in the global batch, so that
the same global batch has the same masks whatever the number of ranks. Sources: Devlin et al. 2018, "BERT", sections
3.1 and A.1; Liu et al. 2019, "RoBERTa", section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import ConfigurationError

IGNORED = -100  # the label of a position that is not to be predicted; torch's cross_entropy leaves it out


class Masking:
    """Chooses positions and hides them.

    vocab_size: tokens are 0 <= t < vocab_size.
    mask: the token that hides others.
    special: tokens that are never chosen nor put in another's place, such as [CLS], and `mask` itself.
    seed: any integer from 0.
    chosen: the share of a sequence's ordinary tokens that is to be predicted.
    hidden, swapped: the shares of those that become `mask` and a random token.
    """

    def __init__(
        self,
        vocab_size: int,
        mask: int,
        special: Sequence[int] = (),
        seed: int = 0,
        chosen: float = 0.15,
        hidden: float = 0.8,
        swapped: float = 0.1,
    ) -> None:
        outside = [token for token in (mask, *special) if not 0 <= token < vocab_size]
        if outside:
            raise ConfigurationError(f"mask, special: got {outside[0]}; needs tokens of a vocabulary of {vocab_size}")
        if not 0 < chosen <= 1:
            raise ConfigurationError(f"chosen: got {chosen}; needs a share above 0, at most 1")
        if hidden < 0 or swapped < 0 or hidden + swapped > 1:
            raise ConfigurationError(f"hidden, swapped: got {hidden}, {swapped}; needs shares of at most 1 together")
        self._ordinary = torch.ones(vocab_size, dtype=torch.bool)
        self._ordinary[[mask, *special]] = False
        self._replacements = self._ordinary.nonzero().flatten()
        if not len(self._replacements):
            raise ConfigurationError(f"special: got all {vocab_size} tokens of the vocabulary; needs others, too")
        self._mask, self._seed = mask, seed
        self._chosen, self._hidden, self._swapped = chosen, hidden, swapped

    def __call__(self, tokens: torch.Tensor, step: int, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, int64 [batch, time] both; `tokens`, of the same shape, are left as they are.

        step: from 0.
        numbers: of each sequence, from 0, in the global batch of the step. The masks depend on the seed, the step and
            the number. Of each sequence as many tokens are chosen as the share comes to, rounded, but at least one
            where there is an ordinary one. Labels are IGNORED where nothing was chosen.
        """
        if len(numbers) != len(tokens):
            raise ConfigurationError(f"numbers: got {len(numbers)} for {len(tokens)} sequences; needs one for each")
        ordinary = self._ordinary[tokens]
        order, fate, other = self._draws(tokens.shape[1], step, numbers)
        # The ordinary tokens in a random order, the rest behind them; the first few are chosen.
        place = order.masked_fill(~ordinary, 2.0).argsort(1).argsort(1)
        available = ordinary.sum(1, keepdim=True)
        count = (available * self._chosen).round().clamp(min=1)
        chosen = ordinary & (place < count)
        random = self._replacements[(other * len(self._replacements)).long()]
        inputs = torch.where(chosen & (fate < self._hidden), self._mask, tokens)
        swapped = chosen & (fate >= self._hidden) & (fate < self._hidden + self._swapped)
        inputs = torch.where(swapped, random, inputs)
        return inputs, tokens.masked_fill(~chosen, IGNORED)

    def _draws(self, time: int, step: int, numbers: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Three numbers in [0, 1) for each position: float64 [batch, time] each."""
        drawn = [np.random.default_rng((self._seed, step, number)).random((3, time)) for number in numbers]
        return torch.from_numpy(np.stack(drawn, 1)).unbind(0)
