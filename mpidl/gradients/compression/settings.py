"""`compress=` of an engine: the compressor by name, where it compresses, whether errors are fed back.

compress="int8"                                                  a name of `COMPRESSORS`, with its settings
compress=mpidl.Compression("powersgd:4", where="everywhere")     with more
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import ConfigurationError
from .blockwise import Blockwise
from .casts import Cast
from .compressor import Compressor

WHERE = ("between_nodes", "everywhere")

# What makes the compressor of a name from its settings, which follow a colon: "powersgd:4". None: there are none.
COMPRESSORS: dict[str, Callable[[str | None], Compressor]] = {
    "bf16": lambda given: _without("bf16", given, Cast(torch.bfloat16)),
    "fp16": lambda given: _without("fp16", given, Cast(torch.float16)),
    "int8": lambda given: _without("int8", given, Blockwise(8)),
    "int4": lambda given: _without("int4", given, Blockwise(4)),
    "sign": lambda given: _without("sign", given, _sign()),
}


@dataclass(frozen=True)
class Compression:
    """How an engine compresses the gradients that it reduces.

    method: a name such as "int8" or "powersgd:4" (`COMPRESSORS`), or a `Compressor`, which then serves one engine.
    where: "between_nodes": gradients are summed inside each node in full precision, and the sums compressed between
        nodes; "everywhere": every rank compresses its own. By default between nodes if there are several, all with as
        many ranks, numbered node by node; else everywhere.
    error_feedback: add what a step did not send to the gradients of the next one; by default as the method needs it.
        Takes memory: 4 bytes a parameter, between nodes divided by the ranks of a node.
    start_step: steps that reduce in full precision first.

    Raises ConfigurationError for wrong values.
    """

    method: str | Compressor
    where: str | None = None
    error_feedback: bool | None = None
    start_step: int = 0

    def __post_init__(self) -> None:
        self.compressor()
        if self.where is not None and self.where not in WHERE:
            raise ConfigurationError(f"compress: where: got {self.where!r}; needs one of {', '.join(WHERE)}, or None")
        if self.error_feedback not in (None, True, False):
            raise ConfigurationError(f"compress: error_feedback: got {self.error_feedback!r}; needs a bool, or None")
        if isinstance(self.start_step, bool) or not isinstance(self.start_step, int) or self.start_step < 0:
            raise ConfigurationError(f"compress: start_step: got {self.start_step!r}; needs an integer from 0 up")

    def compressor(self) -> Compressor:
        """Makes the compressor."""
        if isinstance(self.method, Compressor):
            return self.method
        if not isinstance(self.method, str):
            raise ConfigurationError(
                f"compress: got {type(self.method).__name__}; needs a name, a Compressor or a Compression"
            )
        name, colon, settings = self.method.partition(":")
        if name not in COMPRESSORS:
            raise ConfigurationError(f"compress: got {self.method!r}; needs one of {', '.join(COMPRESSORS)}")
        return COMPRESSORS[name](settings if colon else None)


def compression(given: Compression | Compressor | str) -> Compression:
    """The settings from an engine's argument `compress`. Raises ConfigurationError for wrong ones."""
    return given if isinstance(given, Compression) else Compression(given)


def _sign() -> Compressor:
    from .sign import Sign  # which few programs need

    return Sign()


def _without(name: str, given: str | None, made: Compressor) -> Compressor:
    if given is not None:
        raise ConfigurationError(f"compress: got {name}:{given}; {name} has no settings")
    return made
