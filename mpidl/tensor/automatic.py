"""Makes the plan of any model by what its modules look like, and reports what it does with each.

    vocabulary    embeddings and output layers of as many rows as the vocabulary has tokens
    attention     `attention_structure.attention`
    feed-forward  `feed_forward_structure.feed_forward`
    whole         everything else, with the reason where it looks like one of these

What is not understood stays whole, which is always right. Sequence parallelism begins before the first block of each
list of blocks that hold an attention, and ends after its last. It is refused if a part of a block stays whole, or does
something unknown with tokens (`tokens`): it might need a token that another rank has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from ..errors import ConfigurationError
from .attention_structure import attention
from .feed_forward_structure import feed_forward
from .forward_wrapper import has_own_forward
from .linear import kind_of, sizes_of
from .regions import AttentionParallel, FeedForwardParallel
from .source import SourceMethod, method_with, methods_of
from .styles import SequenceBegins, SequenceEnds, SequenceParallel, Style, VocabParallel
from .tokens import Tokens
from .vocabulary import needs_all_rows


@dataclass
class AutomaticPlan:
    """A plan, by the exact names of modules, and the lines of its report."""

    plan: dict[str, list[Style]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def automatic_plan(
    model: nn.Module, ranks: int, *, sequence_parallel: bool, leave_whole: Mapping[str, str] = MappingProxyType({})
) -> AutomaticPlan:
    """Makes the plan. Raises ConfigurationError if there is nothing to cut, or if sequences cannot be in pieces.

    leave_whole: modules that stay whole, by name, and why; not what is in them.
    """
    decisions = _PlanDecisions(model, ranks, leave_whole)
    if not any(isinstance(style, AttentionParallel | FeedForwardParallel) for style in decisions.styles()):
        why = next((f" ({name or 'the model'}: {reason})" for name, reason in leave_whole.items()), "")
        raise ConfigurationError(
            f"plan: 'auto' found no attention and no feed-forward network in {type(model).__name__}{why}; needs a dict "
            "of names and styles"
        )
    result = AutomaticPlan(decisions.plan)
    if sequence_parallel:
        result.plan = {**decisions.plan}
        for name, styles in _sequences(model, decisions):
            result.plan[name] = [*result.plan.get(name, []), *styles]
    result.lines = [f"auto plan of {type(model).__name__} over {ranks} ranks of tp:", *_report(decisions)]
    return result


class _PlanDecisions:
    """The decision for each module: `plan` has the styles of those to cut, `actions` what is done, and how or why."""

    def __init__(self, model: nn.Module, ranks: int, leave_whole: Mapping[str, str]) -> None:
        self._whole = leave_whole
        self.plan: dict[str, list[Style]] = {}
        self.actions: dict[str, tuple[str, str]] = {}  # by name: what is done, and how
        self._model, self._ranks = model, ranks
        self._tokens = _vocabulary(model)
        self._ids_used_directly = _ids_of_weights_used_directly(model)
        self._visit("", model, expert=False)
        cut = {id(p) for name in self.plan for p in _own_parameters(model.get_submodule(name))}
        for name, (what, _) in list(self.actions.items()):
            own = _own_parameters(model.get_submodule(name))
            if what == "whole" and own and cut.issuperset(map(id, own)):
                del self.actions[name]  # its parameters are those of a module that is cut

    def styles(self) -> Iterator[Style]:
        """Styles of all modules that are cut."""
        for styles in self.plan.values():
            yield from styles

    def _visit(self, name: str, module: nn.Module, *, expert: bool) -> None:
        if name in self.actions:
            return
        dot = f"{name}." if name else ""
        if name in self._whole:
            self._leave_whole(name, module, self._whole[name])
            for child, inner in module.named_children():
                self._visit(dot + child, inner, expert=name.rpartition(".")[2] == "experts")
            return
        if expert:
            return self._leave_whole(name, module, "an expert, which sees other tokens at each step")
        if self._takes_tokens(module):
            return self._add(name, VocabParallel(), "vocabulary", f"{self._tokens} rows")
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            return self._leave_whole(name, module, "torch computes it at once; needs linear layers of its own")
        heads = attention(module, self._ranks)
        if isinstance(heads, AttentionParallel) and _has_replaced_forward(module, heads):
            heads = _FORWARD_IS_REPLACED
        taken = {child for child, _ in module.named_children() if dot + child in self.actions}
        if isinstance(heads, AttentionParallel):
            taken = _layers(heads)
            taken |= {*heads.inside, *([heads.bias_of_heads] if heads.bias_of_heads else [])}
            self._add(name, heads, "attention", _describe_attention(heads))
        elif isinstance(heads, str):
            return self._leave_whole(name, module, heads)
        features = feed_forward(module, taken)
        if isinstance(features, FeedForwardParallel) and _has_replaced_forward(module, features):
            features = _FORWARD_IS_REPLACED
        if isinstance(features, FeedForwardParallel):
            taken |= _layers(features)
            width = sizes_of("", module.get_submodule(features.output))[0]
            layers = ", ".join(features.inputs)
            self._add(name, features, "feed-forward", f"{width} features: {layers} -> {features.output}")
        for layer in taken:
            for inner, _ in module.get_submodule(layer).named_modules(prefix=dot + layer):  # of adapters too
                self.actions[inner] = ("", "")
        if isinstance(features, str):
            self.actions.setdefault(name, ("whole", features))
        if _own_parameters(module):
            self.actions.setdefault(name, ("whole", type(module).__name__))
        for child, inner in module.named_children():
            self._visit(dot + child, inner, expert=name.rpartition(".")[2] == "experts")

    def _takes_tokens(self, module: Any) -> bool:
        if any(id(p) in self._ids_used_directly for p in _own_parameters(module)):
            return False
        if isinstance(module, nn.Embedding):
            if module.num_embeddings != self._tokens or needs_all_rows(module):
                return False
            derived = type(module).forward is not nn.Embedding.forward
            method = method_with(module)
            return not derived or (method is not None and len(method.arguments) == 1)
        return kind_of(module) is not None and sizes_of("", module)[1] == self._tokens

    def _add(self, name: str, style: Style, what: str, how: str) -> None:
        self.plan.setdefault(name, []).append(style)
        before = self.actions.get(name)
        self.actions[name] = (what, how) if before is None else (f"{before[0]}, {what}", f"{before[1]}; {how}")

    def _leave_whole(self, name: str, module: nn.Module, reason: str) -> None:
        if any(True for _ in module.parameters()):
            self.actions[name] = ("whole", reason)


_FORWARD_IS_REPLACED = "it has a forward pass of its own, and not its class's"


def _has_replaced_forward(module: nn.Module, style: AttentionParallel | FeedForwardParallel) -> bool:
    return has_own_forward(module) or has_own_forward(module.get_submodule(style.inner))


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _ids_of_weights_used_directly(model: nn.Module) -> set[int]:
    """Returns the ids of weights that a module computes with by itself, as in F.linear(x, self.embedding.weight)."""
    found = set()
    for module in model.modules():
        methods = [method for method in methods_of(module) if _computes(method)]
        if isinstance(module, nn.Embedding):
            own = any("self" in method.weights and method.name not in vars(nn.Embedding) for method in methods)
        else:
            own = kind_of(module) is None
        found |= {id(p) for p in _own_parameters(module) if p.dim() > 1 and (own or has_own_forward(module))}
        names = {name for method in methods for name in method.weights} - {"self"}
        if "*" in names and kind_of(module) is None:
            found |= {id(p) for inner in module.modules() for p in _own_parameters(inner)}
        for inner in module.modules() if names else ():
            for name in names:
                weight = getattr(getattr(inner, name, None), "weight", None)
                found |= {id(weight)} if isinstance(weight, nn.Parameter) else set()
    return found


def _computes(method: SourceMethod) -> bool:
    """Tells by a method's name and module whether it may belong to a forward pass, and not to construction."""
    names = r"_*(?:(?:init|tie|reset|load|save|resize|set)_|initiali[sz]e|get_(?:in|out)put_embeddings$)"
    of_library = method.written_in == "transformers.modeling_utils" or method.written_in.startswith("peft.")
    return not of_library and re.match(names, method.name) is None


