"""Tokenizers: bytes, or GPT-2's byte-pair encoding; either with the special tokens that BERT needs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import UsageError
from ..optional_packages import import_optional

Tokens = np.ndarray[Any, np.dtype[Any]]


class Tokenizer(Protocol):
    """Interface of a tokenizer. vocab_size: tokens are 0 <= t < vocab_size."""

    vocab_size: int

    def encode(self, text: str) -> Tokens:
        """Encodes text: integers [tokens], of the smallest dtype that holds the vocabulary."""

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens; what cannot be decoded becomes U+FFFD."""


class ByteTokenizer:
    """One token a byte of the UTF-8 text."""

    vocab_size = 256

    def encode(self, text: str) -> Tokens:
        """Encodes text: uint8 [bytes]."""
        return np.frombuffer(bytearray(text.encode()), np.uint8)

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens; broken characters become U+FFFD."""
        return bytes(tokens).decode(errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding by the package tiktoken, which downloads the vocabulary once.

    Sources: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units"; Radford et al. 2019,
    section 2.2, for doing it on bytes.
    """

    def __init__(self) -> None:
        instead = "give a directory with merges.txt and vocab.json as --vocab"
        tiktoken = import_optional(
            "tiktoken", f"the gpt2 tokenizer needs the package tiktoken (pip install 'mpidl[text]'); or {instead}"
        )
        try:
            self._pairs = tiktoken.get_encoding("gpt2")
        except Exception as error:  # of whatever it downloads with
            raise UsageError(f"tiktoken cannot get GPT-2's vocabulary ({type(error).__name__}); {instead}") from None
        self.vocab_size: int = self._pairs.n_vocab

    def encode(self, text: str) -> Tokens:
        """Encodes text: int32 [tokens]; an end-of-text mark in it is ordinary text."""
        return np.array(self._pairs.encode_ordinary(text), np.int32)

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens; broken characters become U+FFFD."""
        return str(self._pairs.decode(tokens))


class BytePairs:
    """GPT-2's byte-pair encoding by the package tokenizers, with the vocabulary in a directory.

    folder: has merges.txt and vocab.json, or vocab.bpe and encoder.json, their older names.
    """

    def __init__(self, folder: str | Path) -> None:
        tokenizers = import_optional(
            "tokenizers", "the gpt2 tokenizer with --vocab needs the package tokenizers (pip install 'mpidl[text]')"
        )
        merges = _one_of(Path(folder), "merges.txt", "vocab.bpe")
        names = _one_of(Path(folder), "vocab.json", "encoder.json")
        try:
            self._pairs = tokenizers.ByteLevelBPETokenizer.from_file(str(names), str(merges))
            vocabulary = self._pairs.get_vocab()
            missing = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()).difference(vocabulary)
            if missing:
                raise ValueError(f"{len(missing)} bytes have no token")
        except Exception as error:  # the package has no class of its own for them
            raise UsageError(f"{merges} and {names}: are no vocabulary of GPT-2 ({error})") from None
        self.vocab_size: int = 1 + max(vocabulary.values())

    def encode(self, text: str) -> Tokens:
        """Encodes text: int32 [tokens]; an end-of-text mark in it is ordinary text."""
        return np.array(self._pairs.encode(text).ids, np.int32)

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens; broken characters become U+FFFD, unknown numbers are left out."""
        return str(self._pairs.decode(tokens))


def _one_of(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise UsageError(f"{folder}: has neither {' nor '.join(names)}")


class MarkedTokenizer:
    """Another tokenizer with BERT's marks behind its vocabulary; no text becomes a mark.

    pad, cls, sep, mask: their numbers.
    special: all of them.
    vocab_size: with them.
    """

    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")

    def __init__(self, text: Tokenizer) -> None:
        self._text = text
        self.special = tuple(range(text.vocab_size, text.vocab_size + len(self.names)))
        self.pad, self.cls, self.sep, self.mask = self.special
        self.vocab_size = text.vocab_size + len(self.names)

    def encode(self, text: str) -> Tokens:
        """Encodes text by the inner tokenizer, without marks."""
        return self._text.encode(text)

    def enclose(self, tokens: torch.Tensor) -> torch.Tensor:
        """Puts [CLS] before and [SEP] behind each sequence: [..., time] -> int64 [..., time + 2]."""
        shape = (*tokens.shape[:-1], 1)
        first, last = (torch.full(shape, mark, device=tokens.device) for mark in (self.cls, self.sep))
        return torch.cat([first, tokens.long(), last], -1)

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens; marks become their names."""
        first = self.special[0]
        parts = []
        for marks, group in itertools.groupby(tokens, lambda token: token >= first):
            run = list(group)
            parts += [self.names[token - first] for token in run] if marks else [self._text.decode(run)]
        return "".join(parts)


def make_tokenizer(name: str, vocabulary: str | None = None) -> Tokenizer:
    """Makes the tokenizer "bytes" or "gpt2"; vocabulary: directory of files for "gpt2"."""
    if name == "gpt2":
        return GPT2Tokenizer() if vocabulary is None else BytePairs(vocabulary)
    if name != "bytes":
        raise UsageError(f"tokenizer: got {name!r}; needs bytes or gpt2")
    if vocabulary is not None:
        raise UsageError("--vocab is for --tokenizer gpt2; bytes need no vocabulary")
    return ByteTokenizer()
