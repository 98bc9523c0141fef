"""Weights from safetensors: a rank reads its slices; what does not fit is refused before anything changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from mpidl.errors import ConfigurationError
from mpidl.job.objects import broadcast_object
from mpidl.zero import Safetensors
from tests.mpidl.elements_read import count_elements_read
from tests.mpidl.small_models import Branching, Mixture, SmoothImages, small_gpt2
from tests.mpidl.zero.construction.test_construction import (
    BF16,
    CHOSEN,
    Initialisers,
    assert_same,
    every_chosen,
    on_meta,
    seeded,
    zero,
)

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.mpi

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": small_gpt2,
    "mixture": Mixture,
    "images": SmoothImages,
    "branching": Branching,
    "initialisers": Initialisers,
}


@pytest.fixture
def save(comm, tmp_path: Path) -> Callable[..., Path]:
    """`save(tensors, files=1)`: a directory of that many files, in which tied tensors are there once."""
    folder = Path(broadcast_object(comm, str(tmp_path)))

    def write(tensors: Mapping[str, torch.Tensor], files: int = 1) -> Path:
        if comm.rank == 0:
            once = {t.data_ptr() if t.numel() else n: n for n, t in reversed(tensors.items())}
            kept = {n: tensors[n].contiguous() for n in sorted(once.values())}
            if files == 1:
                safetensors.save_file(kept, folder / "model.safetensors")
            else:
                where = {n: f"part-{i % files}.safetensors" for i, n in enumerate(kept)}
                for name in set(where.values()):
                    safetensors.save_file({n: kept[n] for n in kept if where[n] == name}, folder / name)
                (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        comm.barrier()
        return folder

    return write


@pytest.mark.parametrize(("name", "way"), [*((name, "stage 3 gathered") for name in MODELS), ("mixture", "stage 2")])
def test_a_model_without_values_reads_them(comm, save, name: str, way: str) -> None:
    saved = seeded(3, MODELS[name])
    folder = save(saved.state_dict(), files=3 if way != "stage 2" else 1)
    torch.manual_seed(4)
    optimizer = zero(mpidl.deferred_init(MODELS[name]), comm, way, weights=folder)
    assert_same(optimizer.model_state_dict(), saved.state_dict(), comm)


@every_chosen
def test_a_plain_model_on_the_meta_device_and_a_real_one_read_them(comm, save, way: str) -> None:
    saved = seeded(3, small_gpt2)
    path = save(saved.state_dict()) / "model.safetensors"
    for model in (on_meta(small_gpt2), small_gpt2()):
        optimizer = zero(model, comm, way, weights=str(path), precision=BF16)
        assert_same(optimizer.model_state_dict(), saved.state_dict(), comm)


@every_chosen
def test_they_are_read_at_any_time_also_in_other_dtypes_and_under_other_names(comm, save, way: str) -> None:
    saved = seeded(3, Mixture).state_dict()
    halves = {f"model.{n}": t.to(torch.float16) if t.is_floating_point() else t for n, t in saved.items()}
    folder = save({**{n: t for n, t in halves.items() if n != "model.head.weight"}, "masks": torch.ones(3)})
    optimizer = zero(seeded(5, Mixture), comm, way, precision=mpidl.Precision(torch.bfloat16))
    optimizer.load_safetensors(folder, lambda name: name.removeprefix("model.") if name != "masks" else None)
    found = optimizer.model_state_dict()
    for name, value in saved.items() if comm.rank == 0 else ():
        wanted = value.to(torch.float16).to(found[name].dtype) if value.is_floating_point() else value
        assert torch.equal(found[name], wanted), name


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda t: t.pop("embed.weight"), r"missing names: embed\.weight"),
    "unexpected": (lambda t: t.update(more=torch.ones(2)), "unexpected names: more"),
    "shape": (lambda t: t.update(scale=torch.ones(2)), r"other shapes: scale \(has \(2,\), needs \(1,\)\)"),
    "tied": (lambda t: t.update({"head.weight": t["embed.weight"] + 1}), "head.weight differs from embed.weight"),
}


@pytest.mark.parametrize(("what", "way"), list(zip(WRONG, [*CHOSEN, "stage 2"], strict=True)))
def test_files_that_do_not_fit_are_refused_and_change_nothing(comm, save, what: str, way: str) -> None:
    tensors = {n: t.clone() for n, t in seeded(3, Mixture).state_dict().items() if n != "head.weight"}
    change, message = WRONG[what]
    change(tensors)
    folder = save(tensors)
    optimizer = zero(seeded(5, Mixture), comm, way)
    with pytest.raises(ConfigurationError, match=message):
        optimizer.load_safetensors(folder)
    assert_same(optimizer.model_state_dict(), seeded(5, Mixture).state_dict(), comm)
    model = mpidl.deferred_init(Mixture)
    with pytest.raises(ConfigurationError, match=message):
        zero(model, comm, way, weights=folder)
    assert all(p.is_meta for p in model.parameters())
    model = seeded(5, Mixture)
    with pytest.raises(ConfigurationError, match=message):
        zero(model, comm, way, weights=folder)
    assert_same(model.state_dict(), seeded(5, Mixture).state_dict(), comm)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@every_chosen
@pytest.mark.parametrize("when", ["at construction", "later"])
def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(comm, save, monkeypatch, when: str, way: str) -> None:
    folder = save(seeded(3, small_gpt2).state_dict())
    if when == "later":
        load = partial(zero(seeded(5, small_gpt2), comm, way).load_safetensors, folder)
    else:
        load = partial(zero, mpidl.deferred_init(small_gpt2), comm, way, weights=folder)

    def fail(*_: Any) -> None:
        raise OSError("deliberate")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr("mpidl.zero.construction.file_values.elements", fail)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors cannot be read: deliberate"):
        load()


def test_files_that_are_not_there_or_no_safetensors_are_named(comm, save) -> None:
    folder = save({"a": torch.ones(1)})
    optimizer = zero(seeded(5, small_gpt2), comm, "stage 3")
    with pytest.raises(ConfigurationError, match=r"nowhere.*no such file"):
        optimizer.load_safetensors(folder / "nowhere")
    comm.barrier()
    if comm.rank == 0:
        (folder / "bad.safetensors").write_bytes(b"not tensors")
        (folder / "model.safetensors.index.json").write_text("[]")
    comm.barrier()
    with pytest.raises(ConfigurationError, match=r"bad\.safetensors cannot be read"):
        optimizer.load_safetensors(folder / "bad.safetensors")
    with pytest.raises(ConfigurationError, match="weight_map"):
        optimizer.load_safetensors(folder)
    for text, message in (
        ("[" * 100_000, "nested too deeply"),
        ('{"weight_map": {"a": 3}}', r"'a' is in 3; needs the name of a file"),
        ('{"weight_map": {"a": ["b"]}}', "needs the name of a file"),
        ('{"weight_map": {"a": "../bad.safetensors"}}', "in the same directory"),
        (f'{{"weight_map": {{"a": "{folder}/bad.safetensors"}}}}', "in the same directory"),
    ):
        if comm.rank == 0:
            (folder / "model.safetensors.index.json").write_text(text)
        comm.barrier()
        with pytest.raises(ConfigurationError, match=rf"index\.json: .*{message}"):
            optimizer.load_safetensors(folder)
        comm.barrier()
    if comm.rank == 0:
        (folder / "model.safetensors.index.json").unlink()
        os.mkfifo(folder / "model.safetensors.index.json")
    comm.barrier()
    with pytest.raises(ConfigurationError, match="is a pipe, no regular file"):
        zero(seeded(5, small_gpt2), comm, "stage 3", weights=folder)
    # A file that only one rank finds.
    path = folder / "model.safetensors" if comm.rank == 0 else folder / "nowhere.safetensors"
    if comm.size > 1:
        with pytest.raises(ConfigurationError):
            zero(mpidl.deferred_init(small_gpt2), comm, "stage 3", weights=Safetensors(path))


def test_a_rank_reads_no_more_rows_than_hold_its_slices(comm, save, monkeypatch) -> None:
    folder = save({"weight": torch.arange(600.0).view(60, 10), "bias": torch.zeros(60)})
    read = count_elements_read(monkeypatch)
    optimizer = zero(on_meta(lambda: nn.Linear(10, 60)), comm, "stage 3", weights=folder)
    line = 16  # elements, with which parameters and shards begin; and at both ends a row of which it has a part
    assert 660 / comm.size - 2 * line <= read.total() <= 660 / comm.size + 2 * line + 20
    found = optimizer.model_state_dict()
    assert comm.rank or torch.equal(found["weight"], torch.arange(600.0).view(60, 10))


def test_training_goes_on_from_them_between_passes(comm, save) -> None:
    saved = seeded(3, small_gpt2)
    folder = save(saved.state_dict())
    tokens = torch.arange(8)[None] % 37
    for way in ("stage 2", "stage 3", "stage 3 gathered"):
        model = seeded(5, small_gpt2)
        optimizer = zero(model, comm, way)
        model(tokens, tokens)  # a unit is left whole, as no backward pass follows
        optimizer.load_safetensors(folder)
        assert torch.equal(model(tokens, tokens), saved(tokens, tokens))


class Adapted(nn.Module):
    """A linear layer of a file, with an adapter that the file lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(5, 7), nn.Parameter(torch.ones(3))
        self.down, self.up = nn.Parameter(torch.empty(2, 5)), nn.Linear(2, 7, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down)
        nn.init.constant_(self.scale, 4.0)
        self.base.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(x @ self.down.t())


