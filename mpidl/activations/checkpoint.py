"""Checkpointed call: a function whose activations are not kept for backward, but computed again from its inputs.

    forward     x -> [function] -> y       x, the checkpoint, is kept: as it is, or in a store
    backward    x -> [function] -> ...     again, with the same random numbers and autocast, and then its gradients

It is torch.utils.checkpoint without re-entrance, and with what that leaves to the caller: tensors in keywords and
containers are inputs like the others, a list that the function extends has its former length when it runs again,
running statistics are updated once, and the saved inputs may lie in a store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..errors import ConfigurationError
from ..models.segments import buffers_left_alone
from ..tensor.kept_sums import KeptSums
from .store import CheckpointStore

OF_TORCH = ("context_fn", "debug", "determinism_check", "early_stop", "preserve_rng_state")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    store: CheckpointStore | None = None,
    use_reentrant: bool = False,
    keep_sums: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls `function(*args, **kwargs)`, and calls it again in backward in place of keeping its activations.

    function: also a module, a method of one, or functools.partial of these, whose buffers the second run leaves alone.
        It must do the same both times, and what it reads of buffers must not be what it wrote there.
    store: where the inputs lie until backward; by default wherever they are. Inside another checkpoint it is not
        used, since the outer one computes those inputs again.
    keep_sums: of a module that is cut over tp, keep the outputs of its row-parallel layers too, so that the second run
        sums nothing over tp (`tensor.kept_sums`).
    context_fn, debug, determinism_check, early_stop, preserve_rng_state: torch.utils.checkpoint's.

    While gradients are off, nothing is kept. Raises ConfigurationError; and with a store that has a group, on all its
    ranks, TrainingError if their inputs differ.
    """
    if not callable(function):
        raise ConfigurationError(f"checkpoint: got {function!r}; needs a function, and its arguments")
    if use_reentrant:
        raise ConfigurationError("use_reentrant: got True; this checkpoint is the one that is not re-entrant")
    if store is not None and not isinstance(store, CheckpointStore):
        raise ConfigurationError(f"store: got {store!r}; needs a CheckpointStore or None")
    options = {name: kwargs.pop(name) for name in OF_TORCH if name in kwargs}
    owner = _owner(function)
    if keep_sums and owner is None:
        raise ConfigurationError(f"keep_sums: got a function {function!r}; needs a module, or a method of one")
    return call(function, args, kwargs, store, options, owner, keep_sums)


def call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    store: CheckpointStore | None,
    options: dict[str, Any],
    owner: torch.nn.Module | None,
    keep_sums: bool = False,
) -> Any:
    """Runs `checkpoint` for arguments that are checked already; all of `kwargs` goes to the function.

    owner: the module that runs, whose buffers the second run leaves alone; None: `function` is of no module.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    run = _Recomputed(function, args, kwargs, owner, keep_sums)
    keeping = contextlib.nullcontext() if store is None or _inside_checkpoint() else store.keeping(run.tensors)
    with keeping:
        return torch_checkpoint(run, *run.tensors, use_reentrant=False, **options)


class _Recomputed:
    """A function that runs on its own arguments, and every time after the first on ones that are put together anew.

    owner, keep_sums: as of `call`.
    tensors: those among the arguments. They are held until the first run only.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        owner: torch.nn.Module | None,
        keep_sums: bool,
    ) -> None:
        self._function, self._owner = function, owner
        self._sums = (KeptSums(), owner) if keep_sums and owner is not None else None
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._places = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.tensors = [self._leaves[n] for n in self._places]
        for n in self._places:
            self._leaves[n] = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._sums is None:
            return self._run(tensors)
        sums, module = self._sums
        with sums.run(module):
            return self._run(tensors)

    def _run(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            self.tensors = []
            return self._function(*args, **kwargs)
        leaves = list(self._leaves)
        for n, tensor in zip(self._places, tensors, strict=True):
            leaves[n] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        with buffers_left_alone([] if self._owner is None else [self._owner]):
            return self._function(*args, **kwargs)


def _owner(function: Callable[..., Any]) -> torch.nn.Module | None:
    """The module that a function is, or is a method of."""
    while isinstance(function, partial):
        function = function.func
    found = getattr(function, "__self__", function)
    return found if isinstance(found, torch.nn.Module) else None


def _inside_checkpoint() -> bool:
    """Returns whether autograd keeps nothing that it saves now: in a checkpoint's forward pass, or its second run."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch_checkpoint.__module__
