"""Base class of the methods that reduce matrices as products of two factors of low rank: PowerSGD and GradZIP.

    phase 0    left    = sum over ranks of  M right            all-reduce of n r numbers, and of the rest of the section
    phase 1    right   = mean over ranks of left^T M           all-reduce of m r numbers
               M'      = left right^T                          the mean, on every rank; remainder = M - M'

A tensor is a matrix of its first dimension n by all others, m. It is compressed if (n + m) r min_rate < n m; other
tensors, of one dimension or small, are sent in full precision with the left factors. With `batched` the whole section
is one matrix, as square as can be.

All ranks compute factors from the same all-reduced numbers with the same kernels, so they have the same bits. A
method defines what it makes of a factor. Factors that are rounded to 16 bits are also added up in these, and the
remainder has what rounding lost.

Loaded factors wait on every rank until sections come that they fit. With `batched` a factor belongs to the first
parameter of a section, and fits one that begins with it and has a matrix of the same size.
"""

from __future__ import annotations

import math
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from collectives import Communicator, Work

from .compressor import WAITING, Compressor, Exchange, Section, Steps, started
from .matrices import MatrixView, of_parameter, of_section, parts_of, runs_outside, square_side
from .options import Option, check

RANK = Option(int, lambda value: isinstance(value, int) and value >= 1, "an integer from 1 up")
MIN_RATE = Option(float, lambda value: value >= 1, "a number from 1 up")
FACTORS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices of one shape, whose factors lie side by side."""

    views: tuple[MatrixView, ...]

    def factors(self, buffer: torch.Tensor, at: int, rank: int, left: bool) -> torch.Tensor:
        """Their part of a buffer from `at` on: (b, n, r) for left factors, (b, r, m) for transposed right ones."""
        rows, columns = self.views[0].shape
        shape = (len(self.views), rows, rank) if left else (len(self.views), rank, columns)
        return buffer[at : at + shape[0] * shape[1] * shape[2]].view(shape)


@dataclass(frozen=True)
class FactorPlan:
    """A section's matrices and what is left.

    uncompressed: (start, stop) of each run of what is left.
    """

    groups: tuple[MatrixGroup, ...]
    uncompressed: tuple[tuple[int, int], ...]

    @cached_property
    def uncompressed_size(self) -> int:
        """Elements that are not compressed."""
        return sum(stop - start for start, stop in self.uncompressed)

    def views(self, buffer: torch.Tensor, rank: int, left: bool) -> list[torch.Tensor]:
        """Each group's factors in a buffer of all of them."""
        found, at = [], 0
        for group in self.groups:
            found.append(group.factors(buffer, at, rank, left))
            at += found[-1].numel()
        return found

    def size(self, rank: int, left: bool) -> int:
        """Elements of all left, or right, factors."""
        return sum(len(group.views) * group.views[0].shape[not left] * rank for group in self.groups)


