"""Matches a checkpoint with a model and an optimizer: makes a plan of what to read into which memory.

Making the plan changes nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import CheckpointError, CheckpointMismatch, ConfigurationError, listed
from ..mesh.placement import Cut
from ..optim.elementwise_state import mark_replicated, saved_state
from ..optim.one_bit import OneBitOptimizer
from . import compression_state, cuts, json_encoding, stateful_checks
from .collect import IMPLEMENTATION, rank_name
from .engine import Engine
from .held_tensor import HeldTensor, Share
from .index import Index
from .saved_state_check import KeptStates
from .schema import SLICES

_LISTED = 3  # names in a message
# Numbers that torch's schedulers put into the optimizer's groups, and take from there.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")


@dataclass(frozen=True, eq=False)
class Request:
    """Elements low..high of a cut of a tensor, to be read into `target`; of several names the mean.

    ranks: over which the mean is taken, of which some may have nothing, which counts as zeros; None: one a name.
    checks: those whose checksums this rank compares: of what all ranks read, each has a share.
    """

    names: tuple[str, ...]
    cut: Cut
    low: int
    high: int
    checks: Sequence[Share]
    target: torch.Tensor
    ranks: int | None = None


@dataclass(eq=False)
class ReadPlan:
    """List of what to read.

    small: tensors to be read whole.
    states: by the optimizer's keys, to be filled.
    unpublished: parameters whose new values wait for the next step, under a delayed update.
    dtypes: those in which the parameters were saved, by the optimizer's keys.
    """

    index: Index
    requests: list[Request] = field(default_factory=list)
    small: list[str] = field(default_factory=list)
    states: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    settings: list[Any] = field(default_factory=list)
    gradients: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unpublished: list[str] = field(default_factory=list)
    dtypes: dict[torch.Tensor, torch.dtype] = field(default_factory=dict)
    compression: compression_state.KeptCompression = field(default_factory=compression_state.KeptCompression)

    def install(self, engine: Engine, tensor: Callable[[str], torch.Tensor]) -> None:
        """Gives the optimizer its groups' settings and its state. tensor: reads a tensor by its name."""
        optimizer = engine.optimizer
        if optimizer is None:
            return
        for group, settings in zip(optimizer.param_groups, self.settings, strict=True):
            group.update(json_encoding.decode(settings, tensor))
        if engine.owned is not None:
            engine.owned.take_settings(optimizer.param_groups)
        states = saved_state(optimizer)
        flags = {p: bool(g.get("fused") or g.get("capturable")) for g in optimizer.param_groups for p in g["params"]}
        for held in engine.parameters:
            if held.key is None or held.parameter not in flags:
                continue
            states.pop(held.key, None)
            entry = {}
            for key, value in self.states.get(held.key, {}).items():
                if not torch.is_tensor(value):  # JSON
                    dtypes = self.dtypes[held.key], _own_dtype(engine, held.key)
                    value = _to_device_of(json_encoding.decode(value, tensor), held.key, dtypes, flags[held.parameter])
                    value = mark_replicated(value)
                entry[key] = value
            if entry:
                states[held.key] = entry
        if isinstance(optimizer, OneBitOptimizer):
            optimizer.gather_errors()  # notes that the loaded states have theirs; nothing is sent
        if engine.owned is not None and "steps" in self.index.about["optimizer"]:
            engine.owned.steps = self.index.about["optimizer"]["steps"]

    def gradient_requests(self, engine: Engine) -> list[Request]:
        """Replaces the gradients by memory for those of the micro-steps, and returns what to read into it."""
        if not self.gradients:
            return []
        dtypes = {name: self.index.tensors[names[0]].dtype for name, names in self.gradients.items()}
        of_ranks = any(_is_of_one_rank(name) for names in self.gradients.values() for name in names)
        unreduced = any(own.get("unreduced", of_ranks) for own in self.index.about["own"])  # earlier ones do not say
        new_gradients = engine.new_gradients(dtypes, unreduced)
        tensors = {held.name: held for held in engine.parameters}
        requests = [_request(tensors[name], self.gradients[name], target) for name, target in new_gradients.items()]
        means = not _takes_its_own(engine, self.index)
        return [replace(r, ranks=self.index.replicas) if means and _is_of_one_rank(r.names[0]) else r for r in requests]


