"""Quantization to integers of 8 or 4 bits, by blocks of values that each have a scale.

    block of 256 values      q = round(x / scale), scale = largest |x| of the block / 127 (8 bits) or / 7 (4 bits)
    message of n values      [ fp32 scales, one a block | the integers of a block after those of another ]
    bytes of a block         8 bits: q[0] ... q[255], of the last one as many as it has values
                             4 bits: q[j] + 16 q[j + 128] for j = 0 ... 127

Any number of values. Bytes an element: 1 + 4/256 or 0.5 + 4/256. A block with a value that is not finite has a scale
that is not, so that the mean of all its values is NaN on every rank.

The blocks are converted in chunks that stay in the cache, and large enough that calls of torch cost little.

Source: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", section 3.1;
the blocks of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
"""

from __future__ import annotations

import torch

from .compressor import OwnedCompressor, rounded_up

BLOCK = 256
_CHUNK = 512  # blocks: 512 KiB of fp32
_TINY = torch.finfo(torch.float32).tiny  # the least scale by which values are divided


class Blockwise(OwnedCompressor):
    """Rounds blocks of 256 values to integers of `bits`: 8 or 4."""

    block = BLOCK

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

    def compress(
        self, values: torch.Tensor, message: torch.Tensor, remainder: torch.Tensor | None, divisor: float = 1
    ) -> None:
        """Rounds to the nearest multiple of each block's scale."""
        scales, integers = self._parts(message, values.numel())
        whole, rest = divmod(values.numel(), BLOCK)
        if whole:
            blocks = values[: whole * BLOCK].view(whole, BLOCK)
            kept = None if remainder is None else remainder[: whole * BLOCK].view(whole, BLOCK)
            self._compress_blocks(
                blocks, scales[:whole, None], integers[: self._packed(whole * BLOCK)].view(whole, -1), kept
            )
        if rest:
            block, packed = values.new_zeros(1, BLOCK), integers.new_empty(1, self._packed(BLOCK))
            block[0, :rest] = values[whole * BLOCK :]
            self._compress_blocks(block, scales[whole:, None], packed, None if remainder is None else block)
            last = integers[self._packed(whole * BLOCK) :]
            last.copy_(packed[0, : last.numel()])
            if remainder is not None:
                remainder[whole * BLOCK :] = block[0, :rest]
        if remainder is not None and not torch.isfinite(scales).all():
            remainder.nan_to_num_(0.0, 0.0, 0.0)
        if divisor != 1:
            scales.div_(divisor)

    def decompress(self, message: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Multiplies the integers by their block's scale."""
        scales, integers = self._parts(message, out.numel())
        whole, rest = divmod(out.numel(), BLOCK)
        if whole:
            blocks = out[: whole * BLOCK].view(whole, BLOCK)
            packed = integers[: self._packed(whole * BLOCK)].view(whole, -1)
            self._decompress_blocks(packed, scales[:whole, None], blocks, add)
        if rest:
            block, packed = out.new_empty(1, BLOCK), integers.new_zeros(1, self._packed(BLOCK))
            last = integers[self._packed(whole * BLOCK) :]
            packed[0, : last.numel()] = last
            self._decompress_blocks(packed, scales[whole:, None], block, False)
            tail = out[whole * BLOCK :]
            if add:
                tail.add_(block[0, :rest])
            else:
                tail.copy_(block[0, :rest])

    def _compress_blocks(
        self, values: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, remainder: torch.Tensor | None
    ) -> None:
        """Compresses whole blocks: fp32 [blocks, 256], [blocks, 1], uint8 [blocks, bytes], and the first's shape."""
        scratch, factors = self._scratch(values), torch.empty_like(scales[:_CHUNK])
        remainders = values if remainder is None else remainder
        for chunk, scale, integers, left in zip(
            *(x.split(_CHUNK) for x in (values, scales, packed, remainders)), strict=True
        ):
            rounded, factor = scratch[: len(chunk)], factors[: len(chunk)]
            torch.abs(chunk, out=rounded)
            torch.amax(rounded, 1, keepdim=True, out=scale).div_(self._largest)
            torch.clamp_min(scale, _TINY, out=factor).reciprocal_()
            torch.mul(chunk, factor, out=rounded).round_()
            self._pack(rounded, integers.view(torch.int8))
            if remainder is not None:  # of what `decompress` makes, to the bit, so no fused product
                torch.sub(chunk, rounded.mul_(scale), out=left)
        self.pool.give_back(scratch.view(-1))

    def _decompress_blocks(self, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """Writes or adds the values of whole blocks; shapes as in `_compress_blocks`."""
        scratch = self._scratch(out)
        for integers, scale, chunk in zip(*(x.split(_CHUNK) for x in (packed, scales, out)), strict=True):
            values = scratch[: len(chunk)] if add else chunk
            self._unpack(integers.view(torch.int8), values)
            values.mul_(scale)
            if add:
                chunk.add_(values)
        self.pool.give_back(scratch.view(-1))

    def _scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a chunk, which stays in the cache."""
        return self.pool.take(_CHUNK * BLOCK, torch.float32, like.device).view(_CHUNK, BLOCK)

    def _packed(self, elements: int) -> int:
        """Bytes of the integers."""
        return elements if self.bits == 8 else -(-elements // BLOCK) * BLOCK // 2

    def _parts(self, message: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = 4 * -(-elements // BLOCK)
        return message[:scales].view(torch.float32), message[scales : scales + self._packed(elements)]

    def _pack(self, rounded: torch.Tensor, packed: torch.Tensor) -> None:
        """Writes the integers of blocks, which are overwritten."""
        if self.bits == 4:
            low, high = rounded.split(BLOCK // 2, 1)
            rounded = torch.add(low, high, alpha=16)
        packed.copy_(rounded)

    def _unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the integers as fp32."""
        if self.bits == 8:
            out.copy_(packed)
            return
        low, high = out.split(BLOCK // 2, 1)
        low.copy_(packed)
        torch.mul(low, 1 / 16, out=high).round_()  # low is within 7 of 16 high
        low.sub_(high, alpha=16)
