"""Checks saved states of a scheduler, a scaler and a sampler before loading, against the objects that will load them.

torch's schedulers take every key as an attribute, and its GradScaler any number: a None in place of a number would be
loaded without an error and fail in a later step, and what is missing would begin again. A value has to be of the kind
that the scheduler here has under that key, and some have a range. A scheduler made with other settings is not refused.

A saved state may lack settings, for which those here stand, so that one of an older torch is loaded. It may not lack
what tells how far the schedule has come.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from . import json_encoding
from .json_checks import Check, boolean, integer_check, one_of, record
from .json_encoding import Malformed, check_at, shown

# Attributes that a step of a scheduler changes, and the next step reads.
_PROGRESS = ("last_epoch", "_step_count", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "_schedulers")
_NONE_OR_NUMBER = ("default_min_lr",)  # None where ReduceLROnPlateau was given a list
_OF_CALLABLES = ("lr_lambdas", "_scale_fn_custom")  # attributes of the program's own objects; None of functions
_SAMPLERS = ("mpidl.data.sampler", "mpidl.data.loader")  # not imported before a program does
_SEED = (1 << 64) - 1  # torch.manual_seed takes no more


def value_of_number(encoded: Any) -> float | None:
    """Returns the value of an encoded number; None for anything else, booleans too."""
    if type(encoded) in (int, float):
        return encoded  # type: ignore[no-any-return]
    if json_encoding.tag_of(encoded) == "$float":
        return float(encoded["$float"])
    if json_encoding.tag_of(encoded) == "$scalar":
        return float(torch.tensor(value_of_number(encoded["$scalar"][1]), dtype=getattr(torch, encoded["$scalar"][0])))
    return None


def number_check(fits: Callable[[float], bool], needed: str) -> Check:
    """Returns a check for an encoded number that fits. needed: completes the error's "needs"."""

    def check(value: Any) -> None:
        plain = value_of_number(value)
        if plain is None or not fits(plain):
            raise Malformed(f"is {shown(value if plain is None else plain)}; needs {needed}")

    return check


count_check: Check = number_check(lambda value: 0 <= value < math.inf, "a finite number of at least 0")
any_number_check: Check = number_check(lambda value: True, "a number")
_above_0 = number_check(lambda value: value > 0, "a number above 0")

_RANGES: dict[str, Check] = {
    **dict.fromkeys(("_step_count", "num_bad_epochs", "cooldown_counter"), integer_check()),
    **dict.fromkeys(("T_i", "total_steps"), integer_check(1)),
    **dict.fromkeys(("step_size", "T_max", "T_0", "T_mult", "total_size", "step_ratio"), _above_0),
}
_RATES, _MOMENTA = one_of(("initial_lr", "max_lr", "min_lr")), one_of(("max_momentum", "base_momentum"))
_WORDS: dict[str, Check] = {
    **dict.fromkeys(("_anneal_func_type", "_anneal_strategy"), one_of(("cos", "linear"))),
    **dict.fromkeys(("start_lr", "end_lr"), _RATES),
    **dict.fromkeys(("start_momentum", "end_momentum"), _MOMENTA),
    "mode": one_of(("min", "max", "triangular", "triangular2", "exp_range")),
    "scale_mode": one_of(("cycle", "iterations")),
    "threshold_mode": one_of(("rel", "abs")),
}

_FLOAT32 = torch.finfo(torch.float32).max
_SCALER = record(
    {
        # A factor of 1 keeps the scale: the setters of torch's GradScaler take it.
        "scale": number_check(lambda v: 2.0**-149 <= v <= _FLOAT32, "a number above 0 that is finite in float32"),
        "growth_factor": number_check(lambda v: 1 <= v < math.inf, "a finite number of at least 1"),
        "backoff_factor": number_check(lambda v: 0 < v <= 1, "a number above 0, of at most 1"),
        "growth_interval": integer_check(1),
        "_growth_tracker": number_check(lambda v: type(v) is int and 0 <= v < 1 << 31, "an integer of 0 to 2147483647"),
    },
    {"skipped_steps": integer_check()},
)

_POSITION = record(
    {
        "epoch": integer_check(),
        "seed": number_check(lambda v: type(v) is int and 0 <= v <= _SEED, "an integer of 0 to 2^64 - 1"),
        "shuffle": boolean,
        "samples": integer_check(),
        "consumed": integer_check(),
    }
)


def check_state(stateful: Any, saved: Any, here: Any) -> None:
    """Raises Malformed for a saved state with which a class of torch or mpidl could not go on.

    stateful: the scheduler, scaler or sampler.
    saved: the state, encoded.
    here: `stateful.state_dict()`.

    A class of the program checks its states itself. Of its schedulers that leave loading to torch `last_epoch` is
    checked.
    """
    loads = getattr(stateful.load_state_dict, "__module__", None)
    if not _is_own(loads):
        return
    if isinstance(stateful, LRScheduler):
        if not _is_own(type(stateful).__module__):
            here = {key: here[key] for key in ("last_epoch",) if isinstance(here, Mapping) and key in here}
        _check_scheduler(stateful, saved, json_encoding.encode(here, "scheduler", {}))
    elif isinstance(stateful, torch.amp.GradScaler):
        if here and saved != {}:
            _SCALER(saved)
    elif loads in _SAMPLERS:
        _POSITION(saved)
        if saved["seed"] + saved["epoch"] > _SEED:
            raise Malformed(f"is {saved['epoch']}; needs a sum with the seed of at most 2^64 - 1", ("epoch",))
    elif _is_own(type(stateful).__module__):
        json_encoding.check_kinds(saved, json_encoding.encode(here, "state", {}), lists_grow=False)


