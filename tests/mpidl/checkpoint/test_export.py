"""Plain weights out and in, transformers as the judge; and the command."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mpidl
from mpidl.checkpoint import export_checkpoint, export_safetensors, folder, import_safetensors
from mpidl.checkpoint.__main__ import main
from mpidl.checkpoint.exporting import byte_count
from mpidl.ending import UNFINISHED
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.models.pretrained import load_pretrained
from tests.harness import launch
from tests.mpidl.checkpoint.training import ENGINES, Run
from tests.mpidl.models import MODELS, SMALL_GPT2, fresh

mpi = pytest.mark.mpi
TOKENS = torch.arange(16).view(2, 8)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By the index of several files, or of the only one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {}
    for name, file in weight_map.items():
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found[name] = opened.get_tensor(name)
    return found


def logits_of_transformers(folder: Path) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model, told = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@mpi
@pytest.mark.parametrize("size", ["5GB", 30_000])
@pytest.mark.parametrize("engine", ["plain", *ENGINES])
def test_an_exported_gpt2_gives_the_same_logits_in_transformers(comm, shared: Path, engine: str, size: Any) -> None:
    run = Run(engine, comm)
    if engine != "plain":
        run.steps(0, 1)
    export_safetensors(shared / "out", run.call, max_shard_size=size, process_group=comm)
    expected = run.weights()
    if comm.rank == 0:
        found = all_tensors(shared / "out")
        assert found.keys() == expected.keys() - {"lm_head.weight"}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        files = sorted(path.name for path in (shared / "out").glob("*.safetensors"))
        if size != "5GB":
            assert len(files) > 1
            assert all((shared / "out" / name).stat().st_size < size + 3000 for name in files)
        plain = GPT2(SMALL_GPT2)
        plain.load_state_dict(expected)
        with torch.no_grad():
            torch.testing.assert_close(logits_of_transformers(shared / "out"), plain(TOKENS), rtol=1e-5, atol=1e-6)
            again = load_pretrained(shared / "out")
            assert torch.equal(again(TOKENS), plain(TOKENS))
    comm.barrier()
    # Once more over it, in another number of files: nothing of the former is left.
    export_safetensors(shared / "out", run.call, max_shard_size=8_000, dtype=torch.bfloat16, process_group=comm)
    if comm.rank == 0:
        left = {path.name for path in (shared / "out").iterdir()}
        weight_map = json.loads((shared / "out" / "model.safetensors.index.json").read_text())["weight_map"]
        assert left == {*weight_map.values(), "config.json", "model.safetensors.index.json"}
        for name, tensor in all_tensors(shared / "out").items():
            assert torch.equal(tensor, expected[name].bfloat16())


@mpi
@pytest.mark.parametrize("engine", ["plain", *ENGINES])
@pytest.mark.parametrize("files", ["one", "several"])
def test_weights_of_transformers_come_in(comm, shared: Path, engine: str, files: str) -> None:
    transformers = pytest.importorskip("transformers")
    if comm.rank == 0:
        torch.manual_seed(5)
        config = transformers.GPT2Config(vocab_size=37, n_positions=8, n_layer=3, n_head=2, n_embd=16)
        theirs = transformers.GPT2LMHeadModel(config).eval()
        theirs.save_pretrained(shared / "hf", max_shard_size="5GB" if files == "one" else "30KB")
        with torch.no_grad():
            expected = theirs(TOKENS).logits
    comm.barrier()
    settings = {"precision": mpidl.Precision(torch.bfloat16)} if engine == "zero3" else {}
    run = Run(engine, comm, **settings)
    import_safetensors(shared / "hf", run.call, process_group=comm)
    weights = run.weights()
    if comm.rank == 0:
        plain = GPT2(SMALL_GPT2)
        plain.load_state_dict(weights)
        with torch.no_grad():
            torch.testing.assert_close(plain(TOKENS), expected, rtol=1e-5, atol=1e-6)
    narrow = Run(engine, comm, GPT2(GPT2Config(vocab_size=37, block_size=8, layers=3, heads=2, embd=8)))
    with pytest.raises(mpidl.CheckpointError, match=r"is of another model.*of another shape: transformer.wte.weight"):
        import_safetensors(shared / "hf", narrow.call, process_group=comm)


@mpi
def test_what_cannot_be_imported_or_exported_is_refused(comm, shared: Path) -> None:
    model = fresh(MODELS["gpt2"])
    with pytest.raises(mpidl.CheckpointError, match=r"model.safetensors: cannot be opened: No such file"):
        import_safetensors(shared / "nothing", model, process_group=comm)
    if comm.rank == 0:
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tensors["lm_head.weight"] += 1
        save_file(tensors, shared / "model.safetensors")
    comm.barrier()
    with pytest.raises(mpidl.CheckpointError, match=r"lm_head.weight differs from transformer.wte.weight"):
        import_safetensors(shared, model, process_group=comm)
    with pytest.raises(mpidl.CheckpointError, match=r"model.safetensors"):
        export_safetensors(shared / "model.safetensors" / "below", model, process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match="max_shard_size: got '5 apples'"):
        export_safetensors(shared, model, max_shard_size="5 apples", process_group=comm)
    with pytest.raises(mpidl.ConfigurationError, match=r"dtype: got torch.int8"):
        export_safetensors(shared, model, dtype=torch.int8, process_group=comm)


@mpi
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_a_checkpoint_is_exported_without_its_model(comm, shared: Path, engine: str) -> None:
    run = Run(engine, comm, fresh(MODELS["mixture"]), **({"find_unused_parameters": True} if engine == "ddp" else {}))
    run.steps(0, 1)
    saving = run.save(shared, 1)
    export_safetensors(shared / "model", run.call, process_group=comm)
    if comm.rank == 0:
        export_checkpoint(saving.path, shared / "checkpoint")
        found = all_tensors(shared / "checkpoint")
        assert found.keys() == all_tensors(shared / "model").keys()
        for name, tensor in all_tensors(shared / "model").items():
            assert torch.equal(tensor, found[name]), name
        assert "calls" in found  # a buffer
        assert "head.weight" not in found  # tied


def test_sizes() -> None:
    given = (1, "5GB", "1.5 MB", "2KiB")
    assert [byte_count(size) for size in given] == [1, 5 * 10**9, 1_500_000, 2048]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints of a GPT-2, saved by one process."""
    torch.manual_seed(1)
    model = GPT2(SMALL_GPT2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    for step in (1, 2):
        mpidl.checkpoint.save(tmp_path, model, optimizer, step=step)
    return tmp_path


def test_the_command_shows_and_verifies(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"complete  {saved / 'step-00000002'}  step 2, ")
    assert out.count("newest") == 1
    assert main(["inspect", str(saved / "step-00000001"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parameters = sum(p.numel() for p in GPT2(SMALL_GPT2).parameters())
    assert (found["step"], found["parameters"], found["optimizer"]) == (1, parameters, "AdamW (exp_avg, exp_avg_sq)")
    assert main(["inspect", str(saved / "step-00000001"), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert f"parameters  {parameters:,}" in out
    assert "optimizer/exp_avg/transformer.wte.weight  float32 (37, 16)  0:592 in rank00000-000.safetensors" in out
    assert main(["verify", str(saved)]) == 0
    assert f"{saved / 'step-00000002'}: good: " in capsys.readouterr().out


def test_the_command_tells_what_is_wrong(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved / "step-00000002" / "rank00000-000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    assert main(["verify", str(saved)]) == 1
    assert f"error: {file}: is damaged: bytes" in capsys.readouterr().err
    file.unlink()
    (saved / "step-00000003.tmp").mkdir()  # a job may be at it
    assert main(["verify", str(saved)]) == 1
    said = capsys.readouterr()
    assert "step-00000001: good" in said.out
    assert said.err == f"error: passed over: {file}: is missing or cannot be read: No such file or directory\n"
    assert main(["export", str(saved), str(saved / "out")]) == 0
    assert f"; passed over: {file}: is missing" in capsys.readouterr().out
    shutil.rmtree(saved / "step-00000003.tmp")
    assert main(["inspect", str(saved)]) == 0
    assert f"torn      {file}: is missing" in capsys.readouterr().out
    shutil.rmtree(saved / "step-00000001")
    assert main(["verify", str(saved)]) == 1
    assert f"{saved}: holds no complete checkpoint: {file}: is missing" in capsys.readouterr().err
    assert main(["inspect", str(saved / "nothing")]) == 1
    assert "no such directory" in capsys.readouterr().err
    for wrong in (["export", str(saved)], ["look", str(saved)], ["export", str(saved), "x", "--max-shard-size=no"]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_the_command_exports_without_mpi(saved: Path) -> None:
    """As on a login node, where MPI refuses to start."""
    out = saved / "out"
    command = [sys.executable, "-m", "mpidl.checkpoint", "export", str(saved), str(out), "--dtype", "bf16"]
    done = launch.run(command, 60, launch.ROOT, launch.environment(PMI_RANK="0", PMI_SIZE="2", PMI_FD="99"))
    assert done.returncode == 0, done.stderr
    assert {tensor.dtype for tensor in all_tensors(out).values()} == {torch.bfloat16}
    assert load_pretrained(out).config == SMALL_GPT2


def test_an_export_that_is_interrupted_or_finds_no_space_leaves_nothing(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = saved / "out"
    assert main(["export", str(saved), str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()

    def interrupted(*_: Any) -> None:
        assert (out / "model.safetensors.tmp").exists()
        assert {out / "model.safetensors.tmp"} == UNFINISHED
        raise KeyboardInterrupt

    for where, act, status, said in (
        ("os.fsync", interrupted, 130, "error: interrupted\n"),
        (
            "shutil.disk_usage",
            lambda _: shutil._ntuple_diskusage(1, 1, 1000),
            1,
            "the disk is too full: the export takes",
        ),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"mpidl.checkpoint.exporting.{where}", act)
            assert main(["export", str(saved), str(out), "--dtype", "bf16"]) == status
        assert said in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert not UNFINISHED


def test_a_dtype_that_files_cannot_hold_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(mpidl.CheckpointError, match=r"model/phase: a tensor of torch.complex128 cannot be kept"):
        mpidl.checkpoint.save(tmp_path / "new", model)
    with pytest.raises(mpidl.CheckpointError, match=r"^phase: a tensor of torch.complex128 cannot be kept"):
        export_safetensors(tmp_path / "new", model)
    assert list(tmp_path.iterdir()) == []


def test_new_directories_are_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(folder, "sync", synced.append)
    folder.begin(tmp_path / "a" / "b", 1)
    assert sorted(synced) == [tmp_path, tmp_path / "a"]
    folder.begin(tmp_path / "a" / "b", 2)
    assert len(synced) == 2
