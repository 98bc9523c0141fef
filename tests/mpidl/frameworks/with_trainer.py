"""A Trainer of transformers in every engine, compared with one process; its export, and its own checkpoints.

Usage: with_trainer.py FOLDER    FOLDER: empty, the same on every rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mpidl
from collectives import Communicator
from tests.mpidl.frameworks.reference import (
    LENGTH,
    MAX_NORM,
    SEQUENCES,
    STEPS,
    Run,
    check,
    made,
    reference,
    sequences,
    weights_of,
    wrapped,
)


class ZeroTrainer(transformers.Trainer):
    """Saves and loads whole weights."""

    def __init__(self, zero: mpidl.ZeroOptimizer, **given: Any) -> None:
        super().__init__(optimizers=(zero, None), **given)
        self.zero = zero

    def save_model(self, *given: Any, **named: Any) -> None:
        with self.zero.gathered(writable=False):
            super().save_model(*given, **named)

    def _load_from_checkpoint(self, *given: Any, **named: Any) -> None:
        with self.zero.gathered():
            super()._load_from_checkpoint(*given, **named)


def settings(folder: Path, **given: Any) -> transformers.TrainingArguments:
    """Arguments of a run that trains on the rank's sequences in their order."""
    return transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_grad_norm=MAX_NORM,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", "per_device_train_batch_size": SEQUENCES, **given},
    )


def dataset(rank: int) -> list[dict[str, torch.Tensor]]:
    """With a column that the model does not take, and no label for the first token, which is not predicted."""
    rows = sequences(rank)
    labels = torch.where(torch.arange(LENGTH) > 0, rows, -100)  # Trainer divides by the number of labels
    return [{"input_ids": x, "labels": y, "number": n} for n, (x, y) in enumerate(zip(rows, labels, strict=True))]


def run_of(trainer: transformers.Trainer, model: Any, optimizer: Any) -> Run:
    """Returns the trainer's log and weights."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms = ([float(entry[key]) for entry in steps] for key in ("loss", "grad_norm"))
    return Run(losses, norms, weights_of(model, optimizer))


def train(comm: Communicator, folder: Path, way: str, micro: int = 1) -> tuple[Run, Any, Any]:
    """The plain Trainer, to which the engine's model and optimizer are given. micro: micro-batches of a step."""
    model, optimizer = wrapped("ddp" if way.startswith("ddp") else way)
    given = model.module if way == "ddp-inside" else model
    args = settings(folder, per_device_train_batch_size=SEQUENCES // micro, gradient_accumulation_steps=micro)
    trainer = transformers.Trainer(
        model=given, args=args, train_dataset=dataset(comm.rank), optimizers=(optimizer, None)
    )
    if way == "ddp-inside":
        trainer.model_wrapped = model
    trainer.train()
    return run_of(trainer, model, optimizer), model, optimizer


def resume(comm: Communicator, folder: Path, way: str) -> None:
    """Trainer's own checkpoints, one folder a rank: half a run, and the rest of it by another Trainer."""
    found = []
    for steps, start in ((STEPS, None), (STEPS // 2, None), (STEPS, True)):
        model, optimizer = wrapped(way)
        saved = {"save_strategy": "steps", "save_steps": STEPS // 2, "max_steps": steps}
        args = settings(folder / ("parts" if found else "whole"), **saved)
        if way == "ddp":
            given = {"args": args, "train_dataset": dataset(comm.rank), "optimizers": (optimizer, None)}
            trainer = transformers.Trainer(model=model.module, **given)
            trainer.model_wrapped = model
        else:
            trainer = ZeroTrainer(optimizer, model=model, args=args, train_dataset=dataset(comm.rank))
        trainer.train(resume_from_checkpoint=start)
        found.append(run_of(trainer, model, optimizer))
    whole, _, rest = found
    assert rest.losses == whole.losses
    assert all(torch.equal(rest.weights[name], p) for name, p in whole.weights.items())


def resize(rank: int) -> None:
    """A vocabulary that grows after the model was wrapped is refused with its remedy."""
    model, _ = wrapped("ddp")
    model.module.resize_token_embeddings(40)
    batch = sequences(rank)
    with pytest.raises(mpidl.TrainingError, match=r"transformer\.wte\.weight \(now \(40, 16\), before \(32, 16\)\)"):
        model(input_ids=batch, labels=batch).loss.backward()


def main(folder: Path) -> None:
    """Runs all; prints "done" where all is as it must be."""
    comm = mpidl.init()
    own = folder / f"rank{comm.rank}"
    expected = reference(comm.size)
    for way in ("stage 1", "stage 3", "stage 3 gathered", "ddp", "ddp-inside"):
        found, model, optimizer = train(comm, own / way, way)
        check(comm, way, found, expected)
        if way != "ddp":
            zero = optimizer if isinstance(optimizer, mpidl.ZeroOptimizer) else None
            mpidl.checkpoint.export_safetensors(folder / way, model, zero)
            again = transformers.GPT2LMHeadModel.from_pretrained(folder / way)
            assert all(torch.equal(p, found.weights[name]) for name, p in again.named_parameters())
            assert again.config.n_embd == made().config.n_embd
    for way in ("stage 2", "stage 3", "ddp"):
        check(comm, f"{way}, micro-batches", train(comm, own / f"{way}-micro", way, micro=2)[0], expected)
    for way in ("stage 3", "stage 3 gathered", "ddp"):
        resume(comm, own / f"{way}-saved", way)
    resize(comm.rank)
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
