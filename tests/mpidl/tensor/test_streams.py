"""Streams of random numbers: dropout agrees over tp where data agree, and differs where data differ."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import mpidl
from collectives import Communicator
from mpidl import Mesh, TrainingError
from mpidl.checkpoint import load, save
from mpidl.job.objects import all_gather_object
from mpidl.models import gpt2
from mpidl.tensor import FeedForwardParallel
from mpidl.tensor.tensor_parallel import Dropouts
from tests.mpidl.tensor.reference import all_in_float64, loss_of, tokens, train
from tests.mpidl.tensor.with_dropout import REGIONS_OF_LAYERS, build, seeded

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh", "ignore:.gradient_checkpointing_enable")]


class Masks(TorchFunctionMode):
    """Collects what each dropout keeps, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if func is F.dropout:
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            self.kept.append(func(torch.ones_like(args[0]), **kwargs) != 0)
            assert torch.equal(torch.get_rng_state(), after)  # the same numbers were drawn
        return result


def masks_of(model: nn.Module) -> list[torch.Tensor]:
    """Kept elements of each dropout of a forward and backward pass."""
    with Masks() as masks:
        loss = loss_of(model, tokens(0))
    loss.backward()
    return masks.kept


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_agree_over_tp_where_data_agree_and_differ_where_data_differ(
    comm: Communicator, sequence_parallel: bool
) -> None:
    model = build("hf gpt2, eager")
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        everyone = all_gather_object(comm, seeded(lambda: masks_of(model)))
    embeddings, *in_blocks = zip(*everyone, strict=True)
    assert len(in_blocks) == 2 * 3
    assert all(torch.equal(mask, embeddings[0]) for mask in embeddings)
    for number, masks in enumerate(in_blocks):
        if number % 3 == 0:  # of attentions: [batch, heads, q, k]; two heads of a rank differ as well
            first = [mask[:, 0] for mask in masks] + [mask[:, 1] for mask in masks if mask.shape[1] > 1]
        else:  # of residuals: [batch, sequence, width]
            first = [mask[:, : min(m.shape[1] for m in masks)] for mask in masks]
        pairs = [(a, b) for n, a in enumerate(first) for b in first[:n]]
        if number % 3 and not sequence_parallel:
            assert all(torch.equal(a, b) for a, b in pairs)
        else:
            assert not any(torch.equal(a, b) for a, b in pairs)
            same = [(a == b).double().mean().item() for a, b in pairs]
            share = masks[0].double().mean().item()
            assert max(same) < share**2 + (1 - share) ** 2 + 0.1  # as of independent ones


@pytest.mark.ranks(2, 3)
def test_masks_of_pieces_differ_where_the_first_block_has_no_dropout(comm: Communicator) -> None:
    model = build("hf gpt2, eager")
    for module in model.transformer.h[0].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        everyone = all_gather_object(comm, seeded(lambda: masks_of(model)))
        for of_residuals in list(zip(*everyone, strict=True))[-2:]:
            first = [mask[:, : min(m.shape[1] for m in of_residuals)] for mask in of_residuals]
            assert not any(torch.equal(a, b) for n, a in enumerate(first) for b in first[:n])
        assert _states_agree(comm)


