"""Trains GPT-2 with ZeRO over MPI and shows the loss falling and a sample of text.

    mpirun -n 4 python examples/gpt2_zero3.py                            # Python's standard library, stage 3
    mpirun -n 4 python examples/gpt2_zero3.py --data my_text.txt --steps 1000 --zero 2
    mpirun -n 4 python examples/gpt2_zero3.py --dtype bf16 --offload disk --delayed-update
    mpirun -n 4 python examples/gpt2_zero3.py --compress int8            # fewer bytes, between nodes if there are any
    mpirun -n 4 python examples/gpt2_zero3.py --zero 0 --optimizer diloco   # ranks meet at every 50th step
    mpirun -n 4 python examples/gpt2_zero3.py --tp 2 --sequence-parallel # layers cut over pairs of ranks
    mpirun -n 4 python examples/gpt2_zero3.py --device cuda --model gpt2 --block-size 1024 --batch 4
    python examples/gpt2_zero3.py                                        # a world of one

The parts that make it parallel are marked with >>>.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidl
from mpidl.cli import (
    ArgumentParser,
    Progress,
    add_compress,
    add_compress_parameters,
    add_device,
    at_least,
    check_writable,
    choose_dtype,
)
from mpidl.data import TokenBatches, make_tokenizer, read_corpus, shares
from mpidl.errors import ConfigurationError, UsageError
from mpidl.models.gpt2 import GPT2, SIZES, Block, GPT2Config, parameter_count
from mpidl.models.pretrained import load_config, load_pretrained, our_name
from mpidl.resuming import Checkpoints, add_options, check_options, settings_of
from mpidl.zero import Safetensors
from optimizers import (
    ONE_BIT,
    add_less_sent,
    check_optimizer,
    dion_groups,
    less_sent_settings,
    make_optimizer_over_ddp,
    parameters_to_clip,
)

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "lamb": mpidl.optim.LAMB,
    "sgd": torch.optim.SGD,
    "adamw8bit": mpidl.optim.AdamW8bit,
    **ONE_BIT,
    "dion": mpidl.optim.Dion,
    "diloco": torch.optim.AdamW,  # the inner one
}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse(comm: Any) -> argparse.Namespace:
    """The options; wrong ones end all ranks with one line and status 2."""
    parser = ArgumentParser(comm, description=__doc__.splitlines()[0])
    data = parser.add_argument_group("data")
    data.add_argument("--data", default="stdlib", help="a UTF-8 text file, tinyshakespeare, or stdlib")
    data.add_argument("--tokenizer", default="bytes", choices=["bytes", "gpt2"], help="gpt2: byte pairs")
    data.add_argument("--vocab", metavar="DIR", help="GPT-2's merges.txt and vocab.json; else tiktoken's")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="27m", choices=list(SIZES), help="size")
    model.add_argument("--layers", type=at_least(1), help="instead of the size's; so are --heads and --embd")
    model.add_argument("--heads", type=at_least(1), help="attention heads a layer")
    model.add_argument("--embd", type=at_least(1), help="width")
    model.add_argument("--dropout", type=at_least(0, float), default=0.0, help="probability")
    model.add_argument("--init-from", metavar="DIR", help="start from GPT-2 weights in this directory")
    train = parser.add_argument_group("training")
    train.add_argument("--zero", type=int, default=3, choices=[0, 1, 2, 3], help="ZeRO stage; 0 is DDP")
    train.add_argument("--steps", type=at_least(0), default=100, help="optimizer steps")
    train.add_argument("--batch", type=at_least(1), default=2, help="sequences a rank a micro-step")
    train.add_argument("--block-size", type=at_least(1), default=64, help="tokens a sequence")
    train.add_argument("--grad-accum", type=at_least(1), default=1, help="micro-steps a step")
    train.add_argument(
        "--global-batch",
        type=at_least(1),
        metavar="N",
        help="sequences a step on all ranks, however many, in micro-steps of at most --batch; for --grad-accum",
    )
    train.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS), help="sgd: momentum --beta1")
    add_less_sent(train)
    train.add_argument("--lr", type=at_least(0, float), default=1e-3, help="highest; for Dion's matrices 20 times it")
    train.add_argument("--min-lr", type=at_least(0, float), help="lowest; a tenth of --lr by default")
    train.add_argument("--warmup", type=at_least(0), default=10, help="steps of linear warm-up")
    train.add_argument("--schedule", default="cosine", choices=["cosine", "constant"], help="after it")
    train.add_argument("--beta1", type=at_least(0, float), default=0.9, help="of Adam's and LAMB's kinds")
    train.add_argument("--beta2", type=at_least(0, float), default=0.99, help="of Adam's and LAMB's kinds")
    train.add_argument("--weight-decay", type=at_least(0, float), default=0.1, help="of matrices")
    train.add_argument("--clip", type=at_least(0, float), default=1.0, help="gradient norm; 0 leaves it")
    train.add_argument(
        "--dtype",
        choices=["fp32", *HALVES],
        help="bf16, fp16: parameters with fp32 masters; DDP: autocast; fp32 on CPUs, bf16 on GPUs by default",
    )
    train.add_argument(
        "--checkpoint-activations",
        type=at_least(1),
        nargs="?",
        const=1,
        metavar="N",
        help="compute blocks again in backward, each N-th or all, instead of keeping what is inside",
    )
    train.add_argument("--offload-activations", type=Path, metavar="DIR", help="keep their inputs on disk")
    train.add_argument("--offload", choices=["cpu", "disk"], help="where optimizer state and masters lie")
    train.add_argument("--offload-dir", metavar="DIR", help="of --offload disk; by default the system's for such files")
    train.add_argument(
        "--delayed-update", nargs="?", const=40, type=at_least(0), metavar="N", help="a step late, after N (40) steps"
    )
    train.add_argument("--tp", type=at_least(1), default=1, metavar="N", help="ranks that hold parts of each layer")
    train.add_argument("--sequence-parallel", action="store_true", help="those cut activations between the layers too")
    add_compress(train)
    add_compress_parameters(train)
    add_device(train)
    train.add_argument("--seed", type=at_least(0), default=1337, help="of weights, batches and the sample")
    add_options(parser)
    train.add_argument(
        "--check-replicas", type=at_least(0), default=0, metavar="N", help="compare the ranks' replicas every N steps"
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--eval-every", type=at_least(0), default=50, help="steps; 0: only at the end")
    shown.add_argument("--eval-sequences", type=at_least(0), default=96, help="for a validation; 0: all")
    shown.add_argument("--sample", type=at_least(0), default=300, help="tokens of text at the end")
    shown.add_argument("--json", type=Path, metavar="PATH", help="write the results there")

    def check(options: argparse.Namespace) -> None:
        if options.beta1 >= 1 or options.beta2 >= 1:
            raise UsageError(f"--beta1 {options.beta1} --beta2 {options.beta2}: need numbers below 1")
        if comm.size % options.tp:
            raise UsageError(f"--tp {options.tp}: got {comm.size} ranks; needs a divisor of their number")
        if options.sequence_parallel and not 1 < options.tp <= options.block_size:
            raise UsageError(
                f"--sequence-parallel: got --tp {options.tp}; needs 2 to --block-size {options.block_size}"
            )
        if options.global_batch:
            if options.grad_accum > 1:
                raise UsageError("--global-batch and --grad-accum: give one of them")
            options.batch, options.grad_accum = shares(options.global_batch, comm.size // options.tp, options.batch)
        if options.min_lr is not None and options.min_lr > options.lr:
            raise UsageError(f"--min-lr {options.min_lr}: is above --lr {options.lr}")
        choose_dtype(options)
        check_optimizer(options, options.zero, options.tp)
        if options.check_replicas and options.optimizer in ("dion", "diloco") and not options.zero:
            raise UsageError(f"--check-replicas: ranks of --optimizer {options.optimizer} differ; leave it out")
        if options.offload_activations and not options.checkpoint_activations:
            raise UsageError("--offload-activations is for --checkpoint-activations")
        if options.init_from and (options.layers or options.heads or options.embd):
            raise UsageError("--init-from brings its sizes; leave out --layers, --heads, --embd")
        if options.offload and not options.zero:
            raise UsageError(f"--offload {options.offload}: needs --zero 1, 2 or 3; DDP keeps its state where it is")
        if options.compress_parameters and options.zero != 3:
            raise UsageError(f"--compress-parameters {options.compress_parameters}: needs --zero 3")
        if options.offload_dir and options.offload != "disk":
            raise UsageError(f"--offload-dir {options.offload_dir}: needs --offload disk")
        if options.offload_dir and not Path(options.offload_dir).is_dir():
            raise UsageError(f"--offload-dir {options.offload_dir}: is not a directory")
        if options.delayed_update is not None and not options.offload:
            raise UsageError("--delayed-update: needs --offload cpu or disk")
        check_options(comm, options)
        if comm.rank == 0:
            check_writable(options.json)

    return parser.parse_on_all_ranks(check)


def configure(options: argparse.Namespace, vocab_size: int) -> GPT2Config:
    """The sizes: a named model has 1024 positions, one put together by hand as many as --block-size."""
    if options.init_from:
        config = load_config(options.init_from, dropout=options.dropout)
        if config.vocab_size != vocab_size:
            raise UsageError(
                f"{options.init_from} has a vocabulary of {config.vocab_size}, "
                f"--tokenizer {options.tokenizer} one of {vocab_size}"
            )
    else:
        given = {name: getattr(options, name) for name in ("layers", "heads", "embd")}
        sizes = {name: size for name, size in given.items() if size}
        if sizes:
            sizes["block_size"] = options.block_size
        config = GPT2Config.named(options.model, vocab_size=vocab_size, dropout=options.dropout, **sizes)
    if options.block_size > config.block_size:
        raise UsageError(f"--block-size {options.block_size}: the model has {config.block_size} positions")
    if options.tp > config.heads:
        raise UsageError(f"--tp {options.tp}: the model has {config.heads} heads; needs at least one for each rank")
    return config


def store_of(folder: Path | None) -> mpidl.activations.CheckpointStore | None:
    """Makes the store of inputs of checkpointed blocks on disk, if a folder is given."""
    try:
        return mpidl.activations.CheckpointStore(offload=folder) if folder else None
    except mpidl.ConfigurationError as error:
        raise UsageError(f"--offload-activations: {error}") from None


def parallelise(
    options: argparse.Namespace, model: GPT2, mesh: mpidl.Mesh, device: torch.device
) -> tuple[Any, Any, Any]:
    """Returns the function for the loss, the optimizer, and the context in which gradients only accumulate.

    With --dtype bf16 or fp16 ZeRO keeps the parameters in 16 bits and masters in fp32; DDP computes by autocast.
    """
    mpidl.parallelize(model, mesh, sequence_parallel=options.sequence_parallel)  # >>> tp: each rank keeps some heads
    weights = Safetensors(options.init_from, our_name) if options.init_from and options.zero == 3 else None
    if options.tp > 1 and options.zero == 3 and not weights:
        mpidl.tensor.materialize(model)  # >>> and computes the values of its parts alone
        model.to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer_class: Any = OPTIMIZERS[options.optimizer]
    settings: dict[str, Any] = {"lr": options.lr, "betas": (options.beta1, options.beta2)}
    if options.optimizer == "sgd":
        settings = {"lr": options.lr, "momentum": options.beta1}
    if options.optimizer in ("adamw", "diloco"):
        settings["fused"] = True
    if options.optimizer == "dion":
        groups = dion_groups(model, options.lr, options.weight_decay)
    settings |= less_sent_settings(options, options.warmup, options.steps)
    if options.zero == 0:
        if options.optimizer == "lamb":
            settings["mesh"] = mesh  # >>> a norm is of a whole parameter, also if it is cut over tp
        # >>> DDP: gradients are averaged during backward, with fewer bytes where --compress or --optimizer says how
        wrapped = mpidl.DistributedDataParallel(model, mesh=mesh, compress=options.compress)
        return wrapped, make_optimizer_over_ddp(wrapped, options, optimizer_class, groups, settings), wrapped.no_sync
    half = HALVES.get(options.dtype)
    precision = mpidl.Precision(half, torch.float32, [torch.nn.LayerNorm]) if half else None
    if options.offload:
        settings["offload"] = mpidl.Offload(
            options.offload,
            path=options.offload_dir,
            delayed_update=options.delayed_update is not None,
            delay_from=options.delayed_update or 0,
        )
    optimizer = mpidl.ZeroOptimizer(  # >>> ZeRO: the model is changed in place, the loop stays as it is
        model,
        optimizer_class,
        stage=options.zero,
        params=groups,
        precision=precision,
        weights=weights,
        device=device,
        mesh=mesh,
        compress=options.compress,
        compress_parameters=options.compress_parameters,
        **settings,
    )
    # Stages 2 and 3 would have to keep whole gradients to save the communication of the micro-steps.
    return model, optimizer, optimizer.no_sync if options.zero == 1 else contextlib.nullcontext


def learning_rate(options: argparse.Namespace, step: int) -> float:
    """Share of --lr at a step: up linearly, then down along a cosine."""
    if step < options.warmup:
        return (step + 1) / (options.warmup + 1)
    if options.schedule == "constant" or not options.lr:
        return 1.0
    lowest = 0.1 if options.min_lr is None else options.min_lr / options.lr
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2


def without_nan(value: Any) -> Any:
    """Converts a value for JSON: null in place of NaN and infinity."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_over_ranks(mesh: mpidl.Mesh, value: float) -> float:
    """Averages a number over the ranks with different sequences."""
    total = np.array([value])
    mesh["dp"].all_reduce(total, "avg")
    return float(total[0])


