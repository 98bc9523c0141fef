"""`python -m mpidl.memory`: its tables, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mpidl.memory import activation_bytes
from mpidl.memory.__main__ import estimates, main, parse, table
from tests.harness import launch


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return launch.run([sys.executable, "-m", "mpidl.memory", *arguments], 60, launch.ROOT, launch.environment(**env))


def test_the_command_prints_a_table_and_leaves_mpi_alone() -> None:
    """In the environment of a rank whose launcher is gone, where initialising MPICH fails."""
    done = command("--params", "7.5e9", "--ranks", "64", "--dtype", "bf16", PMI_FD="77", PMI_RANK="1", PMI_SIZE="2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "7.5 B parameters, 64 ranks on 1 node" in lines[0]
    states = [line[len("0 (DDP)") :].split()[3] for line in lines[3:7]]
    assert states == ["120.0", "31.4", "16.6", "1.9"]
    assert len({len(line) for line in lines[2:7]}) == 1, "aligned"


@pytest.mark.parametrize("options", [["-m", "mpidl.memory"], ["-Im", "mpidl.memory"], ["-mmpidl.memory"]], ids=" ".join)
def test_the_command_imports_mpi_without_initialising_it(options: list[str]) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.orig_argv, sys.argv = [sys.executable, *{options}], ['-m', '--params=1e9', '--ranks=2']\n"
        "try:\n    runpy.run_module('mpidl.memory', run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code)\n"
        "from mpi4py import MPI\nprint(MPI.Is_initialized())\n"
    )
    done = launch.run([sys.executable, "-c", program], 60, launch.ROOT, launch.environment())
    assert done.stdout.splitlines()[-2:] == ["0", "False"], done.stderr


def test_the_command_knows_hybrid_sharding(capsys) -> None:
    status, out, _ = run_here(capsys, "--params 7.5e9 --ranks 128 --nodes 2 --shard-ranks 64 --dtype bf16")
    assert status == 0
    assert "128 ranks on 2 nodes, state cut over 64, bf16" in out
    assert [line[len("0 (DDP)") :].split()[3] for line in out.splitlines()[3:7]] == ["120.0", "31.4", "16.6", "1.9"]
    assert run_here(capsys, "--params 1e9 --ranks 4 --shard-ranks 3")[0] == 2


def test_the_command_knows_the_dtype_of_the_reduction(capsys) -> None:
    """The ZeRO paper's table with two more bytes a parameter for gradients, but DDP's."""
    status, out, _ = run_here(capsys, "--params 7.5e9 --ranks 64 --dtype bf16 --reduce-dtype fp32")
    assert status == 0
    assert "bf16 with fp32 masters, gradients of ZeRO in fp32, adam" in out
    assert [line[len("0 (DDP)") :].split()[3] for line in out.splitlines()[3:7]] == ["120.0", "46.4", "16.9", "2.1"]


def test_the_command_knows_the_step_in_backward(capsys) -> None:
    status, out, _ = run_here(capsys, "--params 7.5e9 --ranks 64 --unit 1e8 --step-in-backward")
    assert status == 0
    assert "fp32, adam, stepped in backward" in out
    rows = [line[len("0 (DDP)") :].split() for line in out.splitlines()[3:7]]
    assert [(row[1], row[4]) for row in rows] == [("0.0", "0.1"), ("0.0", "0.1"), ("0.0", "0.1"), ("0.0", "1.2")]


def run_here(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    """The command in this process."""
    from mpidl.memory.__main__ import main

    status = main(line.split())
    found = capsys.readouterr()
    return status, found.out, found.err


def test_the_command_gives_json_of_a_model_by_name(capsys) -> None:
    line = "--model gpt2 --ranks 4 --stage 3 --batch 2 --sequence 128 --offload disk --json"
    status, out, _ = run_here(capsys, line)
    (row,) = json.loads(out)
    assert status == 0
    assert row["parameters"] == row["gradients"] == 124439808
    assert row["offloaded"] == 2 * 124439808
    assert row["activations"] == activation_bytes(2, 128, 768, 12, 12, "fp32")
    assert row["total"] == row["model_state"] + row["buckets"] + row["activations"]


@pytest.mark.parametrize("model", ["resnet50", "bert-base", "27m"])
def test_other_models_by_name(capsys, model: str) -> None:
    status, out, _ = run_here(capsys, f"--model {model} --ranks 2")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["0", "1", "2", "3"]


def test_gpt2_on_the_command_line(capsys) -> None:
    _, out, _ = run_here(capsys, "--params 124.44M --ranks 4")
    assert all(f" {megabytes} " in out for megabytes in ("1991.0", "1244.4", "871.1", "497.8"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ranks 2", "--params --model is required"),
        ("--params 0 --ranks 2", "--params: got 0; needs at least 1"),
        ("--params many --ranks 2", "invalid number value: 'many'"),
        ("--params 1e9 --ranks 0", "ranks: got 0"),
        ("--params 1e9 --ranks 4 --nodes 3", "ranks: got 4 on 3 nodes"),
        ("--params 1e9 --ranks 4 --stage 4", "invalid choice: '4'"),
        ("--params 1e9 --ranks 4 --optimizer sgdd", "optimizer: got 'sgdd'"),
        ("--params 1e9 --ranks 4 --reduce-dtype int8", "--reduce-dtype: invalid choice: 'int8'"),
        ("--params 1e9 --ranks 4 --batch 2", "need --layers, --hidden, --heads, --sequence too"),
        ("--model lenet --ranks 4", "--model: got 'lenet'"),
        ("--model gpt2 --ranks 4 --heads 3", "--model gpt2 has its own"),
        ("--model resnet18 --ranks 4 --unit 3", "unit: got one together with a model"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(capsys, line: str, message: str) -> None:
    status, out, err = run_here(capsys, line)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_command_line_counts_compression() -> None:
    rows, _ = estimates(parse(["--params", "1e6", "--ranks", "4", "--nodes", "2", "--compress", "int8"]))
    assert [row.compression for row in rows] == [2e6] * 4
    assert "compression" in table(rows).splitlines()[1]
    assert main(["--params", "1e6", "--ranks", "4", "--compress", "int9"]) == 2
    line = "--model gpt2 --ranks 4 --nodes 2 --stage 3 --compress-parameters int8"
    assert estimates(parse(line.split()))[0][0].compression > 1e6
