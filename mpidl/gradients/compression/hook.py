"""Reduces an engine's buckets by a compressor: the communication hook behind `compress=`.

    backward fills a bucket     its gradients are added to what earlier steps have not sent
    phase: inside a node        reduce-scatter in full precision; without nodes, or everywhere: none
    phases of the compressor    with the peers on other nodes, or with all ranks
    phase: inside a node        all-gather of the mean, where every rank needs all of it

All of it runs in the thread of the backward pass (`pipeline`); the operations run in the progress threads of the
Communicators, one for each phase. Making a `CompressedReduction`, its first pass with other buckets and its state
are collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collectives import ArgumentError, Communicator, Work

from ...comm_hooks import GradBucket, Handle
from ...errors import ConfigurationError
from ...job import communicator_pool
from .compressor import Exchange, Matrix, Section, Steps
from .layout import SectionLayout, by_pieces, of_replicas, of_whole_parameters
from .pipeline import Pipeline
from .remainders import BucketSection, mean_remainders, take_over
from .settings import Compression


class CompressedReduction:
    """A communication hook, called as `hook(None, bucket)`, that reduces by `settings`. Collective.

    world: the ranks whose gradients are averaged. names: of the parameters, for `state_dict`.
    shards, replicas: under hybrid sharding, the ranks with the shards of a bucket, and those with this rank's shard;
        compression is then over the replicas.

    steps: number of reduced passes. compressor: the one in use. where: "between_nodes" or "everywhere".

    Raises ConfigurationError on every rank where the nodes do not fit.
    """

    def __init__(
        self,
        settings: Compression,
        world: Communicator,
        names: Mapping[torch.nn.Parameter, str],
        shards: Communicator | None = None,
        replicas: Communicator | None = None,
    ) -> None:
        self.compressor = settings.compressor()
        self.settings, self.steps = settings, 0
        self._names, self._world = dict(names), world
        feedback = settings.error_feedback
        self._feeds_back = self.compressor.feeds_back if feedback is None else feedback
        self._inside: Communicator | None = None
        self._is_hybrid = replicas is not None
        exchanging = world
        if replicas is not None:
            if settings.where == "everywhere":
                raise ConfigurationError(
                    "compress: where='everywhere', but with shard_group= gradients are compressed between the groups "
                    "alone; leave where= out"
                )
            self._inside, exchanging, self.where = shards, replicas, "between_nodes"
        elif world.nodes > 1 and settings.where != "everywhere":
            try:
                self._inside, exchanging = world.split_by_node()
                self.where = "between_nodes"
            except ArgumentError as error:
                if settings.where is not None:
                    raise ConfigurationError(
                        f"compress: where={settings.where!r}: {str(error).partition(':')[2].strip()}"
                    ) from None
                self.where = "everywhere"
        else:
            self.where = settings.where or "everywhere"
        is_all_inside = self.where == "between_nodes" and world.nodes == 1 and not self._is_hybrid
        self.compresses = exchanging.size > 1 and not is_all_inside
        pooled = [communicator_pool.take(exchanging) for _ in range(self.compressor.phases if self.compresses else 0)]
        self._exchange = Exchange([each.comm for each in pooled])
        self._peers = exchanging.size
        self._scatters: Communicator | None = None
        if self.compresses and self._inside is not None and self._inside.size > 1:
            inside = [communicator_pool.take(self._inside) for _ in range(2)]
            self._scatters, self._gathers = (each.comm for each in inside)
            pooled += inside
        for each in pooled:
            weakref.finalize(self, each.give_back).atexit = False
        self._pipeline = Pipeline()
        self._sections: dict[tuple[int, ...], BucketSection] = {}
        self._means: dict[torch.nn.Parameter, torch.Tensor] = {}  # remainders that no section has taken over yet

    def __call__(self, state: Any, bucket: GradBucket) -> Handle:
        """Starts the reduction of a bucket."""
        step = self.steps
        if bucket.is_last():
            self.steps += 1
        if not self.compresses or step < self.settings.start_step:
            return bucket.reduce(process_group=self._world)
        section = self._section(bucket)
        flat = bucket.buffer()
        target = flat if section.layout.needs_all and not self._is_hybrid else flat[bucket.needed()]
        return self._pipeline.start(self._steps(bucket, section, step), lambda: target)

    def drain(self) -> None:
        """Completes the reductions under way, as before a checkpoint. Every rank has begun the same ones."""
        self._pipeline.drain()

    # ---- one bucket -----------------------------------------------------------------------------------------------

    def _steps(self, bucket: GradBucket, made: BucketSection, step: int) -> Steps:
        flat, layout = bucket.buffer(), made.layout
        works = []
        if self._scatters is not None:
            summed = flat.new_empty(layout.size)
            for (at, start, stop), block in zip(layout.parts(), layout.blocks, strict=True):
                own, counts = summed[at : at + stop - start], block.counts
                works += _started(
                    self._scatters.reduce_scatter(own, flat[block.start : block.stop], counts=counts, async_op=True)
                )
            yield works
        else:
            summed = flat
        values = summed if made.values is None else made.values.add_(summed)
        if values.dtype != torch.float32:
            values = values.float()
        result = self._result(bucket, layout)
        section = Section(
            key=made,
            values=values,
            result=result,
            pieces=layout.pieces,
            parameters=self._whole_parameters(made),
            contributions=self._world.size,
            needs_all=layout.needs_all,
            keeps_remainder=made.values is not None,
            step=step,
        )
        yield from self.compressor.reduce(section, self._exchange)
        if self._scatters is None or not layout.gathers:
            if not _same_memory(result, flat):
                target = flat if layout.needs_all and not self._is_hybrid else flat[bucket.needed()]
                target.copy_(result)
            if self._scatters is not None:
                yield []
            return
        mean = result.to(flat.dtype)
        works = []
        for (at, start, stop), block in zip(layout.parts(), layout.blocks, strict=True):
            whole, own = flat[block.start : block.stop], mean[at : at + stop - start]
            works += _started(self._gathers.all_gather(whole, own, counts=block.counts, async_op=True))
        yield works

    def _result(self, bucket: GradBucket, layout: SectionLayout) -> torch.Tensor:
        """Memory of fp32 for the mean: the bucket's own where it fits."""
        flat = bucket.buffer()
        if layout.needs_all and not self._is_hybrid:
            fits, size = self._scatters is None, layout.size
        else:
            fits, size = True, bucket.needed().stop - bucket.needed().start
        if fits and flat.dtype == torch.float32:
            return flat if size == flat.numel() else flat[bucket.needed()]
        return torch.empty(size, dtype=torch.float32, device=flat.device)

    def _whole_parameters(self, made: BucketSection) -> Sequence[Matrix]:
        if not self.compressor.needs_whole:
            return ()
        ((_, first, last),) = made.layout.parts()
        pairs = zip(made.parameters, made.starts, strict=True)
        return [Matrix(p, start - first) for p, start in pairs if first <= start < last]

    # ---- sections of buckets ----------------------------------------------------------------------------------------

    def _section(self, bucket: GradBucket) -> BucketSection:
        parameters: list[torch.nn.Parameter] = bucket.parameters()
        key = tuple(map(id, parameters))
        found = self._sections.get(key)
        if found is None or found.layout.elements != bucket.buffer().numel():
            found = self._sections[key] = self._new_section(bucket, parameters)
        return found

    def _new_section(self, bucket: GradBucket, parameters: list[torch.nn.Parameter]) -> BucketSection:
        """Lays out a bucket's section; remainders in other buckets move to it, which is collective."""
        wanted = set(parameters)
        former = [key for key, section in self._sections.items() if not wanted.isdisjoint(section.parameters)]
        if former:
            self.drain()
        for section in [self._sections.pop(key) for key in former]:
            if section.values is not None:
                self._means |= mean_remainders(section, self._world)
        flat, needed = bucket.buffer(), bucket.needed()
        base, size = flat.data_ptr(), flat.element_size()
        starts = [(view.data_ptr() - base) // size for view in bucket.gradients()]
        made = BucketSection(parameters, starts, self._layout(flat.numel(), needed, starts))
        if self._feeds_back:
            made.values = take_over(made, self._means, self._world.size, self._peers)
            for p in parameters:
                self._means.pop(p, None)
        return made

    def _layout(self, elements: int, needed: slice, starts: Sequence[int]) -> SectionLayout:
        split = (0, 1) if self._scatters is None else (self._scatters.rank, self._scatters.size)
        if self.compressor.needs_whole:
            return of_whole_parameters(elements, starts, split, self._peers)
        shard = None if needed == slice(0, elements) else needed.stop - needed.start
        if self._is_hybrid and shard is not None:
            return of_replicas(elements, shard, split, self._peers)
        return by_pieces(elements, shard, split, self._peers)

    # ---- states ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The steps, each parameter's mean remainder and the compressor's states, by names. Collective.

        The same on every rank, and for any number of ranks.
        """
        self.drain()
        means = dict(self._means)
        for section in self._sections.values():
            if section.values is not None:
                means |= mean_remainders(section, self._world)
        kept = self.compressor.state()
        return {
            "method": self.compressor.name,
            "steps": self.steps,
            "remainders": {name: means[p].view(p.shape).clone() for p, name in self._names.items() if p in means},
            "states": {name: dict(kept[p]) for p, name in self._names.items() if p in kept},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, on all ranks.

        States of another method are left out: its remainders are taken over, as they are gradients.
        Raises ConfigurationError for names or shapes of other parameters.
        """
        self.drain()
        by_name = {name: p for p, name in self._names.items()}
        for kind in ("remainders", "states"):
            unknown = sorted(set(state_dict[kind]) - set(by_name))
            if unknown:
                raise ConfigurationError(f"load_state_dict: {kind}: got {unknown[0]}, which is no parameter")
        means = {by_name[name]: mean for name, mean in state_dict["remainders"].items()}
        for p, mean in means.items():
            if mean.shape != p.shape:
                raise ConfigurationError(
                    f"load_state_dict: {self._names[p]}: got a remainder of shape {tuple(mean.shape)}; needs "
                    f"{tuple(p.shape)}"
                )
        self.steps = int(state_dict["steps"])
        self._sections = {}
        self._means = {p: mean.detach().clone().float() for p, mean in means.items()} if self._feeds_back else {}
        if state_dict["method"] == self.compressor.name:
            self.compressor.load({by_name[name]: kept for name, kept in state_dict["states"].items()})


def _started(work: Work | None) -> list[Work]:
    assert work is not None
    return [work]


def _same_memory(result: torch.Tensor, flat: torch.Tensor) -> bool:
    return result.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
