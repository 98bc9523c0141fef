"""Trains a ResNet on images with DDP over MPI: shows the accuracy rising and how long an epoch takes.

    mpirun -n 4 python examples/resnet_ddp.py                           # the handwritten digits of scikit-learn
    mpirun -n 4 python examples/resnet_ddp.py --data DIR --model resnet101 --segments 4 --epochs 100 --plot out.png
    mpirun -n 4 python examples/resnet_ddp.py --checkpoint-dir DIR --save-every 500    # goes on from DIR
    mpirun -n 4 python examples/resnet_ddp.py --compress int8           # fewer bytes, between nodes if there are any
    mpirun -n 4 python examples/resnet_ddp.py --device cuda             # bf16, on the GPUs in turn
    python examples/resnet_ddp.py                                       # a world of one

The parts that make it parallel are marked with >>>.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import mpidl
from mpidl.cli import ArgumentParser, add_compress, add_device, at_least, check_writable, choose_dtype
from mpidl.data import DataLoader, DistributedSampler
from mpidl.data.images import Digits, image_folders
from mpidl.errors import UsageError
from mpidl.models.resnet import SIZES, ResNet
from mpidl.optim import LAMB, LARS, AdamW8bit, warmup_cosine
from mpidl.replicas.broadcast import broadcast_states
from mpidl.resuming import Checkpoints, add_options, check_options, settings_of
from optimizers import ONE_BIT, add_less_sent, check_optimizer, less_sent_settings, make_optimizer_over_ddp

LEARNING_RATES = {"sgd": 0.05, "lars": 2.0, "adamw": 2e-3, "lamb": 1e-2, "adamw8bit": 2e-3}
LEARNING_RATES |= {"onebitadam": 2e-3, "zerooneadam": 2e-3, "onebitlamb": 1e-2, "diloco": 2e-3}
ADAMS = {"adamw": torch.optim.AdamW, "lamb": LAMB, "adamw8bit": AdamW8bit, **ONE_BIT, "diloco": torch.optim.AdamW}
SMALLEST = 2  # images of a rank in a batch: of a single one, batch norm would leave nothing
SECONDS_BETWEEN_LINES = 5.0


def parse(comm: Any) -> argparse.Namespace:
    """The options; wrong ones end all ranks with one line and status 2."""
    parser = ArgumentParser(comm, description=__doc__.splitlines()[0])
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", metavar="DIR", help="one folder of images a class, or train/ and val/ of such; else digits"
    )
    data.add_argument("--size", type=at_least(8), default=224, help="height and width of the images in DIR")
    data.add_argument("--workers", type=at_least(0), default=0, help="processes a rank that read images; 0: itself")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="resnet18", choices=list(SIZES), help="size")
    model.add_argument("--width", type=at_least(1), help="channels of the first stage; 64 for DIR, 32 for the digits")
    model.add_argument("--segments", type=at_least(0), default=0, help="of checkpointed activations; 0: keep all")
    model.add_argument("--sync-bn", action="store_true", help="batch norm over the images of all ranks")
    train = parser.add_argument_group("training")
    train.add_argument("--epochs", type=at_least(1), default=15, help="passes over the images")
    train.add_argument("--batch-size", type=at_least(1), help="images a step, of all ranks; 64, or just above")
    train.add_argument("--optimizer", default="sgd", choices=list(LEARNING_RATES), help="sgd, lars: momentum 0.9")
    add_less_sent(train)
    train.add_argument("--lr", type=at_least(0, float), help=f"highest learning rate; else {LEARNING_RATES}")
    train.add_argument("--warmup", type=at_least(0, float), default=1.0, help="epochs of linear warm-up")
    train.add_argument("--weight-decay", type=at_least(0, float), default=5e-4, help="of matrices and filters")
    add_compress(train)
    add_device(train)
    train.add_argument("--dtype", choices=["fp32", "bf16"], help="bf16: by autocast; else fp32, on a GPU bf16")
    train.add_argument("--seed", type=at_least(0), default=1337, help="of weights, batches and parts of images")
    add_options(parser)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    shown.add_argument("--plot", type=Path, metavar="PATH", help="draw curves and a histogram of epoch times: a PNG")
    shown.add_argument("--no-progress", action="store_true", help="no lines within an epoch")

    def check(options: argparse.Namespace) -> None:
        choose_dtype(options)
        check_optimizer(options)
        check_options(comm, options)
        blocks = sum(SIZES[options.model][1])
        if options.segments > blocks:
            raise UsageError(f"--segments {options.segments}: {options.model} has {blocks} blocks to divide")
        if options.batch_size is None:
            options.batch_size = -(-64 // comm.size) * comm.size
        if options.batch_size % comm.size or options.batch_size < SMALLEST * comm.size:
            raise UsageError(
                f"--batch-size {options.batch_size}: is divided among {comm.size} rank{'s' * (comm.size > 1)}; "
                f"needs a multiple of that, and at least {SMALLEST} images each"
            )
        if options.warmup > options.epochs:
            raise UsageError(f"--warmup {options.warmup:g}: is more than all {options.epochs} epochs")
        if options.plot and importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot needs the package matplotlib (pip install 'mpidl[plot]')")
        if comm.rank == 0:
            check_writable(options.json)
            check_writable(options.plot)

    return parser.parse_on_all_ranks(check)


def load_data(comm: Any, options: argparse.Namespace) -> tuple[Any, Any]:
    """Loads the data to train on and to validate with."""

    def read() -> tuple[Any, Any]:
        if options.data is None:
            return Digits(train=True), Digits(train=False)
        return image_folders(options.data, options.size, options.seed)

    # >>> What is wrong on one rank alone ends them all, before they would wait for each other.
    train, validation = mpidl.agree_or_exit(comm, read)
    found = mpidl.all_gather_object(comm, (len(train), len(validation), train.classes))

    def compare() -> None:
        if found[comm.rank] != found[0]:
            counts = [f"{sum(seen[:2])} images of {len(seen[2])} classes" for seen in (found[0], found[comm.rank])]
            raise UsageError(f"{options.data}: rank 0 sees {counts[0]}, rank {comm.rank} other ones ({counts[1]})")
        if len(train) < SMALLEST * comm.size:
            raise UsageError(f"{options.data}: {len(train)} images to train on are too few for {comm.size} ranks")

    mpidl.agree_or_exit(comm, compare)
    return train, validation


def make_model(comm: Any, options: argparse.Namespace, images: Any) -> torch.nn.Module:
    """A ResNet for the images: small ones keep their resolution at its entrance."""
    channels, size, _ = images[0][0].shape
    model = ResNet(
        options.model,
        num_classes=len(images.classes),
        in_channels=channels,
        width=options.width or (64 if options.data else 32),
        stem="small" if size <= 64 else "imagenet",
        zero_init_residual=True,
        segments=options.segments,
    )
    if options.sync_bn:  # >>> statistics of all ranks' images
        return mpidl.SyncBatchNorm.convert_sync_batchnorm(model, comm)
    return model


def make_optimizer(
    options: argparse.Namespace, wrapped: mpidl.DistributedDataParallel, warmup: int, steps: int
) -> torch.optim.Optimizer:
    """Weight decay is for filters and matrices, not for norms and biases. warmup, steps: of the whole training."""
    groups = [
        {"params": [p for p in wrapped.parameters() if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in wrapped.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    lr = LEARNING_RATES[options.optimizer] if options.lr is None else options.lr
    if options.optimizer == "lars":
        return LARS(groups, lr=lr, momentum=0.9)
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
    settings = {"lr": lr, **less_sent_settings(options, warmup, steps)}
    if options.optimizer in ONE_BIT:
        settings["betas"] = (0.9, 0.99)  # mean squares are then found steady after some hundred steps
    return make_optimizer_over_ddp(wrapped, options, ADAMS[options.optimizer], groups, settings)


class Training:
    """One model on one rank: an epoch of training, and a validation. steps_done: steps that earlier runs have taken."""

    def __init__(
        self, comm: Any, options: argparse.Namespace, train: Any, validation: Any, device: torch.device
    ) -> None:
        self.comm, self.options, self.images, self.device = comm, options, train, device
        self.model = make_model(comm, options, train).to(device)
        # >>> Gradients are averaged during backward, with fewer bytes where --compress or --optimizer says how.
        self.call = mpidl.DistributedDataParallel(self.model, process_group=comm, compress=options.compress)
        self.batch = options.batch_size // comm.size
        self.sampler = DistributedSampler(train, comm, shuffle=True, seed=options.seed)  # >>> every rank other images
        self.loader = self.load(train, self.sampler)
        # >>> Validation needs no equal parts: every image once.
        self.validation = self.load(validation, range(comm.rank, len(validation), comm.size))
        # >>> The sampler repeats some images so that all ranks have equally many. Those do not count: this rank has
        # `own`, the one with fewest has `fewest`, and a last batch that is too small for batch norm is left out.
        self.own = len(range(comm.rank, len(train), comm.size))
        fewest, steps = len(train) // comm.size, len(self.loader)
        self.steps = steps - (fewest - (steps - 1) * self.batch < SMALLEST)
        warmup = round(options.warmup * self.steps)
        total = options.epochs * self.steps
        self.optimizer = make_optimizer(options, self.call, warmup, total)
        self.schedule = warmup_cosine(self.optimizer, warmup, total, start=1 / (warmup + 1))
        self.guard = None
        if options.on_nan != "ignore":
            self.guard = mpidl.NonfiniteGuard(self.call, None, options.on_nan)
        self.total_steps = total
        self.steps_done, self.sums = 0, np.zeros(3)  # of an epoch that is under way: loss, recognised, images

    def resume(self, stop: Any) -> None:
        """Goes on from a checkpoint, if there is one, in the middle of an epoch."""
        names = "data size model width sync_bn epochs batch_size optimizer lr warmup weight_decay dtype seed"
        names += " freeze_step outer_every outer_warmup"
        settings = settings_of(self.options, names, steps_an_epoch=self.steps)
        # >>> Each rank saves a part of the model, and the loader how far all ranks have come.
        training = (self.call, self.optimizer, self.schedule, None, self.loader)
        self.kept = Checkpoints(self.comm, self.options, stop, training, settings)
        loaded = self.kept.resume(self.total_steps)
        if loaded:
            self.steps_done = loaded.step
            sums = loaded.extra["sums"]
            # >>> Each rank its own; the same in all where there are other ranks now.
            if len(sums) == self.comm.size:
                self.sums[:] = sums[self.comm.rank]
            elif self.comm.rank == 0:
                self.sums[:] = np.sum(sums, 0)

    def load(self, images: Any, sampler: Any) -> DataLoader:
        """Batches of the sampler's images."""
        workers = self.options.workers
        return DataLoader(images, self.batch, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)

    def losses(self, call: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The images' losses added up, and how many of them are recognised."""
        x, y = x.to(self.device), y.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bf16"):
            logits = call(x)
        return F.cross_entropy(logits.float(), y, reduction="sum"), int((logits.argmax(1) == y).sum())

    def mean_over_ranks(self, sums: np.ndarray[Any, Any]) -> tuple[float, float]:
        """Loss and accuracy over the images of all ranks, from this rank's sums and their number."""
        self.comm.all_reduce(sums)
        return float(sums[0] / sums[2]), float(sums[1] / sums[2])

    def epoch(self, number: int, show: Callable[[str], None]) -> tuple[float, float]:
        """Trains on all images once; returns the mean loss and accuracy of the passes."""
        self.sampler.set_epoch(number)
        self.images.set_epoch(number)
        self.call.train()
        for step, (x, y) in zip(range(self.steps_done - number * self.steps, self.steps), self.loader, strict=False):
            x, y = x[: self.own - step * self.batch], y[: self.own - step * self.batch]
            self.optimizer.zero_grad()
            loss_sum, correct = self.losses(self.call, x, y)
            # >>> Ranks may have different numbers of images: the mean is over those of all ranks.
            mpidl.global_mean(loss_sum, len(y), self.comm).backward()
            if self.guard is None or self.guard.allows(loss_sum):  # >>> the same on all ranks
                self.optimizer.step()
                self.sums += loss_sum.item(), correct, len(y)
            self.schedule.step()
            show(f"step {step + 1:4d}/{self.steps}  loss {loss_sum.item() / len(y):.4f} here")
            self.steps_done += 1
            if step + 1 < self.steps:  # else after the validation, which makes rank 0's buffers the model's
                self.keep()
        seen, self.sums = self.sums, np.zeros(3)
        return self.mean_over_ranks(seen)

    def keep(self) -> None:
        """Saves, and stops where a signal has come."""
        self.kept.after(
            self.steps_done, self.total_steps, lambda: {"sums": mpidl.all_gather_object(self.comm, self.sums.tolist())}
        )

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Loss and accuracy over all validation images, each counted once."""
        # >>> Each rank's batch norms have averaged over its own images: rank 0's statistics are the model's.
        broadcast_states(self.comm, self.model.buffers())
        self.model.eval()
        sums = np.zeros(3)
        for x, y in self.validation:
            loss_sum, correct = self.losses(self.model, x, y)
            sums += loss_sum.item(), correct, len(y)
        return self.mean_over_ranks(sums)


def draw(path: Path, epochs: list[dict[str, float]], title: str) -> None:
    """Loss and accuracy over the epochs, and how often an epoch took how long."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    numbers = [epoch["epoch"] for epoch in epochs]
    for axis, what, scale in ((axes[0], "loss", 1), (axes[1], "accuracy", 100)):
        for part, label in (("train", "training"), ("val", "validation")):
            axis.plot(numbers, [scale * epoch[f"{part}_{what}"] for epoch in epochs], marker=".", label=label)
        axis.set(xlabel="epoch", ylabel=f"{what}, %" if scale == 100 else what)
        axis.legend()
        axis.grid(alpha=0.3)
    axes[2].hist([epoch["seconds"] for epoch in epochs], bins="auto")
    axes[2].set(xlabel="seconds an epoch of training", ylabel="epochs")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=80)