ADAPTER = ("down", "up.weight")


@pytest.mark.parametrize("build", [mpidl.deferred_init, on_meta, lambda make: make()], ids=["deferred", "meta", "real"])
@every_chosen
def test_files_may_lack_what_is_said_to_be_missing(comm, save, way: str, build: Callable[[Any], nn.Module]) -> None:
    saved, other = seeded(3, Adapted).state_dict(), seeded(8, Adapted).state_dict()
    folder = save({name: t for name, t in saved.items() if name not in ADAPTER})
    given = Safetensors(folder, missing=ADAPTER.__contains__)
    torch.manual_seed(8)
    found = zero(build(Adapted), comm, way, weights=given, precision=BF16).model_state_dict()
    expected = {name: other[name] if name in ADAPTER else saved[name] for name in saved}
    if build is on_meta and comm.rank == 0:  # which initialises in the order of the modules
        assert all(found[name].isfinite().all() and found[name].std() > 0.1 for name in ADAPTER)
        found.update((name, expected[name]) for name in ADAPTER)
    assert_same(found, expected, comm)


@every_chosen
def test_an_init_fn_sets_what_files_lack(comm, save, way: str) -> None:
    saved = seeded(3, Adapted).state_dict()

    def ones(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.ones_(p)

    given = Safetensors(
        save({n: t for n, t in saved.items() if n not in ADAPTER}), missing=lambda name: name != "scale"
    )
    found = zero(on_meta(Adapted), comm, way, weights=given, init_fn=ones).model_state_dict()
    assert_same(found, {n: torch.ones_like(t) if n in ADAPTER else t for n, t in saved.items()}, comm)


@every_chosen
def test_later_loading_leaves_what_files_lack(comm, save, way: str) -> None:
    saved, other = seeded(3, Adapted).state_dict(), seeded(8, Adapted).state_dict()
    folder = save({name: t for name, t in saved.items() if name not in ADAPTER})
    optimizer = zero(seeded(8, Adapted), comm, way, precision=BF16)
    optimizer.load_safetensors(folder, missing=ADAPTER.__contains__)
    expected = {name: other[name] if name in ADAPTER else saved[name] for name in saved}
    assert_same(optimizer.model_state_dict(), expected, comm)
    optimizer.model(torch.ones(2, 5)).float().sum().backward()
    optimizer.step()
    optimizer.model.down.data = torch.ones(2, 5)
    with pytest.raises(mpidl.TrainingError, match="down"):
        optimizer.load_safetensors(folder, missing=ADAPTER.__contains__)


def test_what_files_lack_must_be_said_and_the_same_on_all_ranks(comm, save) -> None:
    tensors = dict(seeded(3, Mixture).state_dict())
    folder = save({n: t for n, t in tensors.items() if n not in ("embed.weight", "head.weight")})
    for missing, message in (
        (lambda name: name == "head.weight", r"missing names: embed\.weight"),  # of a tensor that has two
        (["head.weight"], r"missing: got \['head.weight'\]; needs a function"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            zero(mpidl.deferred_init(Mixture), comm, "stage 3", weights=Safetensors(folder, missing=missing))
    drop = "scale" if comm.rank else None
    if comm.size > 1:
        given = Safetensors(folder, lambda name: None if name == drop else name, lambda _: True)
        with pytest.raises(mpidl.ModelMismatch, match="weights: rank 0 has missing names="):
            zero(mpidl.deferred_init(Mixture), comm, "stage 3", weights=given)


def test_weights_are_no_advice_for_what_they_cannot_give(comm, save) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("angles", torch.arange(3.0), persistent=False)

    folder = save({"weight": torch.ones(3)})
    with pytest.raises(ConfigurationError, match=r"angles .*meta device.*or give init_fn=$"):
        zero(on_meta(Turned), comm, "stage 3", weights=folder)
    with pytest.raises(ConfigurationError, match=r"weight .*meta device.*or give init_fn= or weights=$"):
        zero(on_meta(Turned), comm, "stage 3")
