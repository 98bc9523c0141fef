"""Tensors in 8 bits: each element is an index into a code book, whose value is multiplied by the scale of its block.

    values   [ 0 .. 255 | 256 .. 511 | ... ]      any floating dtype, flat
    scale    [    s0    |     s1     | ... ]      fp32, the value of largest magnitude, with its sign
    codes    [ uint8 ..                    ]      the nearest of book * s; 0 of non-negative numbers is for 0 alone

The books hold 256 values that lie closer the smaller they are, over seven powers of ten. As the signed one has 1 but
not -1, the scale takes the sign of the largest value, which therefore is exact; so what was decoded is encoded to the
same codes and scales again (of blocks whose scale is above 1e-30).

Non-negative numbers are second moments v, by whose roots Adam divides. Dettmers et al. round the smallest to 0 as well,
those below 1.6e-7 of their block's largest. The first moment of the same element is kept at that size, and divided by
eps alone: one step of thousands of learning rates. Here every v above 0 takes a value above 0, so that steps of such
elements are shorter than Adam's.

Encoding looks up the first 16 bits of a quotient: at most one border between two codes lies among the numbers that
begin with them, and one comparison decides. That is exact, and on a CPU far faster than a search.

Sources: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", sections 2 and 3 (dynamic tree
quantisation, without its sign bit for what is never negative); Li et al. 2023, "Memory Efficient Optimizers with 4-bit
States" (the zero of v).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

BLOCK = 256  # elements of a scale


@dataclass(frozen=True, eq=False)
class CodeBook:
    """A code book.

    values: fp32 [256], ascending.
    signed: also of negative numbers.
    lowest_code, border: by the first 16 bits of a number of -1 .. 1, as uint8 and fp32 [65536]: the code of the lowest
    such number, and the border above which the next code is taken.
    """

    values: torch.Tensor
    signed: bool
    lowest_code: torch.Tensor
    border: torch.Tensor


@cache
def code_book(signed: bool, device: torch.device) -> CodeBook:
    """Makes the code book of signed or of non-negative numbers."""
    values = _tree(signed)
    borders = (values[1:] + values[:-1]) / 2
    if not signed:
        borders[0] = 0.0  # no v above 0 is rounded to 0
    halves = np.arange(65536)
    if signed:  # as int16 from lowest to highest
        halves = (halves - 32768) & 0xFFFF
    ends = np.stack([halves * 65536, halves * 65536 + 0xFFFF]).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):  # some are NaN
        lowest = np.nan_to_num(ends.astype(np.float64).min(0))
    lowest_code = np.searchsorted(borders, lowest)
    border = np.append(borders, np.inf)[lowest_code]
    tensors = (values.astype(np.float32), lowest_code.astype(np.uint8), border.astype(np.float32))
    made = [torch.from_numpy(tensor).to(device) for tensor in tensors]
    return CodeBook(made[0], signed, made[1], made[2])


def _tree(signed: bool) -> np.ndarray:
    """The book's values: after the sign zeros that count powers of ten, a one, and a linear fraction of 0.1 .. 1."""
    found = [0.0, 1.0]
    for zeros in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (6 - zeros + (not signed)) + 1)
        fractions = (edges[1:] + edges[:-1]) / 2 * 10.0**-zeros
        found += [*fractions, *(-fractions if signed else ())]
    return np.array(sorted(found))


def blocks(elements: int) -> int:
    """Number of blocks of a tensor."""
    return -(-elements // BLOCK)


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
    """Encodes whole blocks.

    values: fp32 [n * 256]; overwritten by their quotients.
    codes: uint8 [up to n * 256]; a shorter one leaves out the padding, which must be zero.
    scales: fp32 [n, 1].
    """
    known = code_book(signed, values.device)
    rows = values.view(values.numel() // BLOCK, BLOCK)
    torch.amax(rows, 1, keepdim=True, out=scales)
    if signed:
        lowest = rows.amin(1, keepdim=True)
        torch.where(scales >= -lowest, scales, lowest, out=scales)
    rows.div_(torch.where(scales == 0, 1.0, scales))
    prefix = torch.bitwise_right_shift(values.view(torch.int32), 16)
    if signed:
        prefix += 32768
    else:  # of NaN, too
        prefix.bitwise_and_(0xFFFF)
    above = values > torch.index_select(known.border, 0, prefix)
    found_codes = torch.index_select(known.lowest_code, 0, prefix).add_(above.view(torch.uint8))
    codes.copy_(found_codes[: codes.numel()])


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool, out: torch.Tensor) -> None:
    """Decodes into whole blocks: fp32 [n * 256], zero behind the codes, uint8 [up to n * 256]."""
    known = code_book(signed, codes.device)
    size = codes.numel()
    torch.index_select(known.values, 0, codes.int(), out=out[:size])
    out[size:] = 0
    out.view(out.numel() // BLOCK, BLOCK).mul_(scales)
