"""Refuses to write a rank's parts of a model as if they were the model.

    model.state_dict()                              this rank's parts: to load again in this process, or to copy
    torch.save(model.state_dict(), path)            refused, as all that pickles it
    model.save_pretrained(path)                     refused, on a model of transformers or peft
    model.save_pretrained(path, state_dict=whole)   right, on any rank alone, with whole=model_state_dict(model)

Nothing here communicates: a rank that saves alone gets its error alone, and waits for no other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import UsageError
from ..mesh import placement
from .tensor_parallel import TensorParallel

_MARK = "mpidl_parts"  # in the metadata that torch keeps of each module in a state_dict


class _PartsMark:
    """A mark in the metadata of a state_dict that has this rank's parts; it goes with copies, and is not pickled."""

    def __init__(self, tp: TensorParallel) -> None:
        self._rank, self._ranks = tp.rank, tp.ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> _PartsMark:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"model.state_dict(): was pickled, as by torch.save, on rank {self._rank} of {self._ranks} of tp, "
            "with this rank's parts of a cut model; save mpidl.tensor.model_state_dict(model), to be called on every "
            "rank of tp, or use mpidl.checkpoint.save (dict(model.state_dict()) saves the parts)"
        )


def refuse_to_save_parts(model: nn.Module, tp: TensorParallel) -> None:
    """Lets torch.save of the model's state_dict, and its save_pretrained, raise UsageError until it is whole again."""
    for module in model.modules():
        if any(p is not None and placement(p).cut is not None for p in module._parameters.values()):
            tp.keep(module.register_state_dict_post_hook(_mark_hook(_PartsMark(tp))))
        if callable(getattr(module, "save_pretrained", None)):
            tp.set(module, "save_pretrained", _SavePretrained(module, tp))


def without_marks(states: dict[str, Any]) -> dict[str, Any]:
    """Returns a state_dict whose tensors have become whole, without the marks of parts, to be saved in any way."""
    for metadata in getattr(states, "_metadata", {}).values():
        metadata.pop(_MARK, None)
    return states


def _mark_hook(parts: _PartsMark) -> Any:
    def mark(module: nn.Module, states: Any, prefix: str, metadata: dict[str, Any]) -> None:
        metadata[_MARK] = parts

    return mark


class _SavePretrained:
    """The `save_pretrained` of a cut model: its own one, with whole tensors that it is given."""

    def __init__(self, module: nn.Module, tp: TensorParallel) -> None:
        self._module, self._rank, self._ranks = module, tp.rank, tp.ranks
        self._before = vars(module).get("save_pretrained")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(self._module)
        save = self._before or kind.save_pretrained.__get__(self._module)
        given = inspect.signature(save).bind_partial(*args, **kwargs).arguments.get("state_dict")
        states = kwargs.get("state_dict") if given is None else given
        if states is None or self._has_parts(states):
            raise UsageError(
                f"{kind.__name__}.save_pretrained on rank {self._rank} of {self._ranks} of tp: the model is cut, and "
                "this rank's parts would be written as the whole; call whole = mpidl.tensor.model_state_dict(model) "
                "on every rank of tp, then save_pretrained(path, state_dict=whole) on one of them"
            )
        return save(*args, **kwargs)

    def _has_parts(self, states: Mapping[str, Any]) -> bool:
        cuts = {name: placement(p).cut for name, p in self._module.named_parameters(remove_duplicate=False)}
        return any(
            cut is not None and name in states and tuple(states[name].shape) != cut.shape for name, cut in cuts.items()
        )