def _vocabulary(model: nn.Module) -> int | None:
    """Returns the number of tokens: what the config says, or the rows of the largest embedding."""
    config = getattr(model, "config", None)
    for owner in (config, getattr(config, "text_config", None)):
        if isinstance(found := getattr(owner, "vocab_size", None), int):
            return found
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return max((e.num_embeddings for e in embeddings if e.num_embeddings > e.embedding_dim), default=None)


def _layers(style: AttentionParallel | FeedForwardParallel) -> set[str]:
    if isinstance(style, FeedForwardParallel):
        return {*style.inputs, style.output}
    return {name for name in (style.query, style.key, style.value, style.fused, style.output) if name}


def _describe_attention(style: AttentionParallel) -> str:
    heads = f"{style.heads} heads" + (f", {style.key_heads} for keys" if style.key_heads != style.heads else "")
    layers = style.fused or f"{style.query}, {style.key}, {style.value}"
    return f"{heads}: {layers} -> {style.output}"


def _report(decisions: _PlanDecisions) -> Iterator[str]:
    """Yields a line for each pattern of names."""
    patterns: dict[tuple[str, str, str], None] = {}
    for name, (what, how) in decisions.actions.items():
        if what:
            pattern = ".".join("*" if part.isdigit() else part for part in name.split(".")) or "(model)"
            patterns[pattern, what, how] = None
    width = max(len(what) for _, what, _ in patterns)
    pattern_width = max(len(pattern) for pattern, _, _ in patterns)
    for pattern, what, how in patterns:
        yield f"  {what:{width}}  {pattern:{pattern_width}}  {how}"