def plan_reads(engine: Engine, index: Index) -> ReadPlan:
    """Makes the plan. Raises CheckpointMismatch, naming what does not fit, or CheckpointError for damage."""
    read_plan = ReadPlan(index)
    rank, saved = engine.comm.rank, index.replicas

    def names_of(name: str, per_rank: bool) -> tuple[str, ...]:
        """Returns the names under which a tensor was saved: its own, or one a rank where the ranks' values differed.

        per_rank: the values may differ here too, so that each rank takes its own if as many ranks saved them.
        """
        if name in index.tensors:
            return (name,)
        each = tuple(f"{rank_name(r)}/{name}" for r in range(saved))
        if saved == engine.comm.size and per_rank:
            return (each[rank],) if each[rank] in index.tensors else ()
        if not any(other in index.tensors for other in each):
            return ()
        if any(other not in index.tensors for other in each):
            raise CheckpointError(f"{index.file}: only some ranks have {name}; needs the {saved} ranks that saved it")
        # The mean of counts, such as of batches, is no count.
        return each if index.tensors[each[0]].dtype.is_floating_point else each[:1]

    _match_model(engine, index, read_plan, names_of)
    if engine.optimizer is not None:
        _match_optimizer(engine, index, read_plan, names_of)
        if engine.owned is not None and engine.owned.delays:
            _match_unpublished(engine, index, read_plan)
        if index.about["micro_step"]:
            _match_gradients(engine, index, read_plan)
        _match_compression(engine, index, read_plan)
    return read_plan


def same_parts(engine: Engine, content: Index) -> bool:
    """Returns True if the model lay in as many parts when it was saved."""
    saved = {} if "parts" in content.about else content.about.get("mesh", {})
    return bool(saved == (engine.part.sizes if engine.part.joined else {}))


def own_states(engine: Engine, content: Index) -> dict[str, Any]:
    """Returns the states that this rank takes of those that each rank has of its own.

    Ranks of parts that were not there take those of their replica in the first part: what has to be equal over them,
    such as masks of dropout outside of cut layers, then is.
    """
    part = engine.part.number if engine.part.joined and same_parts(engine, content) else 0
    own: dict[str, Any] = content.about["own"][part * content.replicas + engine.comm.rank % content.replicas]
    return own


NamesOf = Callable[[str, bool], tuple[str, ...]]


def may_differ(engine: Engine, held: HeldTensor) -> bool:
    """Returns True if the ranks' values may differ: always for some tensors, and under post-local SGD for all."""
    return held.per_rank or engine.averager is not None


def _match_model(engine: Engine, index: Index, read_plan: ReadPlan, names_of: NamesOf) -> None:
    about = index.about["model"]
    saved = {*about["parameters"], *about["buffers"]}
    tensors = [*engine.parameters, *engine.buffers]
    problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "of another shape": [], "of another kind": []}
    every = {*engine.join.parameters, *engine.join.buffers}  # of other parts of the model too
    seen = {name if name in saved else about["tied"].get(name, name) for name in every}
    for held in tensors:
        name = held.name if held.name in saved else about["tied"].get(held.name, held.name)
        names = names_of(f"model/{name}", may_differ(engine, held))
        if not names:
            problems["missing"].append(held.name)
            continue
        entry = index.tensors[names[0]]
        if entry.shape != held.shape:
            problems["of another shape"].append(f"{held.name} (has {entry.shape}, needs {held.shape})")
        elif entry.dtype.is_floating_point != held.values.dtype.is_floating_point:
            problems["of another kind"].append(f"{held.name} (has {entry.dtype}, needs {held.values.dtype})")
        else:
            read_plan.requests.append(_request(held, names, held.values))
            if held.key is not None:
                read_plan.dtypes[held.key] = entry.dtype
    extra = about.get("extra_state", dict.fromkeys(engine.extra_states))  # weights of elsewhere have none
    problems["missing"] += [name for name in engine.extra_states if name not in extra]
    extra_here = {name for content in engine.join.contents for name in content.extra_states}
    problems["unexpected"] = sorted(saved - seen) + sorted(extra.keys() - extra_here)
    found = "; ".join(f"{problem}: {listed(names, _LISTED)}" for problem, names in problems.items() if names)
    if found:
        here = type(engine.model).__name__
        classes = "" if about["class"] == here else f" ({about['class']}, here {here})"
        raise CheckpointMismatch(f"{index.file}: is of another model{classes}; {found}")


