"""Signs: one bit a value, and one scale a message.

    message of n values      [ fp32 scale | 4 bytes of zeros | n bits ]        scale = |values|_2 / sqrt(n)
    value sent               +scale where the value is 0 or above, -scale where it is below

The values go through in chunks that stay in the cache; signs of 8 values are looked up at once. A message of values of
which one is not finite has a scale that is not, so that the mean of all its values is not either, on every rank.

Where a value is always zero (a row of an embedding that no token uses), its sign is sent all the same, and error
feedback takes it back in the next step: it swings by the scale. Where the caller masks such values, before and after,
`count` keeps them out of the scale.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; the scale of Tang et al. 2021, "1-bit Adam", section 4.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .compressor import OwnedCompressor, rounded_up

_CHUNK = 1 << 17  # values: 512 KiB of fp32
_HEAD = 8  # bytes before the bits
_EIGHT = np.dtype((np.void, 32))  # eight fp32 values, moved as one
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1


class Sign(OwnedCompressor):
    """Sends the signs of values, and the root of their mean square."""

    @property
    def name(self) -> str:
        """sign."""
        return "sign"

    def message_bytes(self, elements: int) -> int:
        """The scale, then the bits."""
        return rounded_up(_HEAD + -(-elements // 8))

    def compress(
        self, values: torch.Tensor, message: torch.Tensor, remainder: torch.Tensor | None, count: int | None = None
    ) -> None:
        """Writes the signs, and the scale. count: n in it, where not all values count; the others are zeros."""
        scale = _root_mean_square(values, values.numel() if count is None else count)
        message[:_HEAD].view(torch.float32).copy_(torch.tensor([scale, 0.0]))
        bits = message[_HEAD : _HEAD + -(-values.numel() // 8)]
        sent = values.new_empty(min(_CHUNK, values.numel()))
        size = values.new_tensor(scale)
        for start in range(0, values.numel(), _CHUNK):
            chunk = values[start : start + _CHUNK]
            _pack(chunk >= 0, bits[start // 8 : (start + _CHUNK) // 8])
            if remainder is not None:
                part = torch.add(chunk, 0.0, out=sent[: chunk.numel()])  # makes +0 of -0
                torch.copysign(size, part, out=part)
                torch.sub(chunk, part, out=remainder[start : start + _CHUNK])
        if remainder is not None and not math.isfinite(scale):
            remainder.nan_to_num_(0.0, 0.0, 0.0)

    def decompress(self, message: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Looks the signs up, times the scale."""
        scale = message[:4].view(torch.float32)
        whole = out.numel() // 8 * 8
        bits = message[_HEAD : _HEAD + -(-out.numel() // 8)]
        signs = torch.from_numpy(_SIGNS).to(out.device) * scale
        scratch = out.new_empty(min(_CHUNK, rounded_up(out.numel())))
        for start in range(0, out.numel(), _CHUNK):
            chunk = out[start : start + _CHUNK]
            in_place = not add and start + chunk.numel() <= whole
            values = chunk if in_place else scratch[: rounded_up(chunk.numel())]
            _look_up(signs, bits[start // 8 : (start + _CHUNK) // 8], values)
            if add:
                chunk.add_(values[: chunk.numel()])
            elif not in_place:
                chunk.copy_(values[: chunk.numel()])


def _root_mean_square(values: torch.Tensor, count: int) -> float:
    """The fp32 root of the squares' sum over `count`."""
    total = sum(float(torch.dot(chunk, chunk)) for chunk in values.split(_CHUNK))
    return float(np.float32(math.sqrt(total / count))) if count else 0.0


def _pack(positive: torch.Tensor, bits: torch.Tensor) -> None:
    """Writes eight booleans a byte, the first one highest."""
    if bits.device.type == "cpu":
        bits.numpy()[:] = np.packbits(positive.numpy())
        return
    wide = torch.nn.functional.pad(positive.to(torch.uint8), (0, 8 * bits.numel() - positive.numel()))
    weights = 2 ** torch.arange(7, -1, -1, device=bits.device, dtype=torch.uint8)
    torch.sum(wide.view(-1, 8) * weights, 1, dtype=torch.uint8, out=bits)


def _look_up(signs: torch.Tensor, bits: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the eight values of each byte: signs is a table of 256 times 8."""
    if bits.device.type == "cpu":
        table, target = signs.numpy().view(_EIGHT).reshape(-1), values.numpy().view(_EIGHT)
        np.take(table, bits.numpy(), out=target, mode="clip")
        return
    torch.index_select(signs, 0, bits.int(), out=values.view(-1, 8))
