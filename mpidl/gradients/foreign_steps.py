"""Detects an optimizer's step during a backward pass that the engine did not make, as in a hook of the user's.

    pass begins     how often has each parameter been written to? Steps of any optimizer are listened to from here on
    hook of p       optimizer_of[p].step(); p.grad = None              with the gradient of this rank alone
    pass ends       p was written to, or has lost its gradient: an error on every rank, as the ranks agree on it

A pass under no_sync communicates nothing: a write to p there is an error in the next pass that communicates. Torch does
not count the writes of fused optimizers, so a hook reports their steps. Torch does not count writes into `p.data`
either: DDP compares a sample of the elements of parameters on the CPU that have a hook of the program's as the pass
begins, and detects a gradient that such a hook sets to None. `p.data = x` is detected by the new address.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from collectives import Communicator

from ..errors import TrainingError
from ..job.phase import follow_steps
from ..replicas.checksums import sample
from .backward import inside_backward

_KINDS = (
    "its gradient was taken away during the backward pass",
    "changed during the backward pass",
    "changed during a backward pass under no_sync",
)
_LOST, _CHANGED, _CHANGED_EARLIER = range(len(_KINDS))

_passes: weakref.WeakSet[ForeignSteps] = weakref.WeakSet()  # those between `begin` and `end`


@cache
def _listen() -> None:
    """Registers a hook for every optimizer's step, once in the process.

    A hook a pass would change torch's list of hooks while another thread, as of a delayed update, goes through it.
    """

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if inside_backward():
            for each in list(_passes):
                each.note_step(optimizer)

    register_optimizer_step_pre_hook(hook)


class ForeignSteps:
    """Compares parameters before and after a backward pass.

    names: of all parameters.
    stay_in_place: whether a pass of the engine's leaves them and their values where they are.
    """

    def __init__(self, names: Mapping[torch.nn.Parameter, str], *, stay_in_place: bool = False) -> None:
        self._names, self._stay_in_place = names, stay_in_place
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._sampled: set[torch.nn.Parameter] = set()
        self._before: dict[torch.nn.Parameter, tuple[Any, ...]] = {}  # marks as the pass began
        self._stepped: set[torch.Tensor] = set()
        self._changed_before: set[torch.Tensor] = set()  # in passes that did not communicate
        _listen()
        follow_steps()

    def begin(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Begins a pass that gives gradients to these parameters."""
        self.end()
        self._parameters = parameters
        self._sampled = {p for p in parameters if _has_foreign_hook(p)} if self._stay_in_place else set()
        self._before = dict(zip(parameters, self._marks(parameters), strict=True))
        _passes.add(self)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes an optimizer's step during this thread's backward pass."""
        given = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        self._stepped.update(p for p in given if p in self._names)

    def end(self) -> None:
        """Ends a pass, finished or not."""
        self._parameters, self._sampled, self._before, self._stepped = (), set(), {}, set()
        _passes.discard(self)

    @contextmanager
    def engine_writes(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Context in which the engine writes to these parameters and steps with no other optimizer."""
        before = self._marks(parameters)
        stepped = self._stepped | {p for p, v in zip(parameters, before, strict=True) if self._before.get(p, v) != v}
        yield
        self._stepped = stepped
        self._before.update(zip(parameters, self._marks(parameters), strict=True))

    def end_without_agreement(self) -> None:
        """Ends a pass that does not communicate; the next one that does reports what was changed."""
        now = self._marks(self._parameters)
        written = {p for p, version in zip(self._parameters, now, strict=True) if version != self._before[p]}
        self._changed_before |= written | self._stepped.intersection(self._parameters)
        self.end()

    def end_and_encode_change(self, comm: Communicator, lost: Collection[torch.nn.Parameter] = ()) -> int:
        """Ends the pass; returns a code of the first change, or -1. `refuse` takes the maximum of the ranks' codes.

        lost: parameters that have no longer the gradient that the pass gave them.
        """
        found = -1
        for number, (p, now) in enumerate(zip(self._parameters, self._marks(self._parameters), strict=True)):
            changed_earlier = p in self._changed_before
            changed = now != self._before[p] or p in self._stepped
            if changed_earlier or changed or p in lost:
                kind = _CHANGED_EARLIER if changed_earlier else _CHANGED if changed else _LOST
                found = len(_KINDS) * (number * comm.size + comm.rank) + kind
                break
        self._changed_before.clear()
        self.end()
        return found

    def refuse(self, found: int, comm: Communicator, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raises TrainingError if any rank has noticed something. parameters: as given to `begin`."""
        if found < 0:
            return
        number, rank = divmod(found // len(_KINDS), comm.size)
        raise TrainingError(
            f"{self._names[parameters[number]]}: {_KINDS[found % len(_KINDS)]} on rank {rank}, as by an optimizer that "
            "a hook steps there, with the gradient of that rank alone; the ranks' weights differ from here on: "
            "make the step after the pass, or by step_in_backward of DistributedDataParallel or ZeroOptimizer, and "
            "load the weights anew"
        )

    def _marks(self, parameters: Sequence[torch.nn.Parameter]) -> list[tuple[Any, ...]]:
        """Returns for each parameter how many writes torch has counted, its address and maybe a sample of it."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self._stay_in_place:
                return [(p._version,) for p in parameters]
            if not self._sampled:
                return [(p._version, p.data_ptr()) for p in parameters]
            return [(p._version, p.data_ptr(), _sample(p) if p in self._sampled else None) for p in parameters]


def _has_foreign_hook(p: torch.nn.Parameter) -> bool:
    """Tells if a parameter on the CPU has a hook that is not of this package."""
    if not p.is_cpu:
        return False
    hooks: Any = chain((p._backward_hooks or {}).values(), (p._post_accumulate_grad_hooks or {}).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("mpidl.") for hook in hooks)


def _sample(p: torch.nn.Parameter) -> bytes:
    """Some elements in the order of memory, so that nothing is copied for a parameter of another layout."""
    count = min(p.numel(), p.untyped_storage().nbytes() // p.itemsize - p.storage_offset())
    some = sample(p.detach().as_strided((count,), (1,)))
    return some.contiguous().view(torch.uint8).numpy().tobytes()
