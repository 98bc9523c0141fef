"""Times training steps: this project's engines, PyTorch's and DeepSpeed's, on one model in one job.

    mpirun -n 2 python benchmarks/bench_training.py --engines single,ddp,zero1,zero2,zero3,all-reduce,torch-ddp,fsdp2

A byte-level GPT-2 is trained in fp32 by AdamW, on the same weights and data whatever the engine. "single" is each rank
alone, without any communication: what a step costs at least if nothing is sharded. A step's time is the slowest
rank's, a row's the median over the steps of all rounds; so are its parts, forward, backward and the optimizer's step.
"all-reduce" is no engine but the bare averaging of buffers as large as the gradients, in buckets of 25 MiB.

peak_mib is the largest rank's proportional set size (memory that ranks share is divided among them), the highest of
those after forward, backward and step of the steps before the counted ones. node_mib is what a node's ranks hold
together: the sum of their proportional set sizes (Pss of /proc/PID/smaps_rollup), read all through these steps, at its
highest; over several nodes that of the fullest. The loss is the mean over ranks.

The engines come one after the other, as often as --rounds says, and a ratio is the median over the rounds. Where the
machine's speed changes within minutes, `bench_in_turn.py` compares them more fairly.

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
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidl
from collectives import Communicator
from collectives.bench import gpu_limits
from collectives.devices import unusable_reason
from mpidl.cli import ArgumentParser, at_least, check_writable
from mpidl.data import TokenBatches
from mpidl.errors import UsageError
from mpidl.models.gpt2 import GPT2, GPT2Config, parameter_count
from training_report import BARE, ENGINES, PARTS, PEERS, Run, compare, plot, rows_of
from turns import Caller

SETTINGS: dict[str, Any] = {"lr": 3e-4}
BETWEEN_LOOKS = 0.02  # seconds, at the memory of a node


@dataclass
class Engine:
    """Engine under test: loss(x, y) runs forward; backward(loss), step() the rest. close() ends it.

    compressing() is the time that this thread has computed for compressed gradients so far, in seconds.
    """

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    step: Callable[[], Any]
    close: Callable[[], Any] = lambda: None
    compressing: Callable[[], float] = lambda: 0.0


class Stopwatch:
    """Measures the parts of a step by the host's clock, and the memory in use."""

    def begin(self) -> None:
        """Begins a step."""
        self._before, self._parts = time.perf_counter(), dict.fromkeys(PARTS, 0.0)

    def took(self, part: str) -> None:
        """Adds the time since the last call to this part."""
        self._parts[part] += time.perf_counter() - self._before

    def go_on(self) -> None:
        """Begins the next part."""
        self._before = time.perf_counter()

    def parts(self) -> dict[str, float]:
        """Seconds of each part, at the end of the step."""
        return self._parts

    def used_mib(self) -> float:
        """Memory in use."""
        return float(mpidl.memory.pss_mib())


