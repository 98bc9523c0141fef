"""Tells what blocks do with their tokens, of which each rank has a piece of every sequence under sequence parallelism.

    y = x + self.mlp(self.norm(x))                     each token by itself
    y = torch.cat([x[:, :1], x[:, :-1]], 1)            another rank may have the neighbour: not known

Attentions get whole sequences: what they do with them is not looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from functools import partial

from torch import nn

from .elementwise import MODULES_ON_ELEMENTS, ON_ELEMENTS
from .flow import called_by, dim_of, follow
from .forward_wrapper import has_own_forward
from .linear import kind_of
from .source import SourceMethod, method_with, methods_of

_ON_TOKENS = re.compile(r"view(?:_as)?|reshape|linear|layer_norm|rms_norm|apply_chunking_to_forward")
_ON_FEATURES = re.compile(  # with the last dimension
    r"mean|sum|var|std|norm|normalize|(?:log_)?softmax|logsumexp|amax|amin|chunk|split|cat|concat|unbind"
)


class Tokens:
    """Judges what blocks do with pieces of sequences. whole: ids of modules that get whole ones, as attentions."""

    def __init__(self, whole: Collection[int]) -> None:
        self._whole = whole

    def mixed_in(self, block: nn.Module, input: str) -> str:
        """Returns the first thing in a block's source that may look at other tokens; "" if there is none.

        input: the argument that has the pieces.
        """
        return self._in_forward(block, [input])

    def mixed_behind(self, module: nn.Module, layer: str) -> str:
        """Returns the same of what comes behind a layer in an attention: its last one, which gives pieces again."""
        method = method_with(module, layer)
        return type(module).__name__ if method is None else self._in_method(method, module, (), [f"self.{layer}"])

    def _in_forward(self, module: nn.Module, held: Sequence[str] = (), deep: int = 8) -> str:
        method = next((method for method in methods_of(module) if method.name == "forward"), None)
        if method is None or has_own_forward(module) or not deep:
            return type(module).__name__
        return self._in_method(method, module, held or method.arguments, (), deep)

    def _in_method(
        self, method: SourceMethod, module: nn.Module, held: Sequence[str], sources: Sequence[str], deep: int = 8
    ) -> str:
        count = re.search(r"\w+, (\w+)(?:, \w+)*\)? = \w+\.(?:shape|size\(\))", method.text)
        if count and not sources and count[1] != "_" and len(re.findall(rf"\b{count[1]}\b", method.text)) > 1:
            return count[1]
        knows = partial(self._on_tokens, module, deep=deep - 1)
        return follow(method, module, sources, "", knows, held=held, returns=True).unknown

    def _on_tokens(self, module: nn.Module, node: ast.expr, deep: int) -> bool:
        """Tells whether an expression in a module's source computes each token by itself."""
        if isinstance(node, ast.Subscript):
            return _keeps_tokens(node)
        if isinstance(node, ast.Attribute):
            return node.attr not in ("T", "mT", "H", "mH")
        if not isinstance(node, ast.Call):
            return False
        called = called_by(module, node)
        if isinstance(called, nn.Module):
            return self._module_on_tokens(called, deep)
        if isinstance(called, SourceMethod):
            return deep > 0 and not self._in_method(called, module, called.arguments, (), deep)
        given = [ast.unparse(value) for value in node.args]
        if called in ("size", "all", "any"):
            return not given or (called == "size" and given in (["0"], ["2"], ["-1"]))
        methods = [method for method in methods_of(module) if f"self.{method.name}" in given]  # which it calls
        if any(self._in_method(method, module, method.arguments, (), deep) for method in methods if deep):
            return False
        if _ON_FEATURES.fullmatch(called):
            return dim_of(node) == -1  # another may be of tokens that a view has put in groups
        return ON_ELEMENTS.fullmatch(called.rstrip("_")) is not None or _ON_TOKENS.fullmatch(called) is not None

    def _module_on_tokens(self, child: nn.Module, deep: int) -> bool:
        if id(child) in self._whole or kind_of(child) is not None:
            return True
        if has_own_forward(child):
            return False
        if type(child) is nn.Sequential:
            return all(self._module_on_tokens(inner, deep) for inner in child)
        if type(child).__module__.startswith("torch.nn.modules."):
            norm = isinstance(child, nn.LayerNorm) or type(child).__name__ == "RMSNorm"
            return (norm and len(child.normalized_shape) == 1) or type(child).__name__ in MODULES_ON_ELEMENTS  # type: ignore[arg-type]
        return not self._in_forward(child, deep=deep)


def _keeps_tokens(node: ast.Subscript) -> bool:
    """Tells whether an index takes sequences, or features, and all tokens of them; or a size that is not theirs."""
    if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return ast.unparse(node.slice) in ("0", "2", "-1", ":-1", "-1:", "2:")
    if not isinstance(node.slice, ast.Tuple):
        return isinstance(node.slice, ast.Constant | ast.UnaryOp | ast.Slice)
    index = [ast.unparse(part) for part in node.slice.elts]
    return index[1:2] == [":"] or (index[:1] == ["..."] and len(index) == 2)
