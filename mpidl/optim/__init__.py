"""Training with large batches and with little communication: LARS and LAMB, schedules, post-local SGD; averages."""

from .ema import EMA
from .lamb import LAMB
from .lars import LARS
from .post_local import PeriodicAverager, PostLocalSGDOptimizer, PostLocalSGDState, post_local_sgd_hook
from .schedules import (
    scale_learning_rate,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_polynomial,
)

__all__ = [
    "EMA",
    "LAMB",
    "LARS",
    "PeriodicAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "post_local_sgd_hook",
    "scale_learning_rate",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_polynomial",
]
