"""Optimizers for large batches, little communication or little memory; averages of weights; schedules.

    lars, lamb          a learning rate for each layer, for large batches; trust_ratio: what both share
    adam8bit            Adam whose moments have 8 bits; blockwise: the encoding
    one_bit/            1-bit Adam, 0/1 Adam, 1-bit LAMB: the mean is sent in one bit an element
    diloco              ranks train alone for many steps; outer_steps: the steps on the mean of their changes
    post_local          post-local SGD: weights are averaged now and then
    dion                orthonormal updates of matrices, of which factors are sent
    ema                 exponential moving average of the weights
    schedules           learning rates over the steps
    rank_mean           the mean over ranks of flat tensors, in full precision or compressed, for diloco
    elementwise_state   which of an optimizer's states are cut as the parameter is; for ZeRO, checkpoints and estimates

To add an optimizer: a file here with a `torch.optim.Optimizer` whose class declares `step_needs`, a
`mpidl.optimizer_trial.StepNeeds`, by which DDP, ZeRO and tensor parallelism know what it can step on
(`optimizer_trial.needs_of`); its name in `_MODULES`, under `TYPE_CHECKING` and in `__all__`; its bytes in
`mpidl.memory.STATE_BYTES`. CONTRIBUTING.md has the cases and the tests.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazily

if TYPE_CHECKING:
    from .adam8bit import Adam8bit, AdamW8bit
    from .diloco import DiLoCo
    from .dion import Dion, DionState, dion_hook
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
else:  # the engines need few modules of this package
    _MODULES = {
        "adam8bit": ("Adam8bit", "AdamW8bit"),
        "diloco": ("DiLoCo",),
        "dion": ("Dion", "DionState", "dion_hook"),
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
    "Adam8bit",
    "AdamW8bit",
    "DiLoCo",
    "Dion",
    "DionState",
    "OneBitAdam",
    "OneBitLamb",
    "PeriodicAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "ZeroOneAdam",
    "dion_hook",
    "one_bit_hook",
    "post_local_sgd_hook",
    "scale_learning_rate",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
    "warmup_polynomial",
]
