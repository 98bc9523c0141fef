"""PowerSGD: one step of a power iteration for each gradient, which begins where the last step ended.

    right = orthonormal(Q)              M: a rank's gradient, n x m, with what earlier steps have not sent
    P     = sum over ranks of M right
    left  = orthonormal(P)
    Q     = mean over ranks of M^T left
    M'    = left Q^T;  remainder = M - M'

With `alternating` a step does one half: M' = P right^T with the mean P in even steps, M' = left Q^T with left =
orthonormal(P of the step before) in odd ones. One all-reduce, and half the bytes, a step.

Columns are orthonormalised by a Householder QR, which gives orthonormal columns for any matrix: of zeros, or of a lower
rank. So factors of a gradient that was once zero do not stay zero.

Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", algorithms 1 and 2; the alternation is that of the authors' later implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import ConfigurationError
from .compressor import Exchange, Section, Steps
from .low_rank import FACTORS, MIN_RATE, RANK, LowRank, Sums, average_uncompressed
from .matrices import MatrixView
from .options import read


class PowerSGD(LowRank):
    """Sends factors of low rank, "powersgd:4,fp16": the rank, then any of the words and values below.

    rank: columns of a factor, from 1 up.
    factors: the dtype in which factors are sent: torch.float32, or float16 ("fp16") or bfloat16 ("bf16"). Factors have
        the size of the gradient; in fp16 they must stay below 65504.
    batched: the whole section is one square matrix ("batched"): fewer bytes still, with less accuracy.
    alternating: one all-reduce a step ("alternating").
    warm_start: begin with the last step's factor; without ("cold") each step draws one.
    min_rate: compress tensors for which factors have that many times fewer elements ("min_rate=3").

    Raises ConfigurationError for wrong settings.
    """

    method = "powersgd"

    def __init__(
        self,
        rank: int = 4,
        *,
        factors: torch.dtype = torch.float32,
        batched: bool = False,
        alternating: bool = False,
        warm_start: bool = True,
        min_rate: float = 2.0,
    ) -> None:
        super().__init__(rank, factors=factors, batched=batched, warm_start=warm_start, min_rate=min_rate)
        if alternating and not warm_start:
            raise ConfigurationError(
                "compress: powersgd: got alternating and cold; needs one of them, as alternating multiplies by the "
                "factor of the step before"
            )
        self.alternating = alternating
        self.phases = 1 if alternating else 2

    @classmethod
    def of(cls, text: str | None) -> PowerSGD:
        """Makes one of the settings in a name."""
        words = ("fp16", "bf16", "batched", "alternating", "cold")
        given = read(cls.method, text, ("rank", RANK), words, {"min_rate": MIN_RATE})
        dtypes = [name for name in ("fp16", "bf16") if name in given.words]
        if len(dtypes) > 1:
            raise ConfigurationError(f"compress: got '{cls.method}:{text}': fp16 and bf16; needs one of them")
        return cls(
            4 if given.first is None else given.first,
            factors=FACTORS[dtypes[0] if dtypes else "fp32"],
            batched="batched" in given.words,
            alternating="alternating" in given.words,
            warm_start="cold" not in given.words,
            **given.values,
        )

    def _settings(self) -> list[str]:
        return [*super()._settings(), *(["alternating"] if self.alternating else [])]

    def begin(self, right: torch.Tensor, views: Sequence[MatrixView], step: int) -> torch.Tensor:
        """Orthonormalises the columns of Q."""
        return orthonormal(right.mT)

    def finish_left(self, summed: torch.Tensor, right: torch.Tensor, contributions: int) -> torch.Tensor:
        """Orthonormalises the columns of P; its size does not matter."""
        return orthonormal(summed)

    def finish_right(self, mean: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Takes Q as it is."""
        return mean

    def reduce(self, section: Section, exchange: Exchange) -> Steps:
        """Reduces by both halves of the iteration, or by one."""
        return self._reduce_half(section, exchange) if self.alternating else super().reduce(section, exchange)

    def _reduce_half(self, section: Section, exchange: Exchange) -> Steps:
        plan, values = self.plan(section), section.values
        is_left = (section.step + section.repeats) % 2 == 0  # the same half twice would see nothing of the remainder
        known, made = ("right", "left") if is_left else ("left", "right")
        bases = [orthonormal(self.stacked(group, known, section.step).mT) for group in plan.groups]
        sums = Sums(self, plan, section, left=is_left, with_uncompressed=True)
        for group, basis, found in zip(plan.groups, bases, sums.by_group, strict=True):
            for number, view in enumerate(group.views):
                multiply = view.times if is_left else view.transposed_times
                multiply(values, basis[number], found[number])
        yield sums.start(exchange.phases[0])
        sums.finish()
        average_uncompressed(plan, section, sums.uncompressed)
        sums.factors /= section.contributions
        lefts = sums.by_group if is_left else bases
        rights = [basis.mT for basis in bases] if is_left else sums.by_group
        self.take_products(plan, section, exchange, lefts, rights)
        for group, found in zip(plan.groups, sums.by_group, strict=True):
            self.keep(group, made, found.mT if is_left else found)
        sums.give_back()

    def sent_bytes(self, elements: int, ranks: int, needs_all: bool, shapes: Sequence[torch.Size] = ()) -> float:
        """2 (N-1)/N of the factors and the rest; with `alternating` the mean of a step with P and one with Q."""
        both = super().sent_bytes(elements, ranks, needs_all, shapes)
        if not self.alternating:
            return both
        factors = sum(rows + columns for rows, columns in self._matrices(elements, shapes)) * self.rank
        return both - (ranks - 1) / ranks * factors * self.factors.itemsize

    def state_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """The factors kept, fp32: Q, with `alternating` P too."""
        if not self.alternating:
            return super().state_bytes(shapes)
        elements = sum(shape.numel() for shape in shapes)
        return 4 * self.rank * sum(rows + columns for rows, columns in self._matrices(elements, shapes))


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis, (b, n, r), whose span contains that of the columns."""
    return torch.linalg.qr(columns).Q