class LowRank(Compressor):
    """Reduces matrices by factors.

    rank: columns of a factor.
    factors: dtype in which they are sent.
    batched: a whole section is one matrix.
    warm_start: begin with the last step's right factors; those that are not there are drawn, seeded by the step and the
        parameter's name.
    min_rate: how many times smaller the factors must be.
    """

    phases = 2
    needs_whole = True
    start_step = 10
    bucket_cap_mb = 25.0  # factors take no time to send, so that what counts is the work for each bucket
    method: str  # of `name`

    def __init__(
        self,
        rank: int,
        *,
        factors: torch.dtype = torch.float32,
        batched: bool = False,
        warm_start: bool = True,
        min_rate: float = 2.0,
    ) -> None:
        check(self.method, "rank", RANK, rank)
        check(self.method, "min_rate", MIN_RATE, min_rate)
        self.rank, self.factors, self.batched = rank, factors, batched
        self.warm_start, self.min_rate = warm_start, min_rate
        self._kept: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        self._waiting: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}  # loaded, for sections to come
        self._loaded: dict[torch.nn.Parameter, list[tuple[str, torch.Size]]] = {}  # while there may be such
        self._plans: weakref.WeakKeyDictionary[Any, FactorPlan] = weakref.WeakKeyDictionary()  # by keys of sections

    @property
    def name(self) -> str:
        """The method, the rank and the settings that are not the default ones."""
        return f"{self.method}:" + ",".join([str(self.rank), *self._settings()])

    def _settings(self) -> list[str]:
        said = [name for name, dtype in FACTORS.items() if dtype == self.factors and name != "fp32"]
        said += ["batched"] if self.batched else []
        said += [] if self.warm_start else ["cold"]
        return said + ([f"min_rate={self.min_rate:g}"] if self.min_rate != 2 else [])

    # ---- what a method defines --------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, right: torch.Tensor, views: Sequence[MatrixView], step: int) -> torch.Tensor:
        """Makes the right factors to multiply by, (b, m, r), of those kept."""

    @abstractmethod
    def finish_left(self, summed: torch.Tensor, right: torch.Tensor, contributions: int) -> torch.Tensor:
        """Makes the left factors, (b, n, r), of the sum over the ranks of M right. May overwrite it."""

    @abstractmethod
    def finish_right(self, mean: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Makes the transposed right factors, (b, r, m), of the mean of left^T M. May overwrite it."""

    # ---- one section ------------------------------------------------------------------------------------------------

    def reduce(self, section: Section, exchange: Exchange) -> Steps:
        """Multiplies, adds up and multiplies again."""
        plan, values = self.plan(section), section.values
        rights = [
            self.begin(self.stacked(each, "right", section.step), each.views, section.step) for each in plan.groups
        ]
        sums = Sums(self, plan, section, left=True)
        for group, right, left in zip(plan.groups, rights, sums.by_group, strict=True):
            for number, view in enumerate(group.views):
                view.times(values, right[number], left[number])
        yield sums.start(exchange.phases[0])
        sums.finish()
        average_uncompressed(plan, section, sums.uncompressed)
        lefts = [
            self.finish_left(left, right, section.contributions).contiguous()
            for left, right in zip(sums.by_group, rights, strict=True)
        ]
        sums.give_back(lefts)
        sums = Sums(self, plan, section, left=False)
        for group, left, right_t in zip(plan.groups, lefts, sums.by_group, strict=True):
            for number, view in enumerate(group.views):
                view.transposed_times(values, left[number], right_t[number])
        yield sums.start(exchange.phases[1])
        sums.finish()
        sums.factors /= section.contributions
        found = [self.finish_right(mean, left) for mean, left in zip(sums.by_group, lefts, strict=True)]
        self.take_products(plan, section, exchange, lefts, found)
        for group, right_t in zip(plan.groups, found if self.warm_start else (), strict=False):
            self.keep(group, "right", right_t)
        sums.give_back()

    def plan(self, section: Section) -> FactorPlan:
        """Finds a section's matrices, once."""
        known = None if section.key is None else self._plans.get(section.key)
        if known is None:
            known = self._make_plan(section)
            if section.key is not None:
                self._plans[section.key] = known
        for matrix in section.parameters[1:] if self.batched else ():  # sections of former buckets began with them
            self._kept.pop(matrix.parameter, None)
        return known

    def _make_plan(self, section: Section) -> FactorPlan:
        elements = section.values.numel()
        views = []
        if not self.batched:
            views = [of_parameter(m) for m in section.parameters if self._compresses(_as_matrix(m.shape))]
        elif section.parameters and self._compresses(_as_square(elements)):
            views = [of_section(section)]
        shapes = dict.fromkeys(view.shape for view in views)
        groups = tuple(MatrixGroup(tuple(view for view in views if view.shape == shape)) for shape in shapes)
        return FactorPlan(groups, tuple(runs_outside(((view.start, view.stop) for view in views), elements)))

    def _compresses(self, shape: tuple[int, int]) -> bool:
        rows, columns = shape
        return (rows + columns) * self.rank * self.min_rate < rows * columns

    def take_products(
        self,
        plan: FactorPlan,
        section: Section,
        exchange: Exchange,
        lefts: Sequence[torch.Tensor],
        rights: Sequence[torch.Tensor],
    ) -> None:
        """Writes left right^T of each matrix to the result, and subtracts it from the values."""
        factor = section.contributions / exchange.size  # a peer's values may be the sum of its node
        are_finite = all(bool(torch.isfinite(each).all()) for each in (*lefts, *rights))
        for group, left, right_t in zip(plan.groups, lefts, rights, strict=True):
            for number, view in enumerate(group.views):
                mine = left[number], right_t[number]
                if section.keeps_remainder and (are_finite or all(bool(torch.isfinite(each).all()) for each in mine)):
                    view.subtract_product(section.values, section.result, *mine, factor, section.needed_elements)
                    continue
                view.write(section.result, *mine, section.needed_elements)
                if section.keeps_remainder:
                    view.of(section.values).zero_()
        self._clear_padding(section)

    def _clear_padding(self, section: Section) -> None:
        """Makes elements between parameters zero again, which are in the matrix of a whole section."""
        if self.batched:
            taken = [(m.start, m.start + m.shape.numel()) for m in section.parameters]
            for start, stop in runs_outside(taken, section.values.numel()) if taken else []:
                section.result[start:stop].zero_()
                if section.keeps_remainder:
                    section.values[start:stop].zero_()

    # ---- states -----------------------------------------------------------------------------------------------------

    def stacked(self, group: MatrixGroup, side: str, step: int) -> torch.Tensor:
        """The transposed factors kept of a group, (b, r, n or m)."""
        return torch.stack([self._factor(view, side, step) for view in group.views])

    def _factor(self, view: MatrixView, side: str, step: int) -> torch.Tensor:
        shape = (self.rank, view.shape[side == "right"])
        for states in (self._kept, self._waiting):
            found = states.get(view.owner, {}).get(side)
            if found is not None and found.shape == shape:
                if states is self._waiting:
                    del states[view.owner][side]
                    self._kept.setdefault(view.owner, {})[side] = found
                return found
        return drawn(shape, view.name, step).to(view.owner.device)

    def keep(self, group: MatrixGroup, side: str, factors: torch.Tensor) -> None:
        """Keeps transposed factors for the next step, where they are finite and not all zero."""
        copied = factors.clone()
        for view, mine, largest in zip(group.views, copied, copied.abs().amax((1, 2)).tolist(), strict=True):
            if 0 < largest < math.inf:
                self._kept.setdefault(view.owner, {})[side] = mine

    def state(self) -> Mapping[torch.nn.Parameter, Mapping[str, torch.Tensor]]:
        """The factors that begin the next step; with `batched` at the first parameter of a section.

        Those that wait have names of their own (`WAITING`).
        """
        waiting = {p: {WAITING + side: factor for side, factor in kept.items()} for p, kept in self._waiting.items()}
        every = {p: {**waiting.get(p, {}), **self._kept.get(p, {})} for p in {**self._kept, **waiting}}
        return {p: {side: factor.clone() for side, factor in kept.items()} for p, kept in every.items() if kept}

    def load(self, state: Mapping[torch.nn.Parameter, Mapping[str, torch.Tensor]]) -> None:
        """Takes over factors; those of other shapes are drawn anew."""
        self._kept, self._waiting, self._loaded = {}, {}, self._loaded if state else {}
        for p, kept in state.items():
            for side, factor in kept.items():
                states = self._waiting if side.startswith(WAITING) else self._kept
                copied = factor.detach().to(p.device, torch.float32, copy=True)
                states.setdefault(p, {})[side.removeprefix(WAITING)] = copied

    def wait_for_sections(self) -> None:
        """Keeps the factors that were loaded until sections take them over, or until `end_waiting`."""
        self._kept, self._waiting = {}, self._kept
        self._loaded = {p: [(side, f.shape) for side, f in kept.items()] for p, kept in self._waiting.items()}

    def lost_states(self, sections: Iterable[tuple[torch.nn.Parameter, int]]) -> tuple[int, int]:
        """Returns how many parameters have loaded factors, and how many of them fit no section: 0 unless `batched`."""
        loaded = self._loaded
        fitting = {p for p, elements in sections if self._fits(loaded.get(p, ()), _as_square(elements))}
        return len(loaded), len(loaded.keys() - fitting) if self.batched else 0

    def end_waiting(self) -> None:
        """Drops the factors that wait."""
        self._loaded, self._waiting = {}, {}

    def _fits(self, states: Iterable[tuple[str, torch.Size]], matrix: tuple[int, int]) -> bool:
        return any(shape == (self.rank, matrix[side == "right"]) for side, shape in states)

    def forget(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Drops the factors of parameters that another rank reduces, but for those that wait."""
        for p in parameters:
            self._kept.pop(p, None)

    # ---- sizes ------------------------------------------------------------------------------------------------------

    def sent_bytes(self, elements: int, ranks: int, needs_all: bool, shapes: Sequence[torch.Size] = ()) -> float:
        """2 (N-1)/N of the factors and of the rest, whatever is needed."""
        matrices = self._matrices(elements, shapes)
        factors = sum(rows + columns for rows, columns in matrices) * self.rank
        uncompressed = 0 if self.batched and matrices else elements - sum(rows * columns for rows, columns in matrices)
        return 2 * (ranks - 1) / ranks * (factors * self.factors.itemsize + 4 * uncompressed)

    def state_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """The right factors, fp32; with `batched` as if the parameters were one section."""
        elements = sum(shape.numel() for shape in shapes)
        return 4 * self.rank * sum(columns for _, columns in self._matrices(elements, shapes)) if self.warm_start else 0

    def _matrices(self, elements: int, shapes: Sequence[torch.Size]) -> list[tuple[int, int]]:
        found = [_as_square(elements)] if self.batched else [_as_matrix(shape) for shape in shapes]
        return [shape for shape in found if self._compresses(shape)]


class Sums:
    """The arrays that one phase adds up over the ranks.

    factors: fp32, of all groups.
    by_group: each group's.
    uncompressed: what is sent in full precision, with the left factors, or as `with_uncompressed` says.
    """

    def __init__(
        self, method: LowRank, plan: FactorPlan, section: Section, left: bool, with_uncompressed: bool | None = None
    ) -> None:
        size = plan.size(method.rank, left)
        uncompressed_size = plan.uncompressed_size if (left if with_uncompressed is None else with_uncompressed) else 0
        self._pool, self._dtype = method.pool, method.factors
        self._whole = self._pool.take(size + uncompressed_size, torch.float32, section.values.device)
        self.factors, self.uncompressed = self._whole[:size], self._whole[size:]
        self.by_group = plan.views(self.factors, method.rank, left)
        self._rounded = self.factors
        if uncompressed_size:
            torch.cat(parts_of(section.values, plan.uncompressed), out=self.uncompressed)

    def start(self, comm: Communicator) -> list[Work]:
        """Starts them: one all-reduce, or two where factors are sent in 16 bits."""
        if self._dtype == torch.float32:
            return _all_reduced(comm, self._whole)
        self._rounded = self.factors.to(self._dtype)
        return [*_all_reduced(comm, self.uncompressed), *_all_reduced(comm, self._rounded)]

    def finish(self) -> None:
        """Makes the factors of what was sent."""
        if self._dtype != torch.float32:
            self.factors.copy_(self._rounded)

    def give_back(self, made: Sequence[torch.Tensor] = ()) -> None:
        """Gives the memory to other sections, unless something that was made of the factors lies in it."""
        storage = self._whole.untyped_storage().data_ptr()
        if all(each.untyped_storage().data_ptr() != storage for each in made):
            self._pool.give_back(self._whole)


def average_uncompressed(plan: FactorPlan, section: Section, uncompressed: torch.Tensor) -> None:
    """Makes the mean of what is not compressed; nothing of it remains."""
    if plan.uncompressed:
        means = uncompressed.div_(section.contributions).split([stop - start for start, stop in plan.uncompressed])
        torch._foreach_copy_(parts_of(section.result, plan.uncompressed), list(means))
        if section.keeps_remainder:
            torch._foreach_zero_(parts_of(section.values, plan.uncompressed))


def drawn(shape: tuple[int, int], name: str, step: int) -> torch.Tensor:
    """Normal numbers that are a function of a name and a step."""
    random = torch.Generator().manual_seed(zlib.crc32(f"{step} {name}".encode()))
    return torch.randn(shape, generator=random, dtype=torch.float32)


def _as_matrix(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a parameter; one row for those that have one dimension, which are never compressed."""
    return (shape[0], shape.numel() // shape[0]) if len(shape) > 1 and shape.numel() else (1, shape.numel())


def _as_square(elements: int) -> tuple[int, int]:
    side = square_side(elements) if elements else 1
    return -(-elements // side), side


def _all_reduced(comm: Communicator, values: torch.Tensor) -> list[Work]:
    return started(comm.all_reduce(values, async_op=True)) if values.numel() else []