def starts_anew(stateful: Any, saved: Any) -> bool:
    """Returns True for an enabled GradScaler that finds the state of one that was not."""
    return isinstance(stateful, torch.amp.GradScaler) and stateful.is_enabled() and bool(saved == {})


def _is_own(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("torch", "mpidl")


def _check_scheduler(part: Any, saved: Any, here: Any, depth: int = 0) -> None:
    """Checks the state of a scheduler, and of those in it. depth: of how many it is a part."""
    _check_kinds_agree(saved, here)
    saved, here = json_encoding.inner_of(saved), json_encoding.inner_of(here)
    of_torch = _is_own(type(part).__module__)
    for key in saved if of_torch else ():
        if key not in here and hasattr(part, str(key)):
            raise Malformed(f"has {shown(key)}, which is no part of it")
    for key in _PROGRESS if of_torch else ("last_epoch",):
        if key in here and key not in saved:
            raise Malformed(f"lacks {key}")
    if "last_epoch" in here:
        # Each SequentialLR around a scheduler counts one back.
        check_at("last_epoch", _check_kinds_agree, saved["last_epoch"], here["last_epoch"])
        check_at("last_epoch", integer_check(-max(depth, 1)) if of_torch else any_number_check, saved["last_epoch"])
    for key in [key for key in saved if of_torch and key in here and key != "last_epoch"]:
        if key == "_schedulers":
            check_at(key, _check_each_scheduler, part, saved[key], here[key], depth)
        else:
            check_at(key, _check_value, key, saved[key], here[key])


def _check_each_scheduler(part: Any, saved: Any, here: Any, depth: int) -> None:
    _check_kinds_agree(saved, here)
    was, now = json_encoding.inner_of(saved), json_encoding.inner_of(here)
    for place, one in enumerate(part._schedulers):
        if _is_own(getattr(one.load_state_dict, "__module__", None)):
            check_at(place, _check_scheduler, one, was[place], now[place], depth + 1)


def _check_value(key: str, saved: Any, here: Any) -> None:
    """Compares a value of a scheduler with that here. key: the nearest one; items of a list have the list's."""
    if key in _OF_CALLABLES:
        _check_callables(saved, here)
        return
    if key in _NONE_OR_NUMBER and None in (saved, here):
        _check_kinds_agree(saved, None if saved is None else 0)
        return
    _check_kinds_agree(saved, here)
    if key == "milestones":
        _check_milestones(saved)
    elif _kind(here) == "number":
        _check_number(key, saved)
    elif _kind(here) == "text" and saved != here:
        _WORDS.get(key, lambda value: None)(saved)
    else:
        one, other = json_encoding.inner_of(saved), json_encoding.inner_of(here)
        for name in other:
            if name in one:
                check_at(name, _check_value, name if isinstance(name, str) else key, one[name], other[name])
            elif key == "_schedule_phases":
                raise Malformed(f"lacks {name}")


def _check_number(key: str, saved: Any) -> None:
    plain = value_of_number(saved)
    if type(plain) is int and abs(plain) > sys.float_info.max:
        raise Malformed(f"is {shown(plain)}; needs a number that fits in 64 bits")
    if key in _RANGES:
        _RANGES[key](saved)


def _check_callables(saved: Any, here: Any) -> None:
    """Checks that None or attributes stand for each callable; not what attributes."""
    if isinstance(here, list):
        _check_kinds_agree(saved, here)
        for place, one in json_encoding.inner_of(saved).items():
            check_at(place, _check_callables, one, None)
    elif saved is not None:
        _check_kinds_agree(saved, {})


def _check_milestones(saved: Any) -> None:
    """Checks how often each of MultiStepLR's milestones was given."""
    for key, times in json_encoding.inner_of(saved).items():
        if type(key) not in (int, float):
            raise Malformed(f"has {shown(key)}; needs the numbers of epochs")
        check_at(key, integer_check(1), times)


def _kind(encoded: Any) -> str:
    if encoded is None:
        return "None"
    return "boolean" if type(encoded) is bool else json_encoding.kind_of(encoded)


def _check_kinds_agree(saved: Any, here: Any) -> None:
    """Raises Malformed unless both are numbers, texts, sequences of as many values, ...; anything fits None here."""
    was, now = _kind(saved), _kind(here)
    if now == "None" or json_encoding.one_is_scalar(saved, here):
        return
    if was != now:
        raise Malformed(f"is {'None' if saved is None else f'a {was}'}; needs a {now}")
    if now == "sequence" and len(json_encoding.inner_of(saved)) != len(json_encoding.inner_of(here)):
        raise Malformed(f"has {len(json_encoding.inner_of(saved))} values; needs {len(json_encoding.inner_of(here))}")
