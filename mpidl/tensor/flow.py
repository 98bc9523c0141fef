"""Follows values through a method's source: what is done to them, where they go, and which numbers are sizes.

    def forward(self, x):             sources  self.up       what holds what it returns: h, and h.relu()
        h = self.up(x)                end      self.down     what comes back is of the whole again
        y = self.down(h.relu())
        self.kept = h                 leaks    kept in an attribute, returned, or a condition
        return y

What is done to them is judged by the caller, which knows what acts on single features or heads: what it does not list
is not known.

The source is read, as it shows both branches of an `if` and calls that no input takes; `torch.fx` and `torch.export`
follow one path, and stop where it depends on values.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from .forward_wrapper import has_own_forward
from .source import NUMBERS, SourceMethod, methods_of, read_function

Judge = Callable[[nn.Module, ast.expr], bool]  # of an expression in a module's source

_SIZES = ("shape", "size", "numel")
_KNOWN_BY_NAME = ("torch", "transformers", "einops")  # whose functions do what their names say; others are read
_TAKES_SIZES = re.compile(
    r"view|reshape|unflatten|expand|repeat\w*|rearrange|(?:tensor_)?split|chunk|(?:new_)?(?:zeros|ones|empty|full)|narrow|"
    r"_?shape|\w*heads\w*"
)


@dataclass
class Flow:
    """Result of `follow`: where values went.

    leaks: elsewhere than to `end`.
    unknown: the first thing done to them that is not known.
    """

    leaks: bool = False
    unknown: str = ""


def follow(
    method: SourceMethod,
    module: nn.Module,
    sources: Collection[str],
    end: str,
    knows: Callable[[ast.expr], bool],
    *,
    held: Collection[str] = (),
    returns: bool = False,
) -> Flow:
    """Follows what `sources` return, up to the calls of `end`, which gives something else.

    module: of the method's class; branches that its settings rule out are not read.
    sources, end: functions as written, such as "self.up".
    knows: tells whether an expression (call, subscript, attribute, matrix product) may be applied to these values.
    held: the method's arguments that hold such values at its start.
    returns: the method may return them to its caller.
    """
    assert method.tree is not None
    follower = _Follower(module, sources, end, knows, held, returns)
    follower.follow(method.tree.body)
    return follower.flow


class _Follower:
    """Follows values through a method's statements."""

    def __init__(
        self,
        module: nn.Module,
        sources: Collection[str],
        end: str,
        knows: Callable[[ast.expr], bool],
        held: Collection[str],
        returns: bool,
    ) -> None:
        self._module, self._sources, self._end, self._knows, self._returns = module, sources, end, knows, returns
        self._variables = set(held)
        self.flow = Flow()

    def follow(self, body: Iterable[ast.AST]) -> None:
        """Reads statements in order; a loop's body twice, as its second round may use results of the first."""
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                has = node.value is not None and self._has(node.value)
                if isinstance(node, ast.AugAssign):
                    has |= self._has(node.target)
                    if has and isinstance(node.op, ast.MatMult):
                        self._ask(ast.BinOp(node.target, node.op, node.value))
                self._give(targets, has)
            elif isinstance(node, ast.Return):
                has = node.value is not None and self._has(node.value)
                self.flow.leaks |= has and not self._returns
            elif isinstance(node, ast.Expr):
                self.flow.leaks |= self._has(node.value) and not self._keeps(node.value)
            elif isinstance(node, ast.If) and (taken := self._setting(node.test)) is not None:
                self.follow(node.body if taken else node.orelse)
            elif isinstance(node, ast.If | ast.For | ast.While):
                if isinstance(node, ast.For):
                    self._give([node.target], self._has(node.iter))
                else:
                    self.flow.leaks |= self._has(node.test)  # ranks would go other ways
                before = self._variables
                self.follow(node.body)
                if not isinstance(node, ast.If):
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
            elif isinstance(target, ast.Starred):
                self._give([target.value], has)
            elif isinstance(target, ast.Name):
                self._variables = self._variables | {target.id} if has else self._variables - {target.id}
            else:
                self.flow.leaks |= has

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
        """Tells whether an expression may hold the values, and notes what it does to them that is not known."""
        if isinstance(node, ast.Name):
            return node.id in self._variables
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.NamedExpr):
            has = self._has(node.value)
            self._give([node.target], has)
            return has
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            if self._has(node.value.value):
                self._ask(node)
            return False
        if isinstance(node, ast.IfExp):
            if self._has(node.test):
                self._ask(node)
            return self._have([node.body, node.orelse])
        has = self._have(ast.iter_child_nodes(node))
        is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        if has and isinstance(node, ast.expr) and (is_product or isinstance(node, ast.Subscript | ast.Lambda)):
            self._ask(node)
        return has

    def _have(self, nodes: Iterable[ast.AST]) -> bool:
        found = [self._has(node) for node in nodes]  # each is read
        return any(found)

    def _call(self, node: ast.Call) -> bool:
        name = ast.unparse(node.func)
        if name in ("isinstance", "hasattr"):
            return False
        given = self._have([*node.args, *(keyword.value for keyword in node.keywords)])
        if name == self._end or name in self._sources:
            return name != self._end
        if name == "len":
            return False
        if isinstance(node.func, ast.Attribute):
            of_them = node.func.attr not in NUMBERS or node.func.attr in _SIZES
            given |= of_them and self._has(node.func.value)
        else:
            given |= self._has(node.func)
        of_self = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self"
        absent = of_self and not hasattr(self._module, node.func.attr)  # type: ignore[attr-defined]
        if given and not absent:  # one that is not there does not run
            self._ask(node)
        return given and not (isinstance(node.func, ast.Attribute) and node.func.attr in NUMBERS)

    def _attribute(self, node: ast.Attribute) -> bool:
        if node.attr in NUMBERS:
            if node.attr in _SIZES and self._has(node.value):
                self._ask(node)
            return False
        if any(ast.unparse(part) in (self._end, *self._sources) for part in (node, node.value)):
            self.flow.unknown = self.flow.unknown or ast.unparse(node)  # as the layer's weight, or the layer itself
        has = self._has(node.value)
        if has:
            self._ask(node)
        return has

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> bool:
        before = self._variables
        for generator in node.generators:
            self._give([generator.target], self._has(generator.iter))
            for condition in generator.ifs:
                self.flow.leaks |= self._has(condition)
        made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        has = self._have(made)
        self._variables = before
        return has

    def _ask(self, node: ast.expr) -> None:
        if not self.flow.unknown and not self._knows(node):
            name = node.func if isinstance(node, ast.Call) else node
            is_method = name is not node and isinstance(name, ast.Attribute)
            self.flow.unknown = name.attr if is_method else ast.unparse(name)  # type: ignore[attr-defined]


