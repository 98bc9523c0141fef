"""Finds attentions by what is in a module: its linear layers, their sizes, their calls.

An attention has linear layers called q, k, v, or one with all three, whose sizes are those of whole heads, and one that
takes the heads' values; the number of heads is an attribute, or follows from the width of one.

What comes between layers is followed through the source (`flow`), and each operation has to be a known one: of single
elements, or of single heads. A number of heads may be a size there, and nothing else.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection
from functools import partial
from itertools import chain, pairwise
from typing import Any

from torch import nn

from ..errors import ConfigurationError
from .elementwise import MODULES_ON_ELEMENTS, ON_ELEMENTS
from .flow import are_heads_sizes, called_by, dim_of, flow_in, follow, is_size_alone
from .forward_wrapper import has_own_forward
from .layer_calls import Recognised, flow_into_output, layer_inputs, layer_with_dropped_input, linear_children
from .linear import kind_of, sizes_of
from .regions import AttentionParallel
from .sizes import cut_heads
from .source import SourceMethod, method_with, methods_of, run_by

_QUERY = ("q_proj", "query", "q", "q_lin", "wq", "to_q", "query_proj", "q_linear", "queries")
_KEY = ("k_proj", "key", "k", "k_lin", "wk", "to_k", "key_proj", "k_linear", "keys")
_VALUE = ("v_proj", "value", "v", "v_lin", "wv", "to_v", "value_proj", "v_linear", "values")
_FUSED = ("c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv", "in_proj", "W_pack", "attn_qkv")
_OUTPUT = ("o_proj", "out_proj", "o", "out_lin", "wo", "to_out", "dense", "c_proj", "proj", "out", "output", "o_linear")
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads", "attention_heads")
_WIDTHS = ("head_dim", "head_size", "head_width", "attention_head_size", "d_head", "dim_head", "d_kv", "d_k")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "key_heads")
_GROUPS = ("num_key_value_groups", "n_rep", "num_groups", "kv_groups")
_MASKS = ("bias", "masked_bias", "mask", "causal_mask", "tril")
_SHAPES = "(?:view|reshape|unflatten|expand|repeat|split|rearrange)"

# Functions and methods that do not mix heads: shapes, products, attentions, rotary positions, caches of keys.
_ON_HEADS = re.compile(
    r"view(?:_as)?|reshape|(?:un)?flatten|transpose|permute|movedim|swap(?:axes|dims)|(?:un)?squeeze|expand(?:_as)?|"
    r"repeat\w*|rearrange|chunk|split|unbind|cat|concat|stack|size|numel|matmul|bmm|baddbmm|einsum|"
    r"(?:log_|_safe_)?softmax|tril|triu|update|copy|masked_\w+|"
    r"(?!\w*(?:norm|mean|pool|conv))\w*(?:attention|attn|rotary|rope|rotate|heads)\w*"
)

_CUTS = re.compile(r"chunk|(?:tensor_)?split|unbind|narrow|select|index_select|cat|concat|flip|roll")  # a dimension
_REPEATS = re.compile(  # of each key/value head behind itself, for the query heads of its group
    r"repeat_interleave|repeat_kv|enable_gqa|num_key_value_groups|\[:, :, None|unsqueeze\((?:dim=)?(?:2|-3)\)"
)


def attention(module: nn.Module, ranks: int) -> Recognised:
    """Recognises an attention: in a module, or in one inside it whose output layer is `output.dense`.

    ranks: over which it is to be cut.
    """
    output_layer = getattr(getattr(module, "output", None), "dense", None)
    if kind_of(output_layer) is not None:
        for name, child in module.named_children():
            found = _AttentionLayers.of(child, name, "output.dense", output_layer)
            if found is not None:
                style = found.style(ranks)
                if not isinstance(style, AttentionParallel):
                    return style
                flow = flow_into_output(module, (f"self.{name}",), found.on_heads)
                return f"{flow.unknown} may compute on several heads" if flow.unknown else style
    found = _AttentionLayers.of(module, "", "", None)
    return None if found is None else found.style(ranks)


class _AttentionLayers:
    """Names and sizes of an attention's layers, in the module `at`, which is `inner` in the one that a style is for."""

    def __init__(self, at: nn.Module, inner: str, single: tuple[str, ...], fused: str, output: str, joins: Any) -> None:
        self.at, self.inner, self.single, self.fused, self.output = at, inner, single, fused, output
        self.layers = (fused,) if fused else single
        self.joined = sizes_of(output, joins)[0]
        self.width, self.numbers = 0, set[int]()  # of a head; what may be numbers of heads, or of all their elements
        self.method = method_with(at, *self.layers, *(() if inner else (output,)))

    @classmethod
    def of(cls, at: nn.Module, inner: str, output: str, joins: Any) -> _AttentionLayers | None:
        """Looks for the layers; None where they are not all there."""
        layers = linear_children(at)
        names = (next((name for name in known if name in layers), "") for known in (_QUERY, _KEY, _VALUE))
        single = tuple(names)
        fused = "" if all(single) else next((name for name in _FUSED if name in layers), "")
        if not fused and not all(single):
            return None
        if not output:
            output = next((name for name in _OUTPUT if name in layers and name not in (*single, fused)), "")
            joins = layers.get(output)
        return cls(at, inner, single, fused, output, joins) if output else None

    def style(self, ranks: int) -> Recognised:
        """Returns the style, or a reason why there is none."""
        heads = self._heads()
        if heads is None or self.joined % heads:
            return "the number of heads is in no attribute that is known"
        if self.method is None:
            return "its source does not show how it calls its layers"
        reached = self.method.feeds.get(f"self.{self.output}", set())
        if not self.inner and not reached >= {f"self.{name}()" for name in self.layers}:
            return f"its source does not show what goes into {self.output}"
        width = self.joined // heads
        sizes = {name: sizes_of(name, self.at.get_submodule(name))[1] for name in self.layers}
        keys, interleaved = heads, False
        if self.fused:
            keys, rest = divmod(sizes[self.fused] // width - heads, 2)
            if sizes[self.fused] % width or rest or keys < 1:
                return f"{self.fused} is not of whole heads"
            layout = _layout(self.method, self.fused)
            interleaved = layout == "by head"
            if not layout or (interleaved and keys != heads):
                return f"its source does not show how queries, keys and values lie in {self.fused}"
            if keys < ranks and keys < heads:
                return f"{self.fused} has {keys} key/value heads for {ranks} ranks"
        else:
            query, key, value = (sizes[name] for name in self.single)
            if query % heads or key % (query // heads):
                return "queries or keys are not of whole heads"
            keys, width = key // (query // heads), query // heads
            if heads % keys or value % keys or value // keys != self.joined // heads:
                return "values are not of as many heads as keys"
        try:
            cut_heads("", heads, keys, ranks, 0)
        except ConfigurationError as error:
            return str(error).removeprefix(": ")
        self.width, self.numbers = width, {heads, keys, heads * width, keys * width}
        reason = self._others(heads, width) or self._by_width() or self._mixing()
        return reason or self._made(heads, keys, width, interleaved)

    def _heads(self) -> int | None:
        for owner in (self.at, getattr(self.at, "config", None)):
            for name in _HEADS:
                if _is_number(found := getattr(owner, name, None)):
                    return int(found)  # type: ignore[arg-type]
            for name in _WIDTHS if owner is self.at else ():
                found = getattr(owner, name, None)
                if _is_number(found) and self.joined % int(found) == 0:  # type: ignore[arg-type]
                    return self.joined // int(found)  # type: ignore[arg-type]
        return None

    def _others(self, heads: int, width: int) -> str | None:
        """Returns a reason to leave the module whole for what else is in it."""
        assert self.method is not None
        own = [name for name, _ in self.at.named_parameters(recurse=False)]
        own += [n for n, b in self.at.named_buffers(recurse=False) if n not in _MASKS and heads in b.shape[:2]]
        if own:
            return f"{own[0]} may be of heads"
        for argument in self.method.arguments:
            if argument == "alibi" or (
                argument == "position_bias" and not hasattr(self.at, "has_relative_attention_bias")
            ):
                return f"it gets {argument} of all heads"
        known = (*self.layers, self.output)
        for name, child in self.at.named_children():
            shapes = {tuple(p.shape) for p in child.parameters()}
            of_head = "norm" in type(child).__name__.lower() and shapes <= {(width,)}
            biases = isinstance(child, nn.Embedding) and child.embedding_dim == heads
            if shapes and name not in known and not of_head and not biases:
                return f"{name} may compute on several heads"
        return None

    def _by_width(self) -> str | None:
        """Returns a reason to leave the module whole where it goes by its input's width, which is not cut."""
        assert self.method is not None
        lines = [line for line in self.method.text.splitlines() if not re.match(r"\s*(?:if|raise|assert)\b", line)]
        text, first = "\n".join(lines), self.method.arguments[0]
        for of in (first, *self._results()):
            what = "its input" if of == first else of
            if re.search(rf"\b{of}\.(?:shape\[|size\()(?:-1|2)[\])]", text):
                return f"its source goes by the width of {what}"
            # Python 3.10 writes "(b, t, c) = x.shape", later ones without the parentheses.
            for name in re.findall(rf"\w+, \w+, (\w+)\)? = {of}\.(?:shape|size\(\))", text):
                if name != "_" and len(re.findall(rf"\b{name}\b", text)) > 1:
                    return f"its source goes by {name}, the width of {what}"
        return None

    def _results(self) -> list[str]:
        """Returns the variables that hold what a layer returns, and nothing else."""
        assert self.method is not None
        assert self.method.tree is not None
        nodes = list(ast.walk(self.method.tree))
        stores = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        made = [(node.value, node.targets[0]) for node in nodes if isinstance(node, ast.Assign)]
        results = [
            target.id
            for value, target in made
            if isinstance(value, ast.Call) and ast.unparse(value.func) in {f"self.{name}" for name in self.layers}
            if isinstance(target, ast.Name)
        ]
        return [name for name in results if stores[name] == 1]

    def _mixing(self) -> str | None:
        """Returns a reason to leave the module whole for what it does with its heads."""
        assert self.method is not None
        layers = [f"self.{name}" for name in self.layers]
        end = "" if self.inner else f"self.{self.output}"
        flow = follow(self.method, self.at, layers, end, partial(self.on_heads, self.at))
        return f"{flow.unknown} may compute on several heads" if flow.unknown else None

    def on_heads(self, module: nn.Module, node: ast.expr, deep: int = 4) -> bool:
        """Tells whether an expression does not mix heads. deep: how many methods may lie in each other."""
        if isinstance(node, ast.Subscript):
            return not _picks_heads(node)
        if not isinstance(node, ast.Call):
            return not isinstance(node, ast.Lambda)
        called = called_by(module, node)
        if isinstance(called, str):
            if _CUTS.fullmatch(called) and dim_of(node) in (1, -3):
                return False
            across = called.endswith("softmax") and dim_of(node) in (0, 1, -3)
            return not across and any(names.fullmatch(called.rstrip("_")) for names in (ON_ELEMENTS, _ON_HEADS))
        if isinstance(called, nn.Module):
            if has_own_forward(called):
                return False
            if any(True for _ in called.parameters()):
                return "norm" in type(called).__name__.lower()  # of single heads, as `_others` has seen
            if type(called).__module__.startswith("torch.nn.modules."):
                if isinstance(called, nn.Softmax):
                    return called.dim not in (0, 1, -3)
                of_head = tuple(getattr(called, "normalized_shape", ())) == (self.width,)
                return of_head or type(called).__name__ in MODULES_ON_ELEMENTS
            text = "\n".join(method.text for method in methods_of(called))
            own = [name for name, value in vars(called).items() if _is_number(value) and value in self.numbers]
            if any(re.search(rf"\bself\.{name}\b", text) for name in own):  # it has the number of all heads
                return False
        if not deep or (isinstance(called, SourceMethod) and not are_heads_sizes(called)):
            return False
        return not flow_in(called, module, partial(self.on_heads, deep=deep - 1)).unknown

    def _made(self, heads: int, keys: int, width: int, interleaved: bool) -> Recognised:
        assert self.method is not None
        text = "\n".join(method.text for method in methods_of(self.at))
        scaled, scaled_keys, groups = [], [], ""
        known, unknown = False, ""  # whether the source uses the number of heads by a known name, or maybe by another
        dot = f"{self.inner}." if self.inner else ""
        config = getattr(self.at, "config", None)
        asked = dict.fromkeys(re.findall(r"self\.config\.(\w+)", text))
        of_config = {f"config.{name}": getattr(config, name, None) for name in asked}
        for name, value in (*vars(self.at).items(), *of_config.items()):
            last = name.rpartition(".")[2]
            used = re.search(rf"self\.{re.escape(name)}\b", text) is not None
            if not _is_number(value):
                continue
            known |= used and last in _HEADS and value == heads
            if last in _GROUPS and value == heads // keys:
                groups = dot + name
            elif last in _KEY_HEADS and value == keys:
                scaled_keys.append(dot + name)
            elif (last in _HEADS and value == heads) or (used and value == heads * width and last not in _WIDTHS):
                scaled.append(dot + name)
            elif used and value == keys * width and last not in _WIDTHS:
                scaled_keys.append(dot + name)
            elif value in (heads, keys) and last not in _WIDTHS:
                in_shape = re.search(rf"(?:\b{_SHAPES}\(|= [(\[])[^\n]*self\.{re.escape(name)}\b", text)
                unknown = unknown or (name if in_shape else "")
        if unknown and not known:
            return f"{unknown} may be the number of heads"
        if self._width_first():
            return "its source has the width of a head before the number of heads"
        is_known = type(self.at).__module__.startswith("transformers.")  # whose attention functions repeat each head
        if keys < heads and not is_known and _REPEATS.search(text) is None:
            return "its source does not show which query heads share a key/value head"
        if not are_heads_sizes(self.method, self.method.arguments, f"self.{self.output}"):
            return "its source may compute with a number of heads, of which a rank has another one"
        widths = "|".join(_WIDTHS)
        shown = re.search(rf"(?:\b{_SHAPES}\(|= [(\[]|\+ \()[^\n]*self\.(?:config\.)?(?:{widths})\b", text)
        if not known and (shown is None or self._written({heads, keys})):
            return "its source does not show how it makes heads"
        for name in (*scaled, *scaled_keys):
            attribute = name.removeprefix(dot)
            if not all(is_size_alone(method, attribute) for method in run_by(self.at, self.method.name)):
                return f"its source may compute with {attribute}, of which a rank has another one"
        children = dict(self.at.named_children())
        biases = [n for n, c in children.items() if isinstance(c, nn.Embedding) and c.embedding_dim == heads]
        inside = [
            n for n, c in children.items() if "norm" in type(c).__name__.lower() and any(True for _ in c.parameters())
        ]
        memory, each = layer_inputs(self.at, self.method, self.layers)
        dropped = layer_with_dropped_input(self.method, self.layers) if each else ""
        if dropped:
            return f"its source may drop elements of the input of {dropped}"
        query, key, value = (dot + name if name else "" for name in self.single)
        first, calls = self.method.arguments[0], self.method.calls
        return AttentionParallel(
            query="" if self.fused else query,
            key="" if self.fused else key,
            value="" if self.fused else value,
            fused=dot + self.fused if self.fused else "",
            interleaved=interleaved,
            whole_input=bool(self.fused) and not each and re.search(rf"\b{first}\.(shape|size)", text) is not None,
            output=self.output,
            heads=heads,
            key_heads=keys,
            scaled=tuple(scaled),
            scaled_keys=tuple(scaled_keys),
            groups=groups,
            inside=tuple(dot + name for name in inside),
            bias_of_heads=dot + biases[0] if biases else "",
            # Dropout before the region is not of it.
            inner=dot + min(self.layers, key=lambda name: calls.index(f"self.{name}")) if each else self.inner,
            each=each,
            input=first,
            memory=memory,
        )

    def _written(self, numbers: Collection[int]) -> bool:
        """Tells whether one of these numbers is written out in a shape."""
        sizes = chain.from_iterable(self._shapes())
        return any(isinstance(size, ast.Constant) and size.value in numbers and size.value != 1 for size in sizes)

    def _width_first(self) -> bool:
        """Tells whether a shape, or the order that joins heads, has the width of a head before the number of heads."""
        assert self.method is not None
        names = [[ast.unparse(size).rpartition(".")[2] for size in shape] for shape in self._shapes()]
        heads = (*_HEADS, *_KEY_HEADS)
        shaped = any(a in _WIDTHS and b in heads for shape in names for a, b in pairwise(shape))
        return shaped or re.search(r"permute\(0, 2, 3, 1\)|\(\w+ (?:h|heads|n_heads)\)", self.method.text) is not None

    def _shapes(self) -> list[list[ast.expr]]:
        """Lists the sizes in each shape that is written out."""
        assert self.method is not None
        assert self.method.tree is not None
        shapes: list[list[ast.expr]] = []
        for node in ast.walk(self.method.tree):
            if isinstance(node, ast.Call) and re.fullmatch(_SHAPES, ast.unparse(node.func).rpartition(".")[2]):
                shapes.append([size for part in node.args for size in _elements(part)])
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                shapes.append(node.value.elts)
        return shapes


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _picks_heads(node: ast.Subscript) -> bool:
    """Tells whether an index may choose some heads of [batch, heads, time, width]."""
    if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return False  # `are_heads_sizes` judges it
    parts = [ast.unparse(part) for part in _elements(node.slice)]
    if parts[0] == "...":
        return len(parts) > 3 and parts[-3] != ":"
    return len(parts) > 1 and ":" in parts[1] and parts[1] != ":"


def _layout(method: SourceMethod, fused: str) -> str:
    """Tells how queries, keys and values lie in a fused weight: "in a row", "by head", or "" if it is not clear.

    Methods tell of what the layer returns, and of variables that hold this: another function may lay it out anew.
    """
    assert method.tree is not None
    nodes = list(ast.walk(method.tree))
    stores = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                values.setdefault(ast.unparse(target), []).append(node.value)

    def is_it(node: ast.expr, names: Collection[str]) -> bool:
        if isinstance(node, ast.Call):
            return ast.unparse(node.func) == f"self.{fused}"
        return isinstance(node, ast.Name) and node.id in names

    def first(node: ast.expr) -> ast.expr:
        """Returns x of x.view(...).transpose(1, 2)."""
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not is_it(node, ()):
            node = node.func.value
        return node

    held = [name for name, given in values.items() if len(given) == stores[name]]
    plain = {name for name in held if all(is_it(value, ()) for value in values[name])}
    shaped = {name for name in held if any(is_it(value, ()) for value in values[name])}
    shaped = {name for name in shaped if all(is_it(first(value), (name,)) for value in values[name])}
    calls = [
        (node.func.attr, node.func.value, ", ".join(map(ast.unparse, node.args)))
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    shapes = [(name, to) for name, x, to in calls if name in ("view", "reshape", "unflatten") and is_it(x, shaped)]
    in_three = any(is_it(x, plain) and (name == "split" or (name, to[:1]) == ("chunk", "3")) for name, x, to in calls)
    sliced = any(
        isinstance(node, ast.Subscript)
        and is_it(node.value, plain)
        and isinstance(node.slice, ast.Tuple)
        and ast.unparse(node.slice.elts[0]) == "..."
        for node in nodes
    )
    if (in_three or sliced) and not shapes:
        return "in a row"
    if any(name != "unflatten" and re.search(r", 3, (?:self\.)?\w*heads", to) for name, to in shapes):
        return "in a row"
    if shapes and re.search(r"heads, 3\b|-1, 3 \* self\.\w+\)", method.text):
        return "by head"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
