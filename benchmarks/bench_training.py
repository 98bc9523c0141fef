"""Times training steps: this project's engines, PyTorch's and DeepSpeed's, on one model in one job.

    mpirun -n 2 python benchmarks/bench_training.py --engines single,ddp,zero1,zero2,zero3,all-reduce,torch-ddp,fsdp2

A byte-level GPT-2 is trained in fp32 by AdamW, on the same weights and data whatever the engine. "single" is each rank
alone, without any communication: what a step costs at least if nothing is sharded. A step's time is the slowest
rank's, a row's the median over the steps of all rounds; so are its parts, forward, backward and the optimizer's step.
"all-reduce" is no engine but the bare averaging of buffers as large as the gradients, in buckets of 25 MiB.

peak_mib is the largest rank's proportional set size (memory that ranks share is divided among them), the highest of
those after forward, backward and step of the steps before the counted ones. The loss is the mean over ranks.

--in-turn: all engines are there at once, and each makes a step in turn, so that a machine whose speed changes within
minutes is alike for all. Every turn has another order, so that none always comes after the same one, whose data the
caches hold and whose threads may still be at work. Without it they come one after the other, as often as --rounds
says. A ratio is the median over the turns, or rounds, of the ratios within them.

--device cuda: on GPUs, which the ranks take in turn. Times are between events on the GPU, and peak_mib is what is in
use there, divided by its ranks. --dtype bfloat16 computes under autocast, whatever the engine. PyTorch's DDP goes by
NCCL where each rank has a GPU, else by gloo; fully_shard needs NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_limits
import mpidl
from collectives import Communicator
from mpidl.cli import ArgumentParser, at_least, check_writable
from mpidl.data import TokenBatches
from mpidl.errors import UsageError
from mpidl.models.gpt2 import GPT2, GPT2Config, parameter_count

OURS = ("single", "ddp", "zero1", "zero2", "zero3")
BARE = "all-reduce"
PARTS = ("forward", "backward", "step")
PEERS = ("torch-ddp", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3")
Seconds = np.ndarray[Any, Any]
SETTINGS: dict[str, Any] = {"lr": 3e-4}
# On GPUs: a step of an engine takes at most so many times that without communication.
BOUNDS = {"zero3": 1.1}


@dataclass(frozen=True)
class Row:
    """One engine's result."""

    engine: str
    ranks: int
    params: int
    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    tokens_per_s: float
    peak_mib: float | None
    loss_last: float | None


@dataclass
class Run:
    """What one round of an engine gave. seconds: [counted steps, parts] on the slowest rank; peak: MiB."""

    seconds: Seconds
    peak: float
    loss: float


@dataclass
class Engine:
    """loss(x, y) runs forward; backward(loss), step() the rest. close() ends it."""

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    step: Callable[[], Any]
    close: Callable[[], Any] = lambda: None


class Stopwatch:
    """The parts of a step by the host's clock, and the memory in use."""

    def begin(self) -> None:
        """A step begins."""
        self._before, self._parts = time.perf_counter(), dict.fromkeys(PARTS, 0.0)

    def took(self, part: str) -> None:
        """What was since the last call is of this part."""
        self._parts[part] += time.perf_counter() - self._before

    def go_on(self) -> None:
        """What comes is of the next part."""
        self._before = time.perf_counter()

    def parts(self) -> dict[str, float]:
        """Seconds of each part, at the end of the step."""
        return self._parts

    def used_mib(self) -> float:
        """Memory in use."""
        return float(mpidl.memory.pss_mib())


