"""Adds checkpoints to a model that is not written for them: the `forward` of its blocks is called through `checkpoint`.

The modules stay what they are and where they are, so that names in state_dict, hooks and the units of ZeRO do not
change. The hooks of a block run outside its checkpoint, and once: in backward ZeRO-3 has gathered the block before it
runs again.
"""

from __future__ import annotations

import copy
import weakref
from types import TracebackType
from typing import Any

import torch

from ..errors import ConfigurationError
from ..zero.parameters.units import UnitRule, select_modules
from .checkpoint import OF_TORCH, call
from .store import CheckpointStore


class CheckpointedModules:
    """The modules of a model that are checkpointed; `remove()`, or the end of a `with` block, undoes it.

    names: theirs, in the model's order.
    store: where their inputs lie.
    """

    def __init__(self, modules: dict[str, torch.nn.Module], store: CheckpointStore | None) -> None:
        self.names, self.store = list(modules), store
        self._modules = list(modules.values())

    def remove(self) -> None:
        """Has the modules keep their activations again. Graphs that are there stay as they are."""
        for module in self._modules:
            found = module.__dict__.get("forward")
            if isinstance(found, _Checkpointed):
                found.restore(module)
        self._modules = []

    def __enter__(self) -> CheckpointedModules:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def checkpoint_modules(
    model: torch.nn.Module,
    modules: UnitRule | type[torch.nn.Module] = None,
    every: int = 1,
    *,
    store: CheckpointStore | None = None,
    keep_sums: bool = False,
    **options: Any,
) -> CheckpointedModules:
    """Checkpoints modules of a model in place, before or after an engine takes the model.

    modules: module classes, or a function of a module; by default the blocks of the model, as
        `zero.parameters.units.cut_into_units` finds them. Of modules inside each other the outermost.
    every: the step from one checkpointed module to the next, in the model's order from the first; 1: all.
    store: where the inputs lie until backward; by default wherever they are.
    keep_sums: of modules that are cut over tp, keep the outputs of row-parallel layers too, so that the second run sums
        nothing over tp (`tensor.kept_sums`).
    options: torch.utils.checkpoint's, as `checkpoint` takes them.

    While gradients are off, nothing is kept. Raises ConfigurationError.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model: got {type(model).__name__}; needs a torch.nn.Module")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigurationError(f"every: got {every!r}; needs a whole number of at least 1")
    if store is not None and not isinstance(store, CheckpointStore):
        raise ConfigurationError(f"store: got {store!r}; needs a CheckpointStore or None")
    unknown = [name for name in options if name not in OF_TORCH]
    if unknown:
        raise ConfigurationError(f"options: got {', '.join(unknown)}; needs any of {', '.join(OF_TORCH)}")
    found = select_modules(model, [modules] if isinstance(modules, type) else modules, "modules")
    if not found:
        rule = "is a list of blocks of one class" if modules is None else f"fits {modules!r}"
        raise ConfigurationError(f"modules: nothing in {type(model).__name__} {rule}; needs classes, or a function")
    wanted = dict(list(found.items())[::every])
    for name, module in wanted.items():
        if isinstance(module.__dict__.get("forward"), _Checkpointed):
            raise ConfigurationError(f"modules: {name} is checkpointed already; call remove() on what did it first")
    for module in wanted.values():
        module.__dict__["forward"] = _Checkpointed(module, store, keep_sums, options)
    return CheckpointedModules(wanted, store)


class _Checkpointed:
    """The `forward` of a module while it is checkpointed; a copy of the module has a copy that is its own."""

    def __init__(
        self, module: torch.nn.Module, store: CheckpointStore | None, keep_sums: bool, options: dict[str, Any]
    ) -> None:
        self._module = weakref.ref(module)  # which has this object
        self._store, self._keep_sums, self._options = store, keep_sums, options
        self._before = module.__dict__.get("forward")  # one that was set in place of the class's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        forward = self._before or type(module).forward.__get__(module)  # type: ignore[union-attr]
        return call(forward, args, kwargs, self._store, self._options, module, self._keep_sums)

    def restore(self, module: torch.nn.Module) -> None:
        """Makes the module's `forward` what it was."""
        if self._before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._before

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Checkpointed:
        made = _Checkpointed.__new__(_Checkpointed)
        memo[id(self)] = made
        module, before = copy.deepcopy((self._module(), self._before), memo)
        made.__setstate__({**self.__dict__, "_module": module, "_before": before})
        return made
