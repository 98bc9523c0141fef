"""Saves a checkpoint: all ranks agree on what is written before any of them writes.

Who runs what: the caller's thread runs all collectives, in this order on every rank: agree on the arguments, collect
the content, compare replicas, copy (in the background alone), make the directory, write. Each step runs inside
`run_everywhere` or `on_rank_0`: a failure on one rank raises on all before the next collective. Background writing is
without MPI (`writing`).
"""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from collectives import Communicator

from ..ddp.plain_model import plain_model
from ..errors import CheckpointError, ConfigurationError
from ..job.agreement import on_rank_0, run_everywhere
from ..job.ending import JOB_FILES
from ..job.objects import all_gather_object
from ..job.runtime import default_communicator
from ..mesh import Mesh
from ..replicas.start_check import check_settings_agree
from . import compression_state, directory_lock, folder
from .collect import Collected, PieceToWrite, collect, common_states
from .engine import Engine, engine_of
from .parts import ModelPart
from .writing import Saving, make_commit, with_part_label, write_part

_INDEX_BYTES = 1 << 16  # set aside for the index
_PIECE_BYTES = 1 << 9  # and for what it and a header say of a piece
_UNDER_WAY = "_mpidl_saving"  # a model's attribute: the checkpoint of it that is written in the background


def save(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    step: int = 0,
    extra: Any = None,
    *,
    micro_step: int = 0,
    keep_last: int | None = None,
    background: bool = False,
    random_states: bool = True,
    file_bytes: int = 4 << 30,
    compare: bool = True,
    process_group: Communicator | None = None,
    mesh: Mesh | None = None,
) -> Saving:
    """Saves the training as `path`/step-00000010, complete or not at all; each rank writes what it owns. Collective.

    path: the directory of the job's checkpoints, on a file system that all ranks see; until the job ends no other one
        can save there (`claim`).
    model: the plain model or its DistributedDataParallel.
    optimizer: a torch optimizer or the ZeroOptimizer.
    scheduler, scaler, sampler: with state_dict and load_state_dict; a DataLoader of mpidl.data is a sampler too.
    extra: nested dictionaries, lists and tuples of numbers, strings, None, tensors and arrays; rank 0's is kept.
    micro_step: how many micro-steps since the last step of the optimizer; unless 0 their gradients are saved too.
    keep_last: how many complete checkpoints to keep, this one among them; None: all.
    background: copies what this rank owns and writes it in a thread; a failure surfaces at the next `save`, `load` or
        `wait` for this model, or else at the end of the program, as one line and a status that is not 0. One
        checkpoint at a time: the next save waits for it.
    random_states: of python, numpy and torch, each rank's.
    file_bytes: about the size from which on a rank begins another file.
    compare: first read all of what every rank holds and each writes a part of, parameters and optimizer states of plain
        models and DDP, and see that the ranks hold the same; and the buffers that several parts of a mesh hold.
    process_group: of a plain model; DDP and ZeRO have their own. Under post-local SGD and DiLoCo all ranks whose
        weights belong together: by default the averager's or DDP's, if one has the ranks of both, or else the world.
    mesh: where the model lies in parts over pp, tp or ep of one, whose ranks all call: each part is kept with its own
        states and its first rank's `extra`, and the checkpoint is complete with all of them.

    Raises CheckpointError on every rank for replicas that differ, too little space and any failure to copy or write:
    earlier checkpoints are as they were, and nothing is left of this one. ConfigurationError for arguments
    that do not fit. After an interrupt that the program catches, this checkpoint is complete, or nothing is left of it.
    """
    engine = engine_of(model, optimizer, process_group, mesh)
    comm = engine.all_ranks
    wait(model)
    into, step, micro_step, keep_last, file_bytes = run_everywhere(
        comm, lambda: _converted_arguments(path, step, micro_step, keep_last, file_bytes)
    )
    settings: dict[str, Any] = {"path": str(path), "step": step, "micro_step": micro_step, "keep_last": keep_last}
    settings |= {"background": background, "compare": compare, "engine": engine.kind}
    settings |= {"axes of parts": engine.part.sizes}
    stateful = {"scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    settings |= {name: None if each is None else type(each).__name__ for name, each in stateful.items()}
    check_settings_agree(comm, "checkpoint.save", settings)
    if engine.unsaved_hook_type and comm.rank == 0:
        warnings.warn(
            f"checkpoint.save: the state of the communication hook, {engine.unsaved_hook_type}, has no state_dict and "
            "load_state_dict, and is not kept",
            RuntimeWarning,
            stacklevel=2,
        )
    compressed = engine.part.everywhere(lambda: compression_state.gather(engine))
    gradients = engine.part.everywhere(lambda: _gradients(engine)) if micro_step else {}

    def collected() -> Collected:
        states = random_states, compressed
        return run_everywhere(comm, lambda: collect(engine, stateful, step, micro_step, gradients, extra, *states))

    if engine.part.joined and engine.join.reason is not None:
        engine.hold_separately()
    found = collected()
    reason = _differing(engine, found, compare) if engine.part.joined else None
    if reason is not None:
        engine.hold_separately(reason)
        found = collected()
    if compare:
        engine.check_replicas(f"{folder.name_of(step)} was not saved", found.shared, found.copied)
    pieces = run_everywhere(comm, lambda: _copies(found.pieces, step)) if background else found.pieces
    temporary = _begin(engine.part, into.absolute() if background else into, step, found)
    own = temporary / engine.part.name
    saving = Saving(
        comm,
        temporary,
        own,
        lambda: with_part_label(write_part(own, comm.rank, pieces, found.own, file_bytes), engine.part, found.about),
        make_commit(temporary, engine, found.about, keep_last),
    )
    if background:
        engine.model.__dict__[_UNDER_WAY] = saving
        try:
            saving.start()
        except BaseException:  # such as an interrupt
            if not saving.started:
                del engine.model.__dict__[_UNDER_WAY]
            raise
    else:
        saving.run()
    return saving


def claim(path: str | Path, process_group: Communicator | None = None) -> None:
    """Locks a directory for this job's checkpoints, as the first `save` would do only after its steps. Collective.

    The directory is made if it is missing, and is the job's until rank 0 ends. Raises CheckpointError on every rank,
    naming the process that holds it, its node and its job.
    """

    def take() -> None:
        where = folder.path_of(path)
        folder.make(where)
        directory_lock.hold(where)

    on_rank_0(default_communicator(process_group), take)
    JOB_FILES.add(Path(path).resolve() / directory_lock.NAME)


def wait(model: torch.nn.Module) -> Path | None:
    """Waits for the checkpoint of this model that is being written in the background, if there is one. Collective.

    Returns its directory. Raises CheckpointError on every rank if it could not be written.
    """
    kept = plain_model(model)[1].__dict__
    saving: Saving | None = kept.get(_UNDER_WAY)
    if saving is None:
        return None
    try:
        path = saving.wait()
    except CheckpointError:
        del kept[_UNDER_WAY]
        raise
    del kept[_UNDER_WAY]  # not after an interrupt: the thread may still be writing
    return path


def _differing(engine: Engine, found: Collected, buffers: bool) -> str | None:
    """Explains why parts do not join that have states of their own; None if they do. Collective.

    buffers: compare them too.
    """
    sums = run_everywhere(engine.all_ranks, lambda: common_states(found, engine.comm.rank == 0, buffers))
    everyone = all_gather_object(engine.all_ranks, (found.uncut, sums))
    uncut = next((uncut for uncut, _ in everyone if uncut is not None), None)
    if uncut is not None:
        return f"the optimizer's {uncut}"
    every = dict.fromkeys(name for _, sums in everyone for name in sums)
    names = [name for name in every if len({sums[name] for _, sums in everyone if name in sums}) > 1]
    return f"the {names[0]} differs between them" if names else None


def _gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Returns the gradients of the micro-steps. Collective; ZeRO's own method raises its errors on every rank."""
    return engine.gradients() if engine.owned is not None else run_everywhere(engine.comm, engine.gradients)


def _copies(pieces: Sequence[PieceToWrite], step: int) -> list[PieceToWrite]:
    """Copies what this rank writes. Raises CheckpointError if it cannot, as without memory, and frees the copies."""
    copies: list[PieceToWrite] = []
    for piece in pieces:
        try:
            copies.append(piece.copy())
        except Exception as error:
            copies.clear()
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"{folder.name_of(step)} was not saved: {piece.name} was not copied: {said}"
            ) from error
    return copies


