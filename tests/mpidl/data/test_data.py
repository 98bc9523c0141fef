"""Texts, tokens and batches: what a rank gets, and one clear error for what cannot be used."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch

from mpidl.data import TokenBatches, corpora, make_tokenizer, read_corpus, shares
from mpidl.errors import UsageError

TEXT = "Who's there? «Ça va» — it's 3½ 年; we'll see.\n\n  def f(x):\n\treturn x ** 2  # 'd\u2003\u00a0end \n"


# ---- batches -----------------------------------------------------------------------------------------------


def batches(tokens: int = 1000, rank: int = 0, size: int = 1, **settings: int) -> TokenBatches:
    comm = SimpleNamespace(rank=rank, size=size)
    return TokenBatches(np.arange(tokens), comm, **{"block": 8, "batch": 2, **settings})


def global_batch(step: int, ranks: int, **settings: int) -> torch.Tensor:
    """The inputs of all ranks and micro-steps, in rank order."""
    parts = [x for rank in range(ranks) for x, _ in batches(rank=rank, size=ranks, **settings).step(step)]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("total", "ranks", "most", "expected"),
    [
        (12, 4, 3, (3, 1)),
        (12, 3, 3, (2, 2)),
        (12, 2, 3, (3, 2)),
        (12, 1, 5, (4, 3)),
        (7, 1, 3, (1, 7)),
        (4, 2, 9, (2, 1)),
    ],
)
def test_a_global_batch_is_shared_by_the_ranks_there_are(
    total: int, ranks: int, most: int, expected: tuple[int, int]
) -> None:
    batch, micro_steps = shares(total, ranks, most)
    assert (batch, micro_steps) == expected
    whole = global_batch(5, 1, batch=total)
    assert torch.equal(global_batch(5, ranks, batch=batch, micro_steps=micro_steps), whole)


def test_a_global_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UsageError, match=r"12 sequences .*5 ranks"):
        shares(12, 5, 2)


@pytest.mark.parametrize(
    ("ranks", "batch", "micro_steps"), [(2, 6, 1), (3, 4, 1), (4, 3, 1), (2, 3, 2), (1, 4, 3), (12, 1, 1)]
)
def test_the_global_batch_is_the_same_for_any_number_of_ranks(ranks: int, batch: int, micro_steps: int) -> None:
    whole = global_batch(5, 1, batch=12)
    assert torch.equal(global_batch(5, ranks, batch=batch, micro_steps=micro_steps), whole)


def test_targets_are_the_inputs_one_token_on() -> None:
    for x, y in batches(micro_steps=2).step(0):
        assert x.shape == y.shape == (2, 8)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)


def test_batches_depend_on_seed_and_step() -> None:
    made = {(seed, step): global_batch(step, 2, seed=seed) for seed, step in itertools.product(range(3), range(3))}
    again = global_batch(1, 2, seed=1)
    assert torch.equal(made[1, 1], again)
    for a, b in itertools.combinations(made, 2):
        assert not torch.equal(made[a], made[b])


def test_training_never_sees_the_validation_part() -> None:
    found = batches(200, batch=64)
    last = max(int(y.max()) for step in range(50) for _, y in found.step(step))
    assert last == 179  # every place of the first 90 % is reached, and none behind
    assert torch.equal(found.validation, torch.arange(180, 200))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("most", [0, 1, 5, 9])
def test_validation_covers_the_same_sequences_once_over_any_number_of_ranks(ranks: int, most: int) -> None:
    expected = Counter(x[0, 0].item() for x, _, _ in batches(batch=1).validate(most))
    assert set(expected.values()) == {1}
    assert sum(expected.values()) == (min(most, 12) or 12)  # 100 tokens behind 900: 12 sequences of 8
    found: Counter = Counter()
    passes = set()
    for rank in range(ranks):
        parts = list(batches(rank=rank, size=ranks, batch=2).validate(most))
        passes.add(len(parts))
        for x, y, counted in parts:
            assert torch.equal(y, x + 1)
            assert counted in (0, x.numel())
            found.update(x[: counted // 8, 0].tolist())
    assert found == expected
    assert len(passes) == 1


def test_a_text_shorter_than_a_block_says_how_long_it_must_be() -> None:
    with pytest.raises(UsageError, match=r"50 tokens leave 5 .* of 8 needs 9"):
        batches(50)
    batches(90)


@pytest.mark.mpi
def test_the_ranks_together_make_the_global_batch(comm) -> None:
    settings = {"block": 8, "batch": 12 // comm.size, "seed": 3}
    for step in range(3):
        ((x, _),) = TokenBatches(np.arange(1000), comm, **settings).step(step)
        everything = torch.empty(12, 8, dtype=torch.int64)
        comm.all_gather(everything, x.contiguous())
        assert torch.equal(everything, global_batch(step, 1, batch=12, seed=3))


# ---- texts -------------------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_the_standard_library_is_the_same_text_on_every_rank(comm) -> None:
    text = read_corpus("stdlib", comm)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = np.empty((comm.size, 32), np.uint8)
    comm.all_gather(digests, digest)
    assert (digests == digest).all()
    assert 1 << 20 < len(text.encode()) <= corpora.STDLIB_BYTES
    assert "class OrderedDict" in text or "class ArgumentParser" in text


@pytest.mark.mpi
def test_what_rank_0_cannot_read_is_an_error_on_every_rank(comm, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: No such file"):
        read_corpus(str(tmp_path / "nowhere") if comm.rank == 0 else os.devnull, comm)


@pytest.mark.mpi
def test_whatever_goes_wrong_on_rank_0_is_an_error_on_every_rank(comm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise MemoryError("4 MiB")

    monkeypatch.setattr(corpora, "standard_library", fail)
    with pytest.raises(UsageError, match="4 MiB"):
        read_corpus("stdlib", comm)


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\r\n\xc3\xa9\n")
    assert corpora.read_text(path) == "a\r\né\n"


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(UsageError, match=r"text: is not UTF-8 text \(byte 3\)"):
        corpora.read_text(path)
    with pytest.raises(UsageError, match="Is a directory"):
        corpora.read_text(tmp_path)


def test_an_installation_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match=r"no Python sources; .*--data"):
        corpora.standard_library()


@pytest.fixture
def shakespeare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the download, at the address and with the checksum that are expected."""
    source = tmp_path / "source"
    source.write_text("To be, or not to be\n")
    monkeypatch.setattr(corpora, "SHAKESPEARE", source.as_uri())
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source