def _match_optimizer(engine: Engine, index: Index, read_plan: ReadPlan, names_of: NamesOf) -> None:
    about = index.about.get("optimizer")
    if about is None:
        raise CheckpointMismatch(f"{index.file}: was saved without an optimizer")
    if about["class"] != engine.optimizer_class:
        raise CheckpointMismatch(
            f"{index.file}: holds the state of {about['class']}; the optimizer here is {engine.optimizer_class}"
        )
    assert engine.optimizer is not None
    own = engine.join.groups
    saved = [group["params"] for group in about["groups"]]
    grouped_alike = len(engine.optimizer.param_groups) == len(own)  # as in the other parts of the model
    if not grouped_alike or [set(names) for names in own] != [set(names) for names in saved]:
        raise CheckpointMismatch(f"{index.file}: {_groups_differ(saved, own)}")
    for number, group in enumerate(about["groups"]):
        settings = {key: value for key, value in group["settings"].items() if key not in IMPLEMENTATION}
        read_plan.settings.append(settings)
        read_plan.small += json_encoding.names_in(settings)
        _check_settings(index, number, settings, engine.optimizer.param_groups[number])
    kept = KeptStates(engine, index, read_plan.settings)
    trained = {name for names in own for name in names}
    of_the_rank = own_states(engine, index).get("states", {}) if index.replicas == engine.comm.size else {}
    for held in engine.parameters:
        if held.key is None or held.name not in trained:
            continue
        entry: dict[str, Any] = {}
        current = saved_state(engine.optimizer).get(held.key, {})
        saved_states = about["state"].get(held.name, {})
        if saved_states and may_differ(engine, held):
            saved_states = {**saved_states, **of_the_rank.get(held.name, {})}
        if saved_states:
            kept.check(held, saved_states)
        for key, value in saved_states.items():
            if value != SLICES:
                if json_encoding.names_in(value) and engine.steps_on_part(held):
                    raise CheckpointMismatch(
                        f"{index.file}: {key} of {held.name} is of the whole parameter; needs a ZeroOptimizer where "
                        "that is cut"
                    )
                entry[key] = value
                read_plan.small += json_encoding.names_in(value)
                continue
            names = names_of(f"optimizer/{key}/{held.name}", may_differ(engine, held))
            if not names or index.tensors[names[0]].shape != held.shape:
                raise CheckpointError(f"{index.file}: {key} of {held.name} is missing, or has another shape than it")
            entry[key] = _memory_for_state(engine, held.key, key, index.tensors[names[0]].dtype, current.get(key))
            read_plan.requests.append(_request(held, names, entry[key]))
        read_plan.states[held.key] = entry


def _check_settings(index: Index, number: int, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a setting is, say, a text and the optimizer here has a number for it."""
    for key, value in saved.items():
        here = None
        with contextlib.suppress(ConfigurationError):  # what cannot be encoded was not saved either
            here = json_encoding.encode(group.get(key), key, {})
        try:
            of_scheduler = key in _OF_SCHEDULERS and group.get(key, 0) is not None
            if of_scheduler and json_encoding.kind_of(value) != "tensor":
                stateful_checks.any_number_check(value)
            json_encoding.check_kinds(value, here)
        except json_encoding.Malformed as error:
            where = f"optimizer.groups.{number}.{json_encoding.within(key, error)}"
            raise CheckpointError(f"{index.file}: {where}") from None


def _memory_for_state(engine: Engine, key: torch.Tensor, name: str, saved: torch.dtype, current: Any) -> torch.Tensor:
    """Returns the memory for a state of the key's shape: the present state's, or new memory like the key's.

    Its dtype is the one to which the optimizer's `load_state_dict` converts the state.
    """
    own = _own_dtype(engine, key)
    dtype = own if saved.is_floating_point and key.dtype.is_floating_point else saved
    fits = torch.is_tensor(current) and current.shape == key.shape and current.dtype == dtype
    if fits and current.device == key.device:
        return current
    if engine.owned is not None:
        return engine.owned.allocate(key, name, dtype)
    return torch.empty_like(key, dtype=dtype, requires_grad=False)


def _own_dtype(engine: Engine, key: torch.Tensor) -> torch.dtype:
    """Returns the dtype of the optimizer's states of a parameter."""
    wide = getattr(engine.optimizer_type, "wide_states", False)
    return torch.promote_types(key.dtype, torch.float32) if wide else key.dtype


def _to_device_of(value: Any, key: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype], scalars: bool) -> Any:
    """Moves a state's tensors, also in lists, to the key's device, and converts those of the first dtype to the second.

    As torch's `load_state_dict` does with states of the parameter's dtype. Tensors without dimensions keep their dtype,
    and are moved where scalars says so: counts of steps, which fused optimizers have on the device.
    """
    if isinstance(value, list | tuple):
        return type(value)(_to_device_of(each, key, dtypes, scalars) for each in value)
    if not torch.is_tensor(value) or not (value.dim() or scalars):
        return value
    saved, own = dtypes
    converts = value.dim() > 0 and value.dtype == saved and key.is_floating_point()
    return value.to(key.device, own if converts else value.dtype)


