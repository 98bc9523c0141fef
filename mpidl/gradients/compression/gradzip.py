"""GradZIP: factors of low rank by alternating least squares with a ridge, which needs no QR.

    P = mean over ranks of M Q (Q^T Q + l I)^-1           M: a rank's gradient, n x m, with what is fed back
    Q = mean over ranks of M^T P (P^T P + l I)^-1
    M' = P Q^T;  remainder = M - M'

The r x r inverses are the same on all ranks, and are multiplied after the all-reduce. The ridge l is relative, to the
mean of the diagonal of the matrix that it is added to, so that it does not depend on the size of gradients.

Least squares keep the rank that the factors have: where the columns of Q have become dependent, as with a gradient of
low rank, noise of their size is added, the same on every rank; else they would stay dependent for ever.

Source: alternating least squares with a ridge as in GradZIP, without its choice of what to compress.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .low_rank import FACTORS, MIN_RATE, RANK, LowRank, drawn
from .matrices import MatrixView
from .options import Option, check, read

RIDGE = Option(float, lambda value: 0 < value < 1, "a number between 0 and 1")
_DEPENDENT = 1e-8  # smallest eigenvalue of Q^T Q, whose mean is 1


class GradZIP(LowRank):
    """Sends factors of low rank, "gradzip:4,ridge=1e-3": the rank, then any of the words and values below.

    rank: columns of a factor, from 1 up.
    ridge: between 0 and 1, relative ("ridge=1e-3").
    factors, batched, warm_start, min_rate: as of `PowerSGD`.

    Raises ConfigurationError for wrong settings.
    """

    method = "gradzip"

    def __init__(
        self,
        rank: int = 4,
        *,
        ridge: float = 1e-4,
        factors: torch.dtype = torch.float32,
        batched: bool = False,
        warm_start: bool = True,
        min_rate: float = 2.0,
    ) -> None:
        super().__init__(rank, factors=factors, batched=batched, warm_start=warm_start, min_rate=min_rate)
        check(self.method, "ridge", RIDGE, ridge)
        self.ridge = ridge

    @classmethod
    def of(cls, text: str | None) -> GradZIP:
        """Makes one of the settings in a name."""
        words = ("bf16", "batched", "cold")
        given = read(cls.method, text, ("rank", RANK), words, {"ridge": RIDGE, "min_rate": MIN_RATE})
        return cls(
            4 if given.first is None else given.first,
            factors=FACTORS["bf16" if "bf16" in given.words else "fp32"],
            batched="batched" in given.words,
            warm_start="cold" not in given.words,
            **given.values,
        )

    def _settings(self) -> list[str]:
        return [*super()._settings(), *([f"ridge={self.ridge:g}"] if self.ridge != 1e-4 else [])]

    def begin(self, right: torch.Tensor, views: Sequence[MatrixView], step: int) -> torch.Tensor:
        """Scales Q to a mean square of 1 a column, and adds noise where its columns are dependent.

        P Q^T has nothing of this scale, but with error feedback the scale of an unscaled Q grows from step to step.
        """
        scale = _gram(right.mT).diagonal(dim1=1, dim2=2).mean((1,), keepdim=True).rsqrt()
        right.copy_(right.double() * scale.unsqueeze(2))
        is_dependent = torch.linalg.eigvalsh(_gram(right.mT))[:, 0] < _DEPENDENT
        for number in is_dependent.nonzero().flatten().tolist():
            noise = drawn((self.rank, right.shape[2]), views[number].name, step).to(right.device)
            right[number] += noise / math.sqrt(right.shape[2])
        return right.mT

    def finish_left(self, summed: torch.Tensor, right: torch.Tensor, contributions: int) -> torch.Tensor:
        """Solves for P."""
        return self._solve(right, summed.mT / contributions).mT

    def finish_right(self, mean: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Solves for Q."""
        return self._solve(left, mean)

    def _solve(self, factor: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """(F^T F + l I)^-1 times a product of r rows; zero for a factor of zeros."""
        gram = _gram(factor)
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal += self.ridge * diagonal.mean(1, keepdim=True)
        diagonal += diagonal.eq(0.0).all(1, keepdim=True)
        # In double precision, as the matrix has the square of the factor's condition.
        return torch.linalg.solve_ex(gram, product.double())[0].float()


def _gram(factor: torch.Tensor) -> torch.Tensor:
    """F^T F for each of (b, n, r), in double precision."""
    wide = factor.double()
    return wide.mT @ wide
