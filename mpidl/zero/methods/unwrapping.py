"""Makes a sharded model a plain one again: every rank gets whole parameters of its own.

shards on ranks 0..3   [ 0 | 1 | 2 | 3 ]   gathered one after the other, so that what a rank holds grows from its
each parameter         memory of its own   shards to the whole model, plus one more shard's whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...gradients.nonfinite import NonfiniteWatch
from ...job.agreement import refuse_everywhere
from ..copy_guard import allow_copies
from ..gradients.zero_grad import restore_zero_grad
from ..optimizer_parts import Parts
from ..parameter_shard import ParameterShard
from ..parameters.read_hook import unwatch
from ..shard_group import ShardGroup
from ..slices import Slice
from . import clip_and_unscale
from .states import flush


def unwrap(parts: Parts, nonfinite: NonfiniteWatch | None) -> torch.nn.Module:
    """Takes the parts' hooks off the model and makes it a plain one; `parts` are of no use then. Collective.

    nonfinite: what watches the gradients' values. Errors as of `ZeroOptimizer.unwrap`; they change nothing.
    """
    flush(parts)
    refuse_everywhere(parts.with_tp, parts.guard.block_problem("unwrap") or parts.guard.weight_problem())
    parts.inner.refuse_local_weights()
    parts.parameters.release()
    clip_and_unscale.clear(parts, nonfinite, set_to_none=True)
    for part in (parts.guard, parts.watch, parts.shard_reducer, parts.parameters, nonfinite, *parts.hooks):
        if part is not None:
            part.remove()
    allow_copies(parts.model)
    restore_zero_grad(parts.model)
    make_whole(parts.shard_group, parts.parameters.shards, parts.slices, parts.dtypes)
    return parts.model


@torch.no_grad()
def make_whole(
    over: ShardGroup,
    shards: Sequence[ParameterShard],
    slices: Mapping[torch.nn.Parameter, Slice],
    dtypes: Mapping[torch.nn.Parameter, torch.dtype],
) -> None:
    """Gives the parameters of all shards memory of their own, with the values on which training goes on. Collective.

    slices: those that train, with masters where there are any.
    dtypes: of the parameters that are to have another one than now. No hook may be left on them.
    """
    for shard in shards:
        masters = [slices[p] for p in shard.parameters if p in slices and slices[p].is_master]
        dtype = masters[0].values.dtype if masters else shard.values.dtype
        flat = torch.empty(shard.layout.padded, dtype=dtype, device=shard.values.device)
        own = shard.layout.shard(flat, over.rank).copy_(shard.values)
        for master in masters:
            master.view_in(own).copy_(master.values)
        over.shard_comm.all_gather(flat, own)
        shapes = [p.shape for p in shard.parameters]
        for p, view in zip(shard.parameters, shard.layout.views(flat, shapes), strict=True):
            with torch._C.DisableTorchFunctionSubclass():
                unwatch(p)
                p.data = view.to(dtypes.get(p, p.dtype), copy=True)
    for p in dtypes.keys() - {p for shard in shards for p in shard.parameters}:  # frozen, whole on every rank
        p.data = p.data.to(dtypes[p])
