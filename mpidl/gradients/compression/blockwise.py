"""Integers of 8 or 4 bits for blocks of values, each block with a scale of its own.

    block of 256 values      q = round(x / scale), scale = largest |x| of the block / 127 (8 bits) or / 7 (4 bits)
    message of n values      [ fp32 scales, one a block | n integers; two of 4 bits share a byte ]

Any number of values: the last block is shorter. Bytes an element: 1 + 4/256 or 0.5 + 4/256. A block with a value that
is not finite has a scale that is not, so that the mean of all its values is NaN on every rank.

The values go through in chunks that stay in the cache.

Source: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", section 3.1;
the blocks of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
"""

from __future__ import annotations

import torch

from .compressor import OwnedCompressor, rounded_up

BLOCK = 256
_CHUNK = BLOCK * 256  # elements: 256 KiB of fp32


class Blockwise(OwnedCompressor):
    """Rounds blocks of 256 values to integers of `bits`: 8 or 4."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._largest = 2 ** (bits - 1) - 1

    @property
    def name(self) -> str:
        """int8 or int4."""
        return f"int{self.bits}"

    def message_bytes(self, elements: int) -> int:
        """The scales, then the integers."""
        return rounded_up(4 * -(-elements // BLOCK) + self._packed(elements))

    def compress(self, values: torch.Tensor, message: torch.Tensor, remainder: torch.Tensor | None) -> None:
        """Rounds to the nearest multiple of each block's scale."""
        scales, integers = self._parts(message, values.numel())
        rounded = values.new_empty(min(_CHUNK, rounded_up(values.numel(), BLOCK)))
        for start in range(0, values.numel(), _CHUNK):
            chunk = values[start : start + _CHUNK]
            size = chunk.numel()
            blocks = rounded[: rounded_up(size, BLOCK)].view(-1, BLOCK)
            scale = scales[start // BLOCK : start // BLOCK + len(blocks)]
            if size % BLOCK:
                rounded[size : blocks.numel()] = 0.0
            torch.abs(chunk, out=rounded[:size])
            torch.amax(blocks, 1, out=scale).div_(self._largest)
            factors = scale.reciprocal()
            factors.masked_fill_(torch.isinf(factors), 0.0)  # of zeros, or of values too small to divide by
            rounded[:size].copy_(chunk)
            blocks.mul_(factors[:, None]).round_()
            self._pack(rounded, integers[self._packed(start) : self._packed(start + size)])
            if remainder is not None:
                blocks.mul_(scale[:, None])
                torch.sub(chunk, rounded[:size], out=remainder[start : start + size])
        if remainder is not None and not torch.isfinite(scales).all():
            remainder.nan_to_num_(0.0, 0.0, 0.0)

    def decompress(self, message: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Multiplies the integers by their block's scale."""
        scales, integers = self._parts(message, out.numel())
        scratch = out.new_empty(min(_CHUNK, rounded_up(out.numel(), BLOCK)))
        for start in range(0, out.numel(), _CHUNK):
            chunk = out[start : start + _CHUNK]
            size = chunk.numel()
            in_place = not add and not size % BLOCK
            values = chunk if in_place else scratch[: rounded_up(size, BLOCK)]
            blocks = values.view(-1, BLOCK)
            values[size:] = 0.0
            self._unpack(integers[self._packed(start) : self._packed(start + size)], values[:size])
            blocks.mul_(scales[start // BLOCK : start // BLOCK + len(blocks), None])
            if add:
                chunk.add_(values[:size])
            elif not in_place:
                chunk.copy_(values[:size])

    def _packed(self, elements: int) -> int:
        """Bytes of the integers."""
        return -(-elements * self.bits // 8)

    def _parts(self, message: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = 4 * -(-elements // BLOCK)
        return message[:scales].view(torch.float32), message[scales : scales + self._packed(elements)]

    def _pack(self, rounded: torch.Tensor, packed: torch.Tensor) -> None:
        if self.bits == 8:
            packed.view(torch.int8).copy_(rounded[: packed.numel()])
            return
        pairs = rounded[: 2 * packed.numel()].to(torch.int8).view(torch.int16)  # the lower byte is the first, below
        packed.view(torch.int8).copy_((pairs & 15) | ((pairs >> 8) << 4))

    def _unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the integers as fp32."""
        signed = packed.view(torch.int8)
        if self.bits == 8:
            out.copy_(signed)
            return
        wide = signed.to(torch.int16)
        # A byte of each half, the sign extended: the lower four bits first.
        halves = ((wide << 12) >> 12).bitwise_and_(255) | ((wide >> 4) << 8)
        out.copy_(halves.view(torch.int8)[: out.numel()])
