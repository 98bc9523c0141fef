"""The reduction of one bucket in one pass, phase by phase.

bucket   ── reduce-scatter inside ──▶  summed  ── + remainder ──▶  values  ── the compressor's phases ──▶  result
bucket   ◀───────────────────── all-gather inside, or the result lies in the bucket ──────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..grad_bucket import GradBucket
from .bucket_section import BucketSection
from .compressor import Matrix, Section, Steps, started
from .ranks import ReductionMethod


@dataclass(frozen=True)
class BucketReduction:
    """The reduction of a bucket.

    bucket_section: its section.
    method: what reduces it.
    contributions: ranks whose gradients are averaged.
    names: of parameters, some of which may have none.
    step: number of passes before this one.
    begins_step: it is the first since the optimizer stepped.
    window: number of the window whose undo takes this pass back; None: no undo.
    """

    bucket: GradBucket
    bucket_section: BucketSection
    method: ReductionMethod
    contributions: int
    names: Mapping[torch.nn.Parameter, str]
    step: int
    begins_step: bool
    window: int | None

    def target(self) -> torch.Tensor:
        """The elements of the bucket that become the mean: all, or the needed ones."""
        flat, is_whole = self.bucket.buffer(), self.bucket_section.layout.needs_all and not self.method.ranks.is_hybrid
        return flat if is_whole else flat[self.bucket.needed()]

    def steps(self) -> Steps:
        """Yields the operations of each phase."""
        flat, layout, ranks = self.bucket.buffer(), self.bucket_section.layout, self.method.ranks
        summed, inside = flat, ranks.reduce_scatter_comm
        if inside is not None:
            summed, works = flat.new_empty(layout.size), []
            op = "avg" if flat.dtype == torch.float16 else "sum"  # of which a sum may be infinite
            for (at, start, stop), block in zip(layout.parts(), layout.blocks, strict=True):
                own, whole = summed[at : at + stop - start], flat[block.start : block.stop]
                works += started(inside.reduce_scatter(own, whole, op, counts=block.counts, async_op=True))
            yield works
            if op == "avg":
                summed = summed.float().mul_(inside.size)
        section = self._section(summed)
        yield from self.method.compressor.reduce(section, ranks.exchange)
        if inside is None or not layout.gathers_whole:
            if not _same_memory(section.result, flat):
                self.target().copy_(section.result)
            if inside is not None:
                yield []
            return
        mean, works = section.result.to(flat.dtype), []
        assert ranks.all_gather_comm is not None
        for (at, start, stop), block in zip(layout.parts(), layout.blocks, strict=True):
            whole, own = flat[block.start : block.stop], mean[at : at + stop - start]
            works += started(ranks.all_gather_comm.all_gather(whole, own, counts=block.counts, async_op=True))
        yield works

    def _section(self, summed: torch.Tensor) -> Section:
        """Adds a pass's gradients to the remainder, for the compressor to reduce."""
        compressor, bucket_section = self.method.compressor, self.bucket_section
        absorb = partial(
            compressor.absorb,
            begins_step=self.begins_step,
            contributions=self.contributions,
            ranks=self.method.ranks.peers,
        )
        return Section(
            key=bucket_section,
            values=bucket_section.add(summed, self.window, absorb).float(),
            result=self._result(),
            pieces=bucket_section.layout.pieces,
            parameters=self._whole_parameters(),
            contributions=self.contributions,
            needs_all=bucket_section.layout.needs_all,
            keeps_remainder=bucket_section.values is not None,
            step=self.step,
            repeats=bucket_section.repeats,
            needed=self._needed(),
            arrays=() if bucket_section.values is None else [*bucket_section.values[1:]],
        )

    def _result(self) -> torch.Tensor:
        """Memory of fp32 for the mean: the bucket's own where it fits."""
        flat, needed, layout = self.bucket.buffer(), self.bucket.needed(), self.bucket_section.layout
        ranks = self.method.ranks
        if layout.needs_all and (self.method.compressor.needs_whole or not ranks.is_hybrid):
            fits, size = ranks.reduce_scatter_comm is None, layout.size
        else:
            fits, size = True, needed.stop - needed.start
        if fits and flat.dtype == torch.float32:
            return flat if size == flat.numel() else flat[needed]
        return torch.empty(size, dtype=torch.float32, device=flat.device)

    def _needed(self) -> tuple[int, int] | None:
        """The elements that this rank needs of a section that is the whole bucket; None where it needs all."""
        if self.method.ranks.reduce_scatter_comm is not None or not self.method.compressor.needs_whole:
            return None
        needed = self.bucket.needed()
        return needed.start, needed.stop

    def _whole_parameters(self) -> Sequence[Matrix]:
        if not self.method.compressor.needs_whole:
            return ()
        bucket_section = self.bucket_section
        ((_, first, last),) = bucket_section.layout.parts()
        pairs = zip(bucket_section.parameters, bucket_section.starts, strict=True)
        return [Matrix(p, start - first, self.names.get(p, "")) for p, start in pairs if first <= start < last]


def _same_memory(result: torch.Tensor, flat: torch.Tensor) -> bool:
    return result.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
