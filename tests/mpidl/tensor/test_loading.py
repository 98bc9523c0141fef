"""Models on the meta device: cut there, then given the values of files or of one process's construction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl import ConfigurationError, Mesh, broadcast_object
from mpidl.mesh import placement
from mpidl.tensor import ColumnParallel, load_safetensors, materialize, model_state_dict
from tests.mpidl.elements_read import count_elements_read
from tests.mpidl.tensor.reference import MODELS, all_in_float64, build, largest_difference, train
from tests.mpidl.tensor.test_plans import Tiny, raised_on_every_rank

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Mesh")]


@pytest.fixture
def folder(comm: Communicator, tmp_path: Path) -> Iterator[Path]:
    """A folder of rank 0's, the same on every rank."""
    yield Path(broadcast_object(comm, str(tmp_path)))
    comm.barrier()


def written(comm: Communicator, model: nn.Module, folder: Path, **settings: Any) -> Path:
    """The model's weights as its library saves them."""
    if comm.rank == 0:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder, **settings)
        else:
            states = {name: t.clone() for name, t in model.state_dict().items()}
            safetensors.torch.save_file(states, folder / "model.safetensors")
    comm.barrier()
    return folder


@pytest.mark.ranks(2, 3)
def test_of_a_cut_tensor_its_part_alone_is_read(
    comm: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(comm, build("mistral"), folder)
    read = count_elements_read(monkeypatch)
    with torch.device("meta"):
        model = MODELS["mistral"]().double()
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        load_safetensors(model, path)
        assert any(placement(p).cut is not None for p in model.parameters())
        assert read == {name: p.numel() for name, p in model.named_parameters()}


@pytest.mark.at_most(4)
@pytest.mark.each("name")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_the_meta_device_reads_its_parts(comm: Communicator, name: str, folder: Path) -> None:
    whole = build(name)
    path = written(comm, whole, folder, max_shard_size="20KB")
    with torch.device("meta"):
        model = MODELS[name]().double()
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        assert all(p.is_meta for p in model.parameters())
        ids = {name: id(p) for name, p in model.named_parameters()}
        load_safetensors(model, path)
        assert {name: id(p) for name, p in model.named_parameters()} == ids
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        assert largest_difference(model, whole) == 0.0
        for (at, buffer), expected in zip(model.named_buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, msg=at)
        assert train(model, 3) == pytest.approx(train(whole, 3), abs=1e-10)
        assert largest_difference(model, whole) < 1e-10


def test_parameters_that_a_load_replaces_are_cut_as_those_before(comm: Communicator) -> None:
    whole, model = build("llama, two key heads"), build("llama, two key heads")
    with all_in_float64(), Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        before = {name: placement(p) for name, p in model.named_parameters()}
        parts = {name: t.clone() for name, t in model.state_dict().items()}
        model.load_state_dict(parts, assign=True)
        assert {name: placement(p) for name, p in model.named_parameters()} == before
        assert train(model, 2) == pytest.approx(train(whole, 2), abs=1e-10)
        assert largest_difference(model, whole) < 1e-10


@pytest.mark.parametrize("name", ["gpt2", "qwen2, tied", "llama, one key head"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_initial_values_are_those_of_one_process(comm: Communicator, name: str, sequence_parallel: bool) -> None:
    torch.manual_seed(3)
    whole = MODELS[name]()
    after = torch.rand(3)
    torch.manual_seed(3)
    model = mpidl.deferred_init(MODELS[name])
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
        materialize(model)
        assert torch.equal(torch.rand(3), after)
        assert largest_difference(model, whole) == 0.0
        torch.testing.assert_close(train(model, 2), train(whole, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2, 3)
def test_random_values_are_the_first_ranks_on_every_rank(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    model = mpidl.deferred_init(Tiny, seed=5)
    other = mpidl.deferred_init(nn.Sequential, nn.Linear(3, 4))
    torch.manual_seed(comm.rank)
    free = mpidl.deferred_init(lambda: nn.Sequential(nn.Linear(6, 7)))
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        materialize(mpidl.parallelize(model, mesh, {"layers.*.0": ColumnParallel()}))
        assert largest_difference(model, Tiny(seed=5)) == 0.0
        materialize(mpidl.parallelize(free, mesh, {"0": ColumnParallel()}))
        torch.manual_seed(0)
        assert largest_difference(free, nn.Sequential(nn.Linear(6, 7))) == 0.0
        assert not any(p.is_meta for p in other.parameters())


@pytest.mark.ranks(1, 2)
def test_values_are_converted_and_names_changed(comm: Communicator, folder: Path) -> None:
    whole = build("hf gpt2", torch.bfloat16)
    path = written(comm, whole, folder)
    model = build("hf gpt2", torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with Mesh(tp=comm.size, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh)
        load_safetensors(model, path / "model.safetensors")
        assert largest_difference(model, whole.float()) == 0.0
        inner = build("hf gpt2").transformer
        load_safetensors(mpidl.parallelize(inner, mesh), path, rename=lambda name: name.removeprefix("transformer."))
        assert model_state_dict(inner)["wte.weight"].dtype == torch.float64


@pytest.mark.ranks(2, exactly=True)
def test_files_that_do_not_fit_are_one_line_on_every_rank(comm: Communicator, folder: Path) -> None:
    whole = Tiny()
    states = {name: t.clone() for name, t in whole.state_dict().items()}
    del states["layers.3.0.weight"]
    states["layers.3.1.weight"] = torch.zeros(2)
    states["layers.4.0.bias"] = torch.zeros(9)
    paths = [folder / f"{rank}.safetensors" for rank in range(2)]
    if comm.rank == 0:
        safetensors.torch.save_file(states, paths[0])
        safetensors.torch.save_file(dict(whole.state_dict()), paths[1])
        (folder / "torn.safetensors").write_bytes(b"abc")
    comm.barrier()
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        plan = {"layers.*.0": ColumnParallel()}
        model = mpidl.parallelize(Tiny(), mesh, plan)

        def refused(path: Any, match: str, rename: Any = None) -> None:
            raised_on_every_rank(comm, ConfigurationError, match, lambda: load_safetensors(model, path, rename=rename))

        refused(paths[0], r"missing names: layers.3.0.weight; unexpected names: layers.3.1.weight; other shapes: "
                          r"layers.4.0.bias \(has \(9,\), needs \(7,\)\)")  # fmt: skip
        refused(folder / "none", "no such file")
        refused(folder / "torn.safetensors", "cannot be read")
        refused(paths[1], r"layers\.\S+ and layers\.\S+ are both one", rename=lambda _: "one")
        refused(3, "path: got 3")
        with pytest.raises(ConfigurationError, match=r"missing names.*(on rank 0|layers.3.0.weight)"):
            load_safetensors(model, paths[comm.rank])
        tied = mpidl.parallelize(Tiny(tied=True), mesh, {"layers.*.0": ColumnParallel()})
        raised_on_every_rank(
            comm, ConfigurationError, "output.weight differs", lambda: load_safetensors(tied, paths[1])
        )


@pytest.mark.ranks(2, exactly=True)
def test_a_buffer_that_nothing_computes_is_refused_by_name(comm: Communicator, folder: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)
            self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)

    path = written(comm, Scaled(), folder)
    with torch.device("meta"):
        model = Scaled()
    deferred = mpidl.deferred_init(Scaled)
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        mpidl.parallelize(model, mesh, {"layer": ColumnParallel()})
        match = "scale is on the meta device and in no file"
        raised_on_every_rank(comm, ConfigurationError, match, lambda: load_safetensors(model, path))
        raised_on_every_rank(
            comm,
            ConfigurationError,
            "not from mpidl.deferred_init",
            lambda: materialize(nn.Linear(2, 2, device="meta")),
        )
        load_safetensors(mpidl.parallelize(deferred, mesh, {"layer": ColumnParallel()}), path)
        assert deferred.scale.tolist() == [2.0] * 6
        assert placement(deferred.layer.weight).cut is not None


@pytest.mark.ranks(2, exactly=True)
def test_a_mask_that_a_model_computes_is_there(comm: Communicator, folder: Path) -> None:
    class Masked(nn.Module):
        """Computes its mask as models of transformers do."""

        def __init__(self, config: bool) -> None:
            super().__init__()
            self.config, self.layer = config, nn.Linear(4, 6)
            self.register_buffer("causal", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)

        def _init_weights(self, module: Any) -> None:
            if module is self and self.config:
                self.causal.copy_(torch.ones(3, 3, dtype=torch.bool).tril())

    path = written(comm, Masked(True), folder)
    with torch.device("meta"):
        model, other = Masked(True), Masked(False)
    plan = {"layer": ColumnParallel()}
    with Mesh(tp=2, dp=1, comm=comm) as mesh:
        load_safetensors(mpidl.parallelize(model, mesh, plan), path)
        assert model.causal.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
        mpidl.parallelize(other, mesh, plan)
        match = "causal is on the meta device and in no file"
        raised_on_every_rank(comm, ConfigurationError, match, lambda: load_safetensors(other, path))
