"""A step of a ZeroOptimizer: every rank's inner optimizer on its slices, then new parameters for all.

    local         the closure runs, if there is one
    local         has this rank a reason not to step? (guard, foreign gradients, an open pass)
    collective    release(): all ranks call it, and from here on this rank reads no parameter. It sends messages only
                  with `ShardedParameters` (rounds), after which no rank reads one
    collective    one all-reduce: reasons, which parameters any rank's passes reached, a fingerprint of the settings;
                  after it no rank reads a parameter any more, whatever the strategy
    collective    with tp, a second one over tp: have the ranks there a reason, or other settings?
    collective    with tp, over the mesh in some steps: replicated gradients must be equal
    collective    rank 0's buffers are broadcast
    mostly local  the inner optimizer steps on the slices; masters are rounded into the shards
    collective    publish(): every rank sees the new parameters, at once or before it next reads one; left out where the
                  inner optimizer has updated them whole on every rank (OneBitAdam)

The inner optimizer communicates where it needs whole parameters (Muon) or their norms (LARS, LAMB), with `offload`, and
where it exchanges bits (OneBitAdam). With `offload` and in steps on whole parameters the ranks agree that the step has
succeeded. An error of a step on slices is this rank's alone: it ends the job, or, if the program catches it, the others
wait until their watchdogs end it.

All of it runs in the thread that calls `step()`. A reason on one rank is an error on all, before anything is changed;
inside `gathered`, where all ranks are, each raises by itself.
With `step_in_backward` the pass has made the step (`stepping.backward_steps`); `step()` ends it, and broadcasts the
buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...errors import TrainingError
from ...gradients.backward import inside_backward
from ...job.agreement import raise_everywhere
from ...module_tensors import buffers_in
from ...partial_steps import STEP_INSIDE
from ...replicas.broadcast import broadcast_states
from ...replicas.start_check import check_settings_agree
from ..optimizer_parts import Parts
from ..stepping.step_settings import fingerprint, same_fingerprints, settings_of

_CLIPPING = "clipping since the last step"  # changes of `.grad`, compared over the ranks that average


def make_step(
    parts: Parts, outer: torch.optim.Optimizer, broadcasts_buffers: bool, closure: Callable[[], Any] | None
) -> Any:
    """Steps once; returns what `closure` returned. Collective.

    outer: whose param_groups have the settings of the step, and get what the inner optimizer notes in them.
    broadcasts_buffers: whether rank 0's buffers go to all.
    """
    parts.place.refuse_capture("ZeroOptimizer.step")
    if inside_backward():
        raise TrainingError(STEP_INSIDE)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    foreign_problem = parts.grad_attributes.foreign_problem()
    if parts.backward_steps is not None:
        parts.reduced_gradients.refuse_unreduced()
        parts.backward_steps.close(foreign_problem)
        parts.grad_attributes.take_changes()
        if broadcasts_buffers:
            broadcast_states(parts.comm, buffers_in(parts.model))
        return loss
    problem = parts.guard.step_problem(parts.slices) or foreign_problem or parts.grad_attributes.step_problem()
    parts.parameters.release()
    _hand_settings_on(parts, outer)
    reached = _attach_gradients(parts, outer, problem)
    if broadcasts_buffers:
        broadcast_states(parts.comm, buffers_in(parts.model))
    parts.inner.step()
    for mine, inner in zip(outer.param_groups, parts.inner.param_groups, strict=True):
        mine.update({key: value for key, value in inner.items() if key != "params"})  # what it notes there
    for own_slice in parts.slices.values():
        own_slice.write_back()
    if not parts.inner.updates_wholes:
        parts.parameters.publish()
    parts.guard.stepped(reached)
    return loss


def before_backward_steps(parts: Parts, outer: torch.optim.Optimizer) -> None:
    """Checks, as a step does, that a backward pass may change the parameters, and prepares them for it. Collective."""
    assert parts.backward_steps is not None
    steps = parts.backward_steps
    problem = steps.open_problem() or parts.guard.step_problem(parts.slices) or steps.take_foreign_problem()
    parts.parameters.wait_for_gathers()
    _hand_settings_on(parts, outer)
    _agreed(parts, problem, [], settings_of(outer.param_groups, outer.defaults))


def _hand_settings_on(parts: Parts, outer: torch.optim.Optimizer) -> None:
    for mine, inner in zip(outer.param_groups, parts.inner.param_groups, strict=True):
        inner.update({key: value for key, value in mine.items() if key != "params"})


def _attach_gradients(parts: Parts, outer: torch.optim.Optimizer, problem: str | None) -> list[torch.nn.Parameter]:
    """Gives each slice its part of the reduced gradient, or None where no rank's passes reached the parameter.

    Returns the reached ones.

    problem: why this rank cannot step, for which all ranks raise TrainingError.
    """
    parts.grad_attributes.update()
    flags = [r for number in range(len(parts.shards)) for r in parts.reduced_gradients.reached(number)]
    settings = settings_of(outer.param_groups, outer.defaults)  # not what the program notes in the groups
    changes = parts.grad_attributes.take_changes()
    if changes:
        settings[_CLIPPING] = changes
    flag = iter(_agreed(parts, problem, flags, settings))
    reached = []
    for number, shard in enumerate(parts.shards):
        gradient = parts.reduced_gradients.shard(number)
        for p in shard.parameters:
            if next(flag):
                reached.append(p)
                parts.slices[p].attach(gradient)
            else:
                parts.slices[p].attach(None)
    if parts.same_gradients is not None:
        parts.same_gradients.compare(reached, parts.slices, parts.reduced_gradients.shard)
    return reached


def _agreed(parts: Parts, problem: str | None, flags: list[bool], settings: dict[str, Any]) -> list[bool]:
    """Returns which of the flags any rank has set. Raises TrainingError for problems and for settings that differ."""
    agreed = np.array([problem is not None, *flags, *fingerprint(settings)], np.uint8)
    in_pass = inside_backward()
    work = (parts.shard_group.backward_comm if in_pass else parts.comm).all_reduce(agreed, "max", async_op=in_pass)
    if work is not None:
        parts.parameters.wait_for_reduction(work)  # others may still gather units
    refused, differ = bool(agreed[0]), not same_fingerprints(agreed)
    if parts.tp is not None:  # a rank comes here after all ranks of `parts.comm`, so that none waits for its units
        # Coefficients of clipping may differ over tp by rounding, as gradients of parameters that are not cut may.
        of_groups = {name: value for name, value in settings.items() if name != _CLIPPING}
        over_tp = np.array([refused, differ, *fingerprint(of_groups)], np.uint8)
        parts.tp.all_reduce(over_tp, "max")
        refused, differ = bool(over_tp[0]), bool(over_tp[1]) or not same_fingerprints(over_tp)
    if refused:
        raise_everywhere(parts.with_tp, problem)
    if differ:
        check_settings_agree(parts.with_tp, "step", settings)
    return [bool(flag) for flag in agreed[1 : 1 + len(flags)]]
