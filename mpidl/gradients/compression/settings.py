"""`compress=` of an engine: the registry of compressors by name, where to compress, and whether errors are fed back.

compress="auto"                                                  measures, and chooses bf16 or none (`auto`)
compress=mpidl.Compression("auto", allow=("int8",))              or int8 too

compress="int8"                                                  a name of `COMPRESSORS`, with its settings
compress=mpidl.Compression("powersgd:4", where="everywhere")     with more
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from ...errors import ConfigurationError
from .blockwise import Blockwise
from .compressor import Compressor, OwnedCompressor

WHERE = ("between_nodes", "everywhere")
OF_PARAMETERS = ("bf16", "fp16", "int8")  # of COMPRESSORS, those by which weights are gathered: `compress_parameters=`

# The maker of each name's compressor. It takes the settings after the colon ("powersgd:4"); None: there are none.
COMPRESSORS: dict[str, Callable[[str | None], Compressor]] = {
    "bf16": lambda given: _without("bf16", given, _imported("casts", "Cast")(torch.bfloat16)),
    "fp16": lambda given: _without("fp16", given, _imported("casts", "Cast")(torch.float16)),
    "int8": lambda given: _without("int8", given, Blockwise(8)),
    "int4": lambda given: _without("int4", given, Blockwise(4)),
    "sign": lambda given: _without("sign", given, _imported("sign", "Sign")()),
    "powersgd": lambda given: _imported("powersgd", "PowerSGD").of(given),
    "gradzip": lambda given: _imported("gradzip", "GradZIP").of(given),
    "topk": lambda given: _imported("topk", "TopK").of(given),
    "dgc": lambda given: _imported("dgc", "DeepGradient").of(given),
    "sketch": lambda given: _imported("sketch", "CountSketch").of(given),
    "randomk": lambda given: _imported("randomk", "RandomK").of(given),
}


@dataclass(frozen=True)
class Compression:
    """Settings by which an engine compresses the gradients that it reduces.

    method: a name such as "int8" or "powersgd:4" (`COMPRESSORS`), or a `Compressor`, which then serves one engine;
        "auto" measures in the first steps and chooses: between nodes bf16, one of `allow`, or none; on one node none.
    where: "between_nodes": gradients are summed inside each node in full precision, and the sums compressed between
        nodes; "everywhere": every rank compresses its own. By default between nodes if there are several, all with as
        many ranks, numbered node by node; else everywhere.
    error_feedback: add what a step did not send to the gradients of the next one; by default as the method needs it.
        Takes memory: 4 bytes a parameter, between nodes divided by the ranks of a node.
    start_step: passes that reduce in full precision first, one a step unless several reduced ones add up; by default as
        the method needs it: 10 for those of low rank.
    allow: names of methods that "auto" may choose besides bf16.
    undo: keep the values that take a skipped step back, so that its gradients leave no trace in remainders and states;
        takes as much memory as the remainders. By default once a `mpidl.GradScaler` or a `NonfiniteGuard` that skips
        is there; True for other ways to skip, such as torch's own GradScaler.

    Raises ConfigurationError for wrong values.
    """

    method: str | Compressor
    where: str | None = None
    error_feedback: bool | None = None
    start_step: int | None = None
    undo: bool | None = None
    allow: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.allow, tuple | list) or not all(isinstance(name, str) for name in self.allow):
            raise ConfigurationError(f"compress: allow: got {self.allow!r}; needs names of methods, in a tuple or list")
        if self.allow and not self.is_auto:
            raise ConfigurationError(f"compress: allow: got {self.allow!r} with {self.method!r}; needs 'auto'")
        if "auto" in self.allow:
            raise ConfigurationError("compress: allow: got 'auto'; needs names of methods")
        for each in self.candidates():
            self._refuse_arrays(each.compressor())
        if self.where is not None and self.where not in WHERE:
            raise ConfigurationError(f"compress: where: got {self.where!r}; needs one of {', '.join(WHERE)}, or None")
        for name, value in {"error_feedback": self.error_feedback, "undo": self.undo}.items():
            if value is not None and not isinstance(value, bool):
                raise ConfigurationError(f"compress: {name}: got {value!r}; needs a bool, or None")
        start = 0 if self.start_step is None else self.start_step
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise ConfigurationError(f"compress: start_step: got {start!r}; needs an integer from 0 up, or None")

    def _refuse_arrays(self, compressor: Compressor) -> None:
        """Refuses what a method with arrays of its own cannot be right with."""
        if not compressor.arrays:
            return
        said = f"compress: {compressor.name} keeps {', '.join(compressor.arrays)}"
        if self.is_auto:
            raise ConfigurationError(f"{said}, which a choice by 'auto' would lose; needs other names in allow")
        if self.error_feedback is False:
            raise ConfigurationError(f"{said} and adds it to what is not sent; got error_feedback=False")
        if self.start_step:
            raise ConfigurationError(
                f"{said} from the first step on; got start_step={self.start_step}; needs 0 (it has warmup=)"
            )

    @property
    def is_auto(self) -> bool:
        """Returns whether the method is chosen by measuring."""
        return isinstance(self.method, str) and self.method == "auto"

    def candidates(self) -> list[Compression]:
        """The settings that may come to use: of "auto" one for each method that it may choose."""
        if not self.is_auto:
            return [self]
        return [replace(self, method=name, allow=(), start_step=0) for name in dict.fromkeys(("bf16", *self.allow))]

    def compressor(self) -> Compressor:
        """Makes the compressor. "auto" has none before it has chosen."""
        if isinstance(self.method, Compressor):
            return self.method
        if not isinstance(self.method, str):
            raise ConfigurationError(
                f"compress: got {type(self.method).__name__}; needs a name, a Compressor or a Compression"
            )
        name, colon, settings = self.method.partition(":")
        if name not in COMPRESSORS:
            raise ConfigurationError(f"compress: got {self.method!r}; needs one of {', '.join(COMPRESSORS)}, auto")
        return COMPRESSORS[name](settings if colon else None)


def compression(given: Compression | Compressor | str) -> Compression:
    """The settings from an engine's argument `compress`. Raises ConfigurationError for wrong ones."""
    return given if isinstance(given, Compression) else Compression(given)


def parameter_compressor(method: Any) -> OwnedCompressor:
    """The compressor from ZeroOptimizer's argument `compress_parameters`. Raises ConfigurationError."""
    if not isinstance(method, str) or method not in OF_PARAMETERS:
        known = ", ".join(OF_PARAMETERS)
        raise ConfigurationError(f"compress_parameters: got {method!r}; needs one of {known}, or None")
    made = COMPRESSORS[method](None)
    assert isinstance(made, OwnedCompressor)
    return made


def _without(name: str, given: str | None, made: Compressor) -> Compressor:
    if given is not None:
        raise ConfigurationError(f"compress: got {name}:{given}; {name} has no settings")
    return made


def _imported(module: str, name: str) -> Any:
    """A class of a module that few programs need."""
    return getattr(import_module(f"..{module}", __name__), name)
