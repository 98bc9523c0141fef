"""The batch scripts for Slurm, with programs in place of srun and scontrol that note how they are called."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import launch

SCRIPTS = launch.ROOT / "examples" / "slurm"
ALL = ("one_node.sh", "several_nodes.sh")
# Runs as the ranks would: waits for the signal, if it is to, and ends with the status in the file `ends`.
SRUN = """#!/bin/bash
echo "srun $*" >>"$CALLS"
case "$*" in *mpidl.doctor*) [ ! -e "$ENDS.doctor" ] || kill -USR1 $PPID; exit 0 ;; esac
status=$(head -n 1 "$ENDS"); sed -i 1d "$ENDS"
if [ "$status" = wait ]; then
    trap 'exit 75' USR1
    touch "$WAITS"
    for _ in $(seq 600); do sleep 0.1; done
fi
exit "$status"
"""


@pytest.fixture
def slurm(tmp_path: Path):
    """`slurm(script, ends)` starts a script whose runs end so; its process, and the file of the calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    scontrol = '#!/bin/bash\necho "scontrol $*" >>"$CALLS"\n'
    python = f'#!/bin/bash\nexec "{sys.executable}" "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", scontrol), ("python", python)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, *ends: object, **variables: str) -> tuple[subprocess.Popen[bytes], Path]:
        (tmp_path / "ends").write_text("".join(f"{end}\n" for end in ends))
        calls = tmp_path / "calls"
        files = {"CALLS": str(calls), "ENDS": str(tmp_path / "ends"), "WAITS": str(tmp_path / "waits")}
        job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "mine", "SLURM_CPUS_PER_TASK": "4", "SLURM_NTASKS": "8"}
        job["PYTHONPATH"] = str(launch.ROOT)
        path = os.pathsep.join([str(programs), os.environ["PATH"]])
        environment = launch.environment(PATH=path, MPI=None, **files, **job, **variables)
        with (tmp_path / "said").open("wb") as said:
            process = subprocess.Popen(
                ["bash", SCRIPTS / script], env=environment, cwd=tmp_path, stdout=said, stderr=said
            )
        started.append(process)
        return process, calls

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("status", "again"), [(75, True), (138, True), (0, False), (1, False)])
def test_one_node_goes_back_to_the_queue_if_it_was_asked_to_stop(slurm, status: int, again: bool) -> None:
    process, calls = slurm("one_node.sh", status)
    assert process.wait(60) == status
    said = calls.read_text().splitlines()
    assert said[0].startswith("srun --mpi=pmi2 --cpu-bind=cores --cpus-per-task=4 python examples/gpt2_zero3.py ")
    assert said[1:] == ["scontrol requeue 77"] * again


def test_each_job_has_a_directory_of_its_name(slurm, tmp_path: Path) -> None:
    """Which a job that was put back in the queue, and another one of that name, find again."""
    names = {
        re.findall(r"^#SBATCH --job-name=(\S+)", (SCRIPTS / script).read_text(), re.MULTILINE)[0] for script in ALL
    }
    assert len(names) == len(ALL)
    process, calls = slurm("one_node.sh", 0)
    assert process.wait(60) == 0
    assert "--checkpoint-dir runs/mine " in calls.read_text()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


@pytest.mark.limit(120)
def test_several_nodes_go_on_after_a_failure_and_pass_the_signal_on(slurm, tmp_path: Path) -> None:
    process, calls = slurm("several_nodes.sh", 1, "wait")
    while not (tmp_path / "waits").exists():
        assert process.poll() is None, calls.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)  # as Slurm does with the script alone
    assert process.wait(60) == 75
    said = calls.read_text().splitlines()
    assert said[0] == "srun --mpi=pmi2 --cpus-per-task=4 python -m mpidl.doctor"
    assert [line.startswith("srun --mpi=pmi2 --ntasks=8 --kill-on-bad-exit=1 ") for line in said[1:3]] == [True, True]
    assert said[3:] == ["scontrol requeue 77"]


@pytest.mark.thorough
def test_a_job_that_is_cancelled_saves_and_does_not_come_back(slurm, tmp_path: Path) -> None:
    process, calls = slurm("several_nodes.sh", "wait")
    while not (tmp_path / "waits").exists():
        assert process.poll() is None, calls.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert "scontrol" not in calls.read_text()


def test_several_nodes_heed_a_signal_before_the_training_is_started(slurm, tmp_path: Path) -> None:
    (tmp_path / "ends.doctor").touch()  # the signal comes while the doctor looks
    process, calls = slurm("several_nodes.sh")
    assert process.wait(60) == 75
    said = calls.read_text().splitlines()
    assert [line.split()[0] for line in said] == ["srun", "scontrol"]


@pytest.mark.limit(120)
def test_several_nodes_pass_on_a_signal_that_comes_before_the_number_of_the_launcher(slurm, tmp_path: Path) -> None:
    hook = tmp_path / "hook"  # the shell reads it first; as it is about to note the number the training runs already
    command = 'while [ ! -e "$WAITS" ]; do sleep 0.05; done; kill -USR1 $$'
    hook.write_text(f"""trap 'case $BASH_COMMAND in "launcher=\\$!") {command} ;; esac' DEBUG\n""")
    process, calls = slurm("several_nodes.sh", "wait", BASH_ENV=str(hook))
    assert process.wait(60) == 75
    assert calls.read_text().splitlines()[-1] == "scontrol requeue 77"


@pytest.mark.parametrize("script", ALL)
def test_what_the_scripts_ask_the_example_for_it_has(script: str) -> None:
    """Every option that stands in a script, of the example or of what all examples have."""
    text = (SCRIPTS / script).read_text().partition("gpt2_zero3.py")[2]
    options = {word for word in text.partition("\n\n")[0].split() if word.startswith("--")}
    source = "".join((launch.ROOT / path).read_text() for path in ("examples/gpt2_zero3.py", "mpidl/resuming.py"))
    assert options >= {"--checkpoint-dir", "--save-every"}
    assert [option for option in options if f'"{option}"' not in source] == []


def test_what_the_documentation_says_of_batch_options_the_scripts_do() -> None:
    documented = set(re.findall(r"#SBATCH (--[\w-]+)", (launch.ROOT / "docs" / "launching.md").read_text()))
    scripts = [(SCRIPTS / script).read_text() for script in ALL]
    assert {"--signal", "--requeue"} <= documented
    assert [o for o in documented for text in scripts if not re.search(rf"^#SBATCH {o}\b", text, re.MULTILINE)] == []
