"""The methods of ZeroOptimizer about states, as functions of its parts: whole ones, and what this rank owns of them.

They call `states.whole_states`, `states.owned_state` or `states.owned_weights`. Those that read or replace whole states
or weights wait first for a delayed update; those that read shards, for gathers that still use their memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from collectives import Communicator

from ...errors import ConfigurationError, TrainingError
from ...job.agreement import kept_on_rank_0, refuse_everywhere
from ..optimizer_parts import Parts
from ..states import whole_states as state
from ..states.owned_state import OwnedState
from ..states.owned_weights import OwnedWeights
from .clip_and_unscale import refuse_consumed


@torch.no_grad()
def flush(parts: Parts) -> None:
    """Shows the values of a delayed update that is under way. Collective."""
    parts.parameters.drain()  # for ranks whose last forward pass needs this one
    if parts.offloaded is not None and parts.offloaded.pending:
        parts.parameters.release()
        parts.offloaded.finish()
        parts.parameters.publish()


@contextmanager
def gathered(parts: Parts, module: torch.nn.Module | None, writable: bool, from_rank: int | None) -> Iterator[None]:
    """Holds the parameters of `module` whole inside: see `ZeroOptimizer.gathered`. Collective."""
    flush(parts)
    block = parts.gathered_blocks.block(module, writable, from_rank)
    with parts.guard.gathered(module, writable), block:
        yield


def model_state(parts: Parts, masters: bool) -> dict[str, Any]:
    """Gathers the plain model's state_dict on rank 0; `absent_state` on the other ranks. Collective, also over tp.

    masters: in fp32 where there are any.
    """
    flush(parts)
    refuse_everywhere(parts.with_tp, parts.guard.weight_problem())
    parts.inner.refuse_local_weights()
    slices = parts.slices if masters else {}
    tp = _tp(parts)
    own = state.gather_model(parts.shard_group, parts.model, parts.names, parts.parameters, slices, tp)
    return own if tp is None or not parts.shard_group.is_root else state.join_over_tp(tp, parts.names, own)


def _tp(parts: Parts) -> Communicator | None:
    """The ranks of tp, either all of them rank 0 of their shard group's world or none; None if the model is whole."""
    return None if parts.mesh is None or parts.mesh.size("tp") == 1 else parts.mesh["tp"]


def load_model_state(parts: Parts, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Loads rank 0's whole model state. Collective."""
    parts.guard.put_back()
    block = gathered(parts, None, True, from_rank=0)
    state.scatter_model(parts.shard_group, parts.model, parts.names, state_dict, block, parts.slices, _tp(parts))
    parts.guard.accept()


def optimizer_state(parts: Parts, outer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of the plain optimizer with outer's groups, on rank 0; `absent_state` on the others. Collective."""
    flush(parts)
    parts.inner.refuse_local_weights()
    _cut_state(parts)
    return state.gather_optimizer(parts.shard_group, outer, parts.inner, parts.slices)


def load_optimizer_state(parts: Parts, outer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads rank 0's whole optimizer state, and its settings into outer's groups. Collective."""
    flush(parts)
    _cut_state(parts)
    state.scatter_optimizer(parts.shard_group, outer, parts.inner, parts.slices, state_dict)


def gradients(parts: Parts) -> dict[str, Any]:
    """The reduced gradients by name, whole, on rank 0; `absent_state` on the others. Collective, also over tp."""
    refuse_consumed(parts, "gradients")
    parts.parameters.release()
    own = state.gather_gradients(parts.shard_group, parts.names, _owned(parts).gradients(), parts.slices)
    tp = _tp(parts)
    if tp is None:
        return own
    joins = partial(state.join_gradients, tp, parts.names, own)
    whole = kept_on_rank_0(parts.shard_group.world, joins, ConfigurationError)
    return own if whole is None else whole


def owned_state(parts: Parts) -> OwnedState:
    """This rank's slices of parameters and gradients. Collective.

    Waits for a delayed update, and leaves it unpublished.
    """
    parts.parameters.release()  # a library's all-gather may use the shard's memory as scratch space while it runs
    if parts.offloaded is not None:
        parts.offloaded.complete()
    _cut_state(parts)
    return _owned(parts)


def owned_weights(parts: Parts) -> OwnedWeights:
    """This rank's slices of the weights that train."""
    names = {p: name for name, p in reversed(parts.names.parameters.items())}
    return OwnedWeights(
        parts.shard_group, parts.parameters, parts.slices, names, _owned(parts), parts.guard, parts.with_tp
    )


def _owned(parts: Parts) -> OwnedState:
    return OwnedState(
        parts.shard_group,
        parts.parameters,
        parts.slices,
        parts.reduced_gradients,
        parts.grad_attributes,
        parts.shards,
        parts.inner,
        parts.offloaded,
        parts.guard,
    )


def _cut_state(parts: Parts) -> None:
    """Cuts the inner optimizer's state like the parameters. Collective.

    Raises TrainingError on every rank for what no parameter's name could be given to.
    """
    parts.inner.cut_state()
    foreign = parts.inner.foreign_state()
    if foreign:
        raise TrainingError(
            f"state_dict: {type(parts.prototype).__name__} keeps a state {foreign[0]!r} that belongs to no "
            "parameter, and only those of parameters are saved and loaded"
        )


def held_tensors(parts: Parts) -> dict[str, list[torch.Tensor]]:
    """All tensors of model state on this rank, by category; views of one storage may appear several times."""
    held = {**parts.parameters.held_tensors(), **parts.shard_reducer.held_tensors()}
    for category, tensors in parts.inner.held_tensors().items():
        held[category] = held.get(category, []) + tensors
    return held