def main() -> None:
    """Sets up, trains, shows."""
    comm = mpidl.init()  # >>> all ranks that mpirun started
    options = parse(comm)
    stop = mpidl.StopSignal()  # >>> SIGTERM or SIGUSR1 on any rank ends all of them after the same step
    say = print if comm.rank == 0 else lambda *_, **__: None
    torch.manual_seed(options.seed)
    device = mpidl.agree_or_exit(comm, lambda: mpidl.pick_device(comm, options.device))  # >>> GPUs go round
    train, validation = load_data(comm, options)
    training = Training(comm, options, train, validation, device)
    parameters = sum(p.numel() for p in training.model.parameters())
    segments = f", {options.segments} checkpointed segments" if options.segments else ""
    title = f"{options.model} of {parameters / 1e6:.2f} M parameters, DDP on {comm.size} rank{'s' * (comm.size > 1)}"
    say(
        f"{title}, {torch.get_num_threads()} thread(s) each, on {device.type}{segments}; {len(train)} images of "
        f"{len(train.classes)} classes to train on, {options.batch_size} a step, {len(validation)} to validate",
        flush=True,
    )

    training.resume(stop)
    first = training.steps_done // training.steps
    epochs: list[dict[str, float]] = []
    last_line_at = began = time.perf_counter()
    for number in range(first, options.epochs):

        def show(measured: str, number: int = number) -> None:
            nonlocal last_line_at
            if not options.no_progress and time.perf_counter() - last_line_at > SECONDS_BETWEEN_LINES:
                last_line_at = time.perf_counter()
                say(f"epoch {number + 1:3d}/{options.epochs}  {measured}", flush=True)

        comm.barrier()
        start = time.perf_counter()
        train_loss, train_accuracy = training.epoch(number, show)  # ends with a sum over all ranks
        seconds = time.perf_counter() - start
        val_loss, val_accuracy = training.validate()
        training.keep()
        figures = {"train_loss": train_loss, "train_accuracy": train_accuracy}
        figures |= {"val_loss": val_loss, "val_accuracy": val_accuracy, "seconds": seconds}
        epochs.append({"epoch": number + 1, **figures})
        left = int((time.perf_counter() - began) / (number + 1 - first) * (options.epochs - number - 1))
        say(
            f"epoch {number + 1:3d}/{options.epochs}  loss {train_loss:.4f}  accuracy {train_accuracy:.2%}  validation "
            f"loss {val_loss:.4f}  accuracy {val_accuracy:.2%}  {seconds:.2f} s  {left // 60}:{left % 60:02d} left",
            flush=True,
        )
        last_line_at = time.perf_counter()

    if not epochs:
        _, val_accuracy = training.validate()
    times = [epoch["seconds"] for epoch in epochs]
    mean = statistics.mean(times) if times else 0.0
    deviation = statistics.stdev(times) if len(times) > 1 else 0.0
    peak = np.array([mpidl.memory.peak_rss_mib()])
    comm.all_reduce(peak, "max")
    say(f"epoch time {mean:.3f} s ± {deviation:.3f} s over {len(times)} epochs; at most {peak[0]:.0f} MiB a rank")
    if comm.rank == 0 and options.json:
        results = {
            "world_size": comm.size,
            "model": options.model,
            "params": parameters,
            "train_images": len(train),
            "val_images": len(validation),
            "batch_size": options.batch_size,
            "steps_per_epoch": training.steps,
            "segments": options.segments,
            "optimizer": options.optimizer,
            "dtype": options.dtype,
            "epochs": epochs,
            "epoch_seconds_mean": mean,
            "epoch_seconds_std": deviation,
            "val_accuracy": val_accuracy,
            "peak_rss_mib": float(peak[0]),
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if comm.rank == 0 and options.plot and epochs:
        draw(options.plot, epochs, title)


if __name__ == "__main__":
    main()
