"""The sections of an engine's buckets with their remainders, and remainders that wait for a section.

A section is the part of a bucket that this rank reduces with its peers (`section_layout`): all of it without nodes.

    a bucket is new               its section takes over what others with its parameters have kept (collective)
    a state is loaded             what was not sent waits for the sections of the next pass
    full precision                what was not sent is added to the gradients, and is then sent whole

All of it runs in the thread of the backward pass, on every rank for the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from collectives import Communicator

from ...comm_hooks import GradBucket
from .ranks import Method
from .remainders import BucketSection, mean_remainders, take_over
from .section_layout import SectionLayout, by_pieces, of_replicas, of_whole_parameters
from .undo import Window

Means = Mapping[torch.nn.Parameter, torch.Tensor]
Key = tuple[tuple[int, tuple[int, ...]], ...]


class Sections:
    """The sections of an engine's buckets.

    method: what reduces them; may become another one between two passes.
    world: the ranks whose gradients are averaged.
    window: the passes since the last step.
    drain: completes the reductions under way.

    undoable: the passes of the window can be undone.
    """

    def __init__(self, method: Method, world: Communicator, window: Window, drain: Callable[[], None]) -> None:
        self.method, self.undoable = method, False
        self._world, self._window, self._drain = world, window, drain
        self._sections: dict[Key, BucketSection] = {}
        self._means: dict[torch.nn.Parameter, torch.Tensor] = {}  # mean remainders without a section
        self._former_means: dict[torch.nn.Parameter, torch.Tensor] = {}  # likewise, of the start of the window
        self._kept_means: dict[torch.nn.Parameter, torch.Tensor] = {}  # likewise, for `put_back`

    def of(self, bucket: GradBucket) -> BucketSection:
        """The section of a bucket. Collective where the bucket is new."""
        key = _key_of(bucket)
        found = self._sections.get(key)
        if found is None or found.layout.elements != bucket.buffer().numel():
            found = self._sections[key] = self._lay_out(bucket, bucket.parameters())
        return found

    def _lay_out(self, bucket: GradBucket, parameters: list[torch.nn.Parameter]) -> BucketSection:
        """Lays out a bucket's section; remainders in other buckets move to it, which is collective."""
        wanted = set(parameters)
        former = [key for key, section in self._sections.items() if not wanted.isdisjoint(section.parameters)]
        if former:
            self._drain()
        self._collect([section for section in map(self._sections.pop, former) if section.values is not None])
        flat, ranks, compressor = bucket.buffer(), self.method.ranks, self.method.compressor
        base, size = flat.data_ptr(), flat.element_size()
        views = bucket.gradients()
        starts, forms = [(v.data_ptr() - base) // size for v in views], [(v.shape, v.stride()) for v in views]
        made = BucketSection(parameters, starts, forms, self._layout(flat.numel(), bucket.needed(), starts))
        if self.method.feeds_back:
            given = 1 + len(compressor.arrays), self._world.size, ranks.peers
            made.values = take_over(made, self._means, *given)
            if not self._former_means.keys().isdisjoint(parameters):
                made.former = take_over(made, self._means | self._former_means, *given)
                made.window = self._window.number
            for p in parameters:
                self._former_means.pop(p, None)
                self._means.pop(p, None)
        return made

    def _collect(self, moving: Sequence[BucketSection]) -> None:
        """Takes the mean remainders out of sections. Collective."""
        if not moving:
            return
        kept = [self.undoable and section.window == self._window.number for section in moving]
        # Under `join` a rank may have made no step yet, and keep what others do not.
        anywhere = torch.tensor(kept, dtype=torch.uint8)
        self._world.all_reduce(anywhere, "max")
        for section, is_kept, is_anywhere in zip(moving, kept, anywhere.tolist(), strict=True):
            self._means |= mean_remainders(section, self._world)
            if is_anywhere:
                values = section.former if is_kept else section.values
                self._former_means |= mean_remainders(section, self._world, values)

    def _layout(self, elements: int, needed: slice, starts: Sequence[int]) -> SectionLayout:
        ranks = self.method.ranks
        split = (0, 1) if ranks.scatters is None else (ranks.scatters.rank, ranks.scatters.size)
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
        for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True) if self._means else ():
            mean = self._means.pop(p, None)
            if mean is not None:
                view += mean[0].view(view.shape).to(view.device)
                if p in missed:
                    self._kept_means[p] = mean
                if self.undoable:
                    self._former_means.setdefault(p, mean)

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

    def means(self) -> Means:
        """The mean remainder of each parameter, a row, and the compressor's arrays. Collective."""
        found = dict(self._means)
        for section in self._sections.values():
            if section.values is not None:
                found |= mean_remainders(section, self._world)
        return found

    def replace(self, means: Means) -> None:
        """Forgets all remainders; the sections of the next pass take these over."""
        self._sections, self._means, self._former_means = {}, dict(means), {}

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
