"""Compares how a small GPT-2 learns when ranks send less: validation loss by steps, bytes and seconds.

    mpirun -n 4 python benchmarks/bench_learning.py --data shakespeare.txt --methods fp32,int8,powersgd:4,diloco:50 \\
        --seeds 3 --json learning.json --plot learning.png

    fp32                      DDP in full precision
    int8, powersgd:4, ...     a name of mpidl.COMPRESSORS, with error feedback
    onebit                    1-bit Adam, which freezes v by its own rule
    diloco:50                 ranks by themselves, with an outer step at every 50th one
    diloco:50 after 500       the same after 500 steps of averaged gradients
    powersgd:4 after 500      a compressor after as many steps in full precision, not after as many as is its default
    int4 without feedback     a compressor or onebit without error feedback
    powersgd:4 at 0.002       any of them with another learning rate than 0.001

Behind a name these words stand in the order: after, at, without feedback.

Names with commas stand between semicolons: --methods "fp32;powersgd:4,fp16". "dgc" needs its
momentum=0, as AdamW has one.

The model has 4 layers of width 128, the text's characters as tokens, and windows of 64 of them; a step takes 12
windows of all ranks together, or --windows. AdamW with a learning rate of 0.001, a weight decay of matrices alone, a
warm-up of 100 steps, a cosine and clipping at 1, as small GPT-2s on this text are trained on a CPU elsewhere. A seed
sets the weights and the windows, which are the same for all methods and any number of ranks. Bytes are those that a
rank sends, by the method's formula, with its first steps in full precision.
All methods have run with a seed before the next one begins. A job that is ended goes on by the same command: what the
file of --json has is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidl
from collectives import Communicator
from mpidl.cli import check_writable
from mpidl.data.corpora import read_corpus
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.optim import DiLoCo, OneBitAdam, PostLocalSGDState, one_bit_hook, post_local_sgd_hook
from mpidl.optim.schedules import warmup_cosine
from network_methods import names_of

WINDOW, WARM_UP = 64, 100
METHOD = re.compile(r"(\S+?)(?: after ([1-9]\d*))?(?: at (\d*\.?\d+(?:e-\d+)?))?( without feedback)?")
DILOCO = re.compile(r"diloco:([1-9]\d*)")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", default="stdlib", help="the path of a text, or a name of examples/gpt2_zero3.py")
    parser.add_argument("--methods", type=names_of, default="fp32,int8", help="separated by commas, or by semicolons")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs a method has")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--windows", type=int, default=12, help="of a step, of all ranks together (12)")
    parser.add_argument("--every", type=int, default=250, help="steps from one validation to the next")
    parser.add_argument("--validation", type=int, default=200, help="windows of a validation")
    parser.add_argument("--json", type=Path, help="keep every point of the curves, and go on from those that it has")
    parser.add_argument("--plot", type=Path, help="draw them")
    return parser.parse_args(arguments)


def tokens_of(text: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The text's characters as numbers, nine tenths to train and one to validate, and how many different there are."""
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[character] for character in text])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(numbers)


