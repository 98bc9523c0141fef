"""Base class of the methods that send a fraction of the values, such as "topk:0.01"."""

from __future__ import annotations

import math

from .compressor import Compressor
from .options import Option, check, read

FRACTION = Option(float, lambda value: 0 < value <= 1, "a part of the values, above 0 and up to 1")


class FractionCompressor(Compressor):
    """Sends a fraction of the values, and no other settings follow its name.

    Raises ConfigurationError for another fraction than above 0 and up to 1.
    """

    method: str  # of `name`

    def __init__(self, fraction: float = 0.01) -> None:
        check(self.method, "fraction", FRACTION, fraction)
        self.fraction = fraction

    @classmethod
    def of(cls, text: str | None) -> FractionCompressor:
        """Makes one of the settings in a name."""
        given = read(cls.method, text, ("fraction", FRACTION))
        return cls() if given.first is None else cls(given.first)

    @property
    def name(self) -> str:
        """The method and its fraction."""
        return f"{self.method}:{self.fraction:g}"


def count_of(elements: int, fraction: float) -> int:
    """Counts the values that are sent: at least one, if there are any."""
    return min(elements, math.ceil(fraction * elements))
