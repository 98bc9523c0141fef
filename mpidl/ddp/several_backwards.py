"""Several backward passes of one forward pass: when a parameter without a gradient counts as missed.

    a, b = wrapped(x)
    a.sum().backward()      averages what it reaches; b lives, so that its parameters are not missed yet
    b.sum().backward()      averages what it reaches; now every parameter has its gradient

A pass that leaves parameters out is an error as soon as no output is left through which their gradients can come. The
ranks agree on it at the end of each pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class SeveralBackwards:
    """Backward passes that have left parameters out so far.

    forwards: the number of forward passes before the first of them, whose outputs may still be differentiated.
    arrived: the parameters whose gradients came in any of them, on this rank.
    """

    forwards: int
    arrived: set[torch.nn.Parameter] = field(default_factory=set)
