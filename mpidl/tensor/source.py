"""Reads the source of a module's class: which children a method calls, in which order, and with what.

    def forward(self, x):                         calls      gate, act, up, down
        y = self.act(self.gate(x)) * self.up(x)   feeds      gate: {x}, down: {x, gate(), ...}
        return self.down(y) + x                   uses of x  3

The automatic plan goes by it, as names and shapes do not tell what a module does with its input besides.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import FunctionType

from torch import nn

# Attributes of a tensor that are no values of it.
NUMBERS = ("shape", "size", "dim", "ndim", "dtype", "device", "requires_grad", "is_cuda", "numel", "get_device")


@dataclass
class SourceMethod:
    """One method of a class.

    calls: functions in the order in which they are evaluated, as written, such as "self.act".
    feeds: by function, what may be in the first argument of a call of it: arguments of the method, and results as
        "self.act()".
    direct: by function, the arguments of the method that are given to it as they came, and "" for anything else.
    uses: how often each argument is read as it came.
    weights: modules whose weight the method itself computes with, by their last names, "self" for its own; "*" for one
        that a variable holds or a call returns.
    tree: the method's syntax.
    written_in: the module of the class that has it.
    """

    name: str
    text: str
    arguments: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    feeds: dict[str, set[str]] = field(default_factory=dict)
    direct: dict[str, set[str]] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    tree: ast.FunctionDef | None = None
    written_in: str = ""

    def repeats(self, functions: Collection[str]) -> bool:
        """Tells whether a loop calls one of the functions, maybe with what it has returned before."""
        assert self.tree is not None
        loops = (node for node in ast.walk(self.tree) if isinstance(node, ast.For | ast.While))
        calls = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call))
        return any(ast.unparse(call.func) in functions for call in calls)


def methods_of(module: nn.Module) -> list[SourceMethod]:
    """Reads the methods of a module's class, without its constructor; none where there is no source."""
    return _methods(type(module))  # type: ignore[arg-type]


def method_with(module: nn.Module, *children: str) -> SourceMethod | None:
    """Returns the method that calls all of these children of a module; None if there is none."""
    wanted = [f"self.{child}" for child in children]
    return next((method for method in methods_of(module) if all(name in method.calls for name in wanted)), None)


def run_by(module: nn.Module, start: str = "forward") -> list[SourceMethod]:
    """Lists the methods of a module that one of them runs, with that one."""
    methods = methods_of(module)
    running: set[str] = set()
    calls = [f"self.{start}"]
    while not running.issuperset(calls):
        running.update(calls)
        calls = [call for method in methods if f"self.{method.name}" in running for call in method.calls]
    return [method for method in methods if f"self.{method.name}" in running]


