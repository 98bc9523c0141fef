"""Ready plans by the class of a model, also of one that lies inside another.

A family has a plan for its body, the model without an output layer. One with an output layer adds that; any other model
with such a body inside, as for classification or with adapters, has the plan of the body under the body's name.

To add one: a function that returns the plan of a family, and its class in `PLANS`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .plans import Plan
from .regions import AttentionParallel, FeedForwardParallel
from .styles import SequenceBegins, SequenceEnds, SequenceParallel, VocabParallel

_ON_PIECES = SequenceParallel()
_LAST = (_ON_PIECES, SequenceEnds())
_HEAD: Plan = {"lm_head": VocabParallel()}


def _under(name: str, plan: Plan) -> Plan:
    """A plan for a model under its name in another one."""
    return {f"{name}.{pattern}" if name else pattern: styles for pattern, styles in plan.items()}


def _gpt2(attention: AttentionParallel, input: str) -> Plan:
    return {
        "wte": VocabParallel(),
        "h.0": SequenceBegins(input),
        "h.*.ln_1": _ON_PIECES,
        "h.*.attn": attention,
        "h.*.ln_2": _ON_PIECES,
        "h.*.mlp": FeedForwardParallel(inputs=("c_fc",), output="c_proj", input=input),
        "ln_f": _LAST,
    }


def _hf_gpt2(model: nn.Module) -> Plan:
    attention = AttentionParallel(
        fused="c_attn", output="c_proj", heads="num_heads", scaled=("num_heads", "split_size")
    )
    return _gpt2(attention, "hidden_states")


def _llama(model: nn.Module) -> Plan:
    return {
        "embed_tokens": VocabParallel(),
        "layers.0": SequenceBegins(),
        "layers.*.input_layernorm": _ON_PIECES,
        "layers.*.self_attn": AttentionParallel(
            query="q_proj",
            key="k_proj",
            value="v_proj",
            output="o_proj",
            heads="config.num_attention_heads",
            key_heads="config.num_key_value_heads",
            groups="num_key_value_groups",
            inside=("q_norm", "k_norm"),
        ),
        "layers.*.post_attention_layernorm": _ON_PIECES,
        "layers.*.mlp": FeedForwardParallel(inputs=("gate_proj", "up_proj"), output="down_proj", input="x"),
        "norm": _LAST,
    }


def _phi3(model: nn.Module) -> Plan:
    return {
        **_llama(model),
        "layers.*.self_attn": AttentionParallel(
            fused="qkv_proj",
            whole_input=True,
            output="o_proj",
            heads="config.num_attention_heads",
            key_heads="config.num_key_value_heads",
            scaled=("config.num_attention_heads",),
            scaled_keys=("num_key_value_heads",),
            groups="num_key_value_groups",
        ),
        "layers.*.mlp": FeedForwardParallel(inputs=("gate_up_proj",), output="down_proj", segments=2),
    }


def _bert(heads: str, scaled: tuple[str, ...], input: str, crossed: bool = False) -> Plan:
    def attention(memory: str | None) -> AttentionParallel:
        return AttentionParallel(
            query="self.query",
            key="self.key",
            value="self.value",
            output="output.dense",
            heads=heads,
            scaled=scaled,
            inner="self",
            input=input,
            memory=memory,
        )

    crossing: Plan = {
        "encoder.layer.*.crossattention": attention("encoder_hidden_states"),
        "encoder.layer.*.crossattention.output.LayerNorm": _ON_PIECES,
    }
    return {
        "embeddings.word_embeddings": VocabParallel(),
        "encoder.layer.0": SequenceBegins(input),
        "encoder.layer.*.attention": attention(None),
        "encoder.layer.*.attention.output.LayerNorm": _ON_PIECES,
        **(crossing if crossed else {}),
        "encoder.layer.*": FeedForwardParallel(
            inputs=("intermediate.dense",), output="output.dense", inner="intermediate.dense"
        ),
        "encoder.layer.*.output.LayerNorm": _ON_PIECES,
        "encoder.layer.-1": SequenceEnds(),
    }


def _hf_bert(model: nn.Module) -> Plan:
    scaled = ("self.num_attention_heads", "self.all_head_size")
    crossed = hasattr(model.get_submodule("encoder.layer.0"), "crossattention")
    return _bert("self.num_attention_heads", scaled, "hidden_states", crossed)


def _t5_stack(model: nn.Module) -> Plan:
    """The plan of an encoder, or of a decoder, which attends to the encoder's output as well."""
    attention = AttentionParallel(
        query="q",
        key="k",
        value="v",
        output="o",
        heads="n_heads",
        scaled=("n_heads", "inner_dim"),
        bias_of_heads="relative_attention_bias",
        memory="key_value_states",
    )
    decoder = hasattr(model.get_submodule("block.0.layer.1"), "EncDecAttention")
    last = 2 if decoder else 1
    gated = hasattr(model.get_submodule(f"block.0.layer.{last}.DenseReluDense"), "wi_0")
    return {
        "embed_tokens": VocabParallel(),
        "block.0": SequenceBegins(),
        "block.*.layer.*.layer_norm": _ON_PIECES,
        "block.*.layer.0.SelfAttention": attention,
        **({"block.*.layer.1.EncDecAttention": attention} if decoder else {}),
        f"block.*.layer.{last}.DenseReluDense": FeedForwardParallel(
            inputs=("wi_0", "wi_1") if gated else ("wi",), output="wo"
        ),
        "final_layer_norm": _LAST,
    }


