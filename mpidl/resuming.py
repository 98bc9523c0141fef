"""Options and logic of programs that save checkpoints: where to resume, when to save, when to stop.

    add_options(parser)                                  --checkpoint-dir --save-every --keep-last --resume --on-nan
    kept = Checkpoints(comm, options, stop, training, settings_of(options, "lr steps seed"))
    loaded = kept.resume(options.steps)                  what there was to go on from, and a line that says so
    for step in range(loaded.step if loaded else 0, options.steps):
        train_one_step()
        kept.after(step + 1, options.steps)              saves where it is due; where a signal came, ends the job

`--resume auto`, the default, goes on from the newest checkpoint that can be loaded; a directory in which none can be is
an error, as to begin anew would in time remove what there is. A job that `mpidl.launch` has started again goes on from
its own newest checkpoint, whatever --resume says: the option holds for the first start.

Every rank calls `resume` and `after` with the same numbers. Rank 0 looks for checkpoints and tells the others; an error
on any rank ends all ranks with one line.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from collectives import Communicator

from . import checkpoint
from .checkpoint import Loaded
from .cli import at_least
from .errors import CheckpointError, CheckpointMismatch, ConfigurationError, UsageError
from .job.agreement import agree_or_exit
from .job.objects import broadcast_object
from .job.signals import StopSignal
from .mesh import Mesh

NEWEST_CHECKPOINT = "MPIDL_CAME_TO"  # the newest checkpoint of a job that has saved one and is started again
Result = TypeVar("Result")
_NAMES = ("model", "optimizer", "scheduler", "scaler", "sampler")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of checkpoints and of NonfiniteGuard."""
    kept = parser.add_argument_group("checkpoints")
    kept.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="save there, and at the end")
    kept.add_argument("--save-every", type=at_least(1), metavar="N", help="steps")
    kept.add_argument(
        "--keep-last", type=at_least(1), default=2, metavar="N", help="checkpoints, of all that DIR holds"
    )
    kept.add_argument(
        "--resume", default="auto", metavar="auto|never|PATH", help="auto: from the newest complete one in DIR"
    )
    safety = parser.add_argument_group("safety")
    safety.add_argument(
        "--on-nan", default="ignore", choices=["ignore", "stop", "skip"], help="where a loss or gradient is no number"
    )


def check_options(comm: Communicator, options: argparse.Namespace) -> None:
    """Raises UsageError for options that do not fit."""
    if options.save_every and not options.checkpoint_dir:
        raise UsageError("--save-every: needs --checkpoint-dir DIR to save to")
    if comm.rank == 0 and options.checkpoint_dir:
        above = (options.checkpoint_dir, *options.checkpoint_dir.parents)
        there = next(path for path in above if os.path.exists(path))
        if not there.is_dir():
            raise UsageError(f"--checkpoint-dir {options.checkpoint_dir}: {there} is not a directory")


