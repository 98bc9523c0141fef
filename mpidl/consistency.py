"""Do all ranks hold the same model? Found out before the first step, and said which parameter differs where."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from collectives import Communicator

from .errors import ConfigurationError, ModelMismatch, TrainingError
from .objects import all_gather_object

Result = TypeVar("Result")


def check_everywhere(comm: Communicator, check: Callable[[], Result]) -> Result:
    """What `check()` returns; what it raises on any rank ends it on every rank. Collective.

    A rank's own error is raised as it is, that of another one as a ConfigurationError which names the rank.
    """
    error: Exception | None = None
    result: Result | None = None
    try:
        result = check()
    except Exception as raised:
        error = raised
    message = None if error is None else str(error)
    if error is not None and not isinstance(error, ConfigurationError):
        message = f"{type(error).__name__}: {error}"
    messages = all_gather_object(comm, message)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ConfigurationError(f"{message} (on rank {rank})")
    return result  # type: ignore[return-value]


def check_settings_agree(comm: Communicator, of: str, settings: Mapping[str, Any]) -> None:
    """Raises ModelMismatch on every rank unless all give equal settings. Collective.

    of: whose settings these are, for the message.
    """
    everyone = all_gather_object(comm, {name: repr(value) for name, value in settings.items()})
    for rank, other in enumerate(everyone):
        for name in {**everyone[0], **other}:
            mine, theirs = everyone[0].get(name, "(nothing)"), other.get(name, "(nothing)")
            if mine != theirs:
                raise ModelMismatch(f"{of}: rank 0 has {name}={mine}, rank {rank} has {name}={theirs}")


def _order(p: torch.Tensor) -> str:
    """How the elements lie in memory, where that is not the usual order."""
    return "" if p.is_contiguous() else f", strides {p.stride()}"


def check_models_agree(comm: Communicator, model: torch.nn.Module, ignored: Container[str] = ()) -> None:
    """Raises ModelMismatch on every rank unless all have parameters and buffers of the same names, shapes, dtypes.

    Collective. Also compares which parameters train, and which are one under several names. ignored: names not to look
    at.
    """
    lines = []
    first: dict[torch.Tensor, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name not in ignored:
            tied = f", the same as {first[p]}" if p in first else ""
            frozen = ("" if p.requires_grad else ", frozen") + (", on meta" if p.is_meta else "")
            lines.append(f"parameter {name}: {tuple(p.shape)} {p.dtype}{_order(p)}{frozen}{tied}")
            first.setdefault(p, name)
    for name, b in model.named_buffers(remove_duplicate=False):
        if name not in ignored:
            tied = f", the same as {first[b]}" if b in first else ""
            lines.append(f"buffer {name}: {tuple(b.shape)} {b.dtype}{', on meta' if b.is_meta else ''}{tied}")
            first.setdefault(b, name)
    digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest(), np.uint8)
    digests = np.empty(comm.size * digest.size, np.uint8)
    comm.all_gather(digests, digest)
    if (digests.reshape(comm.size, -1) == digests[: digest.size]).all():
        return
    models = all_gather_object(comm, lines)
    for rank, other in enumerate(models):
        if other == models[0]:
            continue
        for mine, theirs in zip([*models[0], "nothing more"], [*other, "nothing more"], strict=False):
            if mine != theirs:
                raise ModelMismatch(f"the ranks' models differ: rank 0 has {mine}, rank {rank} has {theirs}")


def refuse_everywhere(comm: Communicator, problem: str | None) -> None:
    """Raises TrainingError on every rank if any has a problem, which the error tells. Collective."""
    found = np.array([problem is not None], np.uint8)
    comm.all_reduce(found, "max")
    if found[0]:
        raise_everywhere(comm, problem)


def raise_everywhere(comm: Communicator, problem: str | None) -> None:
    """Raises this rank's problem, or that of the first rank which has one, as some rank has. Collective."""
    problems = all_gather_object(comm, problem)
    if problem is not None:
        raise TrainingError(problem)
    raise TrainingError(next(f"{text} (on rank {rank})" for rank, text in enumerate(problems) if text is not None))
