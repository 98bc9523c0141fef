"""Gathers whole states from shards and scatters them, in the plain model's and the plain optimizer's formats.

Rank 0 holds the whole, one tensor at a time travels, and no other rank ever holds more than one unit or tensor whole.

Who runs what: the thread of the program. Every rank walks the parameters in the same order, so all meet each gather,
scatter and broadcast. Rank 0's input is checked first, and an error goes to all ranks before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from collectives import Communicator

from ...absent_state import absent_state, refusal
from ...errors import ConfigurationError, MpidlError
from ...job.agreement import check_everywhere, on_rank_0
from ...job.objects import all_gather_object, broadcast_object
from ...mesh import whole_tensors
from ...mesh.placement import cuts_over, join_parts, placement
from ...module_tensors import modules_with_extra_state
from ...optim.elementwise_state import elementwise, is_slice, mark_replicated
from ...replicas.broadcast import broadcast_states
from ..parameters.strategy import ParameterStrategy
from ..shard_group import ShardGroup
from ..slices import ShardedStateSpec, Slice
from ..stepping.inner import InnerOptimizer

Slices = Mapping[torch.nn.Parameter, Slice]


@dataclass(frozen=True)
class StateNames:
    """The names of a plain model's state_dict, in its order, and the parameters among them."""

    names: tuple[str, ...]
    parameters: dict[str, torch.nn.Parameter]

    @classmethod
    def of(cls, model: torch.nn.Module) -> StateNames:
        """Reads them off a model whose parameters are whole."""
        names = tuple(model.state_dict(keep_vars=True))
        return cls(names, dict(model.named_parameters(remove_duplicate=False)))

    def tensors(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The parameters and buffers of these names."""
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return {**self.parameters, **{name: b for name, b in buffers.items() if name in self.names}}

    def extra_states(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The modules with a `get_extra_state` of their own, by the names of these states."""
        found = modules_with_extra_state(model, remove_duplicate=False)
        return {name: module for name, module in found.items() if name in self.names}


def gather_model(
    over: ShardGroup,
    model: torch.nn.Module,
    names: StateNames,
    parameters: ParameterStrategy,
    slices: Slices,
    tp: Communicator | None = None,
) -> dict[str, Any]:
    """The plain state_dict on rank 0, on the CPU, and a mark that it is there on others.

    Tied parameters are one tensor under two names, as torch has it. Extra states of modules are rank 0's.

    slices: those whose masters are given in place of the parameters.
    tp: the ranks over which the model is cut, on all of which an error of one is raised.
    """
    extra = _extra_states(over, names.extra_states(model), tp)
    copies: dict[torch.nn.Parameter, torch.Tensor] = {}
    for shard in parameters.shards:
        parts = [slices[p] for p in shard.parameters if p in slices]
        if parts and parts[0].is_master:
            for p, part in zip(shard.parameters, parts, strict=True):
                whole_master = _gather_entry(over, p, part, part.values)
                copies.update({p: whole_master} if over.is_root else {})
            continue
        with torch.no_grad(), parameters.gathered(shard.parameters, writable=False):
            if over.is_root:
                copies.update({p: p.detach().cpu().clone() for p in shard.parameters})
    if not over.is_root:
        return absent_state(over.world.rank)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    whole = {}
    for name in names.names:
        if name in names.parameters:
            p = names.parameters[name]
            whole[name] = copies[p] if p in copies else copies.setdefault(p, p.detach().cpu().clone())
        elif name in buffers:
            whole[name] = buffers[name].detach().cpu().clone()
        elif name in extra:
            whole[name] = extra[name]
    return whole


def _extra_states(over: ShardGroup, modules: Mapping[str, torch.nn.Module], tp: Communicator | None) -> dict[str, Any]:
    """Returns the extra states of rank 0's modules, tensors as copies on the CPU; {} on others. Collective."""
    found: dict[str, Any] = {}

    def read() -> None:
        for name, module in modules.items():
            state = module.get_extra_state()
            found[name] = state.detach().cpu().clone() if torch.is_tensor(state) else state

    if modules:  # on all ranks or on none
        on_rank_0(over.world, read if tp is None else partial(check_everywhere, tp, read), ConfigurationError)
    return found


def join_over_tp(tp: Communicator, names: StateNames, own: dict[str, Any]) -> dict[str, Any]:
    """The whole tensors of a state whose parameters are cut over tp. Collective over it. own: this rank's parts."""
    first: dict[torch.nn.Parameter, str] = {}
    for name in names.names:
        p = names.parameters.get(name)
        if p is not None and placement(p).cut is not None:
            first.setdefault(p, name)
    joined = {
        p: join_parts(tp, own[name], cuts) for (p, name), cuts in zip(first.items(), cuts_over(tp, first), strict=True)
    }
    return {name: joined.get(names.parameters.get(name), value) for name, value in own.items()}  # type: ignore[arg-type]


def scatter_model(
    over: ShardGroup,
    model: torch.nn.Module,
    names: StateNames,
    state_dict: Mapping[str, torch.Tensor],
    gathered: AbstractContextManager[None],
    slices: Slices,
    tp: Communicator | None = None,
) -> None:
    """Scatters rank 0's whole model state into every rank's parameters, masters and modules.

    gathered: whole parameters inside, of which rank 0's changes go to all.
    tp: the ranks over which the model is cut, each rank 0 of `over` or none; all of those give the whole.
    """
    places, extra = names.tensors(model), names.extra_states(model)

    def check() -> None:
        if problem := _mismatch(places, extra.keys(), state_dict):
            raise ConfigurationError(f"load_model_state_dict: {problem}")

    failures: list[MpidlError] = []
    if tp is not None and over.is_root:
        try:
            check_everywhere(tp, check)
        except MpidlError as error:
            failures.append(error)

    def check_here() -> None:
        if failures:
            raise failures[0]
        check()

    on_rank_0(over.world, check_here, ConfigurationError)
    if extra:
        _set_extra_states(over, extra, state_dict, tp)
    with gathered:
        for name, place in places.items() if over.is_root else ():
            place.detach().copy_(_part_of(place, state_dict[name]))
        for name, place in places.items():
            if name not in names.parameters:
                broadcast_states(over.world, [place])
    for name, p in names.parameters.items():
        if p in slices and slices[p].is_master:
            master = slices[p].values
            whole = _part_of(p, state_dict[name].detach()) if over.is_root else None
            whole = None if whole is None else whole.to(master.device, master.dtype).contiguous()
            over.scatter(slices[p].values.detach(), whole, slices[p].counts(p, over.size))


def _set_extra_states(
    over: ShardGroup, modules: Mapping[str, torch.nn.Module], state_dict: Mapping[str, Any], tp: Communicator | None
) -> None:
    """Hands rank 0's extra states to every rank's modules. Raises on all ranks what one of them raises. Collective."""
    own = {name: state_dict[name] for name in modules} if over.is_root else None

    def take() -> None:
        states = broadcast_object(over.world, own)

        def take_here() -> None:
            for name, module in modules.items():
                try:
                    module.set_extra_state(states[name])
                except Exception as error:  # the user's classes may raise anything
                    raise ConfigurationError(
                        f"load_model_state_dict: {name}: {str(error) or type(error).__name__}"
                    ) from error

        check_everywhere(over.world, take_here)

    if tp is None:
        take()
    else:
        check_everywhere(tp, take)


def _part_of(place: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a whole tensor, where the model is cut over tp."""
    cut = placement(place).cut
    return whole if cut is None else cut.of(whole)


def _mismatch(places: Mapping[str, torch.Tensor], extra: Set[str], given: Any) -> str | None:
    """The reason why a whole model state does not fit. extra: names of extra states, which may be anything."""
    if not isinstance(given, Mapping):
        return f"got {type(given).__name__}; needs a dictionary of tensors by name"
    if (absent := refusal(given, "model_state_dict()")) is not None:
        return absent
    needed_names = places.keys() | extra
    missing, unexpected = sorted(needed_names - given.keys()), sorted(map(str, given.keys() - needed_names))
    if missing or unexpected:
        return f"missing names {missing[:5]}, unexpected names {unexpected[:5]}"
    for name, place in places.items():
        if not torch.is_tensor(given[name]):
            return f"{name} is of type {type(given[name]).__name__}; needs a tensor"
        cut = placement(place).cut
        needed = tuple(place.shape) if cut is None else cut.shape
        if tuple(given[name].shape) != needed:
            return f"{name} has shape {tuple(given[name].shape)}; needs {needed}"
    return None


def gather_gradients(
    over: ShardGroup, names: StateNames, gradients: Mapping[torch.nn.Parameter, torch.Tensor], slices: Slices
) -> dict[str, Any]:
    """Whole gradients on rank 0, of each rank's slices of them; a mark that they are there on others.

    A tied parameter's is under its first name.
    """
    found: dict[torch.nn.Parameter, torch.Tensor | None] = {}
    for p in names.parameters.values():
        if p in gradients and p not in found:
            found[p] = _gather_entry(over, p, slices[p], gradients[p])
    if not over.is_root:
        return absent_state(over.world.rank)
    first = {p: name for name, p in reversed(names.parameters.items())}
    return {first[p]: whole for p, whole in found.items() if whole is not None}


def join_gradients(tp: Communicator, names: StateNames, own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The whole gradients of this rank's parts. Collective over tp.

    A parameter that the passes of some ranks of tp did not reach has zeros of theirs.
    """
    everyone = all_gather_object(tp, {name: gradient.dtype for name, gradient in own.items()})
    dtypes = {name: dtype for each in everyone for name, dtype in each.items()}
    filled = {
        name: own[name] if name in own else torch.zeros(names.parameters[name].shape, dtype=dtype)
        for name, dtype in dtypes.items()
    }
    return whole_tensors.join(tp, filled, names.parameters, "gradients")


def gather_optimizer(
    over: ShardGroup, outer: torch.optim.Optimizer, inner: InnerOptimizer, slices: Slices
) -> dict[str, Any]:
    """The plain optimizer's state_dict on rank 0; a mark that it is there on others."""
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for group in outer.param_groups:
        numbers = list(range(number, number + len(group["params"])))
        settings = {key: value for key, value in group.items() if key != "params"}
        packed["param_groups"].append({**settings, "params": numbers})
        for index, p in zip(numbers, group["params"], strict=True):
            entry = inner.state.get(slices[p].values, {})
            whole = {key: _gather_entry(over, p, slices[p], value) for key, value in entry.items()}
            if whole and over.is_root:
                packed["state"][index] = whole
        number += len(numbers)
    return packed if over.is_root else absent_state(over.world.rank)


def _gather_entry(over: ShardGroup, p: torch.nn.Parameter, part: Slice, value: Any) -> Any:
    """Gathers one value of an optimizer's state if it has the slice's shape; any other is the same on every rank."""
    if not is_slice(value, part.values):
        return value.detach().cpu().clone() if torch.is_tensor(value) else value
    whole = torch.empty(p.numel(), dtype=value.dtype, device=value.device) if over.is_root else None
    over.gather(whole, value.detach().contiguous(), part.counts(p, over.size))
    return None if whole is None else whole.view(p.shape).cpu()


def scatter_optimizer(
    over: ShardGroup,
    outer: torch.optim.Optimizer,
    inner: InnerOptimizer,
    slices: Slices,
    state_dict: Mapping[str, Any],
) -> None:
    """Scatters rank 0's whole optimizer state into every rank's slices."""
    shapes_vary = inner.needs_wholes

    def read() -> dict[str, Any]:
        problem = _misfit(outer.param_groups, state_dict, shapes_vary)
        if problem:
            raise ConfigurationError(f"load_state_dict: {problem}")
        inner.refuse_foreign_state(state_dict)
        return _outline(state_dict, outer.param_groups, shapes_vary)

    outline = on_rank_0(over.world, read, ConfigurationError)
    for group, saved in zip(outer.param_groups, outline["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
        for number, p in zip(saved["params"], group["params"], strict=True):
            part = slices[p]
            entry = {}
            for key, spec in outline["state"].get(number, {}).items():
                whole = state_dict["state"][number][key] if over.is_root else None
                entry[key] = _scatter_entry(over, p, part, spec, whole)
                if torch.is_tensor(spec) and (group.get("fused") or group.get("capturable")):
                    entry[key] = entry[key].to(part.values.device)  # where such steps count
            inner.state[part.values] = entry
    inner.take_settings(outer.param_groups)


def _misfit(groups: Sequence[Mapping[str, Any]], given: Any, shapes_vary: bool) -> str | None:
    """The reason why a whole optimizer state does not fit these groups. shapes_vary: see `_outline`."""
    if (absent := refusal(given)) is not None:
        return absent
    if not (isinstance(given, Mapping) and {"state", "param_groups"} <= given.keys()):
        listed = ", ".join(map(repr, given)) or "nothing" if isinstance(given, Mapping) else type(given).__name__
        return f"got {listed}; needs what a state_dict() gave, with 'state' and 'param_groups'"
    saved, state = given["param_groups"], given["state"]
    if not isinstance(saved, list) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in saved
    ):
        return "param_groups: needs dictionaries with 'params', the numbers of the parameters"
    sizes, own = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != own:
        return f"got groups of {sizes} parameters; needs {own}"
    for wanted, group in zip(groups, saved, strict=True):
        for key, value in wanted.items():
            if key != "params" and key in group and not _is_same_kind(group[key], value):
                return f"got {key} {group[key]!r} in a group that has {value!r}"
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        return "state: needs a dictionary of each parameter's, by its number"
    numbered = _numbered(given, groups)
    for number, entry in state.items():
        if number not in numbered:
            return f"got a state of parameter {number!r}, which is in no group"
        shape = tuple(numbered[number].shape)
        for key, value in entry.items():
            if isinstance(value, str | bytes):
                return f"got {key} {value!r} for parameter {number}; needs a tensor or a number"
            if torch.is_tensor(value) and value.dim() and value.shape != shape and not shapes_vary:
                return f"got {key} of shape {tuple(value.shape)} for a parameter of shape {shape}"
    return None


def _is_same_kind(given: Any, own: Any) -> bool:
    """Tells if a setting is a number, or a sequence of as many, where the group's own one is; None fits anything."""
    if given is None:
        return True
    if isinstance(own, list | tuple):
        return isinstance(given, list | tuple) and len(given) == len(own) and all(map(_is_same_kind, given, own))
    return not isinstance(own, int | float) or isinstance(given, int | float | torch.Tensor)


def _numbered(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[Any, torch.nn.Parameter]:
    """The parameters by the numbers that they have in a whole state."""
    pairs = zip(state_dict["param_groups"], groups, strict=True)
    return {n: p for saved, own in pairs for n, p in zip(saved["params"], own["params"], strict=True)}


def _outline(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], shapes_vary: bool) -> dict[str, Any]:
    """A state without the tensors that are cut over the ranks: of those only the dtype.

    shapes_vary: states may have other shapes than their parameters; one is cut if its shape is the parameter's,
        whatever its name.
    """
    numbered, state = _numbered(state_dict, groups), state_dict["state"]
    named = elementwise((numbered[number].shape, entry) for number, entry in state.items())

    def is_cut(number: Any, key: str, value: Any) -> bool:
        if not torch.is_tensor(value):
            return False
        return bool(value.dim()) and value.shape == numbered[number].shape if shapes_vary else key in named

    entries = {
        number: {key: ShardedStateSpec(v.dtype) if is_cut(number, key, v) else v for key, v in entry.items()}
        for number, entry in state.items()
    }
    return {"param_groups": state_dict["param_groups"], "state": entries}


def _to_device(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    return tensor.to(where if tensor.dim() else tensor.device, copy=True)


def _scatter_entry(over: ShardGroup, p: torch.nn.Parameter, part: Slice, spec: Any, whole: Any) -> Any:
    if not isinstance(spec, ShardedStateSpec):
        # A tensor goes where the parameter is, a number stays where it is, as in torch.
        move = partial(_to_device, where=part.values.device)
        return mark_replicated(tree_map_only(torch.Tensor, move, spec))
    counts = part.counts(p, over.size)
    where = part.values.device
    own = torch.empty(counts[over.rank], dtype=spec.dtype, device=where)
    over.scatter(own, whole.detach().contiguous().to(where) if over.is_root else None, counts)
    # A state saved with 16-bit parameters goes on in the master's dtype, as in torch.
    return own.to(part.values.dtype) if own.is_floating_point() else own
