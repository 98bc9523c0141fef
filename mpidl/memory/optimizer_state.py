"""Bytes of an optimizer's state, by the optimizer's name or class.

    state = state_of("adamw", masters=True)
    state.of(torch.float32, 1000)    8 for each of 1000 elements: two moments

To add an optimizer: its bytes in `STATE_BYTES`; in `WHOLE` too if every rank keeps all of its state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigurationError
from ..optim.blockwise import BLOCK
from ..optim.dion import RANK_FRACTION, factor_rank
from ..optim.elementwise_state import EIGHT_BIT_LEAST

# Bytes of the state of those that send one bit, which every rank keeps whole, in fp32. Errors are 4 of them.
WHOLE = {"onebitadam": 12, "onebitlamb": 16, "zerooneadam": 20}
OUTER = 8  # of DiLoCo, in fp32: theta_0, and the momentum of SGD
_ADAM = 8
# Bytes of an optimizer's state for a parameter of 4 bytes.
STATE_BYTES = {
    **dict.fromkeys(("sgd",), 0),
    **dict.fromkeys(("momentum", "lars", "adagrad", "rmsprop", "asgd", "muon"), 4),
    **dict.fromkeys(("adam", "adamw", "lamb", "adamax", "nadam", "radam", "adadelta", "rprop"), _ADAM),
    **dict.fromkeys(("amsgrad",), 12),
    **dict.fromkeys(("adam8bit", "adamw8bit"), 2 + 8 / BLOCK),  # two codes, and a share of two scales
    **dict.fromkeys(("dion",), 4),  # of matrices, whose factors come in addition; of others Adam's
    **dict.fromkeys(("diloco",), _ADAM + OUTER),  # AdamW within it
    **WHOLE,
}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of state for each element of a parameter.

    each: of state that has the parameter's own dtype, counted for 4 bytes.
    scales: they grow with the dtype of the stepped values.
    masters: 16-bit parameters have fp32 copies, and their state is fp32.
    least: elements of a parameter below which they are those of Adam.
    wide: of further state, fp32 for parameters of any dtype.
    factors: matrices have a factor of Dion too, and others the state of Adam.
    """

    each: float
    scales: bool
    masters: bool
    least: int = 0
    wide: float = 0
    factors: bool = False

    def of(self, dtype: torch.dtype, size: float, shape: torch.Size | None = None) -> float:
        """Bytes of state and master for each element of a parameter. shape: None where it is not known."""
        each = self.each if size >= self.least else _ADAM
        if self.factors and shape is not None:
            each = 4 + 4 * _factor_elements(shape) / max(1, shape.numel()) if len(shape) == 2 else _ADAM
        if dtype.itemsize == 2 and self.masters:
            return 4 + each + self.wide
        return (each * dtype.itemsize / 4 if self.scales else each) + self.wide


def state_of(optimizer: str | float | type[torch.optim.Optimizer], masters: bool) -> StateBytes:
    """The state of an optimizer: a name in STATE_BYTES, a class of that name, or bytes of state a parameter.

    Raises ConfigurationError for others.
    """
    name = name_of(optimizer)
    if isinstance(optimizer, int | float) and not isinstance(optimizer, bool):
        if 0 <= optimizer < math.inf:
            return StateBytes(optimizer, scales=False, masters=masters)
    elif name == "diloco":
        return StateBytes(STATE_BYTES[name] - OUTER, scales=True, masters=masters, wide=OUTER)
    elif name in ("adam8bit", "adamw8bit"):
        return StateBytes(STATE_BYTES[name], scales=False, masters=masters, least=EIGHT_BIT_LEAST)
    elif name in STATE_BYTES:
        return StateBytes(STATE_BYTES[name], scales=name != "dion", masters=masters, factors=name == "dion")
    raise ConfigurationError(
        f"optimizer: got {optimizer!r}; needs one of {', '.join(STATE_BYTES)}, or bytes of state a parameter"
    )


def name_of(optimizer: Any) -> str:
    """The name of an optimizer as STATE_BYTES has it; empty for a number."""
    name = optimizer.__name__ if isinstance(optimizer, type) else optimizer
    return name.lower() if isinstance(name, str) else ""


def _factor_elements(shape: torch.Size) -> int:
    """Elements of the factor that Dion keeps of a matrix, by default."""
    return shape[1] * factor_rank(shape, RANK_FRACTION)
