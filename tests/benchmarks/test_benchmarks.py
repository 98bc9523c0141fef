"""The benchmarks run, are right, and write what they promise."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.harness.launch import ROOT, environment, run

TRAINING = "benchmarks/bench_training.py"
IN_TURN = "benchmarks/bench_in_turn.py"
ENGINES = ("ddp", "zero1", "zero2", "zero3", "torch-ddp", "fsdp2")
DEEPSPEED = find_spec("deepspeed") is not None


@pytest.mark.thorough
def test_engines_train_the_same(mpirun, tmp_path: Path, brief: bool) -> None:
    engines = ["ddp", "zero3", "torch-ddp"] if brief else [*ENGINES]
    path, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    done = mpirun(
        2,
        TRAINING,
        f"--engines=single,all-reduce,{','.join(engines)}",
        *("--layers=2", "--heads=2", "--embd=16", "--batch=2", "--block-size=8", "--steps=3", "--warmup=1"),
        *(f"--json={path}", f"--plot={picture}"),
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["engine"]: row for row in json.loads(path.read_text())}
    parts = {"forward_ms", "backward_ms", "optimizer_ms"}
    keys = {"engine", "ranks", "params", "step_ms", "tokens_per_s", "peak_mib", "node_mib", "loss_last"} | parts
    assert all(set(row) == keys for row in rows.values())
    assert len({row["params"] for row in rows.values()}) == 1
    for row in rows.values():
        assert min(row["step_ms"], row["peak_mib"], *(row[part] for part in parts if row["engine"] != "all-reduce")) > 0
        assert row["peak_mib"] < row["node_mib"] < 3 * row["peak_mib"]  # of two ranks, at any moment
    assert "of single + all-reduce" in done.stdout
    parallel = [row["loss_last"] for name, row in rows.items() if name not in ("single", "all-reduce")]
    assert parallel == pytest.approx([parallel[0]] * len(engines), rel=1e-4)
    assert picture.read_bytes().startswith(b"\x89PNG")


def in_turn(*arguments: object, timeout: float = 150, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs bench_in_turn.py, with jobs of two ranks and a small model; see `arguments`. more: environment."""
    command = [sys.executable, IN_TURN, *map(str, arguments)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run(command, timeout, ROOT, environment(PATH=path, **more))


@pytest.mark.thorough
@pytest.mark.limit(560)
def test_engines_in_jobs_of_their_own_take_turns_and_train_as_in_one(mpirun, tmp_path: Path) -> None:
    alone, turns = tmp_path / "alone.json", tmp_path / "turns.json"
    small = ("--layers=1", "--heads=2", "--embd=16", "--batch=2", "--block-size=8")
    engines, steps = "--engines=single,zero3,ddp,all-reduce", ("--steps=3", "--warmup=1")
    done = mpirun(2, TRAINING, engines, *small, *steps, f"--json={alone}", timeout=100)
    assert done.returncode == 0, done.stderr
    job = ("--", "mpirun", "-n", "2", sys.executable, TRAINING, *small)
    with tempfile.TemporaryDirectory(prefix="mpidl-") as own:  # with a short name, as sockets need one
        done = in_turn(engines, *steps, "--launches=2", f"--json={turns}", *job, timeout=400, TMPDIR=own)
        left = [path.name for path in Path(own).glob("mpidl-turns-*")]
    assert done.returncode == 0, done.stderr
    assert not left
    before, after = (json.loads(path.read_text()) for path in (alone, turns))
    kept = ("engine", "ranks", "params", "loss_last")
    assert [[row[key] for key in kept] for row in before] == [[row[key] for key in kept] for row in after]
    assert all(np.array(row["seconds"]).shape == (2, 3) and np.min(row["seconds"]) > 0 for row in after)
    assert all(row["step_ms"] > 0 and row["peak_mib"] is not None for row in before)
    assert all(row["step_ms"] > 0 and row["peak_mib"] is None for row in after)
    ratio = np.divide(*(next(row for row in after if row["engine"] == name)["seconds"] for name in ("zero3", "single")))
    of_launches = np.median(ratio, axis=1)
    told = f"{np.median(ratio):.3f} ({of_launches.min():.3f} to {of_launches.max():.3f}) of single"
    assert f"# zero3: {told}" in done.stdout


DIES_IN_ITS_TURN = """if True:
    import os, pathlib, signal, socket, sys
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(sys.argv[sys.argv.index("--called") + 1])
    if "single" in sys.argv:
        pathlib.Path(os.environ["WAITS"]).write_text(str(os.getpid()))
    caller.sendall(b"1\\n")
    while caller.recv(100):
        if "ddp" in sys.argv:
            sys.exit("it is broken")
        caller.sendall(b"{}\\n")
    signal.pause()  # for ever, unless it is killed
"""


def test_a_job_that_dies_ends_all_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAITS", str(tmp_path / "pid"))
    done = in_turn("--engines=single,ddp", "--", sys.executable, "-c", DIES_IN_ITS_TURN)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: ddp: its job ended too early, with status 1", "it is broken"]
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists(), "a job is left"


def test_a_job_whose_caller_has_gone_ends(tmp_path: Path) -> None:
    """The ranks' end of a turn, with a caller that hangs up."""
    import turns

    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with turns.Caller(path, 1) as caller:
            listener.accept()[0].close()
            said = "the program that calls this job's turns has ended"
            with pytest.raises(ConnectionError, match=said), caller.turn():
                pytest.fail("a turn without a caller")


def test_wrong_options_of_turns_are_one_line_and_status_2(tmp_path: Path) -> None:
    job = ("--", "true")
    for options in (["--engines=zero4", *job], ["--engines=", *job], [], [f"--json={tmp_path}", *job]):
        done = in_turn(*options)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), options


