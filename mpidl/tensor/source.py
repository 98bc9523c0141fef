"""Reads the source of a module's class: which children a method calls, in which order, and with what.

    def forward(self, x):                         calls      gate, act, up, down
        y = self.act(self.gate(x)) * self.up(x)   feeds      gate: {x}, down: {x, gate(), ...}
        return self.down(y) + x                   uses of x  3

The automatic plan goes by it, as names and shapes do not tell what a module does with its input besides.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache

from torch import nn


@dataclass
class Method:
    """One method of a class.

    calls: functions in the order in which they are evaluated, as written, such as "self.act". feeds: by function, what
    may be in the first argument of a call of it: arguments of the method, and results as "self.act()". direct: by
    function, the arguments of the method that are given to it as they came, and "" for anything else. uses: how often
    each argument is read as it came. weights: modules whose weight the method itself computes with, by their last
    names, "self" for its own; "*" for one that a variable holds or a call returns. tree: the method's syntax.
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

    def between(self, first: str, last: str) -> list[str]:
        """Lists the functions that are called after `first` and before `last`, each by its last name."""
        start = self.calls.index(first)
        stop = len(self.calls) - 1 - self.calls[::-1].index(last)
        return [call.rpartition(".")[2] for call in self.calls[start + 1 : stop]]

    def repeats(self, functions: Collection[str]) -> bool:
        """Tells whether a loop calls one of the functions, maybe with what it has returned before."""
        assert self.tree is not None
        loops = (node for node in ast.walk(self.tree) if isinstance(node, ast.For | ast.While))
        calls = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call))
        return any(ast.unparse(call.func) in functions for call in calls)

    def leaks(self, module: nn.Module, sources: Collection[str], end: str) -> bool:
        """Tells whether what `sources` return goes anywhere but into calls of `end`, as into a loss of its own.

        module: of this class; branches that its settings rule out are not read.
        """
        assert self.tree is not None
        follower = _Follower(module, sources, end)
        follower.follow(self.tree.body)
        return follower.leaks


def methods_of(module: nn.Module) -> list[Method]:
    """Reads the methods of a module's class, without its constructor; none where there is no source."""
    return _methods(type(module))  # type: ignore[arg-type]


def method_with(module: nn.Module, *children: str) -> Method | None:
    """Returns the method that calls all of these children of a module; None if there is none."""
    wanted = [f"self.{child}" for child in children]
    return next((method for method in methods_of(module) if all(name in method.calls for name in wanted)), None)


@cache
def _methods(cls: type) -> list[Method]:
    found: dict[str, Method] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                found.setdefault(node.name, _read(node, base.__module__))
    return sorted(found.values(), key=lambda method: method.name != "forward")


def _read(node: ast.FunctionDef, written_in: str) -> Method:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    method = Method(node.name, ast.unparse(node), [name for name in names if name != "self"])
    method.tree, method.written_in = node, written_in
    _Reader(method).visit_body(node.body)
    return method


class _Reader(ast.NodeVisitor):
    """Follows a method's statements in their order, and notes which arguments may be in a variable."""

    def __init__(self, method: Method) -> None:
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
        """Reads both branches. A variable may then be what either has made of it; nothing as it came if one has not."""
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
        if node.attr not in _NUMBERS:
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
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Attribute) and node.attr in _NUMBERS):
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


class _Follower:
    """Follows what some functions return through a method's statements, up to the calls of one that ends it.

    leaks: whether the method returns it, keeps it in an attribute, or gives it to a call whose result it does not use.
    """

    def __init__(self, module: nn.Module, sources: Collection[str], end: str) -> None:
        self._module, self._sources, self._end = module, sources, end
        self._variables: set[str] = set()
        self.leaks = False

    def follow(self, body: Iterable[ast.AST]) -> None:
        """Reads statements in their order, a loop's body once."""
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                adds = isinstance(node, ast.AugAssign) and self._has(node.target)
                self._give(targets, adds or (node.value is not None and self._has(node.value)))
            elif isinstance(node, ast.Return | ast.Expr):
                self.leaks |= node.value is not None and self._has(node.value) and not self._keeps(node.value)
            elif isinstance(node, ast.If) and (taken := self._setting(node.test)) is not None:
                self.follow(node.body if taken else node.orelse)
            elif isinstance(node, ast.If | ast.For | ast.While):
                if isinstance(node, ast.For):
                    self._give([node.target], self._has(node.iter))
                else:
                    self.leaks |= self._has(node.test)  # ranks would go other ways
                before = self._variables
                self.follow(node.body)
                after, self._variables = self._variables, before
                self.follow(node.orelse)
                self._variables = self._variables | after
            else:
                self.follow(ast.iter_child_nodes(node))

    def _give(self, targets: Iterable[ast.expr], has: bool) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                self._give(target.elts, has)
            elif isinstance(target, ast.Name):
                self._variables = self._variables | {target.id} if has else self._variables - {target.id}
            else:
                self.leaks |= has

    def _keeps(self, call: ast.expr) -> bool:
        """Tells whether a call changes a variable in place, as `h.relu_()`, or only checks it."""
        name = call.func if isinstance(call, ast.Call) else None
        in_place = isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.attr.endswith("_")
        return in_place or (name is not None and ast.unparse(name) in ("torch._assert", "torch._check"))

    def _setting(self, test: ast.expr) -> bool | None:
        """Returns the value of a condition on attributes of the module alone; None for any other one."""
        names = {leaf.id for leaf in ast.walk(test) if isinstance(leaf, ast.Name)}
        mode = any(isinstance(leaf, ast.Attribute) and leaf.attr == "training" for leaf in ast.walk(test))
        if names != {"self"} or mode or any(isinstance(leaf, ast.Call) for leaf in ast.walk(test)):
            return None
        try:
            return bool(eval(ast.unparse(test), {"__builtins__": {}}, {"self": self._module}))
        except Exception:  # what it reads may not be there yet
            return None

    def _has(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (self._end, *self._sources):
            return ast.unparse(node.func) != self._end
        if isinstance(node, ast.Name):
            return node.id in self._variables
        if isinstance(node, ast.Attribute) and node.attr in _NUMBERS:
            return False
        return any(self._has(child) for child in ast.iter_child_nodes(node))


_NUMBERS = ("shape", "size", "dim", "ndim", "dtype", "device", "requires_grad", "is_cuda", "numel", "get_device")
