"""Guard against a loss or gradient that is NaN or infinite: names it, and stops the job or skips the step.

    for step, (x, y) in enumerate(loader):
        loss = model(x, y)
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        if guard.allows(loss.item(), norm):          the same on every rank
            optimizer.step()
        optimizer.zero_grad()

Without it, one bad batch on one rank makes all weights NaN on all ranks, and the job trains on them until its end.

A step that is skipped leaves weights, the optimizer's state, the model's buffers and what `compress=` has not sent as
they were: a running statistic that has seen a NaN gets back what it was before the step.

A GradScaler looks for gradients that are too large by itself, and its overflows are no faults. A guard that knows of it
goes by the loss alone; the loop is torch's own, with one line more:

    guard = mpidl.NonfiniteGuard(model, optimizer, "skip", scaler=scaler)

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(1.0)
        if guard.allows(loss.item(), norm):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from collectives import Communicator
from collectives.diagnostics import listing

from ..ddp.plain_model import plain_model
from ..errors import ConfigurationError, TrainingError
from ..gradients.nonfinite import NonfiniteWatch, describe
from ..job.objects import all_gather_object
from ..job.runtime import default_communicator
from ..mesh import Mesh
from ..mesh.groups import checked_mesh, refuse_part
from ..trained_by import innermost, trainer_of_model
from ..zero import ZeroOptimizer
from .kept_buffers import KeptBuffers
from .nonfinite_gradients import find_nonfinite_gradients

if TYPE_CHECKING:  # at run time with compress= alone: few programs need it
    from ..gradients.compression.hook import CompressedReduction

Spoilt = list[tuple[str, int | None]]  # (parameter, rank, if it is known)


class NonfiniteGuard:
    """Decides for all ranks together whether a step is taken.

    model: plain or DistributedDataParallel, the one that is called.
    optimizer: its own, if that is a ZeroOptimizer, a DiLoCo or a PostLocalSGDOptimizer.
    on_nan: "stop": TrainingError on every rank; "skip": a warning on rank 0, and `allows` is False.
    give_up_after: so many steps skipped in a row are a TrainingError, too.
    watch: look at each rank's own gradients in every backward pass, to name the rank and the parameter where it began.
        It reads all gradients once more. Without it, only what the reduction has left can be named.
    process_group: the ranks that take or skip a step together; by default the engine's, all of which a group given
        must have, or with a DiLoCo or PostLocalSGDOptimizer all whose weights it averages; for a plain model the world.
    mesh: a `Mesh`: one decision of all its ranks, those of pp and tp too.
    scaler: torch's or mpidl's GradScaler; while it is enabled gradients are its business, and only the loss is looked
        at. `scaler.unscale_(optimizer)` comes before `allows`, and `scaler.update()` after it whatever it says.

    skipped: steps so far.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        on_nan: str = "stop",
        give_up_after: int = 10,
        watch: bool = True,
        process_group: Communicator | None = None,
        scaler: Any = None,
        mesh: Mesh | None = None,
    ) -> None:
        mesh = checked_mesh("NonfiniteGuard", process_group, mesh)
        if on_nan not in ("stop", "skip"):
            raise ConfigurationError(f"on_nan: got {on_nan!r}; needs 'stop' or 'skip'")
        if not isinstance(give_up_after, int) or give_up_after < 1:
            raise ConfigurationError(f"give_up_after: got {give_up_after!r}; needs 1 or more")
        self._model = model
        inner = innermost(optimizer)
        self._zero = inner if isinstance(inner, ZeroOptimizer) else None
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigurationError(f"scaler: got {type(scaler).__name__}; needs a GradScaler, or None")
        self._scaler, self._on_nan = scaler, on_nan
        self._ddp, plain = plain_model(model)
        self._check_can_skip()
        if self._zero is None and trainer_of_model(plain) is not None:
            raise ConfigurationError(
                "NonfiniteGuard: a ZeroOptimizer trains this model; pass it to NonfiniteGuard as optimizer="
            )
        averages: Communicator | None = getattr(getattr(optimizer, "averager", None), "process_group", None)
        trainer = self._zero if self._zero is not None else model
        if mesh is not None:
            self._comm = mesh.comm
        elif process_group is not None:
            self._comm = process_group
            engines: Communicator | None = getattr(trainer, "process_group", None)
            if engines is not None and None in engines.translate_ranks(range(engines.size), process_group):
                raise ConfigurationError(
                    "NonfiniteGuard: process_group lacks ranks of the engine's, which would step while others skip; "
                    "needs all of them"
                )
        elif self._zero is not None:
            self._comm = averages or self._zero.process_group
        elif self._ddp is not None:
            self._comm = averages or self._ddp.process_group
        else:
            self._comm = default_communicator(process_group)
        refuse_part("NonfiniteGuard", self._comm, "mesh=, so that all ranks take or skip a step together")
        self._trainer = trainer
        self._announce()
        self._give_up_after = give_up_after
        self._in_a_row = self.skipped = 0
        self._watch = NonfiniteWatch(plain) if watch else None
        self._buffers = KeptBuffers(model)
        self._bad = np.zeros(1, np.uint8)

    def allows(self, loss: float | torch.Tensor, norm: float | torch.Tensor | None = None) -> bool:
        """Returns whether the step may be taken, the same on every rank. Collective; call it before `optimizer.step()`.

        loss: this rank's, a number or a tensor of one element.
        norm: of all gradients, as clip_grad_norm_ has given it, which tells whether they are finite; without it they
            are all read.
        """
        self._check_can_skip()
        self._announce()
        _check_number("loss", loss)
        if norm is not None:
            _check_number("norm", norm)
        if self._scaler is not None and self._scaler.is_enabled():
            norm = 0.0
        found: list[Spoilt | None] = []
        self._bad[0] = not math.isfinite(loss) or (norm is not None and not math.isfinite(norm))
        if norm is None:
            found.append(self._gradients())
            self._bad[0] |= found[0] is not None
        self._comm.all_reduce(self._bad, "max")
        if not self._bad[0]:
            self._in_a_row = 0
            self._forget()
            self._buffers.forget()
            return True
        self.skipped += 1
        self._in_a_row += 1
        said = self._describe(loss, found[0] if found else self._gradients())
        self._forget()
        self._buffers.restore()
        if self._on_nan == "stop":
            raise TrainingError(said)
        if (compressed := self._compressed) is not None:
            compressed.undo()
        if self._in_a_row >= self._give_up_after:
            raise TrainingError(
                f"{said}; steps skipped in a row: {self._in_a_row}, and give_up_after is {self._give_up_after}"
            )
        if self._comm.rank == 0:
            warnings.warn(f"{said}; the step is skipped", RuntimeWarning, stacklevel=2)
        return False

    def close(self) -> None:
        """Watches gradients, and keeps buffers, no more."""
        self._buffers.remove()
        if self._watch is not None:
            self._watch.remove()

    @property
    def _compressed(self) -> CompressedReduction | None:
        """The reduction that compresses the gradients; of a copy that has had no backward pass yet None."""
        found: CompressedReduction | None = getattr(self._trainer, "compressed", None)
        return found

    def _announce(self) -> None:
        if self._on_nan == "skip" and (compressed := self._compressed) is not None:
            compressed.announce_skips()

    @property
    def _steps_in_backward(self) -> bool:
        if self._zero is not None:
            return self._zero.step_in_backward
        return self._ddp is not None and self._ddp.steps_in_backward

    def _check_can_skip(self) -> None:
        if self._on_nan == "skip" and self._steps_in_backward:
            raise ConfigurationError(
                "on_nan: got 'skip', but with step_in_backward the backward pass has made the step when the guard is "
                "asked; needs 'stop', or passes without it"
            )

    def _gradients(self) -> Spoilt | None:
        watched = self._watch.find(self._comm) if self._watch is not None else None
        if watched is not None:
            return [*watched]
        if self._zero is None and self._steps_in_backward:
            return None  # they are gone
        if self._zero is not None:
            return self._of_all_parts(self._zero.find_nonfinite())
        found = find_nonfinite_gradients(self._model, self._comm)
        if found is None or self._ddp is None:
            return None if found is None else [*found]
        return [(name, None) for name in dict.fromkeys(name for name, _ in found)]  # of the mean: no rank's own

    def _of_all_parts(self, found: Spoilt | None) -> Spoilt | None:
        """Joins what the engines of a model's parts have found, each over the ranks of its part. Collective."""
        assert self._zero is not None
        if self._comm.size == self._zero.process_group.size:
            return found
        names = [name for some in all_gather_object(self._comm, found or []) for name, _ in some]
        return [(name, None) for name in dict.fromkeys(names)] or None

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.clear()

    def _describe(self, loss: float | torch.Tensor, found: Spoilt | None) -> str:
        losses = all_gather_object(self._comm, float(loss))
        bad = [rank for rank, value in enumerate(losses) if not math.isfinite(value)]
        parts = [f"the loss is {losses[bad[0]]} on {listing(bad)}"] if bad else []
        if found:
            parts.append(describe(found))
        elif not bad:
            parts.append("the norm of the gradients is not finite, while each of them is")
        return "; ".join(parts)


def _check_number(name: str, value: Any) -> None:
    """Raises ConfigurationError for what is neither a real number nor a tensor of one."""
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise ConfigurationError(f"{name}: got {type(value).__name__}{shape}; needs a number") from None
