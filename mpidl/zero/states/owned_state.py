"""This rank's slices of a sharded model and of its gradients, which a checkpoint writes and fills.

    parameter, flattened   [ 0 .. start | start .. stop | stop .. ]      the middle is this rank's `values`

Nothing is gathered. The values are those on which training goes on: the fp32 masters where there are any. While a
delayed update is pending they are the new values; `published_values` gives those with which passes still
compute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..gradients.grad_attribute import GradAttributes
from ..gradients.reduced_gradients import ReducedGradients
from ..offload import OffloadedSlice
from ..parameter_shard import ParameterShard
from ..parameters.strategy import ParameterStrategy
from ..parameters.weight_guard import WeightGuard
from ..shard_group import ShardGroup
from ..slices import Slice
from ..stepping.inner import InnerOptimizer

if TYPE_CHECKING:  # at run time with offload= alone
    from ..offload import OffloadedOptimizer


@dataclass(frozen=True, eq=False)
class OwnedSlice:
    """Elements start..stop of a parameter. values: they, flat; for one that trains also the key of its state.

    writes: whether this rank is the one, of those that hold the slice, which writes it.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    values: torch.Tensor
    writes: bool = True


class OwnedState:
    """This rank's slices. shards: those that train, in the order of the gradients' buckets."""

    def __init__(
        self,
        over: ShardGroup,
        parameters: ParameterStrategy,
        slices: Mapping[torch.nn.Parameter, Slice],
        gradients: ReducedGradients,
        grads: GradAttributes,
        shards: Sequence[ParameterShard],
        inner: InnerOptimizer,
        offloaded: OffloadedOptimizer | None,
        guard: WeightGuard,
    ) -> None:
        self._over, self.comm = over, over.world
        self._parameters, self._slices, self._shards = parameters, slices, shards
        self._gradients, self._grads, self._inner = gradients, grads, inner
        self._offloaded, self._guard = offloaded, guard

    def take_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Hands loaded settings on that the next backward pass needs. groups: the optimizer's."""
        self._inner.take_settings(groups)

    def refuse_local_weights(self) -> None:
        """Raises TrainingError on every rank where each has weights of its own (`optim.ZeroOneAdam`)."""
        self._inner.refuse_local_weights()

    def slices(self) -> list[OwnedSlice]:
        """This rank's slices of all parameters that are cut over the ranks; others are whole on every rank."""
        found = []
        for shard in self._parameters.shards:
            for p, piece in zip(shard.parameters, shard.layout.pieces(self._over.rank), strict=True):
                if p in self._slices:
                    values: torch.Tensor = self._slices[p].values
                else:
                    values = piece.view_in(shard.values)
                found.append(OwnedSlice(p, piece.start, piece.stop, values, self._over.has_root))
        return found

    @contextmanager
    def written(self, unpublished: Collection[torch.nn.Parameter] = ()) -> Iterator[None]:
        """Lets slices be overwritten inside, on every rank; then shows the new parameters to all. Collective.

        unpublished: parameters that get new values with the next step, until when they have those written to
            `published_values`.
        """
        self._guard.put_back()
        self._parameters.release()
        if self._offloaded is not None:
            self._offloaded.hold_back([])
        yield
        with torch.no_grad():
            for p, part in self._slices.items():
                if p not in unpublished:
                    part.publish_values()
                    self.forget()
            if self._offloaded is not None:
                self._offloaded.hold_back(self._offloaded_slice(p) for p in self._slices if p in unpublished)
            self._parameters.publish()
        self._guard.accept()

    # ---- what offload adds -----------------------------------------------------------------------------------------

    def unpublished(self) -> set[torch.nn.Parameter]:
        """Returns the parameters whose new values a delayed update shows in the next step. The same on every rank."""
        waiting = set() if self._offloaded is None else set(self._offloaded.unpublished())
        return {p for p, part in self._slices.items() if part in waiting}

    def published_values(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's slice of the values that passes compute with, in the parameter's dtype; may be overwritten."""
        part = self._slices[parameter]
        return part.view_in(part.shard.values)

    @property
    def delays(self) -> bool:
        """True if updates may be delayed."""
        return self._offloaded is not None and self._offloaded.delays

    @property
    def steps(self) -> int | None:
        """The number of steps that were begun, of which the first are not delayed; None without offload. May be set."""
        return None if self._offloaded is None else self._offloaded.steps

    @steps.setter
    def steps(self, count: int) -> None:
        if self._offloaded is not None:
            self._offloaded.steps = count

    def allocate(self, key: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a slice's optimizer state, to be written before it is set: on the disk, if it lies there."""
        if self._offloaded is None:
            return torch.empty_like(key, dtype=dtype, requires_grad=False)
        return self._offloaded.state.allocate(key, name, dtype)

    def forget(self) -> None:
        """Drops from this process's memory the pages of slices that were read or written; the disk keeps them."""
        if self._offloaded is not None:
            self._offloaded.forget()

    def _offloaded_slice(self, parameter: torch.nn.Parameter) -> OffloadedSlice:
        part = self._slices[parameter]
        assert isinstance(part, OffloadedSlice)
        return part

    # ---- gradients -------------------------------------------------------------------------------------------------

    def gradients(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """This rank's slices of the reduced gradients of parameters that any rank's passes reached. Collective.

        Raises TrainingError on every rank where each has gradients of its own (`optim.one_bit`).
        """
        self._grads.update()
        flags = np.array([r for number in range(len(self._shards)) for r in self._gradients.reached(number)], np.uint8)
        self.comm.all_reduce(flags, "max")
        if flags.any():
            self._inner.refuse_local_gradients()
        reached = iter(flags)
        found = {}
        for number, shard in enumerate(self._shards):
            gradient = self._gradients.shard(number)
            for p in shard.parameters:
                if next(reached):
                    found[p] = self._slices[p].view_in(gradient)
        return found

    def new_gradients(self, dtypes: Mapping[torch.nn.Parameter, torch.dtype]) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Replaces the gradients by zeros of these parameters, to be filled; returns this rank's slices of them.

        dtypes: of the values to come; 16-bit buckets take fp32 ones as they are.
        """
        self._gradients.clear()
        self._grads.clear()
        found = {}
        for number, shard in enumerate(self._shards):
            reached = [p in dtypes for p in shard.parameters]
            if any(reached):
                wide = any(dtypes.get(p) == torch.float32 for p in shard.parameters)
                gradient = self._gradients.restore(number, reached, wide)
                found.update({p: self._slices[p].view_in(gradient) for p in shard.parameters if p in dtypes})
        self._grads.show_gradients()
        return found
