"""Optimizers of the examples' --optimizer that send or keep less: options, what they refuse, and how they are made.

    adamw8bit                             moments of 8 bits, with DDP and every stage of ZeRO
    onebitadam, zerooneadam, onebitlamb   one bit an element once mean squares are steady, with DDP and ZeRO-1
    dion                                  matrices by factors of low rank, with DDP; ZeRO reduces gradients
    diloco                                ranks train alone between outer steps, with DDP

Over DDP the last five have a communication hook, which sends what they need in place of the gradients. Each trains
further from the examples' checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

import mpidl
from mpidl.cli import at_least
from mpidl.errors import UsageError
from mpidl.optim import (
    DiLoCo,
    Dion,
    DionState,
    OneBitAdam,
    OneBitLamb,
    PostLocalSGDState,
    ZeroOneAdam,
    dion_hook,
    one_bit_hook,
    post_local_sgd_hook,
)

ONE_BIT: dict[str, Any] = {"onebitadam": OneBitAdam, "zerooneadam": ZeroOneAdam, "onebitlamb": OneBitLamb}
FREEZING = ("onebitadam", "onebitlamb")
HOOKED = (*ONE_BIT, "dion", "diloco")  # over DDP each has a hook, which sends in place of DDP and --compress
DION_RATE = 20  # Dion's steps have orthonormal columns: its learning rate by AdamW's
OUTER_EVERY = 50


def add_less_sent(parser: Any) -> None:
    """Adds the options of these optimizers."""
    few = {"type": at_least(1), "metavar": "N"}
    parser.add_argument("--freeze-step", **few, help="onebitadam, onebitlamb: last step of whole gradients; else found")
    parser.add_argument("--outer-every", **few, help=f"diloco: steps of each rank alone, else {OUTER_EVERY}")
    parser.add_argument("--outer-warmup", **few, help="diloco: first steps, with averaged gradients; else none")


def check_optimizer(options: argparse.Namespace, stage: int = 0, tp: int = 1) -> None:
    """Raises UsageError for what does not go with --optimizer, and sets DiLoCo's period where it is left out.

    stage: of ZeRO; 0 is DDP.
    """
    name = options.optimizer
    asked = f"--optimizer {name}"
    if options.freeze_step and name not in FREEZING:
        raise UsageError(f"--freeze-step {options.freeze_step}: needs --optimizer {' or '.join(FREEZING)}")
    if (options.outer_every or options.outer_warmup) and name != "diloco":
        raise UsageError("--outer-every and --outer-warmup: need --optimizer diloco")
    if name in ONE_BIT and stage > 1:
        raise UsageError(f"--zero {stage}: {asked} needs each rank's whole gradients; needs --zero 0 or 1")
    if name == "diloco" and stage:
        raise UsageError(f"--zero {stage}: {asked} trains on each rank by itself; needs --zero 0")
    sends_less_itself = name in ONE_BIT or (name in HOOKED and not stage)
    if sends_less_itself and options.compress:
        raise UsageError(f"--compress {options.compress}: {asked} sends less by itself; leave it out")
    compressor = None if options.compress in (None, "auto") else mpidl.Compression(options.compress).compressor()
    if compressor is not None and compressor.momentum and getattr(options, "beta1", True):
        raise UsageError(f"--compress {options.compress}: {asked} has momentum too; needs momentum=0 in the method")
    if sends_less_itself and tp > 1:
        raise UsageError(f"--tp {tp}: {asked} needs ranks that hold the whole model; needs --tp 1")
    if name == "dion" and stage and options.offload:
        raise UsageError(f"--offload {options.offload}: {asked} steps on whole matrices; leave it out")
    if name in ONE_BIT and stage:
        if options.offload:
            raise UsageError(f"--offload {options.offload}: {asked} keeps whole states on every rank; leave it out")
        if options.dtype != "fp32":
            raise UsageError(f"--dtype {options.dtype}: {asked} keeps no masters; needs fp32, or --zero 0")
    if name == "diloco":
        if options.device != "cpu":
            raise UsageError(f"--device {options.device}: {asked} needs parameters in the host's memory; needs cpu")
        options.outer_every = options.outer_every or OUTER_EVERY
        options.outer_warmup = options.outer_warmup or 0


def less_sent_settings(options: argparse.Namespace, warmup: int, steps: int) -> dict[str, Any]:
    """The settings of the 1-bit optimizers beyond Adam's; empty for others.

    warmup: steps in which the learning rate rises.
    steps: of the whole training. ZeroOneAdam makes none of its local steps in it: the examples validate and save after
        any step, and between local steps each rank has weights of its own.
    """
    if options.optimizer in FREEZING:
        return {"freeze_step": options.freeze_step, "lr_warmup_steps": warmup}
    return {"local_after": max(1, steps)} if options.optimizer in ONE_BIT else {}


def dion_groups(model: torch.nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for Dion: matrices but embeddings; those and all other parameters by AdamW's rule."""
    embedding_ids = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    by_dion = [p for p in model.parameters() if p.dim() == 2 and id(p) not in embedding_ids]
    tables_alone = [p for p in model.parameters() if id(p) in embedding_ids]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [
        {"params": by_dion, "lr": DION_RATE * lr, "weight_decay": weight_decay / DION_RATE},
        {"params": tables_alone, "lr": lr, "weight_decay": weight_decay, "rule": "adamw"},
        {"params": others, "lr": lr, "weight_decay": 0.0, "rule": "adamw"},
    ]


def make_optimizer_over_ddp(
    wrapped: mpidl.DistributedDataParallel,
    options: argparse.Namespace,
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: Sequence[dict[str, Any]],
    settings: dict[str, Any],
) -> torch.optim.Optimizer:
    """Makes the optimizer over DDP, and registers its hook if it has one. Collective.

    optimizer_class, settings: of --optimizer; for diloco those of its inner steps.
    """
    comm = wrapped.process_group
    if options.optimizer == "diloco":
        inner, period, warmup = optimizer_class(groups, **settings), options.outer_every, options.outer_warmup
        outer = DiLoCo(inner, period, comm, warmup_steps=warmup)
        # >>> Averages gradients in the warm-up; later each rank keeps its own.
        wrapped.register_comm_hook(PostLocalSGDState(comm, averager=outer.averager), post_local_sgd_hook)
        return outer
    if options.optimizer not in HOOKED:
        return optimizer_class(groups, **settings)
    optimizer: Any = optimizer_class(groups, process_group=comm, **settings)
    if options.optimizer == "dion":
        wrapped.register_comm_hook(DionState(optimizer), dion_hook)  # >>> averages what AdamW's rule steps on
    else:
        wrapped.register_comm_hook(optimizer, one_bit_hook)  # >>> averages gradients until they are sent in bits
    return optimizer


def parameters_to_clip(model: torch.nn.Module, optimizer: Any) -> list[torch.nn.Parameter]:
    """The parameters to clip over DDP. Of Dion's matrices each rank has gradients of its own, which must stay."""
    own = optimizer.matrices() if isinstance(optimizer, Dion) else set()
    return [p for p in model.parameters() if p not in own]