def _t5(model: nn.Module) -> Plan:
    stacks = [name for name in ("encoder", "decoder") if hasattr(model, name)]
    plan: dict[str, object] = {"shared": VocabParallel()}
    for name in stacks:
        plan.update(_under(name, _t5_stack(model.get_submodule(name))))
    return plan  # type: ignore[return-value]


def _with(name: str, body: Callable[[nn.Module], Plan], head: Plan) -> Callable[[nn.Module], Plan]:
    """The plan of a model with a body under this name, and an output layer."""
    return lambda model: {**_under(name, body(model.get_submodule(name))), **head}


_MPIDL_GPT2 = _gpt2(
    AttentionParallel(fused="c_attn", output="c_proj", heads="heads", scaled=("heads",), input="x"), "x"
)
_PREDICTIONS: Plan = {"cls.predictions.decoder": VocabParallel()}

# By the package that a class is of, and its name: the plan of a model.
PLANS: dict[tuple[str, str], Callable[[nn.Module], Plan]] = {
    ("mpidl", "GPT2"): lambda _: {**_under("transformer", _MPIDL_GPT2), **_HEAD},
    ("mpidl", "BERT"): lambda _: {**_under("bert", _bert("self.heads", ("self.heads",), "x")), **_PREDICTIONS},
    ("transformers", "GPT2Model"): _hf_gpt2,
    ("transformers", "GPT2LMHeadModel"): _with("transformer", _hf_gpt2, _HEAD),
    ("transformers", "GPT2DoubleHeadsModel"): _with("transformer", _hf_gpt2, _HEAD),
    **{("transformers", f"{family}Model"): _llama for family in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    **{
        ("transformers", f"{family}ForCausalLM"): _with("model", _llama, _HEAD)
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
    },
    ("transformers", "Phi3Model"): _phi3,
    ("transformers", "Phi3ForCausalLM"): _with("model", _phi3, _HEAD),
    ("transformers", "BertModel"): _hf_bert,
    ("transformers", "BertForMaskedLM"): _with("bert", _hf_bert, _PREDICTIONS),
    ("transformers", "BertForPreTraining"): _with("bert", _hf_bert, _PREDICTIONS),
    ("transformers", "BertLMHeadModel"): _with("bert", _hf_bert, _PREDICTIONS),
    ("transformers", "T5Model"): _t5,
    ("transformers", "T5EncoderModel"): _t5,
    ("transformers", "T5ForConditionalGeneration"): lambda model: {**_t5(model), **_HEAD},
}


def plan_for(model: nn.Module) -> Plan | None:
    """Returns the ready plan of a model's class, or of one that it is derived from; None if there is none.

    The plan of a model that has none itself is that of the outermost models inside it which have one.
    """
    plan: dict[str, object] = {}
    covered: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{outer}.") or not outer for outer in covered):
            continue
        for cls in type(module).__mro__:
            found = PLANS.get((cls.__module__.split(".")[0], cls.__name__))
            if found is not None:
                covered.append(name)
                plan.update(_under(name, found(module)))
                break
    return plan or None  # type: ignore[return-value]
