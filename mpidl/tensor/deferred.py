"""Gives a cut model from `mpidl.deferred_init` the values that the same call would have given it in one process.

model = mpidl.deferred_init(GPT2, config)      shapes, and a tape of how the values come about
mpidl.parallelize(model, mesh)                 cuts the shapes
mpidl.tensor.materialize(model)                plays the tape: a whole tensor at a time; a rank keeps its part of it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, ModelMismatch
from ..job.objects import all_gather_object, broadcast_object
from ..mesh import placement
from ..module_tensors import swap_in_place
from .tensor_parallel import ATTRIBUTE, TensorParallel

Views = list[tuple[Any, dict[torch.Tensor, Any]]]


def recorded_views(model: nn.Module) -> Views:
    """Lists the recordings of a model, each with the places of tensors without values on its tape.

    Raises ConfigurationError for a tensor that was written to after its recording.
    """
    found: Views = []
    named = [*model.named_parameters(), *model.named_buffers()]
    recordings = (module.__dict__.get("_mpidl_recording") for module in model.modules())
    for recording in dict.fromkeys(r for r in recordings if r is not None):
        views = {t: view for _, t in named if t.is_meta and (view := recording.view(t)) is not None}
        for name, t in named:
            if t in views and recording.versions.get(id(t), t._version) != t._version:
                raise ConfigurationError(
                    f"model: {name} was written to after deferred_init, without effect; do it in build"
                )
        found.append((recording, views))
    return found


def materialize(model: nn.Module) -> nn.Module:
    """Gives a model from `mpidl.deferred_init` its values, in place, and returns it. Collective over tp.

    model: cut by `parallelize`, or whole. Each rank keeps its parts of the values that one process would have had with
    the random numbers of the first rank of tp at the call of deferred_init; the default generator goes where that
    process would have left it, unless it was used since. Raises ConfigurationError for what no recording has.
    """
    tp: TensorParallel | None = getattr(model, ATTRIBUTE, None)
    recorded = recorded_views(model) if tp is None else tp.recorded
    known = {t for _, views in recorded for t in views}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.is_meta and t not in known:
            raise ConfigurationError(f"materialize: {name} is on the meta device and not from mpidl.deferred_init")
    if tp is not None:
        _use_numbers_of_first_rank(tp, recorded)
    for recording, views in recorded:
        tape = recording.tape
        by_storage: dict[int, list[torch.Tensor]] = {}
        for t, view in views.items():
            if t.is_meta:
                by_storage.setdefault(view.storage, []).append(t)

        def keep_own_parts(
            number: int, storage: torch.UntypedStorage, views: Any = views, tensors_of: Any = by_storage
        ) -> None:
            for t in tensors_of[number]:
                give_value(t, _part(t, views[t].over(storage)))

        untouched = tape.first is not None and torch.equal(torch.get_rng_state(), tape.first)
        tape.play(by_storage, keep_own_parts, by_storage)
        if untouched and tape.after_end is not None:
            torch.set_rng_state(tape.after_end)
    return model


def give_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes a tensor on the meta device an ordinary one with this value, in place."""
    if isinstance(tensor, nn.Parameter):
        swap_in_place(tensor, nn.Parameter(value, tensor.requires_grad))
    else:
        swap_in_place(tensor, value)


def _part(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    cut = placement(tensor).cut
    return whole.clone(memory_format=torch.contiguous_format) if cut is None else cut.of(whole)


def _use_numbers_of_first_rank(tp: TensorParallel, recorded: Views) -> None:
    """Takes the random numbers of the first rank of tp. Collective."""
    tapes = [recording.tape for recording, _ in recorded]
    digests = [tape.digest() for tape in tapes]
    for rank, others in enumerate(all_gather_object(tp.comm, digests)):
        if others != digests:
            raise ModelMismatch(f"materialize: rank {rank} of tp has built another model by deferred_init")
    for tape in tapes:
        drawing = [operation for operation in tape.operations if isinstance(operation.start, torch.Tensor)]
        starts = broadcast_object(tp.comm, [operation.start for operation in drawing])
        for operation, start in zip(drawing, starts, strict=True):
            operation.start = start
