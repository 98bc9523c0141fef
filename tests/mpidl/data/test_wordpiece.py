"""WordPiece tokens equal those of transformers' BertTokenizer; broken vocabularies are named."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from mpidl.data.wordpiece import WordPieceTokenizer
from mpidl.errors import UsageError

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG.,;:!?'\"-_$+*()[]<=>^`|~@#%&/\\éñß年国ż“”—€"]
PIECES = ["un", "##read", "##able", "the", "##ing", "##s", "re", "##ad", "##a", "##b", "mask", "pad", "naïve", "naive"]
VOCABULARY = [*MARKS, *LETTERS, *PIECES, *(f"##{c}" for c in "cdefghilmnoprstu01")]
TEXTS = [
    "Unreadable, the Reading of masks!\n\tNaïve naïve  NAÏVE\u00a0x\u2003y",
    "C'est l'été à Łódź — 年国年 [MASK] [UNK] a\u200bb \u0000c\ufffdd",
    "$5+3=8 <tag> don't e-mail me@home #1 50% ^_^ “quoted” €9 ½ ①",
    "",
    " \n ",
    "a" * 100 + " " + "a" * 101,
    "e\u0301 E\u0301 ﬁ İstanbul ẞ",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return tmp_path


def random_text(seed: int) -> str:
    rng = random.Random(seed)
    alphabet = "abcdehinrstuABéü .,;!'-\n年\u0301$\u00ad\u2028\U0001f600"
    return "".join(rng.choice(alphabet) for _ in range(300))


@pytest.mark.parametrize("lower", [True, False])
def test_tokens_equal_those_of_transformers(folder: Path, lower: bool) -> None:
    transformers = pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    theirs = transformers.BertTokenizer(str(folder / "vocab.txt"), do_lower_case=lower)
    ours = WordPieceTokenizer(folder)
    for text in (*TEXTS, *map(random_text, range(20))):
        plain = text.replace("[MASK]", "mask").replace("[UNK]", "unk")  # to transformers those are no text
        expected = theirs(plain, add_special_tokens=False)["input_ids"]
        assert ours.encode(plain).tolist() == expected, repr(plain)


def test_marks_are_those_of_the_vocabulary_and_no_text_becomes_one(folder: Path) -> None:
    tokenizer = WordPieceTokenizer(folder)
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert tokenizer.special == (0, 2, 3, 4)
    assert tokenizer.vocab_size == len(VOCABULARY)
    assert not set(tokenizer.encode("[MASK] [PAD]").tolist()) & set(tokenizer.special)


def test_decode_joins_pieces(folder: Path) -> None:
    tokenizer = WordPieceTokenizer(folder)
    tokens = tokenizer.encode("Unreadable  the\nreads").tolist()
    assert tokenizer.decode([*tokens, tokenizer.mask]) == "unreadable the reads [MASK]"


def test_vocabularies_that_cannot_be_used_are_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"vocab\.txt: No such file"):
        WordPieceTokenizer(folder / "nowhere")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UsageError, match="cannot be read"):
        WordPieceTokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"tokenizer_config\.json cannot be read"):
        WordPieceTokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json: is a pipe, no regular file"):
        WordPieceTokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "vocab.txt").write_text("[PAD]\n[CLS]\na\n")
    with pytest.raises(UsageError, match=r"has no \[SEP\]"):
        WordPieceTokenizer(folder)