@torch.no_grad()
def validate(
    mesh: mpidl.Mesh, call: Any, batches: TokenBatches, options: argparse.Namespace, device: torch.device
) -> float:
    """Mean loss over all tokens of the validation sequences of all ranks."""
    sums = np.zeros(2)
    call.eval()
    for x, y, counted in batches.validate(options.eval_sequences):
        sums += call(x.to(device), y.to(device)).item() * counted, counted
    call.train()
    mesh["dp"].all_reduce(sums)  # >>> ranks of tp have counted the same sequences
    return float(sums[0] / sums[1])


def sample(
    mesh: mpidl.Mesh, options: argparse.Namespace, model: GPT2, optimizer: Any, tokenizer: Any, device: torch.device
) -> str:
    """Text from the model, on rank 0."""
    whole = (
        optimizer.gathered(writable=False) if options.zero else contextlib.nullcontext()
    )  # >>> the shards put together
    text = ""
    model.eval()
    with whole:
        if mesh.rank("dp") == 0:  # >>> the ranks of one tp group compute it together
            random = torch.Generator(device).manual_seed(options.seed)
            start = torch.from_numpy(tokenizer.encode("\n")).long()[None].to(device)
            tokens = model.generate(start, options.sample, options.block_size, 0.8, 50, random)
            text = tokenizer.decode(tokens[0, start.shape[1] :].tolist())
        mesh.comm.barrier()
    return text


