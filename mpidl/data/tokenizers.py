"""Text to tokens and back: bytes, or GPT-2's byte-pair encoding; either with the marks that BERT needs."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import UsageError
from .bpe import BytePairs

Tokens = np.ndarray[Any, np.dtype[Any]]


class Tokenizer(Protocol):
    """vocab_size: tokens are 0 <= t < vocab_size."""

    vocab_size: int

    def encode(self, text: str) -> Tokens:
        """Integers [tokens], of as few bytes as the vocabulary needs."""

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens; what cannot be decoded becomes U+FFFD."""


class ByteTokenizer:
    """One token a byte of the UTF-8 text."""

    vocab_size = 256

    def encode(self, text: str) -> Tokens:
        """uint8 [bytes]."""
        return np.frombuffer(bytearray(text.encode()), np.uint8)

    def decode(self, tokens: list[int]) -> str:
        """Broken characters become U+FFFD."""
        return bytes(tokens).decode(errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding.

    vocabulary: a directory with merges.txt and vocab.json (or vocab.bpe and encoder.json, their older names),
    read by the package tokenizers; without it tiktoken's, which tiktoken downloads once.
    """

    def __init__(self, vocabulary: str | None = None) -> None:
        self._pairs = None if vocabulary is None else BytePairs(vocabulary)
        if self._pairs is None:
            self._tiktoken = _from_tiktoken()
        self.vocab_size: int = self._tiktoken.n_vocab if self._pairs is None else self._pairs.vocab_size

    def encode(self, text: str) -> Tokens:
        """int32 [tokens]; an end-of-text mark is taken as ordinary text."""
        encode = self._tiktoken.encode_ordinary if self._pairs is None else self._pairs.encode
        return np.array(encode(text), np.int32)

    def decode(self, tokens: list[int]) -> str:
        """Broken characters become U+FFFD."""
        text: str = self._tiktoken.decode(tokens) if self._pairs is None else self._pairs.decode(tokens)
        return text


class MarkedTokenizer:
    """Another tokenizer with BERT's marks behind its vocabulary; no text becomes a mark.

    pad, cls, sep, mask: their numbers. special: all of them. vocab_size: with them.
    """

    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")

    def __init__(self, text: Tokenizer) -> None:
        self._text = text
        self.special = tuple(range(text.vocab_size, text.vocab_size + len(self.names)))
        self.pad, self.cls, self.sep, self.mask = self.special
        self.vocab_size = text.vocab_size + len(self.names)

    def encode(self, text: str) -> Tokens:
        """Encodes without marks, as the tokenizer that it has."""
        return self._text.encode(text)

    def enclose(self, tokens: torch.Tensor) -> torch.Tensor:
        """[CLS] before and [SEP] behind each sequence: [..., time] -> int64 [..., time + 2]."""
        shape = (*tokens.shape[:-1], 1)
        first, last = (torch.full(shape, mark, device=tokens.device) for mark in (self.cls, self.sep))
        return torch.cat([first, tokens.long(), last], -1)

    def decode(self, tokens: list[int]) -> str:
        """Marks become their names."""
        first = self.special[0]
        parts = []
        for marks, group in itertools.groupby(tokens, lambda token: token >= first):
            run = list(group)
            parts += [self.names[token - first] for token in run] if marks else [self._text.decode(run)]
        return "".join(parts)


def _from_tiktoken() -> Any:
    instead = "give a directory with merges.txt and vocab.json as --vocab"
    try:
        import tiktoken
    except ImportError:
        raise UsageError(
            f"the gpt2 tokenizer needs the package tiktoken (pip install 'mpidl[text]'); or {instead}"
        ) from None
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # of whatever it downloads with
        raise UsageError(f"tiktoken cannot get GPT-2's vocabulary ({type(error).__name__}); {instead}") from None


def make_tokenizer(name: str, vocabulary: str | None = None) -> Tokenizer:
    """ "bytes" or "gpt2"; see the classes."""
    if name == "gpt2":
        return GPT2Tokenizer(vocabulary)
    if name != "bytes":
        raise UsageError(f"tokenizer: got {name!r}; needs bytes or gpt2")
    if vocabulary is not None:
        raise UsageError("--vocab is for --tokenizer gpt2; bytes need no vocabulary")
    return ByteTokenizer()