@pytest.mark.skipif(not DEEPSPEED, reason="DeepSpeed is not installed")
def test_deepspeed_trains_the_same_and_leaves_nothing_behind(mpirun, tmp_path: Path) -> None:
    path, caches = tmp_path / "rows.json", tmp_path / "built"
    done = mpirun(
        2,
        TRAINING,
        "--engines=torch-ddp,deepspeed1,deepspeed2,deepspeed3",
        *("--layers=2", "--heads=2", "--embd=16", "--batch=2", "--block-size=8", "--steps=3", "--warmup=1"),
        *("--grad-accum=2", f"--json={path}"),
        timeout=100,
        TORCH_EXTENSIONS_DIR=str(caches),
    )
    assert done.returncode == 0, done.stderr
    losses = [row["loss_last"] for row in json.loads(path.read_text())]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert not caches.exists(), "something was compiled"
    table = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(table) == 4, "DeepSpeed talks in between"
    left = """if True:
        import gc, sys, weakref
        sys.path.insert(0, "benchmarks")
        import torch, mpidl
        from collectives.bench import peers
        from peer_deepspeed import DeepSpeed

        linear = torch.nn.functional.linear
        peers.start_gloo(mpidl.init())
        for stage in (1, 2, 3, 3):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            peer = DeepSpeed(model, torch.optim.AdamW(model.parameters()), stage, 1, 1)
            for _ in range(3):
                peer.backward(peer(torch.ones(1, 4)).sum())
                peer.step()
                assert torch.nn.functional.linear is linear, f"stage {stage}: torch is patched for other engines"
            peer.close()
            alive = weakref.ref(model)
            del model, peer
            gc.collect()
            assert alive() is None, f"stage {stage}: the model is kept"
            assert torch.nn.functional.linear is linear, f"stage {stage}: torch is left patched"
        peers.stop_gloo()
    """
    done = mpirun(2, "-c", left, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(DEEPSPEED, reason="DeepSpeed is installed")
def test_deepspeed_that_is_not_installed_is_one_line(mpirun) -> None:
    done = mpirun(2, TRAINING, "--engines=single,deepspeed3")
    assert (done.returncode, done.stderr.count("error: --engines: DeepSpeed is not installed")) == (2, 1)


@pytest.mark.thorough
def test_barriers_are_timed_against_mpi_s(mpirun) -> None:
    done = mpirun(2, "benchmarks/bench_barrier.py", "--rounds=3", "--calls=20")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines()[1:]] == ["counters", "MPI"]
    assert all(float(line.split()[place]) > 0 for line in done.stdout.splitlines()[1:] for place in (2, 5))


@pytest.mark.thorough
def test_offload_is_measured_and_changes_no_bit(mpirun, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    small = ("--layers=2", "--embd=32", "--steps=2", "--buffer-mb=0.1")
    done = mpirun(2, "benchmarks/bench_offload.py", *small, f"--path={tmp_path}", f"--json={path}", timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {row["offload"]: row for row in json.loads(path.read_text())}
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[2:]] == [f"| {way}" for way in rows]
    plain, disk = rows["none"], rows["disk"]
    assert disk["loss"] == plain["loss"] != rows["disk delayed"]["loss"] == rows["cpu delayed"]["loss"]
    assert disk["offloaded"] == pytest.approx(plain["optimizer"], rel=0.02)
    assert disk["optimizer"] < 0.2 * 2**20


@pytest.mark.thorough
def test_checkpoints_are_timed_against_copies_and_peers(mpirun, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = [f"--dir={tmp_path / 'disk'}", "--model=tiny", "--rounds=1", f"--json={path}"]
    done = mpirun(2, "benchmarks/bench_checkpoint.py", *arguments, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {row["operation"]: row for row in json.loads(path.read_text())}
    peers = {f"{name} {what}" for name in ("mpidl", "torch.save", "dcp") for what in ("save", "load")}
    assert rows.keys() > {"copy", "mpidl load, unverified", "mpidl save, behind", *peers}
    for row in rows.values():
        assert row["bytes"] > 12 * row["params"]
        assert row["seconds"] > 0
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    assert list((tmp_path / "disk").iterdir()) == []  # nothing is left
