"""State of one bucket's gradient, from the first gradient that arrives to this rank's shard of the mean.

`shard_reducer` makes one for each bucket, and changes it in a pass; `reduced_gradients` changes it between passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from collectives import Work

from ...gradients.buckets import GradientBucket
from ...gradients.grad_bucket import Handle


@dataclass(eq=False)
class BucketGradient:
    """The gradient of one bucket.

    In memory, where buckets take turns in buffers: nothing until the first gradient arrives; then bucket.flat, until it
    is reduced; then `shard` alone, until `clear` or the step of a `Stepper`. With `keeps_memory` that lies in `memory`,
    which is there from the first reduction on. Stage 1 without `step_in_backward` keeps bucket.flat, of which `shard`
    is a view.

    number: of the bucket, in the order of reductions.
    keeps_memory: whether the bucket is reduced into `memory`, which stays from step to step, and not in place.
    filled: per parameter, whether its place in bucket.flat holds a gradient of passes not yet reduced.
    reached: per parameter, whether any pass since zero_grad gave it a gradient.
    shard: the reduced part, of all passes since zero_grad.
    target: what the reduction in flight writes.
    handle: of a communication hook, while its reduction is in flight.
    agreed_reached: `reached` of all ranks, once the work is complete, for a `Stepper`.
    used: per parameter, whether a `Stepper` has used up the last pass's gradient.
    """

    number: int
    bucket: GradientBucket
    keeps_memory: bool
    filled: list[bool]
    reached: list[bool]
    shard: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    target: torch.Tensor | None = None
    handle: Handle | None = None
    agreed_reached: tuple[np.ndarray, Work] | None = None
    used: list[bool] = field(default_factory=list)