# ---- sequences in pieces -------------------------------------------------------------------------------------------


def _sequences(model: nn.Module, decisions: _PlanDecisions) -> Iterator[tuple[str, list[Style]]]:
    """Yields the styles for sequences in pieces, by the names of modules."""
    lists = list(_blocks(model, decisions))
    if not lists:
        raise ConfigurationError(
            "sequence_parallel: plan='auto' found no list of blocks with an attention each; needs a plan with "
            "SequenceBegins and SequenceEnds"
        )
    attentions = {
        at: style for at, styles in decisions.plan.items() for style in styles if isinstance(style, AttentionParallel)
    }
    inner = {at: model.get_submodule(at).get_submodule(style.inner) for at, style in attentions.items()}
    tokens = Tokens({id(module) for module in inner.values()})
    for name, blocks in lists:
        children = list(blocks.named_children())
        yield f"{name}.{children[0][0]}", [SequenceBegins(_first_argument(children[0][1]))]
        yield f"{name}.{children[-1][0]}", [SequenceEnds()]
        for at, module in blocks.named_modules(prefix=name):
            what = decisions.actions.get(at, ("whole", "") if _own_parameters(module) else ("", ""))[0]
            for style in decisions.plan.get(at, []):
                if getattr(style, "each", False):
                    raise ConfigurationError(
                        f"sequence_parallel: plan='auto' does not see that {at} uses its input in its linear layers "
                        "alone; needs a plan by hand"
                    )
            if what == "whole":
                if "norm" not in type(module).__name__.lower():
                    raise ConfigurationError(
                        f"sequence_parallel: plan='auto' leaves {at} whole, a {type(module).__name__}, which may look "
                        "at other tokens; needs a plan by hand"
                    )
                yield at, [SequenceParallel()]
        for at, module in blocks.named_modules(prefix=name):
            mixed = ""
            if at in attentions and not attentions[at].inner:
                mixed = tokens.mixed_behind(module, attentions[at].output)
            elif at.rpartition(".")[0] == name:
                mixed = tokens.mixed_in(module, _first_argument(module))
            if mixed:
                raise ConfigurationError(
                    f"sequence_parallel: plan='auto': {at}: {mixed} may look at other tokens; needs a plan by hand"
                )


def _blocks(model: nn.Module, decisions: _PlanDecisions) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost lists of modules that have an attention each."""
    heads = [name for name, styles in decisions.plan.items() if any(isinstance(s, AttentionParallel) for s in styles)]
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not any(name.startswith(f"{at}.") for at in inside):
            blocks = [f"{name}.{child}" for child, _ in module.named_children()]
            if blocks and all(any(f"{at}.".startswith(f"{block}.") for at in heads) for block in blocks):
                inside.append(name)
                yield name, module


def _first_argument(block: nn.Module) -> str:
    method = next((method for method in methods_of(block) if method.name == "forward"), None)
    return method.arguments[0] if method is not None and method.arguments else "hidden_states"
