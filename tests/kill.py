"""Kills ranks of a training again and again, and looks whether anything is lost or left behind.

    python tests/kill.py --kills 30 --ranks 4                # minutes
    python tests/kill.py --kills 3 --seed 7 --zero 0         # as the tests do
    python tests/kill.py --kills 6 --then 3,2,3,1            # goes on with other numbers of ranks

The GPT-2 example trains under `python -m mpidl.launch`. Random ranks get SIGKILL: while the job starts, some steps
after a checkpoint, and, every third time, while one is being written. At the end every loss since the last restart, and
the validation loss, must be those of an undisturbed training, to the bit, or with --then to 1e-5; every run
must have gone on from a checkpoint at least as new as the newest that was seen complete before the kill; nothing may be
left in /dev/shm, in the directory for temporary files, or among the processes. As root it all happens in namespaces of
its own, so that this is known of all of /dev/shm and the whole process table; otherwise of what bears the job's marks.

Prints one line for each kill, and the seed. Status 0: all is well; 1: something is not; it says what.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import hosts  # noqa: E402
from tests.harness import launch  # noqa: E402

SAVE_EVERY = 3
STEPS_A_KILL = 25
RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
INSIDE = "MPIDL_KILL_INSIDE"
SIZE = ["--layers", "1", "--heads", "2", "--embd", "16", "--block-size", "16", "--batch", "2", "--warmup", "2"]
GLOBAL_BATCH = 12  # sequences, where the number of ranks changes
QUIET = ["--sample", "0", "--eval-every", "0", "--eval-sequences", "8"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=3, help="how many")
    parser.add_argument("--ranks", type=int, default=3, help="of the job")
    parser.add_argument("--then", default="", metavar="N,N,...", help="ranks of each restart; the last number holds")
    parser.add_argument("--zero", type=int, default=3, help="stage; 0: DDP")
    parser.add_argument("--seed", type=int, default=None, help="of ranks and moments; random if it is not given")
    options = parser.parse_args()
    options.then = [int(ranks) for ranks in options.then.split(",") if ranks]
    if options.seed is None:
        options.seed = random.randrange(10**6)
    return options


class Training:
    """The example in a folder of its own, undisturbed or under the launcher."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self._options = folder, options
        self.starts = 0  # kills before the job may have called init
        self.kills: list[int] = []  # for each, the newest step that was complete
        self.checkpoints = folder / "checkpoints"
        self.steps = STEPS_A_KILL * (options.kills + 1)
        for name in ("shm", "tmp"):
            (folder / name).mkdir()
        text = folder / "text"
        words = random.Random(0)
        text.write_text(" ".join(words.choice(["rank", "shard", "step", "is", "kept"]) for _ in range(3000)))
        changes = {} if os.environ.get(INSIDE) else {"MPIDL_SHM_DIR": str(folder / "shm")}
        self.environment = launch.environment(TMPDIR=str(folder / "tmp"), PYTHONPATH=str(ROOT), **changes)

    def command(self, results: str, *more: str) -> list[str]:
        example = [sys.executable, str(ROOT / "examples" / "gpt2_zero3.py"), *SIZE, *QUIET, *more]
        if self._options.then:
            example += ["--global-batch", str(GLOBAL_BATCH)]
        about = ["--data", str(self.folder / "text"), "--zero", str(self._options.zero), "--steps", str(self.steps)]
        return [
            launch.launcher(),
            "-n",
            str(self._options.ranks),
            *example,
            *about,
            "--json",
            str(self.folder / results),
        ]

    def undisturbed(self) -> dict[str, Any]:
        done = launch.run(self.command("reference.json"), 300, ROOT, self.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((self.folder / "reference.json").read_text())

    def start(self) -> subprocess.Popen[bytes]:
        saving = ["--checkpoint-dir", str(self.checkpoints), "--save-every", str(SAVE_EVERY)]
        launcher = [sys.executable, "-m", "mpidl.launch", "--checkpoint", str(self.checkpoints), "--backoff", "0"]
        launcher += ["--max-restarts", str(self._options.kills), "--patience", "1000"]
        if self._options.then:
            launcher += ["--ranks-on-restart", ",".join(map(str, self._options.then))]
        launcher += ["--json", str(self.folder / "runs.json"), "--"]
        self.said = (self.folder / "said").open("wb")
        return subprocess.Popen(
            launcher + self.command("results.json", *saving),
            stdout=self.said,
            stderr=subprocess.STDOUT,
            env=self.environment,
            cwd=ROOT,
            start_new_session=True,
        )

    def ranks_of(self, run: int) -> int:
        """Number of ranks of a run."""
        counts = [self._options.ranks, *self._options.then]
        return counts[min(run, len(counts) - 1)]

    def ranks(self) -> dict[int, int]:
        """Process ids of the job's ranks, by rank."""
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    variables = Path(f"/proc/{name}/environ").read_bytes().decode(errors="replace").split("\0")
                    command = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                rank = next((v.split("=")[1] for v in variables if v.startswith(RANK)), None)
                if rank is not None and str(self.checkpoints) in command:
                    found[int(rank)] = int(name)
        return found

    def newest(self) -> int:
        """The step of the newest checkpoint that has its name."""
        try:
            names = os.listdir(self.checkpoints)
        except FileNotFoundError:
            return 0
        return max((int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name)), default=0)

    def writing(self) -> bool:
        """Returns True while a checkpoint is being written."""
        try:
            return any(name.endswith(".tmp") for name in os.listdir(self.checkpoints))
        except FileNotFoundError:
            return False