class EventStopwatch(Stopwatch):
    """By events of the GPU, for which nobody waits before the end of the step."""

    def __init__(self, gpu: gpu_limits.Gpu) -> None:
        self._gpu = gpu

    def begin(self) -> None:
        """See Stopwatch."""
        self._gpu.settle()
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.go_on()

    def took(self, part: str) -> None:
        """See Stopwatch."""
        self._spans.append((part, self._last, self._mark()))

    def go_on(self) -> None:
        """See Stopwatch."""
        self._last = self._mark()

    def parts(self) -> dict[str, float]:
        """See Stopwatch."""
        found = dict.fromkeys(PARTS, 0.0)
        self._gpu.settle()
        for part, begin, end in self._spans:
            found[part] += begin.elapsed_time(end) / 1e3  # milliseconds
        return found

    def used_mib(self) -> float:
        """See Stopwatch."""
        return self._gpu.used_mib()

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def plain(call: Any, optimizer: torch.optim.Optimizer) -> Engine:
    """The loop that everyone knows."""

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Engine(call, lambda loss: loss.backward(), step)


def build(name: str, model: GPT2, comm: Communicator, options: argparse.Namespace) -> Engine:
    """An engine around the model."""
    adam = torch.optim.AdamW
    if name == "single":
        return plain(model, adam(model.parameters(), **SETTINGS))
    if name == "ddp":
        return plain(mpidl.DistributedDataParallel(model, process_group=comm), adam(model.parameters(), **SETTINGS))
    if name.startswith("zero"):
        stage = int(name[-1])
        return plain(model, mpidl.ZeroOptimizer(model, adam, stage=stage, process_group=comm, **SETTINGS))
    if name == "torch-ddp":
        on = [torch.cuda.current_device()] if options.device == "cuda" else None
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=on)
        return plain(wrapped, adam(model.parameters(), **SETTINGS))
    if name == "fsdp2":
        return _fsdp2(model, options.device)
    return _deepspeed(model, int(name[-1]), options)


def _fsdp2(model: GPT2, device: str) -> Engine:
    """PyTorch's fully_shard on each block, then on the rest."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.transformer["h"].children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain(model, torch.optim.AdamW(model.parameters(), **SETTINGS))


def _deepspeed(model: GPT2, stage: int, options: argparse.Namespace) -> Engine:
    """DeepSpeed's ZeRO on the CPU with torch's AdamW."""
    from peer_deepspeed import DeepSpeed

    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    peer = DeepSpeed(model, optimizer, stage, options.batch, options.grad_accum)
    return Engine(peer, peer.backward, peer.step, peer.close)


def tokens_of_the_standard_library(comm: Communicator) -> np.ndarray:
    """Byte tokens, the same on every rank."""
    from mpidl.data import ByteTokenizer, read_corpus

    return ByteTokenizer().encode(read_corpus("stdlib", comm))


def give_back_free_memory(device: str) -> None:
    """So that an engine does not inherit what the one before it has freed but an allocator has kept."""
    if device == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class Trial:
    """An engine, built, and what its steps have taken. watch: by what."""

    def __init__(
        self,
        name: str,
        comm: Communicator,
        options: argparse.Namespace,
        config: GPT2Config,
        batches: TokenBatches,
        watch: Stopwatch,
    ) -> None:
        gc.collect()
        give_back_free_memory(options.device)
        torch.manual_seed(0)
        model = GPT2(config).to(options.device)
        self._comm, self._options, self._batches, self._watch = comm, options, batches, watch
        self._elements = sum(p.numel() for p in model.parameters())
        self._done = 0
        self._seconds: list[list[float]] = []
        self._peak = 0.0
        self._prepare(name, model)

    def _prepare(self, name: str, model: GPT2) -> None:
        self._engine = build(name, model, self._comm, self._options)
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One more; the first `--warmup` do not count, and of them memory is measured."""
        self._comm.barrier()
        self._watch.begin()
        self._run()
        parts = self._watch.parts()
        if self._done >= self._options.warmup:
            self._seconds.append(list(parts.values()))
        self._done += 1

    def _run(self) -> None:
        options, engine = self._options, self._engine
        halves = options.dtype == "bfloat16"
        self._losses = []
        for batch in self._batches.step(self._done):
            x, y = (tokens.to(options.device) for tokens in batch)
            with torch.autocast(options.device, torch.bfloat16) if halves else contextlib.nullcontext():
                loss = engine.loss(x, y)
            self._took("forward")
            engine.backward(loss / options.grad_accum)
            self._losses.append(loss.detach())
            self._took("backward")
        engine.step()
        self._took("step")

    def _took(self, part: str) -> None:
        self._watch.took(part)
        if self._done < self._options.warmup:
            self._peak = max(self._peak, self._watch.used_mib())
        self._watch.go_on()

    def end(self) -> Run:
        """Ends it, and gives what was found."""
        comm = self._comm
        slowest = np.array(self._seconds)
        totals = slowest.sum(1)
        comm.all_reduce(totals, "max")
        comm.all_reduce(slowest, "avg")
        slowest *= (totals / slowest.sum(1))[:, None]  # the parts' shares of the slowest rank's step
        summary = np.array([self._peak])
        comm.all_reduce(summary, "max")
        mean = np.array([self._mean_loss()])
        comm.all_reduce(mean, "avg")
        self._close()
        peak = float("nan") if self._options.in_turn else float(summary[0])  # others' memory was there too
        return Run(slowest, peak, float(mean[0]))

    def _mean_loss(self) -> float:
        return sum(loss.item() for loss in self._losses) / self._options.grad_accum

    def _close(self) -> None:
        self._engine.close()
        del self._engine
        gc.collect()