def settings_of(options: argparse.Namespace, names: str, **more: Any) -> dict[str, Any]:
    """The settings that make a training what it is, to be kept in checkpoints; not how the ranks share it."""
    settings = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names.split()}
    return settings | {name.replace("_", " "): value for name, value in more.items()}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings in which they differ; empty if in none. Checkpoints of earlier versions have fewer, or none."""
    return ", ".join(
        f"{name} {saved[name]}, now {now[name]}" for name in now if saved.get(name, now[name]) != now[name]
    )


def in_one_line(comm: Communicator, action: Callable[[], Result]) -> Result:
    """Returns `action()`; settings or a checkpoint that do not work end all ranks with one line. Collective."""

    def act() -> Result:
        try:
            return action()
        except ConfigurationError as error:
            raise UsageError(str(error)) from error

    return agree_or_exit(comm, act)


class Checkpoints:
    """A program's checkpoints: its directory is claimed, if it has one.

    options: of `add_options`.
    stop: made early, to hear of signals from then on.
    training: model, optimizer, scheduler, scaler, sampler, or the first few of them.
    settings: warned of where a checkpoint has others.
    mesh: over which the model lies in parts, as for `checkpoint.save`.
    """

    def __init__(
        self,
        comm: Communicator,
        options: argparse.Namespace,
        stop: StopSignal,
        training: Sequence[Any],
        settings: Mapping[str, Any],
        mesh: Mesh | None = None,
    ) -> None:
        self._comm, self._options, self._stop, self._mesh = comm, options, stop, mesh
        self._training, self._settings = training, dict(settings)
        if options.checkpoint_dir:
            in_one_line(comm, lambda: checkpoint.claim(options.checkpoint_dir, comm))

    def resume(self, last: int) -> Loaded | None:
        """Loads what there is to go on from, if anything, and says so; what is wrong with it ends all. Collective.

        last: the training's last step, in units of `after`.
        """
        loaded = in_one_line(self._comm, self._load)
        if loaded:
            by = f"{loaded.engine} on {loaded.ranks} rank{'s' * (loaded.ranks > 1)}"
            self._say(f"going on from {loaded.path}, step {loaded.step}, saved by {by}")
            if changed := differences((loaded.extra or {}).get("settings", {}), self._settings):
                self._say(f"warning: it was saved with other settings: {changed}")
            if loaded.step >= last:
                self._say(f"note: it has come to step {loaded.step} of {last}: there is nothing left to train")
        return loaded

    def after(self, done: int, last: int, extra: Callable[[], dict[str, Any]] = dict) -> None:
        """Saves after step `done`, where it is due or the last; a signal saves and ends the job, status 75. Collective.

        extra: gives what to keep besides; it is in `Loaded.extra`. Called on every rank where something is saved.
        """
        options = self._options
        stopping = self._stop.requested() and done < last
        due = done == last or (options.save_every and done % options.save_every == 0)
        if options.checkpoint_dir and (due or stopping):
            kept = {"settings": self._settings, **extra()}
            training: dict[str, Any] = dict(zip(_NAMES, self._training, strict=False))

            def save() -> None:  # each rank what it owns
                how = {"keep_last": options.keep_last, "mesh": self._mesh}
                checkpoint.save(options.checkpoint_dir, step=done, extra=kept, **how, **training)

            in_one_line(self._comm, save)
        if stopping:
            what = ", which is saved" if options.checkpoint_dir else ", nothing is saved"
            self._stop.exit(f"after step {done}{what}")

    def _load(self) -> Loaded | None:
        """Loads the checkpoint to go on from, if any; with --resume auto the newest that turns out undamaged."""
        reported: list[str] = []
        failed: list[Path] = []
        resume = broadcast_object(self._comm, self._resume)  # rank 0's: others may not have the variable
        while True:
            found = agree_or_exit(self._comm, lambda: None if self._comm.rank else self._find(resume, reported, failed))
            found = broadcast_object(self._comm, found)  # rank 0 chooses
            if found is None:
                return None
            try:
                return checkpoint.load(
                    found, *self._training, mesh=self._mesh
                )  # each rank its slices, or the same error on all
            except CheckpointError as error:
                if resume != "auto" or isinstance(error, CheckpointMismatch):
                    raise
                failed.append(found)
                self._say(f"passed over: {error}")

    @property
    def _resume(self) -> str:
        """--resume; "auto" where a former run of the job has saved a checkpoint."""
        came_to, folder = os.environ.get(NEWEST_CHECKPOINT), self._options.checkpoint_dir
        goes_on = came_to and folder and Path(came_to).parent.resolve() == folder.resolve()
        return "auto" if goes_on else self._options.resume

    def _find(self, resume: str, reported: list[str], failed: Collection[Path]) -> Path | None:
        """Finds the checkpoint to go on from, on rank 0.

        resume: auto, never or a path.
        reported: reasons already printed; grows.
        failed: checkpoints that did not load, not to be chosen again.
        """
        folder = self._options.checkpoint_dir
        if resume == "never":
            if folder and (former := checkpoint.named(folder)):
                kept = f"the {self._options.keep_last} written last are kept"
                self._say(f"note: {former[-1]} is of a former run; {kept}")
            return None
        if resume != "auto":
            return self._named(Path(resume), reported)
        if folder is None:
            return None
        found = self._newest(folder, reported, failed)
        if not found and checkpoint.named(folder):
            raise CheckpointError(f"{folder}: no checkpoint in it can be loaded; --resume never begins anew")
        return found

    def _named(self, path: Path, reported: list[str]) -> Path:
        if not os.path.exists(path):
            raise UsageError(f"--resume {path}: no such directory")
        found = self._newest(path, reported)
        if not found and not reported:
            raise UsageError(f"--resume {path}: is no checkpoint, and holds none")
        if not found:
            raise CheckpointError(f"{path}: no checkpoint in it can be loaded")
        return found

    def _newest(self, path: Path, reported: list[str], without: Collection[Path] = ()) -> Path | None:
        """A checkpoint itself, or the newest of a directory."""
        found, passed = checkpoint.find(path, without)
        for why in passed:
            if why not in reported:
                self._say(f"passed over: {why}")
                reported.append(why)
        return found

    def _say(self, line: str) -> None:
        if self._comm.rank == 0:
            print(line, flush=True)