@pytest.mark.ranks(2, 3)
def test_a_copy_looks_at_its_own_dropout(comm: Communicator) -> None:
    model = build("hf gpt2, eager")
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        copied = copy.deepcopy(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for name in [name for name in vars(model.config) if "drop" in name]:
            setattr(model.config, name, 0.0)
        everyone = all_gather_object(comm, seeded(lambda: masks_of(copied)))
    for of_residuals in list(zip(*everyone, strict=True))[2::3]:
        first = [mask[:, : min(m.shape[1] for m in of_residuals)] for mask in of_residuals]
        assert not any(torch.equal(a, b) for n, a in enumerate(first) for b in first[:n])


@pytest.mark.ranks(4, exactly=True)
@pytest.mark.parametrize("dropout", ["streams", "by_index"])
def test_masks_differ_over_dp(comm: Communicator, dropout: str) -> None:
    model = build("hf gpt2, eager")
    with Mesh(tp=2, dp=2, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, dropout=dropout)
        torch.manual_seed(1 + mesh.rank("dp"))
        drawn = []
        with pytest.MonkeyPatch.context() as patch:
            plain = mpidl.tensor.dropout.kept_elements
            patch.setattr(
                mpidl.tensor.dropout, "kept_elements", lambda *args: (drawn.append(plain(*args)), drawn[-1])[1]
            )
            masks = masks_of(model) if dropout == "streams" else (loss_of(model, tokens(0)), drawn)[1]
        over_dp = all_gather_object(mesh["dp"], masks)
        over_tp = all_gather_object(mesh["tp"], masks)
    assert len(masks) == 7
    for number in range(7):
        a, b = (kept[number] for kept in over_dp)
        assert not torch.equal(a, b)
        if number % 3 != 1:
            assert torch.equal(over_tp[0][number], over_tp[1][number])


def _states_agree(comm: Communicator) -> bool:
    states = all_gather_object(comm, torch.get_rng_state())
    return all(torch.equal(state, states[0]) for state in states)


@pytest.mark.each("checkpoints")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["hf gpt2", "llama"])
@pytest.mark.parametrize("checkpoints", ["none", "reentrant", "not reentrant", "mpidl's", "mpidl's of attentions"])
def test_the_default_generator_is_in_one_state_after_every_pass(
    comm: Communicator, name: str, sequence_parallel: bool, checkpoints: str
) -> None:
    """Also do activations that are computed again get the random numbers that they had."""
    kept, model = build(name), build(name)
    with all_in_float64(), Mesh(tp=comm.size, comm=comm) as mesh:
        for each in (kept, model):
            mpidl.parallelize(each, mesh, sequence_parallel=sequence_parallel)
        if checkpoints.startswith("mpidl"):
            attention = type(
                model.get_submodule("transformer.h.0.attn" if "gpt2" in name else "model.layers.0.self_attn")
            )
            mpidl.activations.checkpoint_modules(model, attention if "attention" in checkpoints else None)
        elif checkpoints != "none":
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        for step in range(2):
            for each in (kept, model):
                torch.manual_seed(step)
                loss = loss_of(each, tokens(step))
                assert _states_agree(comm)
                state = torch.get_rng_state()
                loss.backward()
                assert torch.equal(torch.get_rng_state(), state)
        for (at, p), q in zip(model.named_parameters(), kept.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=at)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dropout", ["streams", "by_index"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("module", [gpt2.Block, gpt2.Attention, gpt2.MLP])
