"""Ready plans by the class of a model, and the names in a plan.

A plan maps names of modules to styles. A `*` stands for one part of a name, as in "model.layers.*.mlp".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import ConfigurationError
from .regions import AttentionParallel, FeedForwardParallel
from .styles import SequenceBegins, SequenceEnds, SequenceParallel, Style, VocabParallel

Plan = Mapping[str, Style | Sequence[Style]]

_ON_PIECES = SequenceParallel()
_LAST = (_ON_PIECES, SequenceEnds())

_GPT2: Plan = {
    "transformer.wte": VocabParallel(),
    "transformer.h.0": SequenceBegins("x"),
    "transformer.h.*.ln_1": _ON_PIECES,
    "transformer.h.*.attn": AttentionParallel(
        fused="c_attn", output="c_proj", heads="heads", scaled=("heads",), input="x"
    ),
    "transformer.h.*.ln_2": _ON_PIECES,
    "transformer.h.*.mlp": FeedForwardParallel(inputs=("c_fc",), output="c_proj", input="x"),
    "transformer.ln_f": _LAST,
    "lm_head": VocabParallel(),
}

_HF_GPT2: Plan = {
    **_GPT2,
    "transformer.h.0": SequenceBegins(),
    "transformer.h.*.attn": AttentionParallel(
        fused="c_attn", output="c_proj", heads="num_heads", scaled=("num_heads", "split_size")
    ),
    "transformer.h.*.mlp": FeedForwardParallel(inputs=("c_fc",), output="c_proj"),
}

_LLAMA: Plan = {
    "model.embed_tokens": VocabParallel(),
    "model.layers.0": SequenceBegins(),
    "model.layers.*.input_layernorm": _ON_PIECES,
    "model.layers.*.self_attn": AttentionParallel(
        query="q_proj",
        key="k_proj",
        value="v_proj",
        output="o_proj",
        heads="config.num_attention_heads",
        key_heads="config.num_key_value_heads",
        groups="num_key_value_groups",
        inside=("q_norm", "k_norm"),
    ),
    "model.layers.*.post_attention_layernorm": _ON_PIECES,
    "model.layers.*.mlp": FeedForwardParallel(inputs=("gate_proj", "up_proj"), output="down_proj", input="x"),
    "model.norm": _LAST,
    "lm_head": VocabParallel(),
}

# By the class of a model and the package that it is of.
PLANS: dict[tuple[str, str], Plan] = {
    ("mpidl", "GPT2"): _GPT2,
    ("transformers", "GPT2LMHeadModel"): _HF_GPT2,
    **{("transformers", f"{family}ForCausalLM"): _LLAMA for family in ("Llama", "Mistral", "Qwen2", "Qwen3")},
}


def plan_for(model: nn.Module) -> Plan | None:
    """Returns the ready plan of a model's class, or of one that it is derived from; None if there is none."""
    for cls in type(model).__mro__:
        found = PLANS.get((cls.__module__.split(".")[0], cls.__name__))
        if found is not None:
            return found
    return None


def matches(plan: Plan, model: nn.Module) -> list[tuple[str, nn.Module, list[Style]]]:
    """Lists the modules that a plan names, in the model's order, with their styles.

    Raises ConfigurationError for a name that no module has, and for what is no style.
    """
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    found: dict[str, tuple[nn.Module, list[Style]]] = {}
    for pattern, styles in plan.items():
        regex = re.compile("[^.]+".join(map(re.escape, pattern.split("*"))))
        hits = [(name, module) for name, module in named if regex.fullmatch(name)]
        if not hits:
            raise ConfigurationError(f"plan: {pattern!r} names no module of {type(model).__name__}")
        for name, module in hits:
            found.setdefault(name, (module, []))[1].extend(_as_list(pattern, styles))
    order = {name: place for place, (name, _) in enumerate(named)}
    return [(name, *found[name]) for name in sorted(found, key=order.__getitem__)]


def _as_list(pattern: str, styles: Any) -> list[Style]:
    several = list(styles) if isinstance(styles, Sequence) else [styles]
    for style in several:
        if not hasattr(style, "apply"):
            raise ConfigurationError(
                f"plan: {pattern!r}: got {style!r}; needs a style of mpidl.tensor, such as ColumnParallel()"
            )
    return several