# ---- what a source calls -------------------------------------------------------------------------------------------


def called_by(module: nn.Module, call: ast.Call) -> nn.Module | SourceMethod | str:
    """Returns what a call in a module's source calls: a module, a method of its own, or a function, by its name."""
    of_self = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"
    found = _reached(module, call.func)
    if found is not None:
        while isinstance(found, partial):
            found = found.func
        if isinstance(found, nn.Module):
            return found
        name = getattr(found, "__name__", "")
        own = of_self and getattr(found, "__self__", module) is module
        return next((method for method in methods_of(module) if own and method.name == name), name)
    function = None if of_self else _function(module, call.func)
    if function is not None and function.__module__.partition(".")[0] not in _KNOWN_BY_NAME:
        return read_function(function)
    if isinstance(call.func, ast.Attribute) and not of_self:
        of = ast.unparse(call.func.value).rpartition(".")[2]
        is_function = call.func.attr == "apply"  # of a torch.autograd.Function
        return of.lower().removesuffix("function") if is_function else call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _function(module: nn.Module, node: ast.expr) -> FunctionType | None:
    """Returns the function that a name stands for in the source of a module's class; None for others."""
    if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name | ast.Attribute):
        return None
    for cls in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        found: Any = vars(sys.modules.get(cls.__module__, sys))
        for number, part in enumerate(ast.unparse(node).split(".")):
            is_namespace = isinstance(found, dict | ModuleType | type)
            found = (found.get(part) if number == 0 else getattr(found, part, None)) if is_namespace else None
        if isinstance(found, FunctionType):
            return found
    return None


def _reached(module: nn.Module, node: ast.expr) -> Any:
    """Returns what a path of attributes and keys of self leads to; None if it is no such path, or leads nowhere."""
    if isinstance(node, ast.Attribute):
        return getattr(_reached(module, node.value), node.attr, None)
    if isinstance(node, ast.Subscript):
        try:
            return _reached(module, node.value)[ast.literal_eval(node.slice)]
        except (ValueError, TypeError, LookupError):
            return None
    return module if isinstance(node, ast.Name) and node.id == "self" else None


