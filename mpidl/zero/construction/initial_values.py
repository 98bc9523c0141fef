"""Gives initial values to parameters and buffers on the meta device, and to parameters that precision converts.

of      decides where each tensor's values come from; refuses what cannot work, and changes nothing
check   compares files and recordings over the ranks; changes nothing either
begin   replaces them by placeholders: ordinary parameters that hold one element, whatever their shape
        ... the optimizer cuts placeholders into shards, makes masters of them ...
finish  fills shards and masters, a tensor at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from collectives import Communicator

from ...errors import ConfigurationError
from ...job.agreement import check_everywhere
from ...job.objects import broadcast_object
from ...module_tensors import swap_in_place
from ...replicas.broadcast import broadcast_states
from ...replicas.start_check import check_settings_agree
from ..parameter_shard import ParameterShard
from ..placeholder import placeholder
from ..slices import Slice
from ..states.whole_states import StateNames
from .module_values import InitFn, ModuleCalls
from .recording import Recording
from .tape import RecordedTensor
from .value_targets import Target, wanted, write_all

if TYPE_CHECKING:
    from ...model_files import Rename
    from .file_values import WeightFiles  # at run time where files are given: few programs need it


@dataclass(frozen=True)
class Safetensors:
    """The source of weights: safetensors files.

    path: a file, or a directory as Hugging Face saves it: `model.safetensors`, or several files and
        `model.safetensors.index.json`. The same on every rank.
    rename: from a name in the files to the model's; None from it leaves a tensor out.
    missing: whether the files may lack a name of the model, as that of an adapter or a new head: what is there, or what
        gives values to a model on the meta device, stays. By default they may lack none.
    """

    path: str | Path
    rename: Rename | None = None
    missing: Callable[[str], bool] | None = None


Weights = Safetensors | str | Path | None


class InitialValues:
    """The tensors of a model that have no values yet, and the source of these."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._stored = StateNames.of(model).tensors(model)
        self._parameters = [p for p in model.parameters() if p.is_meta]
        self._buffers = [b for b in model.buffers() if b.is_meta]
        self._dtypes: dict[torch.Tensor, torch.dtype] = {p: p.dtype for p in self._parameters}
        self._files: WeightFiles | None = None
        self._recorded: dict[Recording, dict[torch.Tensor, RecordedTensor]] = {}
        self._calls: ModuleCalls | None = None
        self._others: list[torch.Tensor] = []  # attributes that are no parameters or buffers

    @classmethod
    def of(
        cls, model: torch.nn.Module, init_fn: InitFn | None, weights: Weights, device: torch.device
    ) -> InitialValues:
        """Plans it. ConfigurationError for tensors that nothing gives values, and for files that do not fit.

        device: where the values are to be. They are computed in the host's memory, and so the same for any.
        """
        if init_fn is not None and not callable(init_fn):
            raise ConfigurationError(f"init_fn: got {init_fn!r}; needs a function of a module")
        plan = cls(model, device)
        left = dict.fromkeys([*plan._parameters, *plan._buffers])
        names = {t: name for name, t in (*model.named_parameters(), *model.named_buffers())}
        if weights is not None:
            from .file_values import WeightFiles

            given = weights if isinstance(weights, Safetensors) else Safetensors(weights)
            plan._files = WeightFiles(given.path, given.rename, given.missing, plan._stored)
            left = {t: None for t in left if t not in plan._loaded}
        for recording in _recordings(model):
            views = {t: view for t in left if (view := recording.view(t)) is not None}
            for tensor in views:
                if recording.versions.get(id(tensor), tensor._version) != tensor._version:
                    raise ConfigurationError(
                        f"model: {names[tensor]} was written to after deferred_init, without effect; do it in build"
                    )
            others = [t for t in _attributes(model) if t not in names and recording.view(t) is not None]
            plan._others += others
            views.update({t: view for t in others if (view := recording.view(t)) is not None})
            plan._recorded[recording] = views
            left = {t: None for t in left if t not in views}
        if left:
            if init_fn is None and plan._recorded:
                raise ConfigurationError(
                    f"model: {names[next(iter(left))]} is on the meta device and not from deferred_init, or was "
                    "converted after it; do it in build"
                )
            loadable = set(plan._stored.values()) if weights is None else set()
            plan._calls = ModuleCalls(model, set(left), init_fn, plan._loaded, loadable)
        elif init_fn is not None:
            raise ConfigurationError("init_fn: the model has no tensor on the meta device that it would be called for")
        return plan

    @property
    def _loaded(self) -> set[torch.Tensor]:
        return set() if self._files is None else self._files.tensors

    def check(self, comm: Communicator, with_tp: Communicator) -> None:
        """Raises on every rank for files or recordings that differ over the ranks, or a tied tensor of several values.

        ModelMismatch, and ConfigurationError. Collective.
        """
        if self._files is not None:
            self._files.check(comm, with_tp)
        digests = {f"recording {n}": recording.tape.digest() for n, recording in enumerate(self._recorded)}
        check_settings_agree(comm, "model (deferred_init)", digests)

    def begin(self, comm: Communicator) -> None:
        """Agrees with rank 0 on random numbers, and makes meta tensors ordinary ones. Collective."""
        for recording in self._recorded:
            drawing = [o for o in recording.tape.operations if isinstance(o.start, torch.Tensor)]
            starts = broadcast_object(comm, [o.start for o in drawing] if comm.rank == 0 else None)
            for operation, start in zip(drawing, starts, strict=True):
                operation.start = start
        for p in self._parameters:
            swap_in_place(p, torch.nn.Parameter(placeholder(p.shape, p.dtype, self._device), p.requires_grad))
        for tensor in (*self._buffers, *self._others):
            own = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
            swap_in_place(tensor, own.requires_grad_(tensor.requires_grad))

    def finish(
        self,
        comm: Communicator,
        with_tp: Communicator,
        rank: int,
        originals: dict[torch.nn.Parameter, torch.Tensor],
        shards: Sequence[ParameterShard],
        slices: Mapping[torch.nn.Parameter, Slice],
    ) -> bool:
        """Fills this rank's shards and masters, and all that is in no shard; returns True if there was any. Collective.

        with_tp: as in Parts; all of these ranks raise what one of them finds.
        rank: among those over which shards are cut.
        originals: values from before a conversion, of which each is given up once it is used.
        """
        model, loaded = self._model, self._loaded
        empty = dict.fromkeys([*self._parameters, *originals])
        inside = {p for shard in shards for p in shard.parameters}
        whole = [p for p in model.parameters() if p in empty and p not in inside]
        for p in whole:
            p.data = torch.empty(p.shape, dtype=p.dtype, device=self._device)
        targets = targets_of(model, rank, shards, slices)
        targets.update({t: [Target(0, t.numel(), (t.data,))] for t in self._others})
        for p in self._parameters:
            originals.pop(p, None)
        for p in list(originals):
            value = originals.pop(p)
            if p not in loaded:
                write_all(targets[p], value)
        for recording, views in self._recorded.items():
            self._play(recording, views, targets)
        if self._calls is not None:
            self._run_calls(comm, with_tp, self._calls, targets)
        if self._files is not None:
            files = self._files
            check_everywhere(with_tp, lambda: files.fill({t: targets[t] for t in loaded}))
        broadcast_states(comm, [*whole, *self._buffers])
        return bool(empty or loaded)

    def _play(
        self, recording: Recording, views: dict[torch.Tensor, RecordedTensor], targets: dict[torch.Tensor, list[Target]]
    ) -> None:
        tape = recording.tape
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor, view in views.items():
            if wanted(targets[tensor]):
                by_storage.setdefault(view.storage, []).append(tensor)

        def deliver(number: int, storage: torch.UntypedStorage) -> None:
            for tensor in by_storage[number]:
                write_all(targets[tensor], views[tensor].over(storage))

        untouched = tape.first is not None and torch.equal(torch.get_rng_state(), tape.first)
        tape.play(by_storage, deliver, [view.storage for view in views.values()])
        if untouched and tape.after_end is not None:
            torch.set_rng_state(tape.after_end)

    def _run_calls(
        self, comm: Communicator, with_tp: Communicator, calls: ModuleCalls, targets: dict[torch.Tensor, list[Target]]
    ) -> None:
        own_state = torch.get_rng_state()
        root_state = broadcast_object(comm, own_state)
        torch.set_rng_state(root_state)
        try:
            # A module's error is raised everywhere, as all ranks run the same modules.
            check_everywhere(
                with_tp, lambda: calls.run(self._dtypes, lambda tensor, value: write_all(targets[tensor], value))
            )
        finally:
            if not torch.equal(own_state, root_state):
                torch.set_rng_state(own_state)


