"""Plain weights out and in, transformers as the judge; and the command."""

from __future__ import annotations

import contextlib
import json
import re
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
from mpidl.job.ending import TEMP_PATHS
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.models.pretrained import load_pretrained
from tests.harness import launch
from tests.mpidl.checkpoint.training import Run
from tests.mpidl.small_models import MODELS, SMALL_GPT2, fresh
from tests.mpidl.zero.ways import ENGINES

mpi = pytest.mark.mpi
TOKENS = torch.arange(16).view(2, 8)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Loads all tensors, by the index of several files or from the only one."""
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
    settings = {"precision": mpidl.Precision(torch.bfloat16)} if engine == "stage 3" else {}
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
@pytest.mark.parametrize("engine", ["ddp", "stage 3"])
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


def test_the_command_knows_what_a_path_means(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory of checkpoints, one of them, its index, the text file that names the last one; and what is none."""
    one = saved / "step-00000001"
    torn = saved / "step-00000003"
    torn.mkdir()
    (saved / "notes").write_text("mine")
    (saved / "empty").mkdir()
    for path, found in (
        (saved / "latest", saved / "step-00000002"),
        (one, one),
        (one / "index.json", one),
    ):
        assert main(["verify", str(path)]) == 0
        assert capsys.readouterr().out.startswith(f"{found}: good: ")
        assert main(["inspect", str(path)]) == 0
        assert re.search(rf"^path +{re.escape(str(found))}$", capsys.readouterr().out, re.MULTILINE)
        assert main(["export", str(path), str(saved / "out")]) == 0
        assert capsys.readouterr().out.startswith(f"{found} -> ")
    wrong = {
        saved / "notes": f"{saved / 'notes'}: is a file; needs the directory of a checkpoint, or of several",
        torn: f"{torn}: was not finished",
        saved / "empty": f"{saved / 'empty'}: holds no c",
        saved / "nowhere": f"{saved / 'nowhere'}: no such directory",
        one / "rank00000-000.safetensors": "is a file; needs the directory of a checkpoint",
    }
    for path, said in wrong.items():
        for command in (["verify", path], ["inspect", path], ["export", path, saved / "out"]):
            listed = command[0] == "inspect" and path == torn
            assert main([*map(str, command)]) == (not listed)
            found = capsys.readouterr()
            assert said in (found.out if listed else found.err)
            assert found.err.startswith("error: ") != listed
    (saved / "latest").write_text("step-00000077\n")
    assert main(["verify", str(saved / "latest")]) == 1
    assert f"{saved / 'step-00000077'}: no such directory" in capsys.readouterr().err


def test_the_command_exports_without_mpi(saved: Path) -> None:
    """On a login node MPI may refuse to start."""
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
        assert {out / "model.safetensors.tmp"} == TEMP_PATHS
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
        assert not TEMP_PATHS


FOREIGN: dict[str, Any] = {
    "model.safetensors": lambda file, model: save_file({"x": torch.ones(3)}, file),
    "model-00007-of-00008.safetensors": lambda file, model: save_file(  # as transformers has them: by name
        dict(sorted((name, tensor.clone()) for name, tensor in model.state_dict().items())), file, {"format": "pt"}
    ),
    "model-00001-of-00002.safetensors": lambda file, model: file.write_text("my notes"),
    "model.safetensors.index.json": lambda file, model: file.write_text('{"weight_map": {"other": "x"}}'),
    "config.json": lambda file, model: file.write_text('{"mine": 1}'),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_of_an_earlier_export_is_neither_overwritten_nor_removed(tmp_path: Path, name: str) -> None:
    model = GPT2(SMALL_GPT2)
    FOREIGN[name](tmp_path / name, model)
    (tmp_path / "README").write_text("about")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for size in ("5GB", 30_000):
        with pytest.raises(mpidl.CheckpointError, match=f"{name}: is not of an earlier export of this model"):
            export_safetensors(tmp_path, model, max_shard_size=size)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / name).unlink()
    export_safetensors(tmp_path, model)
    assert (tmp_path / "README").exists()
    smaller = GPT2(GPT2Config(vocab_size=37, block_size=8, layers=2, heads=2, embd=16))
    with pytest.raises(mpidl.CheckpointError, match="is not of an earlier export of this model"):
        export_safetensors(tmp_path, smaller)


@pytest.mark.parametrize(("first", "then"), [("5GB", 30_000), (30_000, "5GB"), (30_000, 30_000), (30_000, 8_000)])
def test_a_kill_while_an_export_takes_another_s_place_leaves_one_of_them_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Any, then: Any
) -> None:
    """At each of its acts, as any reader goes: by the index where there is no single file."""
    former, new = (fresh(MODELS["gpt2"], rank=rank) for rank in (0, 1))

    class Killed(BaseException):
        pass

    def read() -> dict[str, torch.Tensor] | None:
        if (tmp_path / "model.safetensors").exists():
            return load_file(tmp_path / "model.safetensors")
        return all_tensors(tmp_path) if (tmp_path / "model.safetensors.index.json").exists() else None

    for instant in range(40):
        export_safetensors(tmp_path, former, max_shard_size=first)
        left = instant

        def mortal(call: Any) -> Any:
            def act(*arguments: Any, **settings: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return call(*arguments, **settings)

            return act

        with monkeypatch.context() as patched:
            for name in ("replace", "unlink"):
                patched.setattr(Path, name, mortal(getattr(Path, name)))
            with contextlib.suppress(Killed):
                export_safetensors(tmp_path, new, max_shard_size=then)
        found = read()
        weight = None if found is None else found["transformer.wte.weight"]
        bias = None if found is None else found["transformer.ln_f.bias"]
        owners = [
            model
            for model in (former, new)
            if weight is not None
            and torch.equal(weight, model.transformer["wte"].weight)
            and torch.equal(bias, model.transformer["ln_f"].bias)
        ]
        assert owners or (found is None and first == then)
        if left >= 0:
            break
    assert owners[-1] is new
    assert left >= 0


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
