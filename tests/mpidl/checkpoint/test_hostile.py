"""Checkpoints made to harm: one CheckpointError on every rank, at once, and nothing in memory changed; or the truth."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpidl
from mpidl.checkpoint import import_safetensors, index, json_encoding, load, reading, save
from tests.mpidl.checkpoint.mutations import DEEP, as_text, mutated
from tests.mpidl.checkpoint.test_damage import assert_refused
from tests.mpidl.checkpoint.training import Run

pytestmark = pytest.mark.mpi


class Small(torch.nn.Module):
    """Two parameters of the shapes of each other, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.b(self.a(tokens[:, :4].float() / 37)) - self.mean).square().mean()


@pytest.fixture
def hostile(comm, shared: Path) -> tuple[Run, Path]:
    """A run, and its checkpoint of one step before."""
    run = Run("ddp" if comm.size % 2 else "stage 2", comm, Small())
    run.steps(0, 1)
    run.save(shared, 1, extra={"t": torch.arange(5), "a": [1, 2.5, (None, "x")]})
    run.steps(1, 2)
    return run, shared / "step-00000001"


def on_rank_0(comm: Any, action: Callable[[], Any]) -> None:
    if comm.rank == 0:
        action()
    comm.barrier()


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    """An index with another content, and the checksum of that."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(as_text(content, index.content_checksum))


def test_any_mutation_is_refused_on_all_ranks_or_loads_what_it_says(hostile: tuple[Run, Path]) -> None:
    run, path = hostile
    file = path / index.NAME
    sound = json.loads(file.read_text())
    run.load(path)
    weights = run.weights()
    moments = [entry["exp_avg"].clone() for entry in run.optimizer.state.values() if "exp_avg" in entry]
    rng = random.Random(run.comm.size)
    refused = 0
    for _ in range(120):
        content, what = mutated(sound, rng)
        on_rank_0(run.comm, lambda content=content: file.write_text(as_text(content, index.content_checksum)))
        try:
            loaded = run.load(path)
        except mpidl.CheckpointError:
            assert_refused(run, lambda: run.load(path), str(path), kind=None)
            refused += 1
        else:
            after = run.weights()
            assert after.keys() == weights.keys(), what
            assert all(torch.equal(after[name], value) for name, value in weights.items()), what
            found = [entry["exp_avg"] for entry in run.optimizer.state.values() if "exp_avg" in entry]
            assert all(map(torch.equal, found, moments)), what
            assert (loaded.step, loaded.micro_step) == (content["step"], content["micro_step"])
            for group, saved in zip(run.optimizer.param_groups, content["optimizer"]["groups"], strict=True):
                said = {key: json_encoding.decode(value, torch.empty) for key, value in saved["settings"].items()}
                assert {key: group[key] for key in said} == said, what
            if what.startswith(("add", "delete")):  # others put in numbers with which no training can go on
                run.steps(0, 1)
        run.comm.barrier()
    assert 40 < refused < 118
    on_rank_0(run.comm, lambda: file.write_text(json.dumps(sound)))
    assert run.load(path).step == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["optimizer"]["state"]["a.weight"].update(exp_avg="x"), "lacks exp_avg of a.weight"),
        (lambda c: c["optimizer"]["state"]["a.weight"].update(step="x"), "step is 'x', which AdamW does not keep"),
        (lambda c: c["optimizer"]["state"]["a.weight"].pop("step"), "optimizer.state of a.weight: lacks step"),
        (lambda c: c["optimizer"]["groups"][0]["settings"].update(betas="x"), "betas: is a text; needs a sequence"),
        (lambda c: c["optimizer"]["groups"][1]["settings"].update(lr="x"), "groups.1.lr: is a text; needs a number"),
        (lambda c: c["optimizer"]["groups"][1]["settings"].update(lr=None), "optimizer.groups.1: "),
        (lambda c: c["optimizer"]["groups"][1]["settings"].update(lr=-1.0), "groups.1: Invalid learning rate"),
        (lambda c: c["scheduler"].update(last_epoch="x"), "scheduler.last_epoch: is a text; needs a number"),
        (lambda c: c["scheduler"].update(optimizer=3), "scheduler: has 'optimizer', which is no part of it"),
        (lambda c: c["own"][0]["random"].update(torch=3), "the random states cannot be restored"),
        (lambda c: c["own"][0]["random"]["numpy"]["state"].update(pos=1 << 20), "the random states cannot be"),
        (lambda c: c.update(ranks=1 << 40), "own: has . entries; needs one of each of 1099511627776 ranks"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(hostile: tuple[Run, Path], change: Any, said: str) -> None:
    run, path = hostile
    on_rank_0(run.comm, lambda: changed(path / index.NAME, change))
    message = assert_refused(run, lambda: run.load(path))
    assert said in message or "own: has" in said
    assert "(on rank" not in message or "random" in said


def test_an_index_that_asks_for_more_memory_than_there_is_gets_none(hostile: tuple[Run, Path]) -> None:
    """Slices of one piece, as often as would be 80 GiB."""
    run, path = hostile

    def change(content: Any) -> None:
        entry = content["tensors"]["extra/0"]
        piece = entry["slices"][0]
        count = piece["stop"]
        many = 20_000
        entry["shape"] = [count * many]
        entry["slices"] = [{**piece, "start": n * count, "stop": (n + 1) * count} for n in range(many)]

    on_rank_0(run.comm, lambda: changed(path / index.NAME, change))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(run, lambda: run.load(path), "which another slice is")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_claim_of_large_files_is_looked_at_before_memory_is_asked_for(hostile: tuple[Run, Path], monkeypatch) -> None:
    run, path = hostile

    def change(content: Any) -> None:
        piece = content["tensors"]["extra/0"]["slices"][0]
        content["files"][piece["file"]]["bytes"] = 1 << 40

    on_rank_0(run.comm, lambda: changed(path / index.NAME, change))
    monkeypatch.setattr("mpidl.checkpoint.loading.plan_reads", None)
    assert_refused(run, lambda: run.load(path), "is cut short or damaged: has")


def special(path: Path, kind: str) -> None:
    """Something that is no regular file in place of one."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as made:
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's path is short
            try:
                made.bind(path.name)
            finally:
                os.chdir(here)


