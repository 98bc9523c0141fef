"""The sections of an engine's buckets with their remainders, and remainders that wait for a section.

A section is the part of a bucket that this rank reduces with its peers (`section_layout`): all of it without nodes.

    a bucket is new               its section takes over what others with its parameters have kept (collective)
    a state is loaded             the sections of ZeRO's buckets take over what was not sent; where the next pass is in
                                  full precision, and with DDP, it waits for that pass, a part of it on each rank
    full precision                what was not sent is added to the gradients, and is then sent whole

All of it runs in the thread of the backward pass, on every rank for the same buckets in the same order. Where something
may wait, the ranks first agree for which parameters of a bucket it does, and then gather its parts: so no rank waits
for one that keeps nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from collectives import Communicator

from ..grad_bucket import GradBucket
from .bucket_section import BucketSection
from .ranks import ReductionMethod
from .remainders import Made, Rows, gathered, of_means, own_part, take_over
from .section_layout import SectionLayout, by_pieces, of_replicas, of_whole_parameters
from .undo import Window

Means = Mapping[torch.nn.Parameter, torch.Tensor]
Key = tuple[tuple[int, tuple[int, ...]], ...]
_PASSES_AFTER_LOAD = 2  # compressed ones in which all buckets come: DDP cuts them anew after its first pass


class Sections:
    """The sections of an engine's buckets.

    method: what reduces them; may become another one between two passes.
    world: the ranks whose gradients are averaged.
    window: the passes since the last step.
    drain: completes the reductions under way.

    undoable: the passes of the window can be undone.
    """

    def __init__(self, method: ReductionMethod, world: Communicator, window: Window, drain: Callable[[], None]) -> None:
        self.method, self.undoable = method, False
        self._world, self._window, self._drain = world, window, drain
        self._sections: dict[Key, BucketSection] = {}
        self._means: dict[torch.nn.Parameter, torch.Tensor] = {}  # own parts of mean remainders without a section
        self._former_means: dict[torch.nn.Parameter, torch.Tensor] = {}  # likewise, of the start of the window
        self._kept_means: dict[torch.nn.Parameter, torch.Tensor] = {}  # likewise, for `put_back`
        self._may_wait = False  # some rank may have some of these; the same on every rank
        self._found = False  # in the buckets of this pass
        self._passes = 0  # compressed ones since a state was loaded

    def of(self, bucket: GradBucket) -> BucketSection:
        """The section of a bucket. Collective where the bucket is new."""
        key = _key_of(bucket)
        found = self._sections.get(key)
        if found is None or found.layout.elements != bucket.buffer().numel():
            found = self._sections[key] = self._lay_out(bucket, bucket.parameters())
        if self._passes <= _PASSES_AFTER_LOAD and not bucket.is_repeated():
            self._count_pass(bucket)
        return found

    def _lay_out(self, bucket: GradBucket, parameters: list[torch.nn.Parameter]) -> BucketSection:
        """Lays out a bucket's section; remainders in other buckets move to it, which is collective."""
        wanted = set(parameters)
        former = [key for key, section in self._sections.items() if not wanted.isdisjoint(section.parameters)]
        if former or self._may_wait:
            self._drain()
        self._collect([section for section in map(self._sections.pop, former) if section.values is not None])
        flat, ranks, compressor = bucket.buffer(), self.method.ranks, self.method.compressor
        base, views = int(flat.storage_offset()), bucket.gradients()
        starts, forms = [int(v.storage_offset()) - base for v in views], [(v.shape, v.stride()) for v in views]
        made = BucketSection(parameters, starts, forms, self._layout(flat.numel(), bucket.needed(), starts))
        compressor.forget(wanted - made.own_parameters())
        if self.method.feeds_back:
            row_count = 1 + len(compressor.arrays)
            given = row_count, self._world.size, ranks.peers
            waiting, before = self._with_means(parameters)
            made.values = take_over(made, gathered(self._means, waiting, row_count, self._world), *given)
            if before:
                either = [p for p in parameters if p in {*waiting, *before}]
                parts = gathered(self._means | self._former_means, either, row_count, self._world)
                values = take_over(made, parts, *given)
                if not self._former_means.keys().isdisjoint(parameters):
                    made.former, made.window = values, self._window.number
            for p in parameters:
                self._former_means.pop(p, None)
                self._means.pop(p, None)
        return made

    def own_parts(self) -> list[list[tuple[int, int]]]:
        """The parts of each bucket that this rank's section has, as (start, stop), of the buckets that have come."""
        return [[(start, stop) for _, start, stop in s.layout.parts()] for s in self._sections.values()]

    @property
    def has_waiting(self) -> bool:
        """Returns whether something waits for a section, on any rank. The same on every rank."""
        return self._may_wait

    def lay_out(self, buckets: Iterable[GradBucket]) -> None:
        """Lays out the sections of all buckets, so that nothing waits for them. Collective, with the same buckets.

        In a pass the ranks would have to meet for it, and some may come to other engines or units first.
        """
        for bucket in buckets:
            self._sections[_key_of(bucket)] = self._lay_out(bucket, bucket.parameters())
        self._may_wait = bool(self._means)  # of parameters that do not train now; these are the same on every rank

    def _with_means(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """The parameters of which any rank keeps a mean without a section, and a former one. Collective if any may.

        Under `join` a rank that makes no steps may keep what others do not.
        """
        if not self._may_wait:
            return [], []
        kept = [[p in means for p in parameters] for means in (self._means, self._former_means)]
        anywhere = torch.tensor(kept, dtype=torch.uint8)
        self._world.all_reduce(anywhere, "max")
        now, before = ([p for p, has in zip(parameters, row, strict=True) if has] for row in anywhere.tolist())
        return now, before

    def _collect(self, moving: Sequence[BucketSection]) -> None:
        """Takes the mean remainders out of sections. Collective."""
        if not moving:
            return
        kept = [self.undoable and section.window == self._window.number for section in moving]
        # Under `join` a rank may have made no step yet, and keep what others do not.
        anywhere = torch.tensor(kept, dtype=torch.uint8)
        self._world.all_reduce(anywhere, "max")
        self._may_wait = True
        for section, is_kept, is_anywhere in zip(moving, kept, anywhere.tolist(), strict=True):
            self._means |= self._own_parts(section)
            if is_anywhere:
                self._former_means |= self._own_parts(section, section.former if is_kept else section.values)

    def _own_parts(
        self, section: BucketSection, values: torch.Tensor | None = None
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        return of_means(section, self._world, lambda _, rows: own_part(rows, self._world), values)

    def _layout(self, elements: int, needed: slice, starts: Sequence[int]) -> SectionLayout:
        ranks = self.method.ranks
        inside = ranks.reduce_scatter_comm
        split = (0, 1) if inside is None else (inside.rank, inside.size)
        if self.method.compressor.needs_whole:
            return of_whole_parameters(elements, starts, split, ranks.peers)
        shard = None if needed == slice(0, elements) else needed.stop - needed.start
        if ranks.is_hybrid and shard is not None:
            return of_replicas(elements, shard, split, ranks.peers)
        return by_pieces(elements, shard, split, ranks.peers)

    def send_in_full(self, bucket: GradBucket, missed: Collection[torch.Tensor]) -> None:
        """Adds what was not sent, as of a checkpoint, to gradients that are reduced in full precision.

        Also the remainder of a section, as of a trial: what a rank adds to its own gradients is in the sum of all.
        missed: parameters for which `put_back` may be asked.
        """
        section = self._sections.pop(_key_of(bucket), None) if self._sections else None
        if section is not None and section.values is not None:
            for at, start, stop in section.layout.parts():
                bucket.buffer()[start:stop] += section.values[0, at : at + stop - start]
        if not self._may_wait:
            return
        views = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
        waiting, before = self._with_means([*views])
        remainders = {p: mean[:1] for p, mean in (self._former_means | self._means).items() if p in views}
        for p, (mean,) in gathered(remainders, waiting, 1, self._world):
            views[p] += mean.to(views[p].device)
            part = self._means.pop(p, None)
            if part is not None and p in missed:
                self._kept_means[p] = part
            if part is not None and self.undoable:
                self._former_means.setdefault(p, part)
        self._note_waiting(bucket, bool(waiting or before))

    def _note_waiting(self, bucket: GradBucket, found: bool) -> None:
        """Notes that something of a bucket waits; after a pass in which nothing did, the ranks need not agree on it."""
        if not bucket.is_repeated():
            self._found = found or (self._found and bucket.index() > 0)
            self._may_wait = self._found or not bucket.is_last()

    def put_back(self, reached: Collection[torch.Tensor]) -> None:
        """Takes the remainders of all parameters but these back to those of before the pass, if it missed them here."""
        for section in self._sections.values():
            section.put_back(reached)
        self._means |= {p: mean for p, mean in self._kept_means.items() if p not in reached}
        self._kept_means = {}

    # ---- between passes ---------------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Begins a window, which ends the one before."""
        self.undoable, self._former_means = self._window.keeps, {}

    def undo(self, chosen: Collection[torch.Tensor] | None) -> None:
        """Takes the remainders of these parameters, or of all, back to those of before the window."""
        for section in self._sections.values():
            section.undo(self._window.number, chosen)
        back = {p: mean for p, mean in self._former_means.items() if chosen is None or p in chosen}
        self._means |= back
        self._former_means = {p: mean for p, mean in self._former_means.items() if p not in back}

    def rescale(self, factor: float) -> None:
        """Multiplies all remainders."""
        for section in self._sections.values():
            if section.values is not None:
                section.values *= factor
                if section.former is not None:
                    section.former *= factor
        for means in (self._means, self._former_means):
            for mean in means.values():
                mean *= factor

    def of_means(
        self, make: Callable[[torch.nn.Parameter, Sequence[torch.Tensor]], Made]
    ) -> dict[torch.nn.Parameter, Made]:
        """Returns what is made of each parameter's mean remainder and the compressor's arrays, by bucket. Collective.

        make: gets the parameter and tensors of its shape, of which it must keep none: they lie in a bucket's memory.
        """
        found: dict[torch.nn.Parameter, Made] = {}
        for section in self._sections.values():
            if section.values is not None:
                found |= of_means(section, self._world, make)
        for p, part in self._means.items():
            for _, mean in gathered(self._means, [p], len(part), self._world) if p not in found else ():
                found[p] = make(p, [*mean])
        return found

    def means(self) -> Means:
        """The mean remainder of each parameter, and the compressor's arrays, whole on every rank. Collective."""
        return self.of_means(lambda _, rows: torch.stack([*rows]))

    def replace(self, means: Mapping[torch.nn.Parameter, Rows]) -> None:
        """Forgets all remainders; sections to come take these over, of which each rank keeps its part."""
        self._sections, self._former_means = {}, {}
        self._means = {p: own_part(rows, self._world).to("cpu", torch.float32) for p, rows in means.items()}
        self._may_wait, self._found, self._passes = bool(means), False, 0

    def _count_pass(self, bucket: GradBucket) -> None:
        """Counts the passes after a load. As their buckets have come, tells of loaded states that fit none of them."""
        if self._passes == _PASSES_AFTER_LOAD:
            self.method.compressor.end_waiting()
        elif not bucket.is_last():
            return
        self._passes += 1
        if self._passes == _PASSES_AFTER_LOAD:
            self._warn_of_lost_states()

    def _warn_of_lost_states(self) -> None:
        """Warns, on rank 0, of factors that were loaded and that fit no section."""
        compressor = self.method.compressor
        first = [pair for section in self._sections.values() for pair in section.first_parameters()]
        loaded, lost = compressor.lost_states(first)
        if lost and self._world.rank == 0:
            warnings.warn(
                f"compress: {compressor.name}: {lost} of the {loaded} factors that were loaded begin anew, as the "
                "parameters lie otherwise in the buckets here",
                RuntimeWarning,
                stacklevel=2,
            )

    def drop_waiting(self) -> None:
        """Forgets what no section has taken over."""
        self._means = {}

    def held_tensors(self) -> list[torch.Tensor]:
        """Remainders and former ones, as they lie in memory."""
        kept = [t for section in self._sections.values() for t in (section.values, section.former) if t is not None]
        return [*kept, *self._means.values(), *self._former_means.values()]


def _key_of(bucket: GradBucket) -> Key:
    """The parameters of a bucket, with the order in which their elements lie there, which a model may change."""
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    return tuple((id(p), view.stride()) for p, view in pairs)