def _converted_arguments(
    path: Any, step: Any, micro_step: Any, keep_last: Any, file_bytes: Any
) -> tuple[Path, int, int, int | None, int]:
    """Converts the arguments to their types. Raises ConfigurationError."""
    kept = None if keep_last is None else _count("keep_last", keep_last, 1, ", or None to keep all")
    steps = _count("step", step, 0), _count("micro_step", micro_step, 0)
    return folder.path_of(path), *steps, kept, _count("file_bytes", file_bytes, 1)


def _count(name: str, value: Any, least: int, otherwise: str = "") -> int:
    """Converts an integer, also numpy's. Raises ConfigurationError."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and operator.index(value) >= least:
            return operator.index(value)
    raise ConfigurationError(f"{name}: got {value!r}; needs an integer of at least {least}{otherwise}")


def _begin(part: ModelPart, path: Path, step: int, found: Collected) -> Path:
    """Makes the directory to write into, with those of the parts, and checks that there is space. Collective."""
    comm = part.all_ranks
    own = sum(piece.bytes + _PIECE_BYTES for piece in found.pieces)
    needed = sum(all_gather_object(comm, own)) + _INDEX_BYTES * (1 + len(part.names))
    temporary = on_rank_0(comm, lambda: folder.begin(path, step, part.names))
    JOB_FILES.add(path.resolve() / directory_lock.NAME)

    def check() -> None:
        if not (temporary / part.name).is_dir():
            raise CheckpointError(f"{path}: is not the same directory for all ranks; needs a shared file system")
        free = shutil.disk_usage(path).free
        if free < needed:
            raise CheckpointError(
                f"{path}: the disk is too full: the checkpoint takes {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are "
                "free; earlier checkpoints are as they were"
            )
        if not os.access(temporary / part.name, os.W_OK | os.X_OK):
            raise CheckpointError(f"{temporary}: this rank may not write there")

    try:
        run_everywhere(comm, check)
    except CheckpointError:
        on_rank_0(comm, lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise
    return temporary