def main() -> None:
    """Joins the ranks, lays them out, trains."""
    comm = mpidl.init()  # >>> all ranks that mpirun started
    options = parse(comm)
    stop = mpidl.StopSignal()  # >>> SIGTERM or SIGUSR1 on any rank ends all of them after the same step
    with mpidl.Mesh(tp=options.tp) as mesh:  # >>> dp: the ranks with other sequences; tp: with other parts of layers
        run(mesh, options, stop)


def run(mesh: mpidl.Mesh, options: argparse.Namespace, stop: mpidl.StopSignal) -> None:
    """Sets up, trains, shows."""
    comm = mesh.comm
    say = print if comm.rank == 0 else lambda *_, **__: None
    torch.manual_seed(options.seed)
    # >>> With --device cuda a GPU for each rank, in turn.
    device = mpidl.agree_or_exit(comm, lambda: mpidl.pick_device(comm, options.device))

    # >>> What is wrong on one rank alone ends them all, before they would wait for each other.
    tokenizer = mpidl.agree_or_exit(comm, lambda: make_tokenizer(options.tokenizer, options.vocab))
    text = mpidl.agree_or_exit(comm, lambda: read_corpus(options.data, comm))

    def prepare() -> tuple[TokenBatches, GPT2]:
        batches = TokenBatches(  # >>> each rank of dp its own part of each global batch
            tokenizer.encode(text), mesh["dp"], options.block_size, options.batch, options.grad_accum, options.seed
        )
        config = configure(options, tokenizer.vocab_size)
        if options.zero == 3:
            return batches, mpidl.deferred_init(GPT2, config)  # >>> no rank ever holds all of it
        model = load_pretrained(options.init_from, config) if options.init_from else GPT2(config)
        return batches, model.to(device)

    batches, model = mpidl.agree_or_exit(comm, prepare)
    if options.checkpoint_activations:
        store = mpidl.agree_or_exit(comm, lambda: store_of(options.offload_activations))
        mpidl.activations.checkpoint_modules(model, Block, options.checkpoint_activations, store=store)
    parameters = parameter_count(model)  # of the whole model

    def prepare_training() -> tuple[Any, Any, Any]:
        try:
            return parallelise(options, model, mesh, device)
        except ConfigurationError as error:  # weights that do not fit
            raise UsageError(str(error)) from None

    call, optimizer, accumulating = mpidl.agree_or_exit(comm, prepare_training)
    torch.manual_seed(options.seed + mesh.rank("dp"))  # >>> of dropout: others over dp, the same over tp
    # >>> All ranks take or skip a step together.
    scaler = mpidl.GradScaler(device.type, enabled=options.dtype == "fp16", mesh=mesh)
    half = HALVES.get(options.dtype)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(options, step))
    how = f"ZeRO stage {options.zero}" if options.zero else "DDP"
    sent = {"gradients": options.compress, "parameters": options.compress_parameters}
    how += f" with {' and '.join(f'{by} {what}' for what, by in sent.items() if by)}" if any(sent.values()) else ""
    how += f" on {comm.size} rank{'s' * (comm.size > 1)}"
    if options.tp > 1:
        how += f" (dp={mesh.size('dp')}, tp={options.tp}{', sequence parallel' * options.sequence_parallel})"
    say(
        f"GPT-2 of {parameters / 1e6:.1f} M parameters, {how}, "
        f"{torch.get_num_threads()} thread(s) each, on {device.type}; {len(batches.train) / 1e6:.2f} M tokens of "
        f"{options.data}, {batches.tokens_per_step} a step",
        flush=True,
    )

    def evaluate() -> float:
        if options.delayed_update is not None:
            optimizer.flush()  # >>> the weights of the update that is under way
        return validate(mesh, call, batches, options, device)

    names = "data tokenizer vocab model layers heads embd dropout block_size steps lr min_lr warmup schedule"
    names += " optimizer freeze_step outer_every outer_warmup beta1 beta2 weight_decay clip dtype delayed_update seed"
    settings = settings_of(options, names, sequences_a_step=options.batch * options.grad_accum * mesh.size("dp"))
    # >>> Each rank saves and loads what it owns.
    checkpoints = Checkpoints(comm, options, stop, (call, optimizer, schedule, scaler), settings, mesh)
    loaded = checkpoints.resume(options.steps)
    begin = loaded.step if loaded else 0

    guard = None
    if options.on_nan != "ignore":
        guard = mpidl.NonfiniteGuard(call, optimizer, options.on_nan, scaler=scaler, mesh=mesh)
    steps: list[dict[str, float]] = []
    progress = Progress(comm, options.steps, batches.tokens_per_step, begin)
    for step in range(begin, options.steps):
        start = time.perf_counter()
        loss_sum = 0.0
        for micro, batch in enumerate(batches.step(step)):
            x, y = (part.to(device) for part in batch)
            last = micro == options.grad_accum - 1
            with contextlib.nullcontext() if last else accumulating():
                with torch.autocast(device.type, half, enabled=half is not None and not options.zero):
                    loss = call(x, y) / options.grad_accum
                scaler.scale(loss).backward()
            loss_sum += loss.item()
        scaler.unscale_(optimizer)
        norm = None
        if options.clip:
            if options.zero:
                norm = optimizer.clip_grad_norm_(options.clip)  # >>> over all ranks' shards and parts
            else:
                norm = mpidl.clip_grad_norm_(parameters_to_clip(model, optimizer), options.clip, mesh=mesh)
        if guard is None or guard.allows(loss_sum, norm):  # >>> the same on all ranks
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        loss_mean = mean_over_ranks(mesh, loss_sum)
        elapsed = time.perf_counter() - start
        steps.append({"step": step + 1, "loss": loss_mean, "ms": elapsed * 1e3})

        done = step + 1
        if options.check_replicas and done % options.check_replicas == 0:
            mpidl.check_replicas(call, optimizer)
        progress.show(done, elapsed * 1e3, f"loss {loss_mean:.4f}")
        if done < options.steps and options.eval_every and done % options.eval_every == 0:
            # Before it is saved: a delayed update that an evaluation brings in is not the next step's any more.
            say(f"step {done:5d}  validation loss {evaluate():.4f}", flush=True)
        checkpoints.after(done, options.steps)  # >>> saves, and stops where a signal has come

    val_loss = evaluate()
    say(f"validation loss {val_loss:.4f}", flush=True)
    peak = np.array([mpidl.memory.peak_rss_mib()])
    comm.all_reduce(peak, "max")
    if options.sample:
        text = sample(mesh, options, model, optimizer, tokenizer, device)
        say(f"--- a sample of {options.sample} tokens ---\n{text}\n---", flush=True)
    median = statistics.median(s["ms"] for s in steps) if steps else None
    if comm.rank == 0 and options.json:
        results = {
            "world_size": comm.size,
            "params": parameters,
            "zero_stage": options.zero,
            "tp": options.tp,
            "steps": steps,
            "tokens_per_s": batches.tokens_per_step / median * 1e3 if median else None,
            "step_ms_median": median,
            "loss_first": steps[0]["loss"] if steps else None,
            "loss_last": steps[-1]["loss"] if steps else None,
            "val_loss": val_loss,
            "peak_rss_mib": float(peak[0]),
        }
        options.json.write_text(json.dumps(without_nan(results), indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
