"""Processor that copies and reduces for the one-copy collectives: here the host's; a GPU's is in `cuda.symmetric`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base.buffers import DType
from ...base.reduction import BoundCall, Reduction
from ...base.scratch import Scratch

Array = np.ndarray[Any, Any]
Calls = list[BoundCall]  # that carries out one rank's part of an operation


class Processor:
    """The host's processor. chunk_bytes: of scratch for each rank and buffer, for arrays in private memory.

    leader: the rank that reduces for all ranks, and copies for all where all arrays are symmetric; None where each rank
    does its part.
    """

    def __init__(self, chunk_bytes: int = 512 << 10, leader: int | None = None) -> None:
        self.blocks = Scratch()
        self.chunk_bytes = chunk_bytes
        self.leader = leader

    def copy(self, target: Array, source: Array) -> None:
        """target = source."""
        np.copyto(target, source)

    def calls(
        self,
        op: Reduction,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        dtype: DType,
        factors: Sequence[float],
    ) -> list[BoundCall]:
        """The calls that make each of outputs = inputs[0] (op) inputs[1] (op) ...; see `Reduction.calls`."""
        return op.calls(inputs, outputs, dtype, factors, self.blocks)
