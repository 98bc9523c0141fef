"""Casts to 16 bits: values are sent as bf16 or fp16, and added up in fp32.

bf16 has the range of fp32 with 8 bits of precision, fp16 11 bits and values up to 65504. Bytes: 2 an element.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .compressor import OwnedCompressor, rounded_up

_CHUNK = 1 << 17  # values: 512 KiB of fp32, which stay in the cache


class Cast(OwnedCompressor):
    """Sends values in a 16-bit floating dtype.

    dtype: torch.bfloat16 or torch.float16. Remainders are not fed back by default: the rounding is as that of training
    in that dtype, and saves the memory for them.
    """

    feeds_back = False
    elementwise = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.may_overflow = dtype == torch.float16

    @property
    def name(self) -> str:
        """bf16 or fp16."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]

    def message_bytes(self, elements: int) -> int:
        """Two bytes an element."""
        return rounded_up(2 * elements)

    def compress(
        self, values: torch.Tensor, message: torch.Tensor, remainder: torch.Tensor | None, divisor: float = 1
    ) -> None:
        """Rounds to the nearest value of the dtype."""
        rounded = message[: 2 * values.numel()].view(self.dtype)
        if divisor == 1:
            rounded.copy_(values)
        else:
            for chunk, own in zip(values.split(_CHUNK), rounded.split(_CHUNK), strict=True):
                torch.div(chunk, divisor, out=own)
        if remainder is not None:
            chunks = values.split(_CHUNK), self._widened(rounded), remainder.split(_CHUNK)
            for chunk, sent, left in zip(*chunks, strict=True):
                torch.sub(chunk, sent, alpha=divisor, out=left).nan_to_num_(0.0, 0.0, 0.0)

    def decompress(self, message: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Widens to fp32."""
        rounded = message[: 2 * out.numel()].view(self.dtype)
        if not add:
            out.copy_(rounded)
            return
        for chunk, sent in zip(out.split(_CHUNK), self._widened(rounded), strict=True):
            chunk.add_(sent)

    def _widened(self, rounded: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the values chunk by chunk in fp32: torch takes several times as long for a sum of two dtypes."""
        wide = self.pool.take(_CHUNK, torch.float32, rounded.device)
        for chunk in rounded.split(_CHUNK):
            yield wide[: chunk.numel()].copy_(chunk)
        self.pool.give_back(wide)