def targets_of(
    model: torch.nn.Module, rank: int, shards: Iterable[ParameterShard], slices: Mapping[torch.nn.Parameter, Slice]
) -> dict[torch.Tensor, list[Target]]:
    """This rank's targets: slices of shards and their masters; parameters in no shard, and buffers, whole."""
    found: dict[torch.Tensor, list[Target]] = {}
    for shard in shards:
        for p, piece in zip(shard.parameters, shard.layout.pieces(rank), strict=True):
            place = piece.view_in(shard.values)
            masters = [slices[p].values.detach()] if p in slices and slices[p].is_master else []
            found[p] = [Target(piece.start, piece.stop, (place, *masters))]
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor not in found:
            found[tensor] = [Target(0, tensor.numel(), (tensor.data,))]
    return found


def _recordings(model: torch.nn.Module) -> list[Recording]:
    found = (module.__dict__.get("_mpidl_recording") for module in model.modules())
    return list(dict.fromkeys(r for r in found if isinstance(r, Recording)))


def _attributes(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors on the meta device that modules keep as plain attributes, also inside lists and dictionaries."""
    kept = (value for module in model.modules() for key, value in module.__dict__.items() if not key.startswith("_"))
    return list(dict.fromkeys(leaf for leaf in tree_leaves(list(kept)) if torch.is_tensor(leaf) and leaf.is_meta))
