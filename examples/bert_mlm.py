"""Trains BERT on text with gaps, in parallel over MPI, and shows how it fills them.

    mpirun -n 4 python examples/bert_mlm.py                              # Python's standard library
    mpirun -n 4 python examples/bert_mlm.py --data my_text.txt --model base46m --steps 5000 --dtype bf16
    mpirun -n 4 python examples/bert_mlm.py --checkpoint-dir DIR --save-every 100     # goes on from DIR
    mpirun -n 4 python examples/bert_mlm.py --device cuda --model base46m            # bf16, on the GPUs in turn
    mpirun -n 4 python examples/bert_mlm.py --tp 2                       # layers cut over pairs of ranks
    python examples/bert_mlm.py                                          # a world of one

The parts that make it parallel are marked with >>>.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import mpidl
from mpidl.cli import ArgumentParser, Progress, add_device, at_least, check_writable, choose_dtype
from mpidl.data import MarkedTokenizer, Masking, TokenBatches, make_marked_tokenizer, read_corpus
from mpidl.data.masking import IGNORED
from mpidl.errors import UsageError
from mpidl.models.bert import BERT, SIZES, BERTConfig
from mpidl.models.gpt2 import parameter_count
from mpidl.models.pretrained_bert import load_config, load_pretrained
from mpidl.resuming import Checkpoints, add_options, check_options, settings_of

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse(comm: Any) -> argparse.Namespace:
    """The options; wrong ones end all ranks with one line and status 2."""
    parser = ArgumentParser(comm, description=__doc__.splitlines()[0])
    data = parser.add_argument_group("data")
    data.add_argument("--data", default="stdlib", help="a UTF-8 text file, tinyshakespeare, or stdlib")
    data.add_argument("--tokenizer", default="bytes", choices=["bytes", "gpt2", "wordpiece"], help="gpt2: byte pairs")
    data.add_argument("--vocab", metavar="DIR", help="BERT's vocab.txt, or GPT-2's merges.txt and vocab.json")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="small", choices=list(SIZES), help="size; base46m: 46.7 M with bytes")
    model.add_argument("--dropout", type=at_least(0, float), default=0.0, help="probability")
    model.add_argument("--init-from", metavar="DIR", help="start from BERT weights in this directory")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=at_least(0), default=200, help="optimizer steps")
    train.add_argument("--batch-size", type=at_least(1), default=8, help="sequences a rank a micro-step")
    train.add_argument("--sequence-length", type=at_least(3), default=128, help="tokens, with [CLS] and [SEP]")
    train.add_argument("--grad-accumulation", type=at_least(1), default=1, help="micro-steps a step")
    train.add_argument("--lr", type=at_least(0, float), default=5e-4, help="highest learning rate")
    train.add_argument("--warmup", type=at_least(0), default=50, help="steps from 0 to it; then linearly down to 0")
    train.add_argument("--weight-decay", type=at_least(0, float), default=0.01, help="of matrices")
    train.add_argument("--clip", type=at_least(0, float), default=1.0, help="gradient norm; 0 leaves it")
    train.add_argument("--tp", type=at_least(1), default=1, metavar="N", help="ranks that hold parts of each layer")
    add_device(train)
    train.add_argument("--dtype", choices=["fp32", *HALVES], help="bf16, fp16: by autocast; else fp32, on a GPU bf16")
    train.add_argument("--checkpoint-activations", action="store_true", help="less memory, more computation")
    train.add_argument("--seed", type=at_least(0), default=1337, help="of weights, batches and masks")
    add_options(parser)
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--eval-every", type=at_least(0), default=50, help="steps; 0: only before and after")
    shown.add_argument("--eval-sequences", type=at_least(0), default=64, help="held-out ones to look at; 0: all")
    shown.add_argument("--json", type=Path, metavar="PATH", help="write the results there")

    def check(options: argparse.Namespace) -> None:
        if comm.size % options.tp:
            raise UsageError(f"--tp {options.tp}: got {comm.size} ranks; needs a divisor of their number")
        choose_dtype(options)
        check_options(comm, options)
        if comm.rank == 0:
            check_writable(options.json)

    return parser.parse_on_all_ranks(check)


def configure(options: argparse.Namespace, vocab_size: int) -> BERTConfig:
    """The sizes of --model or --init-from."""
    changes = {"dropout": options.dropout, "checkpoint_activations": options.checkpoint_activations}
    if options.init_from:
        config = load_config(options.init_from, **changes)
        if config.vocab_size != vocab_size:
            raise UsageError(
                f"{options.init_from} has a vocabulary of {config.vocab_size}, "
                f"--tokenizer {options.tokenizer} one of {vocab_size} with its marks"
            )
    else:
        config = BERTConfig.named(options.model, vocab_size=vocab_size, **changes)
    if options.sequence_length > config.block_size:
        raise UsageError(f"--sequence-length {options.sequence_length}: the model has {config.block_size} positions")
    if options.tp > config.heads:
        raise UsageError(f"--tp {options.tp}: the model has {config.heads} heads; needs at least one for each rank")
    return config


def learning_rate(options: argparse.Namespace, step: int) -> float:
    """Learning rate at a step from 1: linearly up to --lr, then linearly down."""
    up = step / (options.warmup + 1)
    down = (options.steps + 1 - step) / max(1, options.steps - options.warmup)
    return float(options.lr * min(up, down, 1.0))


class Score(NamedTuple):
    """Score of some gaps: the sum of their losses, the number filled rightly, and the number of all."""

    loss_sum: torch.Tensor
    right: int
    gaps: int


class Gaps:
    """Text with gaps for this rank of `comm`, and how well the model on a device fills them."""

    def __init__(
        self, comm: Any, options: argparse.Namespace, tokenizer: MarkedTokenizer, text: str, device: torch.device
    ) -> None:
        self._comm, self._options, self._tokenizer, self._device = comm, options, tokenizer, device
        self.batches = TokenBatches(  # >>> each rank its own part of each global batch
            tokenizer.encode(text),
            comm,
            options.sequence_length - 2,
            options.batch_size,
            options.grad_accumulation,
            options.seed,
        )
        self._mask = Masking(tokenizer.vocab_size, tokenizer.mask, tokenizer.special, options.seed)

    def train(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and labels, int64 [batch, time], of each micro-step of a step from 1."""
        size, micro_steps = self._options.batch_size, self._options.grad_accumulation
        masked = []
        for micro, (tokens, _) in enumerate(self.batches.step(step)):
            first = (self._comm.rank * micro_steps + micro) * size  # >>> the same gaps for any number of ranks
            masked.append(self._mask(self._tokenizer.enclose(tokens), step, range(first, first + size)))
        return masked

    def score(self, call: Any, inputs: torch.Tensor, labels: torch.Tensor) -> Score:
        """Predicts where labels are; the rest of the scores is not even computed."""
        inputs, labels = inputs.to(self._device), labels.to(self._device)
        where, half = labels != IGNORED, HALVES.get(self._options.dtype)
        with torch.autocast(self._device.type, half) if half else contextlib.nullcontext():
            logits = call(inputs, where=where).logits
        right = int((logits.argmax(-1) == labels[where]).sum())
        return Score(F.cross_entropy(logits.float(), labels[where], reduction="sum"), right, int(where.sum()))

    @torch.no_grad()
    def held_out(self, call: Any) -> dict[str, float]:
        """Mean loss and accuracy over the gaps, always the same, in the held-out sequences of all ranks."""
        sums = np.zeros(3)
        call.eval()
        for number, (tokens, _, counted) in enumerate(self.batches.validate(self._options.eval_sequences)):
            first = self._comm.rank + number * self._options.batch_size * self._comm.size
            numbers = range(first, first + len(tokens) * self._comm.size, self._comm.size)
            inputs, labels = self._mask(self._tokenizer.enclose(tokens), 0, numbers)
            if counted:
                score = self.score(call, inputs, labels)
                sums += score.loss_sum.item(), score.right, score.gaps
        call.train()
        self._comm.all_reduce(sums)  # >>> over what all ranks counted
        return {"loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2]}


@torch.no_grad()
def fill_in(model: BERT, tokenizer: MarkedTokenizer, text: str, longest: int, device: torch.device) -> str:
    """A line of the text with two words hidden, what the model puts there, and its best guesses for each token."""
    lines = (line.split() for line in text.splitlines()[1:])
    words = next((line for line in lines if len(line) >= 6 and len(" ".join(line)) < longest // 2), text.split()[:8])
    hidden = {len(words) // 3, 2 * len(words) // 3}
    tokens: list[int] = []
    gaps: list[int] = []
    for number, word in enumerate(words):
        for token in tokenizer.encode(" " * (number > 0) + word).tolist():
            if number in hidden and tokenizer.decode([token]) != " ":
                gaps.append(len(tokens) + 1)  # [CLS] comes before
            tokens.append(token)
    tokens = tokens[: longest - 2]
    gaps = [gap for gap in gaps if gap <= len(tokens)]
    whole = tokenizer.enclose(torch.tensor([tokens]))
    masked = whole.clone()
    masked[0, gaps] = tokenizer.mask
    model.eval()
    best = model(masked.to(device)).logits[0, gaps].float().cpu().softmax(-1).topk(3)
    filled = masked.clone()
    filled[0, gaps] = best.indices[:, 0]
    shown = []
    for name, each in (("gaps:  ", masked), ("filled:", filled), ("was:   ", whole)):
        shown.append(f"{name} {tokenizer.decode(each[0, 1:-1].tolist()).replace('[MASK]', '_')}")
    for gap, guesses, shares in zip(gaps, best.indices.tolist(), best.values.tolist(), strict=True):
        listed = ", ".join(f"{tokenizer.decode([t])!r} {p:.0%}" for t, p in zip(guesses, shares, strict=True))
        shown.append(f"  {tokenizer.decode([int(whole[0, gap])])!r} <- {listed}")
    return "\n".join(shown)


def main() -> None:
    """Joins the ranks, lays them out, trains."""
    comm = mpidl.init()  # >>> all ranks that mpirun started
    options = parse(comm)
    stop = mpidl.StopSignal()  # >>> SIGTERM or SIGUSR1 on any rank ends all of them after the same step
    with mpidl.Mesh(tp=options.tp) as mesh:  # >>> dp: the ranks with other sequences; tp: with other parts of layers
        run(mesh, options, stop)


def run(mesh: mpidl.Mesh, options: argparse.Namespace, stop: mpidl.StopSignal) -> None:
    """Sets up, trains, shows."""
    comm, data = mesh.comm, mesh["dp"]
    say = print if comm.rank == 0 else lambda *_, **__: None
    torch.manual_seed(options.seed)

    # >>> What is wrong on one rank alone ends them all, before they would wait for each other.
    device = mpidl.agree_or_exit(comm, lambda: mpidl.pick_device(comm, options.device))  # >>> GPUs go round
    tokenizer = mpidl.agree_or_exit(comm, lambda: make_marked_tokenizer(options.tokenizer, options.vocab))
    text = mpidl.agree_or_exit(comm, lambda: read_corpus(options.data, comm))

    def prepare() -> tuple[Gaps, BERT]:
        gaps, config = Gaps(data, options, tokenizer, text, device), configure(options, tokenizer.vocab_size)
        model = load_pretrained(options.init_from, config) if options.init_from else BERT(config)
        return gaps, model.to(device)

    gaps, model = mpidl.agree_or_exit(comm, prepare)
    parameters = parameter_count(model)
    mpidl.parallelize(model, mesh)  # >>> each rank of tp keeps some heads, features and tokens
    call = mpidl.DistributedDataParallel(model, mesh=mesh)  # >>> gradients are averaged during backward
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, fused=True)
    # Small gradients would vanish in fp16.
    scaler = mpidl.GradScaler(device.type, enabled=options.dtype == "fp16", mesh=mesh)
    torch.manual_seed(options.seed + data.rank)  # >>> of dropout: others over dp, the same over tp

    tokens_per_step = data.size * options.grad_accumulation * options.batch_size * options.sequence_length
    how = f" (dp={data.size}, tp={options.tp})" if options.tp > 1 else ""
    say(
        f"BERT of {parameters / 1e6:.1f} M parameters, DDP on {comm.size} rank{'s' * (comm.size > 1)}{how}, "
        f"{torch.get_num_threads()} thread(s) each, on {device.type}; {len(gaps.batches.train) / 1e6:.2f} M tokens of "
        f"{options.data}, {tokens_per_step} a step",
        flush=True,
    )
    names = "data tokenizer vocab model dropout sequence_length steps lr warmup weight_decay clip dtype seed"
    settings = settings_of(options, names, sequences_a_step=tokens_per_step // options.sequence_length)
    # >>> Each rank saves a part.
    checkpoints = Checkpoints(comm, options, stop, (call, optimizer, None, scaler), settings, mesh)
    loaded = checkpoints.resume(options.steps)
    begin = loaded.step if loaded else 0
    guard = None
    if options.on_nan != "ignore":
        guard = mpidl.NonfiniteGuard(call, None, options.on_nan, scaler=scaler, mesh=mesh)
    steps: list[dict[str, float]] = []
    held_out: list[dict[str, float]] = []

    def evaluate(step: int) -> None:
        seen = gaps.held_out(call)
        held_out.append({"step": step, **seen})
        say(f"step {step:5d}  held-out loss {seen['loss']:.4f}  accuracy {seen['accuracy']:.1%}", flush=True)

    evaluate(begin)
    progress = Progress(comm, options.steps, tokens_per_step, begin)
    for step in range(begin + 1, options.steps + 1):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        micro_batches = gaps.train(step)
        count = sum(int((labels != IGNORED).sum()) for _, labels in micro_batches)
        sums = np.zeros(3)
        for inputs, labels in micro_batches:
            last = inputs is micro_batches[-1][0]
            with contextlib.nullcontext() if last else call.no_sync():
                score = gaps.score(call, inputs, labels)
                # >>> After DDP's average the gradient is that of the mean over all gaps of all ranks and micro-steps.
                loss = mpidl.global_mean(score.loss_sum, count, mesh=mesh)
                scaler.scale(loss).backward()
            sums += score.loss_sum.item(), score.right, score.gaps
        scaler.unscale_(optimizer)
        norm = mpidl.clip_grad_norm_(model.parameters(), options.clip, mesh=mesh) if options.clip else None
        if guard is None or guard.allows(sums[0], norm):  # >>> the same on all ranks
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        data.all_reduce(sums)  # >>> losses, right answers and gaps of all sequences
        ms = (time.perf_counter() - start) * 1e3
        loss_mean, accuracy = sums[0] / sums[2], sums[1] / sums[2]
        steps.append({"step": step, "loss": loss_mean, "accuracy": accuracy, "ms": ms})
        progress.show(step, ms, f"loss {loss_mean:.4f}  accuracy {accuracy:5.1%}")
        if step == options.steps or (options.eval_every and step % options.eval_every == 0):
            evaluate(step)
        checkpoints.after(step, options.steps)  # >>> saves, and stops where a signal has come

    median = statistics.median(s["ms"] for s in steps) if steps else None
    if median:
        say(f"{median:.1f} ms a step, {tokens_per_step / median * 1e3:.0f} tokens/s")
    if data.rank == 0:  # >>> the ranks of one tp group compute it together
        unseen = tokenizer.decode(gaps.batches.validation[:4000].tolist())
        filled = fill_in(model, tokenizer, unseen, options.sequence_length, device)
        say(f"--- held-out text ---\n{filled}\n---", flush=True)
    if comm.rank == 0 and options.json:
        results = {
            "world_size": comm.size,
            "params": parameters,
            "steps": steps,
            "held_out": held_out,
            "tokens_per_s": tokens_per_step / median * 1e3 if median else None,
            "step_ms_median": median,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