def _match_unpublished(engine: Engine, index: Index, read_plan: ReadPlan) -> None:
    """Plans the values that wait for the next step under a delayed update; other training sees them at once."""
    assert engine.owned is not None
    for held in engine.parameters:
        name = f"seen/{held.name}"
        if held.parameter is not None and held.key is not None and name in index.tensors:
            if index.tensors[name].shape != held.shape:
                raise CheckpointError(f"{index.file}: {name} has another shape than {held.name}")
            read_plan.unpublished.append(held.name)
            read_plan.requests.append(_request(held, (name,), engine.owned.published_values(held.parameter)))


def _groups_differ(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> str:
    was, now = ({name for names in groups for name in names} for groups in (saved, own))
    if was == now:
        return f"its parameters are in {len(saved)} groups there and in {len(own)} here"
    differences = [("trained only here", sorted(now - was)), ("trained only when it was saved", sorted(was - now))]
    return "other parameters were trained; " + "; ".join(
        f"{what}: {listed(names, _LISTED)}" for what, names in differences if names
    )


def _takes_its_own(engine: Engine, index: Index) -> bool:
    """Returns True if each rank takes the gradients that it saved, and False if they take the mean of the ranks'."""
    return engine.zero is None and index.replicas == engine.comm.size


def _match_gradients(engine: Engine, index: Index, read_plan: ReadPlan) -> None:
    for held in engine.parameters:
        name = f"gradient/{held.name}"
        each = [f"{rank_name(rank)}/{name}" for rank in range(index.replicas)]
        if _takes_its_own(engine, index):
            each = [each[engine.comm.rank]]
        names = tuple(known for known in each if known in index.tensors)
        if not names and name in index.tensors:
            names = (name,)
        if names:
            if any(index.tensors[each].shape != held.shape for each in names):
                raise CheckpointError(f"{index.file}: the gradient of {held.name} has another shape than it")
            read_plan.gradients[held.name] = names


def _match_compression(engine: Engine, index: Index, read_plan: ReadPlan) -> None:
    """Plans the mean remainders, of which each rank reads its part, and the compressor's states."""
    found = read_plan.compression = compression_state.match_compression(engine, index)
    for name, target in found.targets.items():
        held = found.held[name]
        names = (f"remainder/{name}",)
        read_plan.requests.append(
            Request(names, held.cut, 0, cuts.element_count(held.cut), shares_to_verify(held, names), target)
        )
    read_plan.small += json_encoding.names_in(found.states)


def shares_to_verify(held: HeldTensor, names: tuple[str, ...]) -> Sequence[Share]:
    """Returns the elements whose checksums this rank compares: its share, or all if it alone reads the tensor."""
    alone = held.per_rank or (len(names) == 1 and _is_of_one_rank(names[0]))
    return [Share(held.cut, held.start, held.stop)] if alone else held.writes


def _is_of_one_rank(name: str) -> bool:
    return re.match(r"rank\d{5,}/", name) is not None


def _request(held: HeldTensor, names: tuple[str, ...], target: torch.Tensor) -> Request:
    return Request(names, held.cut, held.start, held.stop, shares_to_verify(held, names), target)