def test_modules_called_again_by_a_checkpoint_get_their_random_numbers_again(
    comm: Communicator, module: type[nn.Module], reentrant: bool, dropout: str, sequence_parallel: bool
) -> None:
    """Also their hooks run again there, and a stream that one begins has no end."""
    kept, model = build("gpt2"), build("gpt2")

    def call(self: nn.Module, x: torch.Tensor, *rest: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(
            lambda x: nn.Module.__call__(self, x, *rest), x, use_reentrant=reentrant
        )

    with Mesh(tp=comm.size, comm=comm) as mesh:
        for each in (kept, model):
            mpidl.parallelize(each, mesh, dropout=dropout, sequence_parallel=sequence_parallel)
        for step in range(2):
            for each in (kept, model):
                torch.manual_seed(step)
                with pytest.MonkeyPatch.context() as patch:
                    if each is model:
                        patch.setattr(module, "__call__", call)
                    loss_of(each, tokens(step)).backward()
                assert _states_agree(comm)
        for (at, p), q in zip(model.named_parameters(), kept.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=at)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dropout", ["streams", "by_index"])
@pytest.mark.parametrize("place", ["h.0", "h.1.attn", "h.1.attn.c_proj", "h.1.mlp.act", "h.1.ln_2", "ln_f"])
def test_a_failed_forward_pass_leaves_the_generator_in_one_state(
    comm: Communicator, place: str, dropout: str, sequence_parallel: bool
) -> None:
    model, other = build("hf gpt2"), build("hf gpt2")
    with all_in_float64(), Mesh(tp=comm.size, comm=comm) as mesh:
        for each in (model, other):
            mpidl.parallelize(each, mesh, dropout=dropout, sequence_parallel=sequence_parallel)
        for error in (RuntimeError, KeyboardInterrupt):  # torch calls no hooks after the second one

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error("here")

            handle = model.get_submodule(f"transformer.{place}").register_forward_pre_hook(fail)
            with pytest.raises(error, match="here"):
                loss_of(model, tokens(0))
            if error is RuntimeError:
                assert _states_agree(comm)
            handle.remove()
        model.eval()(tokens(0))  # which ends what the pass left
        assert _states_agree(comm)
        model.train()
        assert seeded(lambda: train(model, 2)) == seeded(lambda: train(other, 2))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dropout", ["streams", "by_index"])
def test_training_resumes_to_the_bit(comm: Communicator, dropout: str, sequence_parallel: bool, tmp_path: Path) -> None:
    shared = all_gather_object(comm, tmp_path)[0]
    with Mesh(tp=comm.size, comm=comm) as mesh:

        def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = build("gpt2", torch.float32)
            mpidl.parallelize(model, mesh, dropout=dropout, sequence_parallel=sequence_parallel)
            return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

        first, of_first = begin()
        seeded(lambda: train(first, 3, of_first))
        save(shared, first, of_first, step=3, mesh=mesh)
        losses = train(first, 3, of_first)
        second, of_second = begin()
        torch.manual_seed(99)
        load(shared, second, of_second, mesh=mesh)
        assert train(second, 3, of_second) == losses
        for (name, p), q in zip(second.named_parameters(), first.parameters(), strict=True):
            assert torch.equal(p, q), name


@pytest.mark.ranks(2, 3)
def test_a_plan_of_single_layers_has_streams_between_them(comm: Communicator) -> None:
    """13 features, of which the ranks draw different numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 13), nn.Dropout(0.5), nn.Linear(13, 4), nn.Dropout(0.5))
    plan = {"0": mpidl.tensor.ColumnParallel(), "2": mpidl.tensor.RowParallel()}
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, plan)
        with Masks() as masks:
            y = seeded(lambda: model(torch.ones(64, 4)))
        assert _states_agree(comm)
        features, outputs = zip(*all_gather_object(comm, masks.kept), strict=True)
    assert all(torch.equal(mask, outputs[0]) for mask in outputs)
    assert not torch.equal(features[0][:, :4], features[1][:, :4])
    assert y.shape == (64, 4)


@pytest.mark.ranks(2, exactly=True)
def test_several_column_parallel_layers_share_a_stream(comm: Communicator) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 13), nn.Linear(4, 13), nn.Linear(13, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.down(F.dropout(self.gate(x)) * F.dropout(self.up(x))))

    torch.manual_seed(0)
    column = mpidl.tensor.ColumnParallel()
    with Mesh(tp=2, comm=comm) as mesh:
        model = mpidl.parallelize(
            nn.Sequential(Gated()), mesh, {"0.gate": column, "0.up": column, "0.down": mpidl.tensor.RowParallel()}
        )
        y = model(torch.ones(64, 4))
        assert _states_agree(comm)
        everyone = all_gather_object(comm, y.detach())
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.at_most(4)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("region", REGIONS_OF_LAYERS)
def test_a_region_that_begins_at_a_layer_has_streams_up_to_its_end(comm: Communicator, region: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(region(), nn.Dropout(0.5))
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, "auto")
        with Masks() as masks:
            y = seeded(lambda: model(torch.ones(8, 16, 8)))
        assert _states_agree(comm)
        assert len(masks.kept) == 2
        everyone = all_gather_object(comm, (masks.kept[0].flatten(), masks.kept[1], y.detach()))
    inside, behind, outputs = zip(*everyone, strict=True)
    count = min(mask.numel() for mask in inside)
    assert not torch.equal(inside[0][:count], inside[1][:count])
    assert all(torch.equal(mask, behind[0]) for mask in behind)
    assert all(torch.equal(other, outputs[0]) for other in outputs)


class DropsItsInput(nn.Module):
    """A feed-forward network, the module that is cut, which drops elements of its input first."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.up, self.down = nn.Dropout(0.5), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(self.drop(x))))  # type: ignore[no-any-return]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("plan", ["auto", {"0": FeedForwardParallel(("up",), "down", input="x")}], ids=["auto", "plan"])
def test_a_dropout_of_the_input_in_a_region_is_the_same_on_all_ranks(comm: Communicator, plan: Any) -> None:
    """The sum of the input's gradient is behind it, in the layer."""
    torch.manual_seed(0)
    model, x = nn.Sequential(DropsItsInput()).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    whole, ours, theirs = copy.deepcopy(model), x.clone().requires_grad_(), x.clone().requires_grad_()
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, plan)
        with Masks() as masks:
            y = seeded(lambda: model(ours))
        y.square().sum().backward()
        assert _states_agree(comm)
    network = whole[0]
    expected = network.down(F.relu(network.up(theirs * masks.kept[0] * 2)))
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


