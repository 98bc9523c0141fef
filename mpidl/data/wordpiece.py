"""BERT's word pieces from the vocabulary that its published weights bring, with nothing but Python's standard library.

    text -> words and punctuation signs -> of each the longest piece that the vocabulary has, then of the rest ...
    "Unreadable!" -> unreadable ! -> un ##read ##able !

Sources: Wu et al. 2016, "Google's Neural Machine Translation System", section 4.1; Devlin et al. 2018, section 3.
"""

from __future__ import annotations

import json
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..errors import UsageError
from .tokenizers import MarkedTokenizer, Tokens

_LONGEST_WORD = 100  # characters; a longer one is unknown
# Chinese, Japanese and Korean ideographs: each is a word.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class WordPieceTokenizer(MarkedTokenizer):
    """The vocabulary in a directory: vocab.txt, a piece a line; its marks stand among the pieces.

    tokenizer_config.json there says with `"do_lower_case": false` that case and accents count; else they do not.
    """

    def __init__(self, folder: str | Path) -> None:
        path, settings = Path(folder) / "vocab.txt", Path(folder) / "tokenizer_config.json"
        try:
            self._pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            self._lower = True
            if settings.exists():
                self._lower = bool(json.loads(settings.read_text(encoding="utf-8")).get("do_lower_case", True))
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None
        except (ValueError, AttributeError) as error:
            raise UsageError(f"{folder}: vocab.txt or tokenizer_config.json cannot be read: {error}") from None
        self._numbers = {piece: number for number, piece in enumerate(self._pieces)}
        missing = [mark for mark in (*self.names, "[UNK]") if mark not in self._numbers]
        if missing:
            raise UsageError(f"{path}: has no {missing[0]}; is it a vocabulary of BERT?")
        self.special = tuple(self._numbers[mark] for mark in self.names)
        self.pad, self.cls, self.sep, self.mask = self.special
        self._unknown = self._numbers["[UNK]"]  # not special: there a text has a word
        self.vocab_size = len(self._pieces)
        self._cut = lru_cache(maxsize=1 << 18)(self._cut_word)

    def encode(self, text: str) -> Tokens:
        """int32 [tokens]. A mark in the text is ordinary text."""
        return np.array([token for word in self._words(text) for token in self._cut(word)], np.int32)

    def decode(self, tokens: list[int]) -> str:
        """Words with a space between each two; what `encode` dropped stays lost."""
        return " ".join(self._pieces[token] for token in tokens).replace(" ##", "")

    def _words(self, text: str) -> list[str]:
        if self._lower:
            text = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
        return "".join(_spaced(character) for character in text).split()

    def _cut_word(self, word: str) -> tuple[int, ...]:
        tokens: list[int] = []
        start = 0
        while start < len(word) <= _LONGEST_WORD:
            ends = range(len(word), start, -1)
            pieces = ("##" * (start > 0) + word[start:end] for end in ends)
            found = next((piece for piece in pieces if piece in self._numbers), None)
            if found is None:
                break
            tokens.append(self._numbers[found])
            start += len(found) - 2 * (start > 0)
        return tuple(tokens) if start == len(word) else (self._unknown,)


@lru_cache(maxsize=1 << 16)
def _spaced(character: str) -> str:
    """A character with spaces around it where it is a word of its own; a space or nothing for what is not shown."""
    code, kind = ord(character), unicodedata.category(character)
    if character in "\t\n\r" or kind == "Zs":
        return " "
    if kind[0] == "C" or code == 0xFFFD:
        return ""
    ascii_sign = code < 128 and not character.isalnum()  # such as $ and +, which are not punctuation to Unicode
    ideograph = any(first <= code <= last for first, last in _IDEOGRAPHS)
    return f" {character} " if ascii_sign or ideograph or kind[0] == "P" else character