def windows(tokens: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
    """Draws windows of the text, with the token after each."""
    starts = torch.randint(len(tokens) - WINDOW, (count,), generator=random)
    return torch.stack([tokens[start : start + WINDOW + 1] for start in starts.tolist()])


def validation_loss(model: torch.nn.Module, tokens: torch.Tensor, count: int, comm: Communicator) -> float:
    """The mean loss of windows that are the same in every validation, each rank with its part of them."""
    drawn = windows(tokens, count, torch.Generator().manual_seed(0))
    total = np.zeros(2)
    with torch.no_grad():
        for part in drawn[comm.rank :: comm.size].split(50):
            total += model(part[:, :-1], part[:, 1:]).item() * len(part), len(part)
    comm.all_reduce(total)
    return float(total[0] / total[1])


@dataclass(frozen=True)
class Learner:
    """A model and its optimizer in training.

    call: gives the loss of a batch.
    sent: bytes that a rank has sent after so many steps.
    """

    call: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    sent: Callable[[int], float]


@dataclass(frozen=True)
class Method:
    """A method and its variant.

    name: fp32, onebit, diloco:n, or one of mpidl.COMPRESSORS.
    first: how many first steps average gradients in full precision; None: as many as is the method's default.
    lr: the highest learning rate.
    feeds_back: with error feedback.
    """

    name: str
    first: int | None
    lr: float
    feeds_back: bool

    @classmethod
    def of(cls, text: str) -> Method:
        """Reads one of --methods. Raises UsageError."""
        found = METHOD.fullmatch(text)
        if found is None or (found[3] and not float(found[3])):
            raise mpidl.UsageError(
                f"--methods: got {text!r}; needs a name, and behind it 'after STEPS', 'at LEARNING RATE' or "
                "'without feedback', in this order"
            )
        name, first, rate, without = found.groups()
        return cls(name, int(first) if first else None, float(rate or 1e-3), not without)

    @property
    def adam(self) -> dict[str, Any]:
        """Adam's settings; the decay is of matrices alone."""
        return {"lr": self.lr, "betas": (0.9, 0.99), "weight_decay": 0.1}


def parameters_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The groups for an optimizer: matrices, and what is not decayed."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def build(method: Method, model: torch.nn.Module, comm: Communicator) -> Learner:
    """The method around a model."""
    name, first = method.name, method.first
    elements = sum(p.numel() for p in model.parameters())
    in_full = 2 * (comm.size - 1) / comm.size * 4 * elements
    if (local := DILOCO.fullmatch(name)) is not None:
        period, warmup_steps = int(local[1]), first or 0
        outer = DiLoCo(torch.optim.AdamW(parameters_of(model), **method.adam), period, comm, warmup_steps=warmup_steps)
        call: Any = model
        if warmup_steps:
            call = mpidl.DistributedDataParallel(model)
            call.register_comm_hook(PostLocalSGDState(comm, averager=outer.averager), post_local_sgd_hook)

        def sent_in_full(steps: int) -> float:
            return (min(steps, warmup_steps) + max(0, steps - warmup_steps) // period) * in_full

        return Learner(call, outer, sent_in_full)
    if name == "onebit":
        ddp = mpidl.DistributedDataParallel(model)
        one_bit = OneBitAdam(
            parameters_of(model), **method.adam, lr_warmup_steps=WARM_UP, error_feedback=method.feeds_back
        )
        ddp.register_comm_hook(one_bit, one_bit_hook)
        return Learner(
            ddp, one_bit, lambda steps: in_full * min(steps, one_bit.frozen_at or steps) + one_bit.sent_bytes
        )
    compress, full_precision_steps, bytes_per_step = None, 0, in_full
    if name != "fp32":
        feedback = None if method.feeds_back else False
        compress = mpidl.Compression(name, where="everywhere", error_feedback=feedback, start_step=first)
        made, shapes = compress.compressor(), [p.shape for p in model.parameters()]
        full_precision_steps = made.start_step if first is None else first
        bytes_per_step = made.sent_bytes(elements, comm.size, True, shapes)
    ddp = mpidl.DistributedDataParallel(model, compress=compress)
    adam = torch.optim.AdamW(parameters_of(model), **method.adam)

    def sent(steps: int) -> float:
        return min(steps, full_precision_steps) * in_full + max(steps - full_precision_steps, 0) * bytes_per_step

    return Learner(ddp, adam, sent)


def train(method: str, seed: int, text: tuple[torch.Tensor, torch.Tensor, int], options: Any) -> list[dict[str, Any]]:
    """Trains one model; returns a point of the curve for each validation."""
    comm = mpidl.init()
    learned, held_out, characters = text
    torch.manual_seed(seed)
    model = GPT2(GPT2Config(vocab_size=characters, block_size=WINDOW, layers=4, heads=4, embd=128))
    learner = build(Method.of(method), model, comm)
    optimizer = learner.optimizer
    schedule = warmup_cosine(optimizer, WARM_UP, max(options.steps, WARM_UP + 1), end=0.1)
    random = torch.Generator().manual_seed(seed)
    seconds, curve = 0.0, []
    for step in range(options.steps + 1):
        if step % options.every == 0 or step == options.steps:
            loss = validation_loss(model, held_out, options.validation, comm)
            point = {"method": method, "seed": seed, "step": step, "loss": loss, "bytes": learner.sent(step)}
            curve.append({**point, "seconds": seconds})
            if comm.rank == 0:
                print(f"{method:28s} seed {seed}  step {step:5d}  validation loss {loss:.4f}", flush=True)
        if step == options.steps:
            break
        own = windows(learned, options.windows, random).chunk(comm.size)[comm.rank]
        begin = time.perf_counter()
        learner.call(own[:, :-1], own[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seconds += time.perf_counter() - begin
    return curve


def table(points: Sequence[dict[str, Any]], steps: int) -> list[str]:
    """A line for each method: the final loss over its seeds, MB and seconds of a run."""
    heads = f"{'validation loss':>16s} {'of fp32':>8s} {'lowest to highest':>18s} {'MB sent':>9s} {'s':>7s}"
    lines = [f"{'method':28s} {heads}"]
    finals = [point for point in points if point["step"] == steps]
    plain = [point["loss"] for point in finals if point["method"] == "fp32"]
    for method in dict.fromkeys(point["method"] for point in finals):
        own = [point for point in finals if point["method"] == method]
        losses = [point["loss"] for point in own]
        difference = f"{np.mean(losses) - np.mean(plain):+.3f}" if plain else ""
        lines.append(
            f"{method:28s} {np.mean(losses):16.3f} {difference:>8s} {min(losses):8.3f} to {max(losses):6.3f} "
            f"{own[0]['bytes'] / 1e6:9.1f} {np.median([point['seconds'] for point in own]):7.1f}"
        )
    return lines


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the mean curve of each method after step 0 against steps, bytes and the median of its seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = list(dict.fromkeys(point["method"] for point in points))
    rows = -(-len(methods) // 4)
    height = 3.7 + 0.2 * rows
    figure, panels = pyplot.subplots(1, 3, figsize=(11, height), sharey=True)
    for number, method in enumerate(methods):
        own = [point for point in points if point["method"] == method]
        steps = sorted({point["step"] for point in own} - {0})
        of_steps = [[point for point in own if point["step"] == step] for step in steps]
        losses = [np.mean([point["loss"] for point in at]) for at in of_steps]
        line = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
        for panel, what, scale in zip(panels, ("step", "bytes", "seconds"), (1, 1e-6, 1), strict=True):
            panel.plot(
                [np.median([point[what] for point in at]) * scale for at in of_steps], losses, label=method, **line
            )
    for panel, name in zip(panels, ("step", "MB sent by a rank", "seconds"), strict=True):
        panel.set_xlabel(name)
        panel.grid(alpha=0.3)
    panels[1].set_xscale("log")
    panels[0].set_ylabel("validation loss (nats a character)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, (0.15 + 0.2 * rows) / height, 1, 1))
    figure.savefig(path, dpi=110)


def kept(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """Reads the points that an earlier job has kept. Raises UsageError where it ran by other settings."""
    if not options.json or not options.json.exists():
        return []
    try:
        found = json.loads(options.json.read_text())
        settings, points = found["settings"], found["points"]
    except (OSError, ValueError, KeyError, TypeError):
        raise mpidl.UsageError(f"--json {options.json}: is no file of this benchmark") from None
    if settings != settings_of(options, ranks):
        raise mpidl.UsageError(f"--json {options.json}: was written with {settings}; needs the same, or another file")
    return list(points)


def settings_of(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The settings that all runs of a table share."""
    names = ("data", "steps", "windows", "every", "validation")
    return {"ranks": ranks, **{name: getattr(options, name) for name in names}}


def checked(options: argparse.Namespace, comm: Communicator) -> tuple[str, list[dict[str, Any]]]:
    """Reads the text and the points there are, and checks methods and windows. Raises UsageError."""
    if options.windows < 1 or options.windows % comm.size:
        raise mpidl.UsageError(f"--windows: got {options.windows}; needs a multiple of the {comm.size} ranks")
    for option in ("seeds", "steps", "every", "validation"):
        if (number := getattr(options, option)) < 1:
            raise mpidl.UsageError(f"--{option}: got {number}; needs at least 1")
    for text in options.methods:
        method = Method.of(text)
        name, local = method.name, DILOCO.fullmatch(method.name) is not None
        if (name in ("fp32", "onebit") and method.first) or ((name == "fp32" or local) and not method.feeds_back):
            raise mpidl.UsageError(f"--methods: got {text!r}; {name} has no such variant")
        if name not in ("fp32", "onebit") and not local:
            try:
                mpidl.Compression(name)
            except mpidl.ConfigurationError as error:
                raise mpidl.UsageError(f"--methods: {error}") from None
    text = read_corpus(options.data, comm)  # collective
    if comm.rank == 0:
        check_writable(options.json and options.json.with_suffix(".part"))
        check_writable(options.plot)
    return text, kept(options, comm.size) if comm.rank == 0 else []


def write_whole(path: Path, content: Any) -> None:
    """Writes a file so that a job that is ended in between leaves the former one."""
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").replace(path)


def main() -> None:
    """Trains every method with every seed, and prints the table."""
    options = parse()
    comm = mpidl.init()
    text, points = mpidl.agree_or_exit(comm, lambda: checked(options, comm))
    tokens = tokens_of(text)
    runs = [(method, seed) for seed in range(options.seeds) for method in options.methods]
    finished_runs = mpidl.broadcast_object(comm, {(point["method"], point["seed"]) for point in points})
    for method, seed in runs:
        if (method, seed) in finished_runs:
            continue
        points += train(method, seed, tokens, options)
        if comm.rank == 0 and options.json:
            write_whole(options.json, {"settings": settings_of(options, comm.size), "points": points})
    if comm.rank == 0:
        asked = options.methods
        points = sorted((p for p in points if p["method"] in asked), key=lambda p: asked.index(p["method"]))
        print("\n".join(table(points, options.steps)), flush=True)
        if options.plot:
            draw(points, options.plot)


if __name__ == "__main__":
    main()
