"""GPT-2's byte-pair encoding from its vocabulary files, by the package tokenizers.

Sources: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units"; Radford et al.
2019, section 2.2, for doing it on bytes.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from .library import tokenizers_library


class BytePairs:
    """The vocabulary in a directory: merges.txt and vocab.json, also named vocab.bpe and encoder.json."""

    def __init__(self, folder: str | Path) -> None:
        library = tokenizers_library("the gpt2 tokenizer with --vocab")
        merges = _one_of(Path(folder), "merges.txt", "vocab.bpe")
        names = _one_of(Path(folder), "vocab.json", "encoder.json")
        try:
            vocabulary, pairs = library.models.BPE.read_file(str(names), str(merges))
            missing = set(library.pre_tokenizers.ByteLevel.alphabet()).difference(vocabulary)
            if missing:
                raise ValueError(f"{len(missing)} bytes have no token")
            self._tokenizer = library.Tokenizer(library.models.BPE(vocabulary, pairs))
        except Exception as error:  # the package has no class of its own for them
            raise UsageError(f"{merges} and {names}: are no vocabulary of GPT-2 ({error})") from None
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = library.decoders.ByteLevel()
        self.vocab_size: int = 1 + max(vocabulary.values())

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; an end-of-text mark in it is ordinary text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, with U+FFFD for broken characters; nothing for numbers that the vocabulary lacks."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _one_of(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise UsageError(f"{folder}: has neither {' nor '.join(names)}")