def test_tinyshakespeare_is_downloaded_once(shakespeare: Path, tmp_path: Path) -> None:
    text = corpora.tiny_shakespeare()
    assert text == "To be, or not to be\n"
    shakespeare.unlink()
    assert corpora.tiny_shakespeare() == text
    assert [path.name for path in (tmp_path / "cache/mpidl").iterdir()] == ["tinyshakespeare.txt"]


def test_a_damaged_cache_is_downloaded_anew(shakespeare: Path, tmp_path: Path) -> None:
    (tmp_path / "cache/mpidl").mkdir(parents=True)
    (tmp_path / "cache/mpidl/tinyshakespeare.txt").write_text("To be")
    assert corpora.tiny_shakespeare() == "To be, or not to be\n"


def test_offline_says_what_to_do_instead(shakespeare: Path) -> None:
    shakespeare.unlink()
    with pytest.raises(UsageError, match=r"cannot be downloaded .*--data PATH"):
        corpora.tiny_shakespeare()


def test_another_text_than_expected_is_refused(shakespeare: Path) -> None:
    shakespeare.write_text("To be, or to be\n")
    with pytest.raises(UsageError, match="another checksum"):
        corpora.tiny_shakespeare()


# ---- tokens ------------------------------------------------------------------------------------------------


def test_bytes_are_tokens() -> None:
    tokenizer = make_tokenizer("bytes")
    tokens = tokenizer.encode(TEXT)
    assert tokens.tolist() == list(TEXT.encode())
    assert tokenizer.decode(tokens.tolist()) == TEXT
    assert tokenizer.decode([0xE5, 0xB9, 0x20]) == "\ufffd "


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary in the published format, learned from the texts of this file by counting pairs."""
    letters = letters_of_bytes()
    words = [[letters[b] for b in word.encode()] for word in (Path(__file__).read_text() + TEXT).split(" ")]
    words = [["Ġ", *word] for word in words]
    merges: list[tuple[str, str]] = []
    for _ in range(300):
        (a, b), _count = Counter(pair for w in words for pair in itertools.pairwise(w)).most_common(1)[0]
        merges.append((a, b))
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (a, b):
                    word[i : i + 2] = [a + b]
                i += 1
    shown = sorted(letters, key=lambda letter: (ord(letter) > 255, letter))
    tokens = [*shown, *(a + b for a, b in merges), "<|endoftext|>"]
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def letters_of_bytes() -> list[str]:
    """How the files write each byte: as the Latin-1 character if it shows, else as one counted on from U+0100."""
    hidden = itertools.count(256)
    return [chr(b) if chr(b).isprintable() and chr(b) != " " else chr(next(hidden)) for b in range(256)]


def texts() -> list[str]:
    """The text above, this file, and random characters of many kinds."""
    rng = random.Random(0)
    pools = [
        "abc XYZ's 've 12 \n\t",
        "éßж年ñ½²٣Ⅷ",
        "\u00a0\u2003\u0085\u3000 \x1c\x1f\x0b",
        "—«»🙂\u0301\u200d\x00",
    ]
    mixed = ["".join(rng.choice(rng.choice(pools)) for _ in range(60)) for _ in range(300)]
    return [TEXT, Path(__file__).read_text(), "", " ", "\n\n", *mixed]


def test_byte_pairs_equal_those_of_tiktoken(vocabulary: Path) -> None:
    """The judge ranks the pairs by their tokens' numbers, and tells letters by a regular expression of its own."""
    bytes_of = {letter: bytes([byte]) for byte, letter in enumerate(letters_of_bytes())}
    ranks = {
        b"".join(bytes_of[letter] for letter in token): number
        for token, number in json.loads((vocabulary / "vocab.json").read_text()).items()
        if token != "<|endoftext|>"
    }
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    other = tiktoken.Encoding("judge", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 556})
    tokenizer = make_tokenizer("gpt2", str(vocabulary))
    assert tokenizer.vocab_size == other.n_vocab == 557
    for text in [*texts(), "an <|endoftext|> is ordinary text"]:
        tokens = tokenizer.encode(text).tolist()
        assert tokens == other.encode_ordinary(text), repr(text)
        assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([ranks[b"\xe5"], 10_000, ranks[b" "]]) == "\ufffd "
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode())