def dim_of(call: ast.Call) -> Any:
    """Returns the dimension that a call names, by keyword or last; None if it is not written out."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "dim"] or call.args[-1:]
    try:
        return ast.literal_eval(given[0])
    except (ValueError, IndexError):
        return None


def flow_in(
    called: nn.Module | SourceMethod, module: nn.Module, judge: Judge, *, sources: Collection[str] = (), end: str = ""
) -> Flow:
    """Follows values through a module's forward pass, or through a method of `module`, from its arguments.

    sources: functions inside that return them, in place of the arguments.
    end: the one that takes them, from the first argument on.
    """
    method: SourceMethod | None
    if isinstance(called, nn.Module):
        module, method = called, next((method for method in methods_of(called) if method.name == "forward"), None)
        if method is None or has_own_forward(called):
            return Flow(unknown=type(called).__name__)
    else:
        method = called
    held = method.arguments[: 1 if end else None]
    return follow(method, module, sources, end, partial(judge, module), held=() if sources else held, returns=True)


# ---- numbers -------------------------------------------------------------------------------------------------------


def is_size_alone(method: SourceMethod, attribute: str) -> bool:
    """Tells whether a method takes an attribute for a size alone: in shapes, and where elements are cut off.

    attribute: of self, such as "num_heads" or "config.hidden_size". What computes with it as a number, or gives it to
    functions that are not known to take sizes, needs the whole one.
    """
    return _are_sizes(method, lambda node: isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{attribute}")


def are_heads_sizes(method: SourceMethod, whole: Collection[str] = (), end: str = "") -> bool:
    """Tells whether a method takes the heads in a tensor's shape for a size alone.

    They stand in dimension 1 of four, where `q.shape[1]` or `b, h, t, d = q.shape` reads them, and before a transpose
    in dimension 2.

    whole: variables without heads, of which dimension 1 is the time.
    end: a function that returns such.
    """
    assert method.tree is not None
    unpacked: set[str] = set()
    others = set(whole)
    for node in ast.walk(method.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == end:
            others |= {ast.unparse(target) for target in node.targets}
        if isinstance(node, ast.Assign) and re.search(r"\.(?:shape|size\(\))$", ast.unparse(node.value)):
            names = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else []
            unpacked |= {name.id for name in names[1:3] if len(names) == 4 and isinstance(name, ast.Name)}

    def begins(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return isinstance(node.ctx, ast.Load) and node.id in unpacked
        found = re.fullmatch(r"(.+)\.(?:shape\[(?:1|-3)\]|size\((?:1|-3)\))", ast.unparse(node), re.DOTALL)
        is_one = isinstance(node, ast.Subscript | ast.Call) and found is not None
        return is_one and found is not None and found[1] not in others

    return _are_sizes(method, begins)


def _are_sizes(method: SourceMethod, begins: Callable[[ast.AST], bool]) -> bool:
    """Tells whether the expressions that `begins` chooses, and the variables that hold them, are sizes alone."""
    assert method.tree is not None
    parents = {child: node for node in ast.walk(method.tree) for child in ast.iter_child_nodes(node)}
    left: list[ast.AST] = [node for node in parents if begins(node)]
    followed: set[str] = set()
    while left:
        node: ast.AST = left.pop()
        path = [node]
        while _is_arithmetic(parents[node]):
            node = parents[node]
            path.append(node)
        parent = parents[node]
        if isinstance(parent, ast.Assign):
            names = {leaf.id for leaf in _targets(parent, path) if isinstance(leaf, ast.Name)}
            if not names:
                return False
            new = names - followed
            followed |= new
            left += [n for n in parents if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in new]
        elif isinstance(parent, ast.Call):
            name = ast.unparse(parent.func).rpartition(".")[2]
            if node is parent.func or _TAKES_SIZES.fullmatch(name) is None:
                return False
        elif isinstance(parent, ast.Compare):
            sides = (parent.left, *parent.comparators)
            if not all(re.fullmatch(r"self(?:\.\w+)+", ast.unparse(side)) for side in sides):
                return False
        elif not isinstance(parent, ast.Slice | ast.FormattedValue):
            return False
    return True


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.FloorDiv | ast.Mult | ast.Mod | ast.Add | ast.Sub)
    return isinstance(node, ast.Tuple | ast.List | ast.Starred | ast.keyword | ast.UnaryOp | ast.BoolOp | ast.IfExp)


def _targets(node: ast.Assign, path: list[ast.AST]) -> Iterable[ast.AST]:
    """Returns what an assignment makes of a part of its value; path: from it to the value."""
    targets = list(node.targets)
    if len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple) and len(path) > 1:
        pairs = zip(node.value.elts, targets[0].elts, strict=False)
        return [target for value, target in pairs if value is path[-2]]
    return chain.from_iterable(map(ast.walk, targets))