def kill(
    training: Training, process: subprocess.Popen[bytes], draw: random.Random, number: int, ended: set[int]
) -> None:
    """Kills a random rank at a random moment. ended: processes of earlier runs; this run's are added."""
    count = training.ranks_of(number)
    while len(ranks := {r: p for r, p in training.ranks().items() if p not in ended}) < count:
        assert process.poll() is None, "the job ended before all kills"
        time.sleep(0.02)
    begun, way = training.newest(), ("steps", "saving", "start")[number % 3]
    if way == "start":
        time.sleep(draw.uniform(0, 1.5))
    else:
        enough = begun + SAVE_EVERY * draw.randint(1, 3)
        while training.newest() < enough:
            assert process.poll() is None, "the job ended before all kills"
            time.sleep(0.002)
        if way == "saving":
            while not training.writing() and process.poll() is None:
                pass
        time.sleep(draw.uniform(0, 0.004 if way == "saving" else 0.05))
    seen, state = training.newest(), "writing" if training.writing() else "between"
    rank = draw.randrange(count)
    os.kill(ranks[rank], signal.SIGKILL)
    ended.update(ranks.values())
    print(f"kill {number + 1}: rank {rank} of {count}, {way}, {state}, step {seen} was complete", flush=True)
    training.kills.append(seen)
    training.starts += way == "start"


def main() -> int:
    options = parse()
    if hosts.obstacle() is None and not os.environ.get(INSIDE):
        again = [sys.executable, __file__, *sys.argv[1:], "--seed", str(options.seed)]
        setup = 'mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec "$@"'
        return subprocess.call([*hosts.ISOLATED, "sh", "-c", setup, "sh", *again], env={**os.environ, INSIDE: "1"})
    print(f"seed {options.seed}", flush=True)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="mpidl-kill-") as name:
        training = Training(Path(name), options)
        reference = training.undisturbed()
        before = _others() | set(os.listdir(training.folder / "tmp"))  # torch leaves an empty directory
        process = training.start()
        try:
            ended: set[int] = set()
            for number in range(options.kills):
                kill(training, process, draw, number, ended)
            status = process.wait(300)
            training.said.close()
            wrong = [] if status == 0 else [f"the job's status is {status}:\n{(Path(name) / 'said').read_text()}"]
            wrong = wrong or compare(training, reference, before, 1e-5 if options.then else 0.0)
        finally:
            process.kill()
            process.wait()
            for pid in training.ranks().values():
                os.kill(pid, signal.SIGKILL)
    for text in wrong:
        print(f"wrong: {text}")
    if not wrong:
        print(f"{options.kills} kills: the losses are the same, no checkpoint is lost, nothing is left behind")
    return int(bool(wrong))


def compare(training: Training, reference: dict[str, Any], before: set[str], tolerance: float) -> list[str]:
    """Lists what differs from the reference. tolerance: by how much losses may differ."""
    folder, wrong = training.folder, []
    results = json.loads((folder / "results.json").read_text())
    runs = json.loads((folder / "runs.json").read_text())
    expected = {entry["step"]: entry["loss"] for entry in reference["steps"]}
    for entry in results["steps"]:
        if not abs(entry["loss"] - expected[entry["step"]]) <= tolerance:
            wrong.append(f"step {entry['step']}: the loss is {entry['loss']!r}, not {expected[entry['step']]!r}")
            break
    if not abs(results["val_loss"] - reference["val_loss"]) <= tolerance:
        wrong.append(f"the validation loss is {results['val_loss']!r}, not {reference['val_loss']!r}")
    if len(runs) != len(training.kills) + 1:
        wrong.append(f"{len(training.kills)} kills, but {len(runs)} runs")
    counts = [training.ranks_of(number) for number in range(len(runs))]
    if [run["ranks"] for run in runs] != counts:
        wrong.append(f"the runs had {[run['ranks'] for run in runs]} ranks, not {counts}")
    for number, (seen, run) in enumerate(zip(training.kills, runs[1:], strict=False), 1):
        began = int(run["began_at"][-8:]) if run["began_at"] else 0
        if began < seen:
            wrong.append(f"after kill {number} it went on from step {began}, but step {seen} was complete")
    left = [*(set(os.listdir(folder / "tmp")) - before), *os.listdir(folder / "shm")]
    if os.environ.get(INSIDE):
        # A kill within MPI_Init may leave MPICH's own file before its owner can be seen.
        ours = [name for name in os.listdir("/dev/shm") if not name.startswith("mpich_shm_")]
        unseen = len(os.listdir("/dev/shm")) - len(ours)
        left += ours + [f"{unseen} of MPICH's files"] * (unseen > training.starts)
    left += [name for name in os.listdir(training.checkpoints) if name.endswith((".tmp", ".old", ".gone"))]
    left += sorted(_others() - before) if os.environ.get(INSIDE) else map(str, training.ranks())
    if left:
        wrong.append(f"left behind: {left}")
    return wrong


def _others() -> set[str]:
    """All processes that there are, but this one; those that only wait for their parent not counted."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if command:
                found.add(f"{name} {command}")
    return found


if __name__ == "__main__":
    sys.exit(main())