class Network(nn.Module):
    """13 features, of which the ranks draw different numbers. where: of the rate of dropout."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.p, self.settings = where, 0.5 * (where == "p"), SimpleNamespace(dropout=0.0)
        self.rates: dict[str, float] = {}
        if where == "config":
            self.settings.dropout = 0.5
        elif where == "dict":
            self.rates["hidden_dropout"] = 0.5
        self.up, self.down = nn.Linear(4, 13), nn.Linear(13, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        rate = self.p + self.settings.dropout + self.rates.get("hidden_dropout", 0.0)
        return self.down(F.dropout(h, rate, self.training))  # type: ignore[no-any-return]


class Literal(Network):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(self.up(x), p=0.25, training=self.training))  # type: ignore[no-any-return]


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("where", ["config", "dict", "p", "literal"])
def test_a_rate_is_seen_wherever_it_is(comm: Communicator, where: str) -> None:
    torch.manual_seed(5)
    network = (Literal if where == "literal" else Network)(where)
    style = mpidl.tensor.FeedForwardParallel(inputs=("up",), output="down", input="x")
    with Mesh(tp=2, comm=comm) as mesh:
        model = mpidl.parallelize(nn.Sequential(network), mesh, {"0": style})
        model(torch.ones(64, 4))
        assert _states_agree(comm)


class Configured(nn.Module):
    """A network whose rate of dropout its settings have."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings, self.up, self.down = settings, nn.Linear(4, 13), nn.Linear(13, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.changed(self.up(x)))  # type: ignore[no-any-return]

    def changed(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(h, self.settings.rate, self.training)


class Nested(Configured):
    def changed(self, h: torch.Tensor) -> torch.Tensor:
        rate = self.settings.features.rate if self.training else 0.0
        return F.dropout(h, p=rate)


class AsArgument(Configured):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropped(self.up(x), *self.settings))  # type: ignore[no-any-return]

    def dropped(self, h: torch.Tensor, rate: float) -> torch.Tensor:
        return F.dropout(h, rate, self.training)


class Noisy(Configured):
    def changed(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.randn_like(h)


class Written(Configured):
    def changed(self, h: torch.Tensor) -> torch.Tensor:
        return h.relu()

    def sample(self) -> torch.Tensor:
        return torch.rand(3)


@dataclass(slots=True)
class Slots:
    rate: float


class Rates(NamedTuple):
    rate: float


@pytest.mark.ranks(1, 2)
def test_what_may_draw_random_numbers_is_found() -> None:
    slots, features = Slots(0.5), SimpleNamespace(rate=0.5)
    drawing = [Configured(slots), Configured(Rates(0.5)), Nested(SimpleNamespace(features=features))]
    for network in (*drawing, AsArgument([0.0]), Noisy(None), nn.RReLU()):
        assert Dropouts(nn.Sequential(network)), network
    judged = Dropouts(nn.Sequential(drawing[0], drawing[2]))
    for rate in (0.0, 0.1):
        slots.rate = features.rate = rate
        assert bool(judged) == (rate > 0.0)
    for network in (Configured(Slots(0.0)), Configured(Rates(0.0)), Written(None), nn.ReLU()):
        assert not Dropouts(nn.Sequential(network)), network


@pytest.mark.ranks(2, 3, 4)
def test_sequences_shorter_than_the_ranks_are_one_error_in_training(comm: Communicator) -> None:
    model = build("gpt2")
    short = tokens(0)[:, : comm.size - 1]
    with Mesh(tp=comm.size, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=True)
        with pytest.raises(TrainingError, match=f"{comm.size - 1} tokens on {comm.size} ranks"):
            model(short)
        assert model.eval()(short).shape[:2] == short.shape
        train(model.train(), 1)