class BareAllReduce(Trial):
    """The averaging of as many fp32 elements in symmetric memory, as DDP does it, but all at once."""

    def _prepare(self, name: str, model: GPT2) -> None:
        flat = self._comm.empty(self._elements, torch.float32, device=self._options.device)
        self._buckets = flat.zero_().split(25 * mpidl.memory.MIB // 4)

    def _run(self) -> None:
        for bucket in self._buckets:
            self._comm.all_reduce(bucket, "avg")
        self._took("backward")

    def _mean_loss(self) -> float:
        return float("nan")

    def _close(self) -> None:
        del self._buckets


def measure(
    options: argparse.Namespace, make: Callable[[str], Trial], say: Callable[..., None]
) -> dict[str, list[Run]]:
    """All rounds of all engines; or, --in-turn, a step of each in turn, in one round."""
    steps = options.warmup + options.steps
    if options.in_turn:
        trials = {name: make(name) for name in options.engines}
        orders = random.Random(0)  # the same on all ranks
        for _ in range(steps):
            for trial in orders.sample([*trials.values()], len(trials)):
                trial.step()
        return {name: [trial.end()] for name, trial in trials.items()}
    found: dict[str, list[Run]] = {name: [] for name in options.engines}
    for _ in range(options.rounds):
        for name in options.engines:
            trial = make(name)
            for _ in range(steps):
                trial.step()
            found[name].append(trial.end())
            del trial
            say(f"# {name}: {statistics.median(found[name][-1].seconds.sum(1)) * 1e3:.1f} ms", flush=True)
    return found


def parse(comm: Communicator) -> argparse.Namespace:
    """The options."""
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to train")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="to compute in")
    parser.add_argument("--engines", default="single,ddp,zero1,zero2,zero3,all-reduce,torch-ddp,fsdp2", help="which")
    parser.add_argument("--batch", type=at_least(1), default=4, help="sequences a rank a micro-step")
    parser.add_argument("--block-size", type=at_least(1), default=128, help="tokens a sequence")
    parser.add_argument("--grad-accum", type=at_least(1), default=1, help="micro-steps a step")
    parser.add_argument("--steps", type=at_least(1), default=10, help="counted steps a round")
    parser.add_argument("--warmup", type=at_least(0), default=2, help="steps before them, of which memory is measured")
    parser.add_argument("--rounds", type=at_least(1), default=1, help="times that each engine is built and run")
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="build all engines at once and have each make a step in turn: the fairest comparison of times on a "
        "machine whose speed changes; memory is not measured",
    )
    parser.add_argument("--layers", type=at_least(1), default=8, help="of the model")
    parser.add_argument("--heads", type=at_least(1), default=8, help="of the model")
    parser.add_argument("--embd", type=at_least(1), default=512, help="width of the model")
    parser.add_argument(
        "--vocab", type=at_least(256), default=256, help="tokens that the model knows; the data are bytes"
    )
    parser.add_argument("--threads", type=at_least(1), default=1, help="threads a rank")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw step times and memory there (PNG)")

    def check(options: argparse.Namespace) -> None:
        if options.device == "cuda" and gpu_limits.missing():
            raise UsageError(f"--device cuda: {gpu_limits.missing()}")
        if options.in_turn and (options.plot or options.rounds > 1):
            raise UsageError(
                "--in-turn: goes without --plot, which draws memory, and --rounds; needs more --steps instead"
            )
        options.engines = [name for name in options.engines.split(",") if name]
        for name in options.engines or [""]:
            if name not in (*OURS, *PEERS, BARE):
                raise UsageError(f"--engines: got {name!r}; needs any of {','.join((*OURS, *PEERS, BARE))}")
        if any(name.startswith("deepspeed") for name in options.engines):
            if options.device == "cuda":
                raise UsageError("--engines: DeepSpeed is compared with on the CPU only")
            from peer_deepspeed import load as load_deepspeed

            try:
                load_deepspeed()
            except ImportError as error:
                raise UsageError(f"--engines: DeepSpeed is not installed ({error})") from None
        GPT2Config(options.vocab, options.block_size, options.layers, options.heads, options.embd)
        if comm.rank == 0:
            check_writable(options.json)
            check_writable(options.plot)

    return parser.parse_on_all_ranks(check)


