"""Loads weights from safetensors files into a model that trains, of which a rank reads what its slices need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...job.agreement import check_everywhere, refuse_everywhere
from ..construction.initial_values import targets_of
from ..optimizer_parts import Parts
from .states import flush, gathered

if TYPE_CHECKING:
    from ...model_files import Rename


def load_safetensors(
    parts: Parts, path: str | Path, rename: Rename | None, missing: Callable[[str], bool] | None
) -> None:
    """Fills this rank's slices of the model's weights from files. Collective."""
    from ..construction.file_values import WeightFiles  # which few programs need

    flush(parts)
    names = parts.names.tensors(parts.model)
    files = check_everywhere(parts.with_tp, lambda: WeightFiles(path, rename, missing, names))
    check_everywhere(parts.with_tp, lambda: files.check(parts.comm, parts.with_tp))
    if files.tensors.issuperset(names.values()):
        parts.guard.put_back()
    else:
        refuse_everywhere(parts.with_tp, parts.guard.weight_problem(inside=True))
        if parts.gathered_blocks.is_open:
            with gathered(parts, None, True, from_rank=None):
                pass  # what blocks around this have changed is in the shards then
    parts.parameters.release(inside_gathered=True)
    targets = targets_of(parts.model, parts.shard_group.rank, parts.parameters.shards, parts.slices)
    check_everywhere(parts.with_tp, lambda: files.fill({t: targets[t] for t in files.tensors}))
    parts.parameters.publish()
    parts.guard.accept()
