"""Training with large batches and little communication: LARS, LAMB, schedules, 1-bit Adam, local SGD; averages."""

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .ema import EMA
    from .lamb import LAMB
    from .lars import LARS
    from .one_bit import OneBitAdam, OneBitLamb, ZeroOneAdam, one_bit_hook
    from .post_local import PeriodicAverager, PostLocalSGDOptimizer, PostLocalSGDState, post_local_sgd_hook
    from .schedules import (
        scale_learning_rate,
        warmup_constant,
        warmup_cosine,
        warmup_linear,
        warmup_polynomial,
    )
else:  # the engines need two modules of this package alone
    _MODULES = {
        "ema": ("EMA",),
        "lamb": ("LAMB",),
        "lars": ("LARS",),
        "one_bit": ("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "one_bit_hook"),
        "post_local": ("PeriodicAverager", "PostLocalSGDOptimizer", "PostLocalSGDState", "post_local_sgd_hook"),
        "schedules": (
            "scale_learning_rate",
            *("warmup_constant", "warmup_cosine", "warmup_linear", "warmup_polynomial"),
        ),
    }
    __getattr__, __dir__ = lazily(
        __name__, {name: module for module, names in _MODULES.items() for name in (module, *names)}
    )

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "OneBitAdam",
    "OneBitLamb",
    "PeriodicAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "ZeroOneAdam",
    "one_bit_hook",
    "post_local_sgd_hook",
    "scale_learning_rate",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_polynomial",
]
