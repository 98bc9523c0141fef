"""Casts to 16 bits: values are sent as bf16 or fp16, and added up in fp32.

bf16 has the range of fp32 with 8 bits of precision, fp16 11 bits and values up to 65504. Bytes: 2 an element.
"""

from __future__ import annotations

import torch

from .compressor import OwnedCompressor, rounded_up


class Cast(OwnedCompressor):
    """Sends values in a 16-bit floating dtype.

    dtype: torch.bfloat16 or torch.float16. Remainders are not fed back by default: the rounding is as that of training
    in that dtype, and saves the memory for them.
    """

    feeds_back = False
    elementwise = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @property
    def name(self) -> str:
        """bf16 or fp16."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]

    def message_bytes(self, elements: int) -> int:
        """Two bytes an element."""
        return rounded_up(2 * elements)

    def compress(self, values: torch.Tensor, message: torch.Tensor, remainder: torch.Tensor | None) -> None:
        """Rounds to the nearest value of the dtype."""
        rounded = message[: 2 * values.numel()].view(self.dtype)
        rounded.copy_(values)
        if remainder is not None:
            torch.sub(values, rounded, out=remainder).nan_to_num_(0.0, 0.0, 0.0)

    def decompress(self, message: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Widens to fp32."""
        rounded = message[: 2 * out.numel()].view(self.dtype)
        if add:
            out.add_(rounded)
        else:
            out.copy_(rounded)
