"""Loads a checkpoint: all ranks check everything, then each reads what it holds.

index -> names, shapes, files -> checksums, each rank a share -> do all agree? -> scheduler, scaler, sampler -> tensors
         nothing in memory has changed up to here ---------------'   -> optimizer, gradients -> random states
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from collectives import Communicator

from ..errors import CheckpointError, CheckpointMismatch
from ..job.agreement import on_rank_0, run_everywhere
from ..mesh import Mesh
from ..replicas.start_check import check_settings_agree
from . import cuts, folder, index, json_encoding, parts, stateful_checks
from . import random_states as randoms
from .collect import state_of
from .engine import Engine, engine_of
from .held_tensor import Share
from .index import Index
from .matching import ReadPlan, own_states, plan_reads, same_parts, shares_to_verify
from .reading import CheckpointReader
from .saving import wait


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint's own facts.

    path: its directory.
    ranks, engine: those that saved it.
    """

    path: Path
    step: int
    micro_step: int
    extra: Any
    ranks: int
    engine: str


def load(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    *,
    random_states: bool = True,
    verify: bool = True,
    process_group: Communicator | None = None,
    mesh: Mesh | None = None,
) -> Loaded:
    """Loads a checkpoint that any engine on any number of ranks has saved. Collective.

    path: a checkpoint's directory, or that of a job's checkpoints, of which the newest complete one is taken, or the
        file `latest` there.
    model, optimizer, scheduler, scaler, sampler: filled with what was saved of them; those left out are not read. The
        optimizer's groups must hold the same parameters as when it was saved.
    random_states: go on with each rank's random numbers; a rank that the saving run did not have gets some of its own.
    verify: compare the checksums of all that will be read, before anything is changed.
    process_group: as for `save`.
    mesh: as for `save`, of any sizes; if the parts were saved separately, its pp and tp, and for experts ep, are those
        that it was saved with, dp and cp any.

    Gradients of the micro-steps since the last step come back with the optimizer. Dtypes are converted. Raises
    CheckpointError on every rank, naming the file, for what is missing or damaged, its subclass
    CheckpointMismatch for what is of another model or training, and then has changed nothing; ConfigurationError for
    arguments that do not fit.
    """
    engine = engine_of(model, optimizer, process_group, mesh, replaces=optimizer is not None)
    comm = engine.all_ranks
    wait(model)
    check_settings_agree(comm, "checkpoint.load", {"path": str(path), "engine": engine.kind, "verify": verify})
    opened = open_checkpoint(comm, path)
    content = own_content(engine, opened)
    stateful = {"scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    stateful = {name: each for name, each in stateful.items() if each is not None}
    with CheckpointReader(content) as reader:
        read_plan = run_everywhere(comm, lambda: _prepare(engine, reader, stateful, random_states, verify))
        extra, random = run_everywhere(comm, lambda: _read_small(engine, reader, random_states))
        _load_stateful(engine, reader, stateful)
        try:
            with engine.writing(read_plan.unpublished):
                run_everywhere(comm, lambda: reader.fill(read_plan.requests, engine.forget))
            run_everywhere(comm, lambda: read_plan.install(engine, reader.tensor))
            factor = _scale_factor(content, scaler)
            run_everywhere(comm, lambda: _finish(engine, reader, read_plan, random, factor))
            run_everywhere(comm, lambda: read_plan.compression.install(engine, reader.tensor, factor))
            if engine.compressed is not None:
                engine.compressed.place_remainders()
        except CheckpointError as error:  # of a file that could be read when it was checked
            raise CheckpointError(f"{error}; only a part is loaded: load a checkpoint that is whole") from error
    if comm.rank == 0:
        starts_anew = "scaler" in stateful and stateful_checks.starts_anew(scaler, content.about["scaler"])
        remarks = (
            ["the scaler was saved while it was not enabled; the one here keeps its own scale"] if starts_anew else []
        )
        for said in [*read_plan.compression.said, *_hook_said(engine, content), *remarks]:
            warnings.warn(f"checkpoint.load: {content.file}: {said}", RuntimeWarning, stacklevel=2)
    about = opened.about
    return Loaded(opened.path, about["step"], about["micro_step"], extra, about["ranks"], about["engine"])


def open_checkpoint(comm: Communicator, path: str | Path) -> Index:
    """Returns the index of a checkpoint, or of the newest complete one in a directory, on every rank. Collective."""
    read: list[Index] = []  # on rank 0

    def choose() -> tuple[Path, str]:
        given = folder.path_of(path)
        found, passed = folder.find(given)
        if found is None and passed:
            raise CheckpointError(f"{path}: holds no complete checkpoint: {'; '.join(passed)}")
        text = index.read_text(found or given)
        read.append(index.parse(found or given, text))
        folder.check_files(read[0])  # so that no more is asked for than they hold
        return found or given, text

    chosen, text = on_rank_0(comm, choose)
    return run_everywhere(comm, lambda: read[0] if read else index.parse(chosen, text))


def own_content(engine: Engine, content: Index) -> Index:
    """Returns the index that has the tensors of this rank's part. Collective.

    Raises CheckpointMismatch on every rank for a model that lies in other parts here, if one of both does not join.
    """
    if "parts" in content.about:
        engine.hold_separately()
        return parts.own_content(engine.part, content)
    if engine.join.reason is not None:
        raise CheckpointMismatch(
            f"{content.file}: holds a whole model; here is {parts.parts_in_words(engine.part.sizes)}, which do not "
            f"join to one: {engine.join.reason}"
        )
    return content


def _prepare(
    engine: Engine, reader: CheckpointReader, stateful: Mapping[str, Any], random: bool, verify: bool
) -> ReadPlan:
    """Checks everything that can be wrong without a change, and returns the plan."""
    content = reader.index
    engine.check_writable()
    read_plan = plan_reads(engine, content)
    for name, each in stateful.items():
        here = state_of(name, each)
        if name not in content.about:
            raise CheckpointMismatch(f"{content.file}: was saved without a {name}")
        own_class, saved_class = type(each).__name__, content.about.get(f"{name}_class")
        if saved_class not in (None, own_class):
            raise CheckpointMismatch(
                f"{content.file}: holds the state of {saved_class}; the {name} here is {own_class}"
            )
        try:
            stateful_checks.check_state(each, content.about[name], here)
        except json_encoding.Malformed as error:
            raise CheckpointError(f"{content.file}: {json_encoding.within(name, error)}") from None
    averaged = ["averager"] if engine.averager is not None and "averager" in content.about else []
    kept = [content.about[name] for name in (*stateful, *averaged, "extra")]
    small = [*read_plan.small, *json_encoding.names_in([*kept, content.about["model"].get("extra_state")])]
    own = own_states(engine, content)
    small += json_encoding.names_in({name: value for name, value in own.items() if random or name != "random"})
    wanted = [(name, Share(r.cut, r.low, r.high), r.checks) for r in read_plan.requests for name in r.names]
    for held in engine.parameters:
        names = read_plan.gradients.get(held.name, ())
        wanted += [(name, Share(held.cut, held.start, held.stop), shares_to_verify(held, names)) for name in names]
    for name in small:
        entry = content.tensors[name]
        all_of_it = Share(cuts.whole(entry.shape), 0, entry.count)
        wanted.append((name, all_of_it, [all_of_it]))
    for name, share, _ in wanted:
        reader.open(name, share.cut, share.start, share.stop)
    for name, share in [(name, share) for name, _, shares in wanted if verify for share in shares]:
        reader.check(name, share.cut, share.start, share.stop)
    return read_plan


def _read_small(engine: Engine, reader: CheckpointReader, random: bool) -> tuple[Any, Any]:
    """Reads `extra` and this rank's random states, which are checked; changes nothing."""
    about = reader.index.about
    own = own_states(engine, reader.index)
    extra = json_encoding.decode(about["extra"], reader.tensor)
    states = json_encoding.decode(own["random"], reader.tensor) if random and "random" in own else None
    if states is not None:
        randoms.check(states, reader.index.file)
    return extra, states


def _load_stateful(engine: Engine, reader: CheckpointReader, stateful: Mapping[str, Any]) -> None:
    """Loads scheduler, scaler, sampler and the modules' extra states, then what averages the weights. Collective.

    If one raises an error, on any rank, all get their former states back. An averager's states and loading may be
    collective, so nothing that may fail on one rank alone comes before them in the same step.
    """
    about = reader.index.about

    def current_states() -> dict[str, tuple[Any, Any, Any]]:
        """Returns, by name, the saved state, the present one, and the function that loads one."""
        states = {name: states_of(name, each) for name, each in stateful.items()}
        for name, saved in about["model"].get("extra_state", {}).items():
            module = engine.extra_states[name]
            before = copy.deepcopy(module.get_extra_state())
            states[name] = read(saved, before), before, module.set_extra_state
        return states

    def states_of(name: str, each: Any) -> tuple[Any, Any, Any]:
        before = copy.deepcopy(state_of(name, each))
        return read(about[name], before), before, each.load_state_dict

    def read(saved: Any, before: Any) -> Any:
        return _with_counters(json_encoding.decode(saved, reader.tensor), before)

    def load_all(states: Mapping[str, tuple[Any, Any, Any]]) -> None:
        for name, (state, _, load_into) in states.items():
            try:
                if state or name != "scaler":  # a scaler that was not enabled has nothing to say
                    load_into(state)
            except Exception as error:  # the user's classes may raise anything
                said = str(error) or type(error).__name__
                raise CheckpointMismatch(f"{reader.index.file}: the {name}: {said}") from error

    in_turn = [run_everywhere(engine.all_ranks, current_states)]
    averager = engine.averager
    if averager is not None and "averager" in about:
        in_turn.append({"averager": run_everywhere(engine.all_ranks, lambda: states_of("averager", averager))})
    begun: dict[str, tuple[Any, Any, Any]] = {}
    try:
        for states in in_turn:
            begun |= states
            run_everywhere(engine.all_ranks, partial(load_all, states))
    except CheckpointError:
        for name, (_, before, load_into) in begun.items():
            if before or name not in (*stateful, "averager"):
                with contextlib.suppress(Exception):  # the one that failed may fail again; the others get theirs
                    load_into(before)
        raise


def _with_counters(state: Any, here: Any) -> Any:
    """Returns the state with a Counter for each that is one here, as MultiStepLR's milestones; JSON has none."""
    if type(state) is dict and isinstance(here, Mapping):
        filled = {key: _with_counters(value, here.get(key)) for key, value in state.items()}
        return Counter(filled) if type(here) is Counter else filled
    if type(state) is list and isinstance(here, list):
        return [_with_counters(*pair) for pair in zip_longest(state, here[: len(state)])]
    return state


def _finish(engine: Engine, reader: CheckpointReader, read_plan: ReadPlan, random: Any, factor: float) -> None:
    """Loads the gradients of micro-steps, times the factor, the state of a hook, and the random states."""
    content, rank = reader.index, engine.comm.rank
    if engine.optimizer is not None:
        engine.optimizer.zero_grad()
        requests = read_plan.gradient_requests(engine)
        reader.fill(requests)
        for request in requests if factor != 1.0 else ():
            request.target.mul_(factor)
    hook, own = engine.saved_hook(), own_states(engine, content)
    if hook is not None and "hook" in own and same_parts(engine, content):
        hook.load_state_dict(json_encoding.decode(own["hook"], reader.tensor))
    if random is not None:
        if rank < content.replicas:
            randoms.restore(random)
        else:
            randoms.derive(random, rank)


def _hook_said(engine: Engine, content: Index) -> list[str]:
    """Explains what of a communication hook's state does not come back, in training that goes on."""
    saved, here = any("hook" in own for own in content.about["own"]), engine.saved_hook() is not None
    if saved and here and not same_parts(engine, content):
        return ["holds the state of a communication hook, which is dropped, as pp, tp or ep is another here"]
    if engine.optimizer is None or saved == here:
        return []
    if saved:
        return ["holds the state of a communication hook, which is dropped, as no hook with one is registered here"]
    return ["was saved without the state of a communication hook; the hook here keeps its own"]


def _scale_factor(content: Index, scaler: Any) -> float:
    """Returns the loss scale here as a multiple of the saved one; without a scaler a loss has scale 1.

    1 for scalers of a class of the program's own, whose states do not have the scale under torch's name.
    """
    state = content.about.get("scaler") or {"scale": 1.0}
    saved = stateful_checks.value_of_number(state.get("scale")) if isinstance(state, dict) else None
    here: float = scaler.get_scale() if hasattr(scaler, "get_scale") else 1.0
    return here / saved if saved else 1.0