@pytest.mark.limit(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket"])
@pytest.mark.parametrize("name", ["index.json", "rank00000-000.safetensors", "latest"])
def test_what_is_no_file_is_not_waited_for(hostile: tuple[Run, Path], name: str, kind: str) -> None:
    run, path = hostile
    if name == "latest":
        on_rank_0(run.comm, lambda: special(path.parent / name, kind))
        assert run.load(path.parent).step == 1
        run.comm.barrier()
        with pytest.raises(mpidl.CheckpointError, match=r"latest: (cannot be read: Not a directory|has no index)"):
            run.load(path.parent / name)
        return
    on_rank_0(run.comm, lambda: special(path / name, kind))
    for given in (path, path.parent):
        assert_refused(run, lambda given=given: run.load(given), str(path))
    save(path.parent, Small(), step=2, process_group=run.comm)
    assert load(path.parent, Small(), process_group=run.comm).step == 2


@pytest.mark.limit(20)
def test_a_pipe_in_place_of_what_a_save_writes_first_is_not_waited_for(comm, shared: Path) -> None:
    on_rank_0(comm, lambda: os.mkfifo(shared / "latest.tmp"))
    save(shared, Small(), step=1, process_group=comm)
    assert load(shared, Small(), process_group=comm).step == 1
    assert not (shared / "latest.tmp").exists()


@pytest.mark.limit(20)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_that_are_no_file_are_not_waited_for(comm, shared: Path, name: str) -> None:
    on_rank_0(comm, lambda: os.mkfifo(shared / name))
    with pytest.raises(mpidl.CheckpointError, match="is a pipe, no regular file"):
        import_safetensors(shared, Small(), process_group=comm)
    comm.barrier()
    on_rank_0(comm, lambda: (shared / name).unlink())
    if name.endswith("json"):
        for text in (
            "[" * DEEP,
            '{"weight_map": [1]}',
            '{"weight_map": {"a": ["b"]}}',
            '{"weight_map": {"a": "../b"}}',
        ):
            on_rank_0(comm, lambda text=text: (shared / name).write_text(text))
            with pytest.raises(mpidl.CheckpointError, match=name):
                import_safetensors(shared, Small(), process_group=comm)
            comm.barrier()


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "{}", "\0"])
def test_a_newest_checkpoint_that_is_none_is_passed_over(hostile: tuple[Run, Path], text: str) -> None:
    run, path = hostile

    def spoil() -> None:
        shutil.copytree(path, path.with_name("step-00000002"))
        (path.with_name("step-00000002") / index.NAME).write_text(f'{{"format":1,"number":9,"x":{text}')

    on_rank_0(run.comm, spoil)
    assert run.load(path.parent).path == path
    assert_refused(run, lambda: run.load(path.with_name("step-00000002")), index.NAME)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("error", [TypeError("mine"), KeyError("name"), RecursionError(), MemoryError()])
def test_any_error_of_one_rank_is_one_of_all(hostile: tuple[Run, Path], monkeypatch, error: Exception) -> None:
    run, path = hostile

    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        if run.comm.rank == run.comm.size - 1:
            patched.setattr(reading.CheckpointReader, "check", fails)
        said = assert_refused(run, lambda: run.load(path), f"{type(error).__name__}: {error}")
        assert f"(on rank {run.comm.size - 1})" in said
        with pytest.raises(mpidl.CheckpointError) as raised:
            run.load(path)
        assert raised.value.__cause__ is (error if run.comm.rank == run.comm.size - 1 else None)
    assert run.load(path).step == 1


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, mpidl.optim.LAMB, mpidl.optim.LARS, mpidl.optim.Adam8bit])
def test_states_that_are_no_tensors_are_refused_for_each_class(comm, shared: Path, optimizer: Any) -> None:
    engine, settings = "ddp" if comm.size % 2 else "stage 2", {"lr": 0.01}
    if optimizer is mpidl.optim.LARS:
        settings["momentum"] = 0.9
    run = Run(engine, comm, Small(), optimizer, settings)
    run.steps(0, 1)
    run.save(shared, 1)
    file, kept = shared / "step-00000001" / index.NAME, "momentum_buffer" if "momentum" in settings else "exp_avg"

    def state_of_text(content: Any) -> None:
        del content["tensors"][f"optimizer/{kept}/a.weight"]
        content["optimizer"]["state"]["a.weight"][kept] = "x"

    def rate_below_zero(content: Any) -> None:
        content["optimizer"]["groups"][1]["settings"]["lr"] = -1.0

    sound = file.read_text()
    for change, said in [(state_of_text, f"{kept} is 'x', which"), (rate_below_zero, "optimizer.groups.1: ")]:
        on_rank_0(comm, lambda change=change: changed(file, change))
        assert said in assert_refused(run, lambda: run.load(file.parent))
        on_rank_0(comm, lambda: file.write_text(sound))
    run.load(file.parent)
