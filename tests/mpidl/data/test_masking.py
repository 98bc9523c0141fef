"""Masking: the shares of the paper, nothing special touched, the same masks however a batch is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from mpidl.data import MarkedTokenizer, make_tokenizer
from mpidl.data.masking import IGNORED, Masking
from mpidl.errors import ConfigurationError

PAD, CLS, SEP, MASK = SPECIAL = (50, 51, 7, 53)  # one of them amid the others
VOCABULARY = 60


def masking(**settings: object) -> Masking:
    return Masking(**{"vocab_size": VOCABULARY, "mask": MASK, "special": SPECIAL, **settings})


def batch(sequences: int, words: int, seed: int = 0) -> torch.Tensor:
    """[CLS] words [SEP] [PAD] [PAD]."""
    ordinary = torch.tensor([token for token in range(VOCABULARY) if token not in SPECIAL])
    random = torch.Generator().manual_seed(seed)
    drawn = ordinary[torch.randint(0, len(ordinary), (sequences, words), generator=random)]
    first, *last = (torch.full((sequences, 1), token) for token in (CLS, SEP, PAD, PAD))
    return torch.cat([first, drawn, *last], 1)


@pytest.mark.parametrize("words", [1, 3, 4, 100])
def test_fifteen_percent_of_each_sequence_are_chosen_and_at_least_one(words: int) -> None:
    inputs, labels = masking()(batch(50, words), 0, range(50))
    assert inputs.shape == labels.shape == (50, words + 4)
    assert inputs.dtype == labels.dtype == torch.int64
    assert ((labels != IGNORED).sum(1) == max(1, round(0.15 * words))).all()


def test_of_the_chosen_most_are_hidden_some_swapped_and_some_kept() -> None:
    tokens = batch(400, 200)
    inputs, labels = masking(seed=3)(tokens, 5, range(400))
    chosen = labels != IGNORED
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    total = int(chosen.sum())
    assert total == 400 * 30
    hidden, kept = inputs[chosen] == MASK, inputs[chosen] == tokens[chosen]
    swapped = inputs[chosen & (inputs != MASK)]
    # A random token is the old one in 1 of 56 cases. 12 000 draws: standard deviations of 0.4 and 0.3 %.
    assert float(hidden.sum()) / total == pytest.approx(0.8, abs=0.012)
    assert float(kept.sum()) / total == pytest.approx(0.1 + 0.1 / 56, abs=0.009)
    assert not set(swapped.tolist()) & set(SPECIAL)


def test_all_places_and_all_ordinary_tokens_have_the_same_chance() -> None:
    tokens = batch(2000, 20)
    inputs, labels = masking(hidden=0.0, swapped=1.0)(tokens, 0, range(2000))
    chosen = labels != IGNORED
    places = chosen[:, 1:21].sum(0) / 2000
    assert ((places - 0.15).abs() < 0.035).all()  # over four standard deviations
    counts = torch.bincount(inputs[chosen], minlength=VOCABULARY)
    assert counts[list(SPECIAL)].sum() == 0
    ordinary = counts[counts > 0]
    assert len(ordinary) == VOCABULARY - len(SPECIAL)
    assert ((ordinary - 6000 / 56).abs() < 4.5 * (6000 / 56) ** 0.5).all()


def test_special_tokens_are_never_chosen_nor_replaced() -> None:
    tokens = batch(100, 5)
    tokens[:50, 1:6] = torch.tensor([CLS, SEP, PAD, MASK, SEP])  # nothing left to choose
    inputs, labels = masking(chosen=1.0)(tokens, 0, range(100))
    special = torch.isin(tokens, torch.tensor(SPECIAL))
    assert (labels[special] == IGNORED).all()
    assert torch.equal(inputs[special], tokens[special])
    assert (labels[:50] == IGNORED).all()
    assert ((labels[50:] != IGNORED).sum(1) == 5).all()


def cut(ranks: int, micro: int, tokens: torch.Tensor, mask: Masking, step: int) -> Sequence[torch.Tensor]:
    """Inputs and labels of a global batch, masked in parts as ranks and micro-steps would."""
    size = len(tokens) // (ranks * micro)
    parts = [mask(tokens[i : i + size], step, range(i, i + size)) for i in range(0, len(tokens), size)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 3), (2, 1), (3, 2), (4, 1), (12, 1)])
def test_the_masks_are_the_same_for_any_number_of_ranks(ranks: int, micro: int) -> None:
    tokens = batch(12, 30)
    expected = masking(seed=9)(tokens, 4, range(12))
    for found, whole in zip(cut(ranks, micro, tokens, masking(seed=9), 4), expected, strict=True):
        assert torch.equal(found, whole)


def test_seed_step_and_number_each_change_the_masks() -> None:
    tokens = batch(1, 60).expand(3, -1)
    made = [
        row for seed in range(3) for step in range(3) for row in masking(seed=seed)(tokens, step, range(3))[1].unbind()
    ]
    for a, b in itertools.combinations(made, 2):
        assert not torch.equal(a, b)


def test_neither_the_tokens_nor_torchs_generator_are_touched() -> None:
    tokens, state = batch(4, 20), torch.get_rng_state()
    before = tokens.clone()
    masking()(tokens, 0, range(4))
    assert torch.equal(tokens, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": 60}, "got 60; needs tokens of a vocabulary of 60"),
        ({"special": (-1,)}, "got -1"),
        ({"special": range(60)}, "got all 60 tokens"),
        ({"chosen": 0.0}, "chosen: got 0.0"),
        ({"chosen": 1.5}, "chosen: got 1.5"),
        ({"hidden": 0.8, "swapped": 0.3}, "at most 1 together"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        masking(**settings)


def test_a_number_for_each_sequence_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="got 3 for 4 sequences"):
        masking()(batch(4, 5), 0, range(3))


def test_marks_stand_behind_the_vocabulary_and_show_their_names() -> None:
    tokenizer = MarkedTokenizer(make_tokenizer("bytes"))
    assert tokenizer.special == (256, 257, 258, 259) == (*tokenizer.special[:3], tokenizer.mask)
    assert tokenizer.vocab_size == 260
    tokens = torch.from_numpy(tokenizer.encode("né"))
    whole = tokenizer.enclose(tokens.expand(2, -1))
    assert whole.tolist() == [[tokenizer.cls, 110, 195, 169, tokenizer.sep]] * 2
    hidden = [*whole[0].tolist(), tokenizer.mask, 98, tokenizer.pad]
    assert tokenizer.decode(hidden) == "[CLS]né[SEP][MASK]b[PAD]"
