"""Signs: one bit a value, and one scale for a message.

    message of n values      [ fp32 scale | 4 bytes of zeros | n bits ]        scale = |values|_2 / sqrt(n)
    value sent               +scale where the value is 0 or above, -scale where it is below

The values are converted in chunks that stay in the cache; signs of 8 values are looked up at once. A message of values
of which one is not finite has a scale that is not, so that the mean of all its values is not either, on every rank.

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
from .pool import ArrayPool

CHUNK = 1 << 16  # values: 256 KiB of fp32
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
        self,
        values: torch.Tensor,
        message: torch.Tensor,
        remainder: torch.Tensor | None,
        divisor: float = 1,
        count: int | None = None,
        squares: float | None = None,
    ) -> None:
        """Writes the signs, and the scale over the divisor.

        count: n in it, where not all values count; the others are zeros.
        squares: the sum of the values' squares, if it is known.
        """
        n = values.numel() if count is None else count
        scale = _root_mean_square(sum_of_squares(values) if squares is None else squares, n)
        message[:_HEAD].view(torch.float32).copy_(torch.tensor([scale / divisor, 0.0]))
        sent, flags = MessageReader(message, self.pool, divisor), self.pool.take(CHUNK, torch.bool, values.device)
        for start in range(0, values.numel(), CHUNK):
            chunk = values[start : start + CHUNK]
            _pack(chunk, sent.bits[start // 8 : -(-(start + chunk.numel()) // 8)], flags[: chunk.numel()])
            if remainder is not None:
                sent.subtract_from(chunk, start, remainder[start : start + CHUNK])
        sent.close()
        self.pool.give_back(flags)
        if remainder is not None and not math.isfinite(scale):
            remainder.nan_to_num_(0.0, 0.0, 0.0)

    def decompress(self, message: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Looks the signs up, times the scale."""
        sent = self.reader(message)
        for start in range(0, out.numel(), CHUNK):
            (sent.add_to if add else sent.write)(out[start : start + CHUNK], start)
        sent.close()

    def reader(self, message: torch.Tensor) -> MessageReader:
        """Reads a message chunk by chunk."""
        return MessageReader(message, self.pool)


class MessageReader:
    """Reads the values of a message, times `factor`: at most `CHUNK` at a time, each time from a multiple of 8 on.

    bits: the signs, eight a byte.
    """

    def __init__(self, message: torch.Tensor, pool: ArrayPool, factor: float = 1) -> None:
        scale = np.float32(message[:4].view(torch.float32).item()) * np.float32(factor)
        self.bits = message[_HEAD:]
        self._eights = torch.from_numpy(_SIGNS * scale).to(message.device)  # the eight values of each byte
        self._pool, self._scratch = pool, pool.take(CHUNK, torch.float32, message.device)
        self._numbers = pool.take(CHUNK // 8, torch.int64, message.device)  # the bytes, as numbers of rows

    def write(self, out: torch.Tensor, start: int) -> None:
        """Writes the values from number `start` on."""
        if out.numel() % 8:
            out.copy_(self._read(out.numel(), start))
        else:
            self._look_up(out, start)

    def add_to(self, values: torch.Tensor, start: int) -> None:
        """Adds the values from number `start` on."""
        values.add_(self._read(values.numel(), start))

    def subtract_from(self, values: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """Writes other values, less those from number `start` on."""
        torch.sub(values, self._read(values.numel(), start), out=out)

    def close(self) -> None:
        """Gives the memory back."""
        self._pool.give_back(self._scratch, self._numbers)

    def _read(self, count: int, start: int) -> torch.Tensor:
        self._look_up(self._scratch[: rounded_up(count)], start)
        return self._scratch[:count]

    def _look_up(self, values: torch.Tensor, start: int) -> None:
        numbers = self._numbers[: values.numel() // 8].copy_(self.bits[start // 8 : (start + values.numel()) // 8])
        if numbers.device.type == "cpu":
            table, target = self._eights.numpy().view(_EIGHT).reshape(-1), values.numpy().view(_EIGHT)
            np.take(table, numbers.numpy(), out=target, mode="clip")
            return
        torch.index_select(self._eights, 0, numbers, out=values.view(-1, 8))


def sum_of_squares(values: torch.Tensor) -> float:
    """The sum of the values' squares."""
    return sum(float(torch.dot(chunk, chunk)) for chunk in values.split(CHUNK))


def _root_mean_square(squares: float, count: int) -> float:
    """The fp32 root of the squares' sum over `count`."""
    return float(np.float32(math.sqrt(squares / count))) if count else 0.0


def _pack(values: torch.Tensor, bits: torch.Tensor, flags: torch.Tensor) -> None:
    """Writes eight signs a byte, the first one highest. flags: memory for as many booleans."""
    if bits.device.type == "cpu":  # NumPy compares several times as fast
        bits.numpy()[:] = np.packbits(np.greater_equal(values.numpy(), 0, out=flags.numpy()))
        return
    wide = torch.nn.functional.pad((values >= 0).to(torch.uint8), (0, 8 * bits.numel() - values.numel()))
    weights = 2 ** torch.arange(7, -1, -1, device=bits.device, dtype=torch.uint8)
    torch.sum(wide.view(-1, 8) * weights, 1, dtype=torch.uint8, out=bits)
