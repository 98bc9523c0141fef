"""Compares the accuracy of post-local SGD with that of SGD on small and on large batches.

    mpirun -n 4 python benchmarks/bench_post_local.py --methods small,large,local:8,post-local:8 --seeds 5

    small           DDP; all ranks together take `--batch` images a step
    large           DDP; every rank takes as many, at a learning rate that is so many times higher
    local:8         every rank steps by itself on `--batch` images, from the first step on; weights are averaged at
                    every 8th step
    post-local:8    "large" until the learning rate first falls, after half of the steps, then "local:8"

A small convolutional network learns scikit-learn's digits, of which `--train` are trained on and all others tell the
accuracy. All methods see as many images. SGD with Nesterov momentum of 0.9, a warm-up of 5 % of the steps, a rate that
falls to a tenth at one half and at three quarters of them, as in Lin et al. 2020, "Don't Use Large Mini-Batches, Use
Local SGD", section 4. A seed sets the weights and the order of the images, which are the same for any number of ranks.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import mpidl
from collectives import Communicator
from mpidl.cli import ArgumentParser, at_least
from mpidl.data.images import digits
from mpidl.errors import UsageError
from mpidl.optim import PeriodicAverager, PostLocalSGDOptimizer, PostLocalSGDState, post_local_sgd_hook

METHOD = re.compile(r"small|large|(post-)?local:([1-9]\d*)")


@dataclass(frozen=True)
class Result:
    """A run.

    accuracy: of the other images.
    reductions: how often all ranks sent a model's worth.
    seconds: of steps.
    """

    accuracy: float
    steps: int
    reductions: int
    seconds: float


def network() -> nn.Module:
    """Builds the network: [n, 1, 8, 8] -> [n, 10]."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 16, 10)),
    )


def factor(step: int, steps: int, scale: float) -> float:
    """The factor of the learning rate: rises to `scale`, then falls in two stages."""
    warm = max(1, steps // 20)
    if step < warm:
        return 1 + (scale - 1) * (step + 1) / warm
    return scale * 0.1 ** (int(step >= steps // 2) + int(step >= 3 * steps // 4))


def build(method: str, model: nn.Module, comm: Communicator, steps: int, lr: float) -> tuple[nn.Module, Any, int]:
    """The module to call, its optimizer, and the first local step."""
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    found = METHOD.fullmatch(method)
    if found is None or found[2] is None:
        return wrapped, sgd, steps
    start = steps // 2 if found[1] else 0
    averager = PeriodicAverager(model.parameters(), comm, period=int(found[2]), warmup_steps=start)
    wrapped.register_comm_hook(PostLocalSGDState(comm, averager=averager), post_local_sgd_hook)
    return wrapped, PostLocalSGDOptimizer(sgd, averager), start


def train(method: str, seed: int, data: tuple[torch.Tensor, torch.Tensor], options: argparse.Namespace) -> Result:
    """Trains one model. Collective."""
    comm, (images, labels) = mpidl.init(), data
    torch.manual_seed(seed)
    model = network()
    global_batch = options.batch * (1 if method == "small" else comm.size)
    steps_per_epoch = options.train // global_batch
    steps = steps_per_epoch * options.epochs
    called, optimizer, start = build(method, model, comm, steps, options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor(step, steps, global_batch / options.batch)
    )
    random, seconds = torch.Generator().manual_seed(seed), 0.0
    reductions = start
    for step in range(steps):
        if step % steps_per_epoch == 0:
            order = torch.randperm(options.train, generator=random)
        first = step % steps_per_epoch * global_batch
        own = order[first : first + global_batch].chunk(comm.size)[comm.rank]
        begun = time.perf_counter()
        nn.functional.cross_entropy(called(images[own]), labels[own]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seconds += time.perf_counter() - begun
    if start < steps:
        reductions += -(-(steps - start) // optimizer.averager.period)
        optimizer.averager.average_parameters()
    return Result(accuracy(model, images[options.train :], labels[options.train :], comm), steps, reductions, seconds)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, comm: Communicator) -> float:
    """The part of the images that the model names right, each rank with some of them."""
    with torch.no_grad():
        right = model(images[comm.rank :: comm.size]).argmax(1) == labels[comm.rank :: comm.size]
    total = np.array([int(right.sum()), len(right)], np.float64)
    comm.all_reduce(total)
    return float(total[0] / total[1])


def table(found: dict[str, list[Result]]) -> list[str]:
    """A line for each method: the accuracy over the seeds, and what a run took."""
    lines = [
        f"{'method':16s} {'accuracy, %':>12s} {'lowest to highest':>18s} {'steps':>6s} {'reductions':>11s} {'s':>6s}"
    ]
    for method, runs in found.items():
        percent = [100 * run.accuracy for run in runs]
        lines.append(
            f"{method:16s} {np.mean(percent):12.2f} {min(percent):9.2f} to {max(percent):5.2f} {runs[0].steps:6d} "
            f"{runs[0].reductions:11d} {np.mean([run.seconds for run in runs]):6.1f}"
        )
    return lines


def shuffled() -> tuple[torch.Tensor, torch.Tensor]:
    """All digits in an order that is always the same, in units of their mean and deviation."""
    images, labels = digits()
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    deviation, mean = torch.std_mean(images.float())
    return ((images - mean) / deviation)[order], labels[order]


def parse(comm: Communicator, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default="small,large,local:8,post-local:8", help="separated by commas")
    parser.add_argument("--seeds", type=at_least(1), default=5, help="how many runs a method has (5)")
    parser.add_argument("--epochs", type=at_least(1), default=60, help="passes over the images (60)")
    parser.add_argument("--train", type=at_least(1), default=512, help="images to train on, of 1,797 (512)")
    parser.add_argument("--batch", type=at_least(1), default=32, help="images (32)")
    parser.add_argument("--lr", type=at_least(0, float), default=0.02, help="the rate of such a batch (0.02)")

    def check(options: argparse.Namespace) -> None:
        options.methods = options.methods.split(",")
        for method in options.methods:
            if METHOD.fullmatch(method) is None:
                raise UsageError(f"--methods: got {method!r}; needs any of small, large, local:STEPS, post-local:STEPS")
        if not comm.size * options.batch <= options.train < 1797:
            raise UsageError(f"--train: got {options.train}; needs {comm.size * options.batch} to 1796 images")
        if options.batch < comm.size:
            raise UsageError(f"--batch: got {options.batch}; needs an image for each of {comm.size} ranks")

    return parser.parse_on_all_ranks(check)


def main() -> None:
    """Trains every method with every seed, and prints the table."""
    comm = mpidl.init()
    options = parse(comm)
    data = mpidl.agree_or_exit(comm, shuffled)
    found: dict[str, list[Result]] = {}
    for method in options.methods:
        found[method] = [train(method, seed, data, options) for seed in range(options.seeds)]
        if comm.rank == 0:
            print(f"# {method}: {', '.join(f'{100 * run.accuracy:.2f}' for run in found[method])}", flush=True)
    if comm.rank == 0:
        print("\n".join(table(found)), flush=True)


if __name__ == "__main__":
    main()
