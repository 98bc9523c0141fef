"""Tokenizer of BERT: word pieces of the vocabulary that its published weights bring, by the package tokenizers.

    text -> words and punctuation signs -> of each the longest piece that the vocabulary has, then of the rest ...
    "Unreadable!" -> unreadable ! -> un ##read ##able !

Sources: Wu et al. 2016, "Google's Neural Machine Translation System", section 4.1; Devlin et al. 2018, section 3.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ..errors import UsageError
from ..optional_packages import import_optional
from ..regular_files import read_regular
from .tokenizers import MarkedTokenizer, Tokens, make_tokenizer

_LONGEST_WORD = 100  # characters; a longer one is unknown
_LONGEST_FILE = 1 << 28  # bytes


class WordPieceTokenizer(MarkedTokenizer):
    """The vocabulary in a directory: vocab.txt, a piece a line; its marks stand among the pieces.

    tokenizer_config.json there says with `"do_lower_case": false` that case and accents count; else they do not.
    """

    def __init__(self, folder: str | Path) -> None:
        tokenizers = import_optional(
            "tokenizers", "the wordpiece tokenizer needs the package tokenizers (pip install 'mpidl[text]')"
        )
        path, settings = Path(folder) / "vocab.txt", Path(folder) / "tokenizer_config.json"
        try:
            text = read_regular(path, _LONGEST_FILE).decode("utf-8")
            self._pieces = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
            lower = True
            if settings.exists():
                lower = bool(json.loads(read_regular(settings, _LONGEST_FILE)).get("do_lower_case", True))
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None
        except (ValueError, AttributeError, RecursionError) as error:
            raise UsageError(f"{folder}: vocab.txt or tokenizer_config.json cannot be read: {error}") from None
        numbers = {piece: number for number, piece in enumerate(self._pieces)}
        missing = [mark for mark in (*self.names, "[UNK]") if mark not in numbers]
        if missing:
            raise UsageError(f"{path}: has no {missing[0]}; is it a vocabulary of BERT?")
        self.special = tuple(numbers[mark] for mark in self.names)  # not [UNK]: there a text has a word
        self.pad, self.cls, self.sep, self.mask = self.special
        self.vocab_size = len(self._pieces)
        # The marks are not added as special tokens: in a text they are ordinary characters.
        model = tokenizers.models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> Tokens:
        """Encodes text: int32 [tokens]; a mark in it is ordinary text."""
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def decode(self, tokens: list[int]) -> str:
        """Decodes to words with one space between; what `encode` dropped is lost."""
        return " ".join(self._pieces[token] for token in tokens).replace(" ##", "")


def make_marked_tokenizer(name: str, vocabulary: str | None = None) -> MarkedTokenizer:
    """Makes the tokenizer "wordpiece", with a directory's vocabulary, or one of `make_tokenizer` with marks added."""
    if name != "wordpiece":
        return MarkedTokenizer(make_tokenizer(name, vocabulary))
    if vocabulary is None:
        raise UsageError("--tokenizer wordpiece needs a directory with vocab.txt as --vocab")
    return WordPieceTokenizer(vocabulary)
