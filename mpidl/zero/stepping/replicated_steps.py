"""Steps on whole parameters, with whole states, on every rank: for optimizers that exchange themselves (OneBitAdam).

    bucket of gradients    [ shard | shard | shard ]    whole: means, or later this rank's own
    states                 [ shard | shard | shard ]    whole on every rank; the shard's owner is that of the exchange
    parameters             [ shard | shard | shard ]    updated whole, the same on every rank: nothing is gathered

To save and to load, a slice's state is this rank's part of the whole one, as of any other optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...errors import ConfigurationError, TrainingError
from ...optim.one_bit import OneBitOptimizer, one_bit_hook
from ...optim.one_bit.base import ERROR
from ..gradients.reduced_gradients import ReducedGradients
from ..parameter_shard import ParameterShard
from ..shard_group import ShardGroup
from ..slices import Slice
from .inner import InnerOptimizer


class ReplicatedSteps(InnerOptimizer):
    """An optimizer that exchanges bits on the whole parameters of stage 1.

    optimizer_class, settings: make the OneBitOptimizer.
    groups: of the model's parameters.
    shards: of every bucket.
    wholes: of every bucket, its parameters flat.
    slices: of all parameters.
    gradients: of the buckets, whole.
    """

    updates_wholes: ClassVar[bool] = True
    hook = staticmethod(one_bit_hook)

    def __init__(
        self,
        optimizer_class: type[Any],
        settings: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        group: ShardGroup,
        shards: Sequence[ParameterShard],
        wholes: Sequence[torch.Tensor],
        slices: Mapping[torch.nn.Parameter, Slice],
        gradients: ReducedGradients,
    ) -> None:
        self._group, self._shards, self._slices, self._gradients = group, shards, slices, gradients
        self._whole: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for shard, flat in zip(shards, wholes, strict=True):
            views = shard.layout.views(flat, [p.shape for p in shard.parameters])
            pairs = zip(shard.parameters, views, strict=True)
            self._whole |= {p: torch.nn.Parameter(view) for p, view in pairs}
        of_wholes = [{**given, "params": [self._whole[p] for p in given["params"]]} for given in groups]
        self.optimizer: OneBitOptimizer = optimizer_class(of_wholes, **settings)
        self.optimizer.bind_to_engine(
            group.world, [([self._whole[p] for p in each.parameters], each.layout) for each in shards]
        )
        self.param_groups = [
            {**made, "params": [slices[p].values for p in given["params"]]}
            for made, given in zip(self.optimizer.param_groups, groups, strict=True)
        ]
        self.state: dict[Any, dict[str, Any]] = {}
        self._shown: dict[Any, dict[str, Any]] = {}  # entries of `state` that are views of the whole states

    def step(self) -> Any:
        """Steps on all parameters to whose slices a gradient is attached. Collective."""
        for own, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})
        self._push_loaded()
        for number, shard in enumerate(self._shards):
            views = shard.layout.views(self._gradients.whole(number), [p.shape for p in shard.parameters])
            for p, view in zip(shard.parameters, views, strict=True):
                self._whole[p].requires_grad_(p.requires_grad)  # the optimizer leaves frozen ones as they are
                self._whole[p].grad = None if self._slices[p].values.grad is None else view
        self.optimizer.step()
        for whole in self._whole.values():
            whole.grad = None
        for own, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            own.update({key: value for key, value in inner.items() if key != "params"})
        self._show()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Raises ConfigurationError."""
        raise ConfigurationError(f"add_param_group: {type(self.optimizer).__name__} has laid its buckets out")

    def take_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes over loaded counters, by which the hook decides what the next backward pass averages."""
        for each in (self.param_groups, self.optimizer.param_groups):
            for own, given in zip(each, groups, strict=True):
                own.update({key: value for key, value in given.items() if key != "params"})

    def refuse_foreign_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ConfigurationError for the state of another optimizer."""
        self.optimizer.refuse_foreign_state(state_dict)

    def refuse_local_weights(self) -> None:
        """Raises TrainingError between two exchanges of weights (ZeroOneAdam)."""
        self.optimizer.refuse_local_weights()

    def refuse_local_gradients(self) -> None:
        """Raises TrainingError after the freeze."""
        if self._group.world.size > 1 and not self.optimizer.averages_gradients:
            raise TrainingError(
                f"{type(self.optimizer).__name__}: each rank has gradients of its own now, and there are none of the "
                "model; take them before the freeze, or save after a step"
            )

    def cut_state(self) -> None:
        """Shows the mean errors among the states, until the next step; none between two exchanges. Collective."""
        if self._is_loaded() or not self.optimizer.is_synchronised:
            return
        self.optimizer.gather_errors()
        for p, part in self._slices.items():
            error = self.optimizer.state.get(self._whole[p], {}).get(ERROR)
            if error is not None:
                self.state[part.values][ERROR] = error.view(-1)[part.piece.start : part.piece.stop].clone()
        self.optimizer.forget_errors()

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The whole states and the errors, and memory for messages."""
        return self.optimizer.held_tensors()

    def _is_loaded(self) -> bool:
        entries = ((self.state.get(part.values), self._shown.get(part.values)) for part in self._slices.values())
        return any(entry is not shown for entry, shown in entries)

    def _show(self) -> None:
        """Makes each slice's state a view of the whole one."""
        for p, part in self._slices.items():
            entry = self._shown.get(part.values)
            if entry is None:
                whole = self.optimizer.state[self._whole[p]]
                pairs = ((key, value.view(-1)[part.piece.start : part.piece.stop]) for key, value in whole.items())
                self.state[part.values] = self._shown[part.values] = dict(pairs)
            else:
                entry.pop(ERROR, None)

    def _push_loaded(self) -> None:
        """Joins the loaded slices' states to whole ones on every rank. Collective if any were loaded."""
        if not self._is_loaded():
            return
        own = [entry for part in self._slices.values() if (entry := self.state.get(part.values))]
        self.optimizer.state.clear()
        for key in sorted({key for entry in own for key in entry}):
            for shard in self._shards:
                flat = torch.zeros(shard.layout.padded, device=shard.values.device)
                mine = shard.layout.shard(flat, self._group.rank)
                for p in shard.parameters:
                    part = self._slices[p]
                    value = self.state.get(part.values, {}).get(key)
                    if value is not None:
                        part.view_in(mine).copy_(value)
                self._group.world.all_gather(flat, mine.clone())
                views = shard.layout.views(flat, [p.shape for p in shard.parameters])
                for p, view in zip(shard.parameters, views, strict=True):
                    self.optimizer.state[self._whole[p]][key] = view
        self._shown.clear()
        self.state.clear()
