"""The automatic plan on whole models: what it finds, what it leaves whole, and that the cut model computes the same."""

from __future__ import annotations

from typing import Any

import pytest

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh
from mpidl.mesh import placement
from mpidl.tensor import AttentionParallel, FeedForwardParallel
from mpidl.tensor.automatic import automatic_plan
from tests.mpidl.tensor.automatic_checks import assert_same
from tests.mpidl.tensor.automatic_families import OTHERS, REFUSED, _hf, made
from tests.mpidl.tensor.reference import MODELS, all_in_float64, build, largest_difference

pytestmark = pytest.mark.filterwarnings("ignore:Mesh")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_model_that_leaves_out_blocks_is_refused_in_pieces(comm: Communicator) -> None:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 53, "decoder_ffn_dim": 53}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "decoder_start_token_id": 2}
    model = _hf("Bart", "ForConditionalGeneration", **sizes, **heads, encoder_layerdrop=0.5)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        with pytest.raises(ConfigurationError, match=r"model\.encoder has layerdrop=0\.5"):
            mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)
        model.model.encoder.layerdrop = 0.0
        mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)


@pytest.mark.at_most(4)
@pytest.mark.mpi
@pytest.mark.brief_on(2)
@pytest.mark.each("name")
@pytest.mark.thorough(*(f"{name}-{pieces}" for name in MODELS for pieces in (False, True)))  # test_parity trains them
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_gradients_are_those_of_one_process(
    comm: Communicator, name: str, sequence_parallel: bool, capsys: Any
) -> None:
    whole, model = made(name), made(name)
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        if sequence_parallel and name in REFUSED and comm.size > 1:
            with pytest.raises(ConfigurationError, match=r"^sequence_parallel: plan='auto'"):
                mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)
            return
        if sequence_parallel and name == "opt" and comm.size > 1:  # it joins batch and sequence in a block
            with pytest.raises(ConfigurationError, match=r"sequence parallelism: got an input of shape \(\d+, 32\)"):
                mpidl.parallelize(model, mesh, "auto", sequence_parallel=True)
            return
        mpidl.parallelize(model, mesh, "auto", sequence_parallel=sequence_parallel)
        said = capsys.readouterr().out
        assert (type(model).__name__ in said) == (comm.rank == 0 and comm.size > 1)
        assert_same(model, whole)
        assert largest_difference(model, whole) == 0.0
        assert comm.size == 1 or any(placement(p).cut is not None for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "phi3"])
def test_it_finds_what_ready_plans_name(name: str) -> None:
    from mpidl.tensor.plans import styled_modules
    from mpidl.tensor.ready_plans import plan_for

    model = build(name)
    ready = plan_for(model)
    assert ready is not None
    regions = AttentionParallel | FeedForwardParallel

    def cut(plan: Any) -> set[str]:
        found = styled_modules(plan, model)
        return {name for name, _, styles in found for style in styles if isinstance(style, regions)}

    assert cut(automatic_plan(model, 2, sequence_parallel=False).plan) == cut(ready)


def test_the_report_has_a_line_for_each_pattern_with_the_reason_to_leave_it_whole() -> None:
    lines = automatic_plan(OTHERS["olmo2"](), 2, sequence_parallel=False).lines
    assert lines[0].startswith("auto plan of Olmo2ForCausalLM over 2 ranks")
    fields = {line.split()[1]: line.split(maxsplit=2) for line in lines[1:]}
    assert len(fields) == len(lines) - 1
    assert fields["model.embed_tokens"][0] == fields["lm_head"][0] == "vocabulary"
    assert fields["model.layers.*.self_attn"][::2] == ["whole", "q_norm may compute on several heads"]
    assert fields["model.layers.*.mlp"][::2] == ["feed-forward", "53 features: gate_proj, up_proj -> down_proj"]


@pytest.mark.parametrize(
    ("name", "at", "reason"),
    [
        ("bloom", "transformer.h.*.self_attention", "query_key_value"),
        ("mixtral", "model.layers.*.mlp.experts", "MixtralExperts"),
    ],
)
def test_what_cannot_be_cut_stays_whole_with_a_reason(name: str, at: str, reason: str) -> None:
    lines = automatic_plan(OTHERS[name](), 2, sequence_parallel=False).lines
    assert any(line.split()[:2] == ["whole", at] and reason in line for line in lines)
