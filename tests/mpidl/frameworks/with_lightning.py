"""A Lightning module in every engine, compared with one process; its own checkpoints.

Usage: with_lightning.py FOLDER    FOLDER: empty, the same on every rank.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch

import mpidl
from tests.mpidl.frameworks.reference import (
    ADAM,
    MAX_NORM,
    SEQUENCES,
    ZERO,
    Run,
    check,
    made,
    reference,
    sequences,
    weights_of,
)


class Module(pytorch_lightning.LightningModule):
    """Clips by itself where the optimization is manual, else by the trainer's gradient_clip_val."""

    def __init__(self, way: str, manual: bool = False) -> None:
        super().__init__()
        self.way, self.automatic_optimization = way, not manual
        self.model = mpidl.DistributedDataParallel(made()) if way == "ddp" else made()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        if self.way == "ddp":
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **ADAM)
        else:
            self.optimizer = mpidl.ZeroOptimizer(self.model, torch.optim.AdamW, **ZERO[self.way], **ADAM)
        return self.optimizer

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            self.norms.append(self.norm())
            self.clip_gradients(optimizer, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def on_before_optimizer_step(self, _: Any) -> None:
        if self.automatic_optimization:
            self.norms.append(self.norm())

    def norm(self) -> float:
        """Computes the norm of the present gradients."""
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))

    def state_dict(self, *given: Any, **named: Any) -> Any:
        """Whole weights, for Lightning's checkpoints."""
        if self.way == "ddp":
            return super().state_dict(*given, **named)
        with self.optimizer.gathered(writable=False):
            return copy.deepcopy(super().state_dict(*given, **named))


def fit(rank: int, module: Module, epochs: int = 1, path: Path | None = None) -> pytorch_lightning.Trainer:
    """A run of Lightning's Trainer. path: the checkpoint with which it begins."""
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        gradient_clip_val=MAX_NORM if module.automatic_optimization else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = torch.utils.data.DataLoader(sequences(rank), batch_size=SEQUENCES)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=path)
    return trainer


def resume(rank: int, way: str, path: Path) -> None:
    """Compares one epoch and a second by another trainer with two epochs of one trainer."""
    whole, first, second = Module(way), Module(way), Module(way)
    fit(rank, whole, epochs=2)
    fit(rank, first).save_checkpoint(path)
    fit(rank, second, epochs=2, path=path)
    assert first.losses + second.losses == whole.losses, way
    expected, found = (weights_of(m.model, m.optimizer) for m in (whole, second))
    assert all(torch.equal(found[name], p) for name, p in expected.items()), way


def main(folder: Path) -> None:
    """Runs all; prints "done" where all is as it must be."""
    comm = mpidl.init()
    expected = reference(comm.size)
    for way, manual in (
        ("stage 1", True),
        ("stage 2", False),
        ("stage 3", False),
        ("stage 3 gathered", False),
        ("stage 3 gathered", True),
        ("ddp", False),
    ):
        module = Module(way, manual)
        fit(comm.rank, module)
        found = Run(module.losses, module.norms, weights_of(module.model, module.optimizer))
        check(comm, f"{way}, manual: {manual}", found, expected)
    for way in ("stage 3", "stage 3 gathered", "ddp"):
        resume(comm.rank, way, folder / f"{way}-{comm.rank}.ckpt")
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
