"""Detects parameters that came into a module after it was wrapped, or have another shape since.

    model.resize_token_embeddings(60)         a new parameter, or other memory in the old one
    model.load_state_dict(..., assign=True)   new parameters replace the old ones
    layer.weight = nn.Parameter(...)          a new one replaces the old one
    model.adapter = nn.Linear(4, 4)           new parameters join the others

No bucket has a slot for these: each rank would train its own. Every pass compares the entries of all modules by
identity, in loops of C, and the shapes; only where one differs is the module searched.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from operator import is_
from typing import Any

import torch

from ..errors import listed


class ModuleChanges:
    """The parameters of a module as they were when it was wrapped.

    names: of those that are reduced if they train.
    ignored: names of others that may be there.
    """

    def __init__(
        self, module: torch.nn.Module, names: Mapping[torch.nn.Parameter, str], ignored: Container[str]
    ) -> None:
        self._module, self._names, self._ignored = module, names, ignored
        self._shapes = [p.shape for p in names]
        self._note()

    def _note(self) -> None:
        """Records the entries of all modules."""
        modules = list(self._module.modules())
        tables = [table for m in modules for table in (m._parameters, m._modules)]
        self._tables: list[dict[str, Any]] = [t for t in tables if isinstance(t, dict)]  # scripted ones cannot change
        self._size = sum(map(len, self._tables))
        self._table_of = [table for table in self._tables for _ in table]
        self._keys = [key for table in self._tables for key in table]
        self._values = [value for table in self._tables for value in table.values()]
        self._others = {
            p: name for name, p in self._module.named_parameters() if p not in self._names and name not in self._ignored
        }

    def problem(self) -> str | None:
        """The reason why the module cannot be trained as it is now."""
        same = sum(map(len, self._tables)) == self._size
        if not (same and all(map(is_, map(dict.get, self._table_of, self._keys), self._values))):
            self._note()
        found = [self._described(p, name) for p, name in self._others.items() if p.requires_grad]
        if [p.shape for p in self._names] != self._shapes:
            pairs = zip(self._names.items(), self._shapes, strict=True)
            found += [self._described(p, name) for (p, name), was in pairs if p.requires_grad and p.shape != was]
        if not found:
            return None
        return (
            f"{listed(found)}: replaced, resized or added after the module was wrapped, as by resize_token_embeddings, "
            "load_state_dict(assign=True) or an adapter, so that no bucket has a place for its gradient; change the "
            "module first and wrap it then, or wrap the model anew (`wrapped.module`) and make the optimizer anew"
        )

    def _described(self, parameter: torch.nn.Parameter, name: str) -> str:
        shapes = dict(zip(self._names.values(), self._shapes, strict=True))
        if name not in shapes:
            return f"{name} (new, {tuple(parameter.shape)})"
        was, now = tuple(shapes[name]), tuple(parameter.shape)
        return name if was == now else f"{name} (now {now}, before {was})"