class EventStopwatch(Stopwatch):
    """Measures by events of the GPU, without a wait before the end of the step."""

    def __init__(self, gpu: gpu_limits.Gpu) -> None:
        self._gpu = gpu

    def begin(self) -> None:
        """Implements `Stopwatch.begin`."""
        self._gpu.synchronize()
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.go_on()

    def took(self, part: str) -> None:
        """Implements `Stopwatch.took`."""
        self._spans.append((part, self._last, self._mark()))

    def go_on(self) -> None:
        """Implements `Stopwatch.go_on`."""
        self._last = self._mark()

    def parts(self) -> dict[str, float]:
        """Implements `Stopwatch.parts`."""
        found = dict.fromkeys(PARTS, 0.0)
        self._gpu.synchronize()
        for part, begin, end in self._spans:
            found[part] += begin.elapsed_time(end) / 1e3  # milliseconds
        return found

    def used_mib(self) -> float:
        """Implements `Stopwatch.used_mib`."""
        return self._gpu.used_mib()

    @staticmethod
    def _mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class NodeMemory:
    """Reads what the ranks of a node hold together, in a thread of the first of them. Collective.

    highest: MiB; NaN on the other ranks, and where the system does not tell.
    """

    def __init__(self, comm: Communicator) -> None:
        numbers = mpidl.all_gather_object(comm, os.getpid())
        self._files = [Path(f"/proc/{numbers[rank]}/smaps_rollup") for rank in comm.node_ranks]
        self._looks = comm.local_rank == 0 and all(os.access(path, os.R_OK) for path in self._files)
        self.highest = math.nan

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Reads it inside, again and again."""
        if not self._looks:
            yield
            return
        over = threading.Event()

        def look() -> None:
            while True:
                ends = over.wait(BETWEEN_LOOKS)
                self.highest = max(self._held(), self.highest)
                if ends:
                    return

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _held(self) -> float:
        lines = [line for path in self._files for line in path.read_text().splitlines() if line.startswith("Pss:")]
        return sum(int(line.split()[1]) for line in lines) / 1024


def plain(call: Any, optimizer: torch.optim.Optimizer) -> Engine:
    """The loop that everyone knows."""

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def compressing() -> float:
        parts = (getattr(call, "compressed", None), getattr(optimizer, "compressed", None), optimizer)
        return sum(getattr(part, "computing_seconds", 0.0) for part in parts)

    return Engine(call, lambda loss: loss.backward(), step, compressing=compressing)


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
    """Returns memory that allocators keep to the system, so that an engine does not inherit that of the one before."""
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
        self._peak, self._node = 0.0, NodeMemory(comm)
        self._prepare(name, model)

    def _prepare(self, name: str, model: GPT2) -> None:
        self._engine = build(name, model, self._comm, self._options)
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Makes one step; the first `--warmup` are not timed, and memory is measured in them."""
        self._comm.barrier()
        self._watch.begin()
        with self._node.watched() if self._done < self._options.warmup else contextlib.nullcontext():
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
        summary = np.array([self._peak, np.nan_to_num(self._node.highest)])
        comm.all_reduce(summary, "max")
        mean = np.array([self._mean_loss()])
        comm.all_reduce(mean, "avg")
        self._close()
        return Run(slowest, float(summary[0]), float(summary[1]) or math.nan, float(mean[0]))

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
    """All rounds of all engines."""
    found: dict[str, list[Run]] = {name: [] for name in options.engines}
    for _ in range(options.rounds):
        for name in options.engines:
            trial = make(name)
            for _ in range(options.warmup + options.steps):
                trial.step()
            found[name].append(trial.end())
            del trial
            say(f"# {name}: {statistics.median(found[name][-1].seconds.sum(1)) * 1e3:.1f} ms", flush=True)
    return found


def measure_when_called(options: argparse.Namespace, trial: Trial, comm: Communicator, about: dict[str, int]) -> Run:
    """Runs one round in the turns that `bench_in_turn.py` gives, then reports to it. about: more values to report."""
    with Caller(options.called, comm.size) as caller:
        for _ in range(options.warmup + options.steps):
            with caller.turn():
                trial.step()
        with caller.turn() as answer:
            run = trial.end()
            answer |= {**about, "ranks": comm.size, "seconds": run.seconds.tolist(), "loss": run.loss}
        return run


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
    parser.add_argument("--called", type=Path, metavar="PATH", help="how `bench_in_turn.py` calls its jobs")
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
        if options.device == "cuda" and unusable_reason():
            raise UsageError(f"--device cuda: {unusable_reason()}")
        options.engines = [name for name in options.engines.split(",") if name]
        for name in options.engines or [""]:
            if name not in ENGINES:
                raise UsageError(f"--engines: got {name!r}; needs any of {','.join(ENGINES)}")
        if options.called and len(options.engines) != 1:
            raise UsageError(f"--called: got {len(options.engines)} engines; needs one")
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


def main() -> None:
    """Measures, prints, writes, draws."""
    comm = mpidl.init(export_ranks=True)  # DeepSpeed asks for LOCAL_RANK
    options = parse(comm)
    say = print if comm.rank == 0 else lambda *_, **__: None
    torch.set_num_threads(options.threads)
    gpu = gpu_limits.Gpu(comm) if options.device == "cuda" else None
    watch = Stopwatch() if gpu is None else EventStopwatch(gpu)
    if gpu is not None and not gpu.own and "fsdp2" in options.engines:
        options.engines.remove("fsdp2")
        say("# fsdp2: not run, as NCCL needs a GPU for each rank")
    if set(options.engines) & set(PEERS):
        from collectives.bench.peers import start_gloo

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

    def make(name: str) -> Trial:
        kind = BareAllReduce if name == BARE else Trial
        return kind(name, comm, options, config, batches, watch)

    if options.called:
        about = {"params": parameters, "tokens": batches.tokens_per_step}
        found = {name: [measure_when_called(options, make(name), comm, about)] for name in options.engines}
    else:
        found = measure(options, make, say)
    rows = rows_of(found, comm.size, parameters, batches.tokens_per_step, say)
    rounds = {name: np.array([np.median(run.seconds.sum(1)) for run in runs]) for name, runs in found.items()}
    compare(rounds, say, bounded=gpu is not None)
    if comm.rank == 0:
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        if options.plot:
            plot(rows, options.plot)
    if set(options.engines) & set(PEERS):
        from collectives.bench.peers import stop_gloo

        stop_gloo()


if __name__ == "__main__":
    main()
