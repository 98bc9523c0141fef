"""Deep Gradient Compression: sends the largest of accumulated velocities, with momentum on every rank.

    u += (mu - 1) u + g           velocity: a rank's momentum, of its own gradients      an array of the section
    v += u                        what is accumulated of it                              the remainder
    sent: the largest |v|;        there u = v = 0, in the rest both remain

Momentum of the mean would forget what has not been sent; so it is applied before sending, instead of the optimizer's
(correction and masking of momentum). The fraction that is sent falls over `warmup` reduced passes from 25 % to the
fraction that is set.

Three differences from the paper: exactly k values are sent, so that messages have one length on all ranks; a rank clips
the gradients of a section, as it knows those of the model only at the end of a pass; and under ZeRO velocities decay
once in passes that add up to one step, while DDP refuses them without `no_sync`.

Source: Lin, Han, Mao, Wang, Dally 2018, "Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training", sections 3.1 to 3.3 and algorithm 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .fraction import FRACTION
from .options import Option, check, read
from .topk import TopK

MOMENTUM = Option(float, lambda value: 0 <= value < 1, "a number from 0 up, below 1")
WARMUP = Option(int, lambda value: isinstance(value, int) and value >= 0, "a number of steps from 0 up")
CLIP = Option(float, lambda value: 0 < value < math.inf, "a norm above 0")
_STAGES = 4  # of the warm-up; each sends a quarter of what the one before did


class DeepGradient(TopK):
    """Sends the largest accumulated velocities, "dgc:0.001,momentum=0.9": which part of them, and any value below.

    momentum: mu, in place of the optimizer's; 0 keeps no array for it ("momentum=0").
    warmup: reduced passes in which the part falls from 25 % ("warmup=1000"), one a step unless several add up; 0: none.
    clip: norm of the mean gradient, of a section, to which ranks clip theirs ("clip=1"); None: none.

    Raises ConfigurationError for wrong settings.
    """

    method = "dgc"

    def __init__(
        self, fraction: float = 0.001, *, momentum: float = 0.9, warmup: int = 0, clip: float | None = None
    ) -> None:
        super().__init__(fraction)
        check("dgc", "momentum", MOMENTUM, momentum)
        check("dgc", "warmup", WARMUP, warmup)
        if clip is not None:
            check("dgc", "clip", CLIP, clip)
        self.momentum, self.warmup, self.clip, self.homogeneous = momentum, warmup, clip, clip is None
        self.arrays = ("momentum",) if momentum else ()

    @classmethod
    def of(cls, text: str | None) -> DeepGradient:
        """Makes one of the settings in a name."""
        values = {"momentum": MOMENTUM, "warmup": WARMUP, "clip": CLIP}
        given = read("dgc", text, ("fraction", FRACTION), values=values)
        return cls(0.001 if given.first is None else given.first, **given.values)

    @property
    def name(self) -> str:
        """The method, and the settings that are not the default ones."""
        said = [f"dgc:{self.fraction:g}"]
        said += [] if self.momentum == 0.9 else [f"momentum={self.momentum:g}"]
        said += [f"warmup={self.warmup}"] if self.warmup else []
        said += [] if self.clip is None else [f"clip={self.clip:g}"]
        return ",".join(said)

    def fraction_at(self, step: int) -> float:
        """The part of the values that a step sends: falls in the warm-up."""
        if step >= self.warmup:
            return self.fraction
        return max(self.fraction, 0.25 ** (1 + _STAGES * step // self.warmup))

    def absorb(
        self, summed: torch.Tensor, arrays: Sequence[torch.Tensor], begins_step: bool, contributions: int, ranks: int
    ) -> torch.Tensor:
        """Adds the clipped gradients to the velocity, which decays as a step begins (mu u + g, then u + g)."""
        factor = self._clipped_to(summed, contributions, ranks)
        for velocity in arrays:
            if begins_step:
                return velocity.mul_(self.momentum).add_(summed, alpha=factor)
            velocity.add_(summed, alpha=factor)
        return summed if factor == 1.0 else summed * factor

    def _clipped_to(self, summed: torch.Tensor, contributions: int, ranks: int) -> float:
        """Clipping factor of a rank's gradients; 1 for those that are not finite, so that all ranks see them.

        The norm of what a rank gives to a section's mean is clipped to clip / sqrt(N).
        """
        if self.clip is None:
            return 1.0
        norm = float(torch.linalg.vector_norm(summed, dtype=torch.float32)) / contributions
        limit = self.clip / math.sqrt(ranks)
        return limit / norm if limit < norm < math.inf else 1.0