def plot(rows: list[Row], path: Path) -> None:
    """Two panels of bars: the parts of a step and peak memory, by engine.

    What backward takes longer than that of "single" is communication that nothing hides.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [row for row in rows if row.engine != BARE][::-1]
    alone = next((row.backward_ms for row in drawn if row.engine == "single"), None)
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 1.4 + 0.42 * len(drawn)), sharey=True)
    engines = [row.engine for row in drawn]
    left = np.zeros(len(drawn))
    exposed = np.array([0.0 if alone is None else max(0.0, row.backward_ms - alone) for row in drawn])
    backward = np.array([row.backward_ms for row in drawn]) - exposed
    parts = {
        "forward": np.array([row.forward_ms for row in drawn]),
        "backward": backward,
        "exposed communication": exposed,
        "optimizer": np.array([row.optimizer_ms for row in drawn]),
    }
    for (label, width), colour in zip(parts.items(), ("#9ecae1", "#4292c6", "#d94801", "#74c476"), strict=True):
        bars = times.barh(engines, width, left=left, label=label, color=colour)
        left += width
    times.bar_label(bars, labels=[f"{row.step_ms:.0f}" for row in drawn], padding=3)
    times.set_title(f"ms a step, {rows[0].ranks} ranks, {rows[0].params / 1e6:.1f} M parameters")
    times.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False, fontsize="small")
    colours = ["#4292c6" if engine in OURS else "#aaaaaa" for engine in engines]
    memory.bar_label(memory.barh(engines, [row.peak_mib for row in drawn], color=colours), fmt="%.0f", padding=3)
    memory.set_title("peak MiB a rank")
    for panel in (times, memory):
        panel.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def compare(times: dict[str, Seconds], say: Callable[..., None], bounded: bool = False) -> None:
    """Prints each of this project's engines as a ratio to the peers, and DDP to what it cannot be faster than.

    times: of each engine, a step's in each turn or round. bounded: whether BOUNDS hold here.
    """

    def ratio(ours: str, *others: str) -> float:
        return float(np.median(times[ours] / sum(times[other] for other in others)))

    for ours in OURS:
        rivals = ("single", "ddp", *PEERS) if ours in ("zero1", "zero2") else ("single", *PEERS)
        others = [other for other in rivals if other in times and other != ours and ours in times]
        against = [f"{ratio(ours, other):.3f} of {other}" for other in others]
        if against:
            say(f"# {ours}: {', '.join(against)}")
    for ours, most in BOUNDS.items() if bounded else ():
        if {ours, "single"} <= times.keys():
            found = ratio(ours, "single")
            say(f"# {ours}: {found:.3f} of single (at most {most:g}: {'kept' if found <= most else 'MISSED'})")
    if {"single", "ddp", BARE} <= times.keys():
        say(f"# ddp: {ratio('ddp', 'single', BARE):.3f} of single + {BARE}")


def main() -> None:
    """Measures, prints, writes, draws."""
    comm = mpidl.init()
    options = parse(comm)
    say = print if comm.rank == 0 else lambda *_, **__: None
    torch.set_num_threads(options.threads)
    gpu = gpu_limits.Gpu(comm) if options.device == "cuda" else None
    watch = Stopwatch() if gpu is None else EventStopwatch(gpu)
    if gpu is not None and not gpu.own and "fsdp2" in options.engines:
        options.engines.remove("fsdp2")
        say("# fsdp2: not run, as NCCL needs a GPU for each rank")
    if set(options.engines) & set(PEERS):
        from peers import start_gloo

        start_gloo(comm, "cpu:gloo,cuda:nccl" if gpu is not None and gpu.own and comm.size > 1 else "gloo")
    config = GPT2Config(options.vocab, options.block_size, options.layers, options.heads, options.embd)
    tokens = tokens_of_the_standard_library(comm)
    batches = TokenBatches(tokens, comm, options.block_size, options.batch, options.grad_accum)
    with torch.device("meta"):
        parameters = parameter_count(GPT2(config))
    say(
        f"# GPT-2 of {parameters / 1e6:.2f} M parameters, {comm.size} ranks, {options.threads} thread(s) each, "
        f"{options.batch} x {options.block_size} tokens a rank a micro-step, {options.grad_accum} micro-step(s)"
        + ("" if gpu is None else f", {options.dtype} on {gpu.name}, {gpu.sharing} rank(s) on each")
    )
    heads = " ".join(f"{part:>9}" for part in PARTS)
    say(f"# {'engine':>12} {'ms a step':>10} {heads} {'tokens/s':>9} {'peak MiB':>9} {'last loss':>10}", flush=True)

    def make(name: str) -> Trial:
        kind = BareAllReduce if name == BARE else Trial
        return kind(name, comm, options, config, batches, watch)

    found = measure(options, make, say)
    rows = []
    times: dict[str, Seconds] = {}
    for name, rounds in found.items():
        seconds = np.concatenate([each.seconds for each in rounds])
        step = float(np.median(seconds.sum(1)))
        times[name] = seconds.sum(1) if options.in_turn else np.array([np.median(r.seconds.sum(1)) for r in rounds])
        parts = np.median(seconds, axis=0) * 1e3
        peak, loss = max(each.peak for each in rounds), rounds[-1].loss
        forward, backward, optimizer = parts.tolist()
        speed = batches.tokens_per_step / step
        rows.append(
            Row(
                name,
                comm.size,
                parameters,
                step * 1e3,
                forward,
                backward,
                optimizer,
                speed,
                None if np.isnan(peak) else peak,
                None if np.isnan(loss) else loss,
            ),
        )
        told = " ".join(f"{part:>9.1f}" for part in parts)
        say(f"  {name:>12} {step * 1e3:>10.1f} {told} {rows[-1].tokens_per_s:>9.0f} {peak:>9.0f} {loss:>10.4f}")
    compare(times, say, bounded=gpu is not None)
    if comm.rank == 0:
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        if options.plot:
            plot(rows, options.plot)
    if set(options.engines) & set(PEERS):
        from peers import stop_gloo

        stop_gloo()


if __name__ == "__main__":
    main()
