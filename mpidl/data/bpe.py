"""GPT-2's byte-pair encoding from its vocabulary files, with nothing but Python's standard library.

    text -> words (a regular expression) -> each word's bytes -> the earliest-learned pair of neighbours
    becomes one token, again and again, until no neighbours are a learned pair

Sources: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units"; Radford et al.
2019, section 2.2, for doing it on bytes.
"""

from __future__ import annotations

import json
import re
import unicodedata
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from ..errors import UsageError

# Contractions; letters, digits or other signs with at most one space before; spaces, the last left to a word.
_WORD = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)


class _Shapes(dict[int, str]):
    """A stand-in in ASCII for each character, of the same class: letter, number, space or other.

    With it the expression above needs no classes of Unicode, which Python's `re` does not have.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)[0]
        if code < 128 and not 0x1C <= code <= 0x1F:  # those four are space to Python, not to Unicode
            shape = character
        elif kind in "LN":
            shape = "a" if kind == "L" else "0"
        else:
            shape = "\t" if character.isspace() and code >= 128 else "!"
        self[code] = shape
        return shape


class BytePairs:
    """The vocabulary in a directory: merges.txt and vocab.json, also named vocab.bpe and encoder.json."""

    def __init__(self, folder: str | Path) -> None:
        merges = _one_of(Path(folder), "merges.txt", "vocab.bpe")
        names = _one_of(Path(folder), "vocab.json", "encoder.json")
        letters = _letters_of_bytes()
        bytes_of = {letter: bytes([byte]) for byte, letter in letters.items()}
        try:
            lines = merges.read_text(encoding="utf-8").removeprefix("#version: 0.2").split("\n")
            vocabulary: dict[str, int] = json.loads(names.read_text(encoding="utf-8"))
            pairs = [tuple(line.split()) for line in lines if line.strip()]
            self._ranks = {(vocabulary[a], vocabulary[b]): rank for rank, (a, b) in enumerate(pairs)}
            self._merged = {(vocabulary[a], vocabulary[b]): vocabulary[a + b] for a, b in pairs}
            self._first = [vocabulary[letters[byte]] for byte in range(256)]
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(f"{merges} and {names}: are no vocabulary of GPT-2 ({reason})") from None
        self._bytes = {
            number: b"".join(bytes_of.get(letter, letter.encode()) for letter in token)
            for token, number in vocabulary.items()
        }
        self.vocab_size = 1 + max(vocabulary.values())
        self._shapes = _Shapes()
        self._word = lru_cache(maxsize=1 << 18)(self._merge)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; an end-of-text mark in it is ordinary text."""
        tokens: list[int] = []
        for match in _WORD.finditer(text.translate(self._shapes)):
            tokens.extend(self._word(text[match.start() : match.end()]))
        return tokens

    def decode(self, tokens: list[int]) -> bytes:
        """The bytes of tokens; nothing for numbers that the vocabulary does not have."""
        return b"".join(self._bytes.get(token, b"") for token in tokens)

    def _merge(self, word: str) -> tuple[int, ...]:
        parts = [self._first[byte] for byte in word.encode()]
        never = len(self._ranks)
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, never))
            if best not in self._ranks:
                break
            joined, i = [], 0
            while i < len(parts):
                together = i < len(pairs) and pairs[i] == best
                joined.append(self._merged[best] if together else parts[i])
                i += 2 if together else 1
            parts = joined
        return tuple(parts)


def _letters_of_bytes() -> dict[int, str]:
    """How the files write a byte: as the Latin-1 character if it shows, else as one counted on from
    U+0100."""
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + n) for n, b in enumerate(hidden)}


def _one_of(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise UsageError(f"{folder}: has neither {' nor '.join(names)}")
