"""Initial values by the modules themselves: `reset_parameters()`, or a function that is given each module.

Modules are called as `torch.nn.Module.apply` goes, those inside a module before it, as an ordinary construction does.
A parameter is whole from the first call that concerns it to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from ...errors import ConfigurationError
from .value_targets import Deliver

InitFn = Callable[[torch.nn.Module], object]
Named = tuple[str, torch.nn.Module]


class ModuleCalls:
    """The modules that are called, and the tensors that each of them sets. Changes nothing.

    wanted: parameters and buffers without values.
    init_fn: called with each module that has some of its own; None: the `reset_parameters` (or `_reset_parameters`) of
        every module that has such a method, for all that is in the module.
    filled_later: parameters that get their values after the calls, which may set them.
    loadable: what `file_values` could give, for the message.

    Raises ConfigurationError for a module with parameters or buffers that no call sets.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        wanted: set[torch.Tensor],
        init_fn: InitFn | None,
        filled_later: Collection[torch.Tensor] = (),
        loadable: Collection[torch.Tensor] = (),
    ) -> None:
        self._init_fn, self._wanted = init_fn, wanted
        self._calls: list[tuple[str, torch.nn.Module, list[torch.Tensor]]] = []
        for name, module in _inside_first(model):
            if init_fn is None and _reset_of(module) is None:
                continue
            of = dict.fromkeys(_tensors(module, recurse=init_fn is None))
            if any(t in wanted for t in of):
                self._calls.append((name, module, [t for t in of if t in wanted or t in filled_later]))
        self._last = {t: number for number, (_, _, tensors) in enumerate(self._calls) for t in tensors}
        for name, module in model.named_modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor in wanted and tensor not in self._last:
                    raise ConfigurationError(
                        f"model: {f'{name}.{key}'.lstrip('.')} is on the meta device, and its {type(module).__name__} "
                        "has no reset_parameters(): construct the model by mpidl.deferred_init, or give init_fn="
                        + (" or weights=" if tensor in loadable else "")
                    )

    @torch.no_grad()
    def run(self, dtypes: dict[torch.Tensor, torch.dtype], deliver: Deliver) -> None:
        """Calls the modules, and hands over each parameter when it is finished.

        dtypes: of parameters on the meta device, before any conversion. A buffer must have storage and is set in place.
        """
        whole: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        for number, (name, module, tensors) in enumerate(self._calls):
            for tensor in tensors:
                if tensor not in whole:
                    old = tensor.data
                    if isinstance(tensor, torch.nn.Parameter):
                        tensor.data = _unset(tensor.shape, dtypes.get(tensor, tensor.dtype))
                    whole[tensor] = (old, tensor._version)
            reset = _reset_of(module) if self._init_fn is None else None
            if reset is not None:
                reset()
            else:
                assert self._init_fn is not None
                self._init_fn(module)
            for tensor in tensors:
                if self._last[tensor] == number:
                    old, version = whole.pop(tensor)
                    if tensor in self._wanted:
                        _check(name, module, tensor, version)
                    if isinstance(tensor, torch.nn.Parameter):
                        value, tensor.data = tensor.data, old
                        if tensor in self._wanted:
                            deliver(tensor, value)


def _inside_first(model: torch.nn.Module) -> Iterator[Named]:
    """The modules in the order of `torch.nn.Module.apply`, each once."""
    seen: set[int] = set()

    def visit(name: str, module: torch.nn.Module) -> Iterator[Named]:
        seen.add(id(module))
        for key, child in module.named_children():
            if id(child) not in seen:
                yield from visit(f"{name}.{key}".lstrip("."), child)
        yield name, module

    return visit("", model)


def _reset_of(module: torch.nn.Module) -> Callable[[], object] | None:
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _tensors(module: torch.nn.Module, recurse: bool) -> Iterable[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _unset(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Fills a tensor with NaN, so that a value that no module sets is found."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)


def _check(name: str, module: torch.nn.Module, tensor: torch.Tensor, version: int) -> None:
    named = [*module.named_parameters(), *module.named_buffers()]
    keys = [key for key, candidate in named if candidate is tensor]
    if not keys:
        return  # replaced by another one
    if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
        missed = bool(tensor.isnan().any())
    else:
        missed = tensor._version == version and tensor.numel() > 0
    if missed:
        raise ConfigurationError(
            f"model: {f'{name}.{keys[0]}'.lstrip('.')} was on the meta device, and the call for its "
            f"{type(module).__name__} has not set all of it"
        )
