"""A rank's parts of a cut model are not written as the model: what would do so is one line, on that rank alone."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import Mesh, UsageError
from mpidl.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, model_state_dict
from tests.mpidl.tensor.reference import build, loss_of, tokens

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


def saved(states: Any) -> Any:
    """Contents read back from a file."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_parts_of_a_state_dict_are_not_pickled(comm: Communicator, rank: int) -> None:
    """By one rank alone, on which it is one line, while others come to the next collective call."""
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        plain = build("gpt2").state_dict()
        model = mpidl.parallelize(build("gpt2"), mesh)
        if comm.rank == rank:
            for states in (model.state_dict(), {"epoch": 3, "model": [nn.Sequential(model).state_dict()]}):
                with pytest.raises(UsageError, match=rf"rank {rank} of {comm.size} of tp, .*model_state_dict") as error:
                    saved(states)
                assert "\n" not in str(error.value)
            own = model.state_dict()
            assert same(saved(dict(own)), own)
        whole = model_state_dict(model)
        assert same(saved(whole), plain)
        engine = mpidl.DistributedDataParallel(model, mesh=mesh)
        assert same(saved(model_state_dict(engine)), plain)
        assert same(saved(mpidl.unparallelize(engine).state_dict()), plain)


@pytest.mark.ranks(2)
def test_parts_are_copied_and_loaded_again_in_the_process(comm: Communicator) -> None:
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        model = mpidl.parallelize(build("gpt2"), mesh)
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        model.load_state_dict(before)
        assert same(model_state_dict(model), build("gpt2").state_dict())
        with pytest.raises(UsageError, match="model_state_dict"):
            saved(before)
        copied = copy.deepcopy(model)
        with pytest.raises(UsageError, match="model_state_dict"):
            saved(copied.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: ColumnParallelLinear(4, 6, mesh=mesh),
        lambda mesh: RowParallelLinear(4, 6, mesh=mesh),
        lambda mesh: VocabParallelEmbedding(7, 4, mesh=mesh),
    ],
    ids=["column", "row", "vocabulary"],
)
def test_layers_that_a_model_is_written_with_refuse_it_too(
    comm: Communicator, make: Callable[[Mesh], nn.Module]
) -> None:
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        model = nn.Sequential(OrderedDict(first=make(mesh), last=nn.Linear(4, 4)))
        with pytest.raises(UsageError, match="model_state_dict"):
            saved(model.state_dict())
        assert saved(model_state_dict(model)).keys() == model.state_dict().keys()
        assert saved(model.last.state_dict()).keys() == {"weight", "bias"}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["hf gpt2", "qwen2, tied"])
def test_save_pretrained_takes_whole_tensors_alone(comm: Communicator, tmp_path: Path, name: str) -> None:
    whole: Any = build(name)
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        model: Any = mpidl.parallelize(build(name), mesh)
        if comm.rank == comm.size - 1:
            for parts in ({}, {"state_dict": None}, {"state_dict": model.state_dict()}):
                match = (
                    rf"{type(model).__name__}.save_pretrained on rank {comm.rank} of {comm.size} of tp: .* state_dict="
                )
                with pytest.raises(UsageError, match=match) as error:
                    model.save_pretrained(tmp_path, **parts)
                assert "\n" not in str(error.value)
            assert not list(tmp_path.iterdir())
        states = model_state_dict(model)
        if comm.rank == comm.size - 1:
            model.save_pretrained(tmp_path, state_dict=states)
            read = type(whole).from_pretrained(tmp_path)
            assert same(read.state_dict(), whole.state_dict())
            whole.save_pretrained(tmp_path / "plain")
            assert len({(path / "config.json").read_text() for path in (tmp_path, tmp_path / "plain")}) == 1
            assert torch.equal(loss_of(read, tokens(0)), loss_of(whole, tokens(0)))
        mpidl.unparallelize(model)
        model.save_pretrained(tmp_path / "again")
        assert same(type(whole).from_pretrained(tmp_path / "again").state_dict(), whole.state_dict())


@pytest.mark.ranks(2)
def test_adapters_are_saved_whole(comm: Communicator, tmp_path: Path) -> None:
    import peft

    def adapted() -> Any:
        model: Any = peft.get_peft_model(build("hf gpt2"), peft.LoraConfig(r=3, target_modules=["c_attn", "c_proj"]))
        torch.manual_seed(3)
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p)
        return model

    whole, model = adapted(), mpidl.parallelize(adapted(), mesh := Mesh(tp=comm.size, dp=1, comm=comm))
    with mesh:
        with pytest.raises(UsageError, match="PeftModel"):
            model.save_pretrained(tmp_path / str(comm.rank))
        states = model_state_dict(model)
        if comm.rank == 0:
            model.save_pretrained(tmp_path, state_dict=states)
            read = peft.PeftModel.from_pretrained(build("hf gpt2"), tmp_path)
            assert torch.equal(loss_of(read, tokens(0)), loss_of(whole, tokens(0)))
