"""Methods of a module's class are read from its source, wherever the class is defined."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from mpidl.tensor.source import methods_of

SEVERAL = """
from torch import nn

class Base(nn.Module):
    def forward(self, x):
        return self.norm(self.inner(x))
    def inner(self, x):
        return self.first(x)

class Changed(Base):
    def inner(self, x):
        return self.second(self.first(x))

class Outer:
    class Base(nn.Module):
        def forward(self, x):
            return self.nested(x)

if True:
    class Conditional(nn.Module):
        def forward(self, x):
            return self.taken(x)

for number in range(2):
    try:
        class Repeated(nn.Module):
            def forward(self, x):
                return self.repeated(x)
    finally:
        pass
"""


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "several_classes.py"
    path.write_text(f"# {tmp_path}{SEVERAL}")  # no text that is known
    spec = importlib.util.spec_from_file_location("several_classes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "several_classes", module)
    spec.loader.exec_module(module)
    return module


def calls(cls: type[nn.Module]) -> dict[str, list[str]]:
    return {method.name: method.calls for method in methods_of(cls())}


def test_a_class_has_its_own_methods_and_those_of_its_bases(several: ModuleType) -> None:
    assert calls(several.Base) == {"forward": ["self.inner", "self.norm"], "inner": ["self.first"]}
    assert calls(several.Changed) == {"forward": ["self.inner", "self.norm"], "inner": ["self.first", "self.second"]}
    assert methods_of(several.Changed())[0].name == "forward"


def test_classes_in_others_and_in_statements_and_functions_are_found(several: ModuleType) -> None:
    class Local(nn.Module):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.here(x)

    assert calls(several.Outer.Base) == {"forward": ["self.nested"]}
    assert calls(several.Conditional) == {"forward": ["self.taken"]}
    assert calls(several.Repeated) == {"forward": ["self.repeated"]}
    assert calls(Local) == {"forward": ["self.here"]}


def test_a_class_without_source_has_no_methods() -> None:
    made = type("Made", (nn.Module,), {"forward": lambda self, x: x})
    assert calls(made) == {}
    made.__module__ = "nowhere"
    assert calls(type("Made", (nn.Module,), {"__module__": "nowhere"})) == {}


def test_a_file_is_read_once_for_all_its_classes(several: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """To parse a file of transformers takes a tenth of a second, and a model has ten classes of it."""
    parsed: list[str] = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda source, *given: parsed.append(source) or parse(source, *given))
    for cls in (several.Base, several.Changed, several.Outer.Base, several.Conditional):
        methods_of(cls())
    assert parsed == [Path(several.__file__ or "").read_text()]