@cache
def read_function(function: FunctionType) -> SourceMethod | str:
    """Reads a function; "" where there is no source."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    return _read(node, function.__module__) if isinstance(node, ast.FunctionDef) else ""


@cache
def _methods(cls: type) -> list[SourceMethod]:
    found: dict[str, SourceMethod] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for method in _written_in(base):
            found.setdefault(method.name, method)
    return sorted(found.values(), key=lambda method: method.name != "forward")


@cache
def _written_in(cls: type) -> list[SourceMethod]:
    node = _definition(cls)
    methods = (each for each in (node.body if node else ()) if isinstance(each, ast.FunctionDef))
    return [_read(method, cls.__module__) for method in methods if method.name != "__init__"]


def _definition(cls: type) -> ast.ClassDef | None:
    """Returns the syntax of a class; None where there is no source."""
    try:
        lines, _ = inspect.findsource(sys.modules[cls.__module__])
        found = _classes("".join(lines)).get(cls.__qualname__, [])
    except (KeyError, OSError, TypeError, SyntaxError):
        return None
    line = vars(cls).get("__firstlineno__")  # since Python 3.13: of several with one name, the one that was executed
    return next((node for node in found if line in _first_lines(node)), found[0] if found else None)


def _first_lines(node: ast.ClassDef) -> set[int]:
    return {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}


@lru_cache(maxsize=2)  # the classes of a model are read one after the other, and most are of one module
def _classes(source: str) -> dict[str, list[ast.ClassDef]]:
    """Returns the classes of a module by their qualified names."""
    found: dict[str, list[ast.ClassDef]] = {}

    def look(outer: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(outer):
            if isinstance(node, ast.ClassDef):
                found.setdefault(prefix + node.name, []).append(node)
                look(node, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                look(node, f"{prefix}{node.name}.<locals>.")
            elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                look(node, prefix)

    look(ast.parse(source), "")
    return found


def _read(node: ast.FunctionDef, written_in: str) -> SourceMethod:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    method = SourceMethod(node.name, ast.unparse(node), [name for name in names if name != "self"])
    method.tree, method.written_in = node, written_in
    _MethodReader(method).visit_body(node.body)
    return method


class _MethodReader(ast.NodeVisitor):
    """Follows a method's statements in their order, and notes which arguments may be in a variable."""

    def __init__(self, method: SourceMethod) -> None:
        self._method = method
        self._holds: dict[str, set[str]] = {name: {name} for name in method.arguments}
        self._is: dict[str, set[str]] = {name: {name} for name in method.arguments}  # arguments as they came

    def visit_body(self, body: list[ast.stmt]) -> None:
        """Reads the statements."""
        for statement in body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Notes what the variables hold; one that an argument is given to is that argument from then on."""
        itself = self._itself(node.value)
        if not itself:
            self.visit(node.value)
        held = self._held(node.value)
        for target in node.targets:
            for leaf in ast.walk(target):
                if isinstance(leaf, ast.Name):
                    self._holds[leaf.id] = self._holds.get(leaf.id, set()) | held
                    self._is[leaf.id] = itself if isinstance(target, ast.Name) else set()

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Counts the use of a variable, which is no argument as it came from then on."""
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.visit(ast.Name(node.target.id, ast.Load()))
            self._is[node.target.id] = set()
        else:
            self.visit(node.target)

    def visit_If(self, node: ast.If) -> None:
        """Reads both branches. A variable may then be what either made of it; unknown if one made something else."""
        self.visit(node.test)
        before = dict(self._is)
        self.visit_body(node.body)
        taken, self._is = self._is, before
        self.visit_body(node.orelse)
        for name in {*taken, *self._is}:
            # One that a branch alone knows is of that branch wherever it is used.
            sides = taken.get(name, self._is.get(name)), self._is.get(name, taken.get(name))
            self._is[name] = sides[0] | sides[1] if sides[0] and sides[1] else set()

    def visit_Call(self, node: ast.Call) -> None:
        """Notes a call after those in it."""
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func)
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        for value in values:
            self.visit(value)
        name = ast.unparse(node.func)
        self._method.calls.append(name)
        if values:
            self._method.feeds.setdefault(name, set()).update(self._held(values[0]))
            self._method.direct.setdefault(name, set()).update(self._itself(values[0]) or {""})

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Leaves out what no gradient comes from; notes a module whose weight is read."""
        if node.attr not in NUMBERS:
            if node.attr == "weight":
                self._method.weights.add(_last_name(node.value))
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Notes its calls alone, as no gradient comes from it."""
        self._method.calls += [ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]

    def visit_Name(self, node: ast.Name) -> None:
        """Counts the use of an argument."""
        for name in self._is.get(node.id, ()) if isinstance(node.ctx, ast.Load) else ():
            self._method.uses[name] = self._method.uses.get(name, 0) + 1

    def _itself(self, node: ast.AST) -> set[str]:
        """Returns the arguments of which an expression is one, as it came."""
        if isinstance(node, ast.IfExp):
            sides = self._itself(node.body), self._itself(node.orelse)
            return sides[0] | sides[1] if all(sides) else set()
        return self._is.get(node.id, set()) if isinstance(node, ast.Name) else set()

    def _held(self, node: ast.AST) -> set[str]:
        """Returns the arguments that may be in an expression."""
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Attribute) and node.attr in NUMBERS):
            return set()
        if isinstance(node, ast.Name):
            return self._holds.get(node.id, set())
        children = [node.body, node.orelse] if isinstance(node, ast.IfExp) else ast.iter_child_nodes(node)
        called = {f"{ast.unparse(node.func)}()"} if isinstance(node, ast.Call) else set()
        return called.union(*(self._held(child) for child in children))


def _last_name(node: ast.expr) -> str:
    """Returns the last name of an attribute, a key, or "self"; "*" where none is written out."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    if isinstance(node, ast.Name) and node.id == "self":
        return "self"
    return node.attr if isinstance(node, ast.Attribute) else "*"