def test_the_older_names_of_the_vocabulary_files(vocabulary: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.bpe").write_bytes((vocabulary / "merges.txt").read_bytes())
    (tmp_path / "encoder.json").write_bytes((vocabulary / "vocab.json").read_bytes())
    tokens = make_tokenizer("gpt2", str(tmp_path)).encode(TEXT)
    assert tokens.tolist() == make_tokenizer("gpt2", str(vocabulary)).encode(TEXT).tolist()


def test_vocabularies_that_cannot_be_used_are_named(vocabulary: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has neither merges\.txt nor vocab\.bpe"):
        make_tokenizer("gpt2", str(tmp_path))
    (tmp_path / "merges.txt").write_bytes((vocabulary / "merges.txt").read_bytes())
    for wrong in ("{", "[]", "{}", '{"a": 0}'):
        (tmp_path / "vocab.json").write_text(wrong)
        with pytest.raises(UsageError, match="are no vocabulary of GPT-2"):
            make_tokenizer("gpt2", str(tmp_path))


def test_tokenizers_that_do_not_exist_or_take_no_vocabulary() -> None:
    with pytest.raises(UsageError, match="'words'; needs bytes or gpt2"):
        make_tokenizer("words")
    with pytest.raises(UsageError, match="--vocab is for --tokenizer gpt2"):
        make_tokenizer("bytes", "somewhere")


def test_without_the_package_tokenizers_it_is_asked_for(vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"needs the package tokenizers \(pip install 'mpidl\[text\]'\)"):
        make_tokenizer("gpt2", str(vocabulary))


def test_without_tiktoken_a_vocabulary_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UsageError, match=r"package tiktoken .*merges\.txt and vocab\.json as --vocab"):
        make_tokenizer("gpt2")


def test_a_vocabulary_that_tiktoken_cannot_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ConnectionError

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=refuse))
    with pytest.raises(UsageError, match=r"cannot get GPT-2's vocabulary \(ConnectionError\)"):
        make_tokenizer("gpt2")
