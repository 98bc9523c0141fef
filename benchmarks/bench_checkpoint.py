"""Times saving and loading a GPT-2 with Adam's states, plain copies of the same bytes and two peers, in one job.

    mpirun -n 4 python benchmarks/bench_checkpoint.py --dir /some/disk --json checkpoint.json

"copy": every rank copies its own files of a checkpoint of mpidl's and syncs them, by `shutil.copyfile`; "mpidl": save
and load by the engine of --stage, files synced, checksums written and compared ("mpidl, unverified": not compared);
"mpidl, behind": the time for which a save in the background holds the training up, and the whole until it is complete;
"torch.save": the whole state gathered on rank 0, written and synced there, and read and scattered again; "dcp":
torch.distributed.checkpoint over gloo, of the same model and optimizer under fully_shard.

Times are the slowest rank's from a barrier on, the median over the rounds after the first. extra_mib is by how much
the largest rank's data (`mpidl.memory.data_mib`, sampled every few ms) rose above what it was before, in the first
round, which is not timed. Reads come from the page cache unless the machine is short of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpidl
from collectives import Communicator
from mpidl.cli import ArgumentParser, at_least, check_writable
from mpidl.errors import UsageError
from mpidl.memory import data_mib
from mpidl.models.gpt2 import GPT2, SIZES, GPT2Config, parameter_count

ENGINES = ("mpidl", "torch.save", "dcp")
_SAMPLE = 5e-3  # seconds


@dataclass(frozen=True)
class Row:
    """One operation.

    gb_s: 10^9 bytes of state a second.
    of_copy: its time over that of the plain copies.
    """

    operation: str
    ranks: int
    params: int
    bytes: int
    seconds: float
    gb_s: float
    of_copy: float
    extra_mib: float


class Highest:
    """Context that samples this process's memory; afterwards `extra` is its largest growth, in MiB."""

    def __enter__(self) -> Highest:
        self._before, self._stop = data_mib(), threading.Event()
        self.extra = 0.0
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE):
            self.extra = max(self.extra, data_mib() - self._before)

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = max(self.extra, data_mib() - self._before)


class Bench:
    """Runs operations in rounds and keeps their times."""

    def __init__(self, comm: Communicator, rounds: int) -> None:
        self.comm, self._rounds = comm, rounds
        self.seconds: dict[str, list[float]] = {}
        self.extra: dict[str, float] = {}

    def round(self, number: int, name: str, act: Callable[[], Any]) -> Any:
        """Runs an action once; round 0 measures memory, the others time."""
        gc.collect()
        self.comm.barrier()
        if number == 0:
            with Highest() as highest:
                result = act()
            self.extra[name] = self._largest(highest.extra)
            return result
        start = time.perf_counter()
        result = act()
        self.seconds.setdefault(name, []).append(self._largest(time.perf_counter() - start))
        return result

    def rounds(self) -> range:
        """Numbers of the rounds, of which the first is not timed."""
        return range(self._rounds + 1)

    def _largest(self, value: float) -> float:
        found = np.array([value])
        self.comm.all_reduce(found, "max")
        return float(found[0])


def sync_copies(sources: list[Path], targets: list[Path]) -> None:
    """Copies files and syncs them to the disk."""
    for source, target in zip(sources, targets, strict=True):
        shutil.copyfile(source, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())


def after_one_step(config: GPT2Config, call: Callable[[GPT2], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Builds a model by `call` and makes a step, so that Adam's states exist."""
    torch.manual_seed(0)
    made, optimizer = call(GPT2(config))
    tokens = torch.arange(8)[None] % config.vocab_size
    made(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return made, optimizer


def bench_mpidl(bench: Bench, folder: Path, config: GPT2Config, stage: int, gather: bool) -> int:
    """Runs the rounds of mpidl, of copies and, with `gather`, of torch.save; returns the bytes of the state's files."""
    comm = bench.comm

    def engine(model: GPT2) -> tuple[Any, Any]:
        if stage == 0:
            return mpidl.DistributedDataParallel(model, process_group=comm), torch.optim.AdamW(model.parameters())
        return model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=comm)

    model, optimizer = after_one_step(config, engine)
    here = folder / "mpidl"
    for number in bench.rounds():

        def save(number: int = number, **how: Any) -> Any:
            return mpidl.checkpoint.save(here, model, optimizer, step=number, **how)

        saved = bench.round(number, "mpidl save", save).path
        own = sorted(saved.glob(f"rank{comm.rank:05d}-*"))
        copies = [path.with_name(f"copy-{path.name}") for path in own]
        bench.round(number, "copy", partial(sync_copies, own, copies))
        for path in copies:
            path.unlink()
        comm.barrier()
        size = sum(path.stat().st_size for path in saved.glob("rank*"))
        bench.round(number, "mpidl load", lambda: mpidl.checkpoint.load(here, model, optimizer))
        quick = "mpidl load, unverified"
        bench.round(number, quick, lambda: mpidl.checkpoint.load(here, model, optimizer, verify=False))
        start = time.perf_counter()
        bench.round(number, "mpidl save, behind", lambda: save(background=True))
        behind = mpidl.checkpoint.wait(model)
        if number:
            bench.seconds.setdefault("mpidl save, behind, until complete", []).append(time.perf_counter() - start)
        comm.barrier()
        if comm.rank == 0 and behind is not None:
            shutil.rmtree(behind)
        comm.barrier()
        if gather:
            bench_torch_save(bench, number, folder, model, optimizer, stage)
    return size


def bench_torch_save(bench: Bench, number: int, folder: Path, model: Any, optimizer: Any, stage: int) -> None:
    """Saves the whole state to one file on rank 0, and loads it."""
    comm, path = bench.comm, folder / "whole.pt"

    def save() -> None:
        weights = optimizer.model_state_dict() if stage else model.module.state_dict()
        state = optimizer.state_dict()
        if comm.rank == 0:
            with path.open("wb") as file:
                torch.save({"model": weights, "optimizer": state}, file)
                file.flush()
                os.fsync(file.fileno())
        comm.barrier()

    def load() -> None:
        # DDP's ranks read the file each; a ZeroOptimizer takes all from rank 0.
        read = comm.rank == 0 or not stage
        found = torch.load(path, weights_only=True) if read else {"model": {}, "optimizer": {}}
        if stage:
            optimizer.load_model_state_dict(found["model"])
        else:
            model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        comm.barrier()

    bench.round(number, "torch.save save", save)
    bench.round(number, "torch.save load", load)


def bench_dcp(bench: Bench, folder: Path, config: GPT2Config) -> None:
    """Runs the rounds of torch.distributed.checkpoint."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def engine(model: GPT2) -> tuple[Any, Any]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.transformer["h"].children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = after_one_step(config, engine)
    path = folder / "dcp"

    def save() -> None:
        weights, state = get_state_dict(model, optimizer)
        writer = dcp.FileSystemWriter(path, sync_files=True, overwrite=True)
        dcp.save({"model": weights, "optimizer": state}, storage_writer=writer)

    def load() -> None:
        weights, state = get_state_dict(model, optimizer)
        whole: dict[str, Any] = {"model": weights, "optimizer": state}
        dcp.load(whole, storage_reader=dcp.FileSystemReader(path))
        set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])

    for number in bench.rounds():
        bench.round(number, "dcp save", save)
        bench.round(number, "dcp load", load)


def parse(comm: Communicator) -> argparse.Namespace:
    """The options."""
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="directory to write to, on the disk in question")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which; copies are always there")
    parser.add_argument("--model", default="gpt2", choices=[*SIZES, "tiny"], help="size")
    parser.add_argument("--stage", type=int, default=3, choices=[0, 1, 2, 3], help="of ZeRO; 0 is DDP")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="timed ones")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")

    def check(options: argparse.Namespace) -> None:
        options.engines = [name for name in options.engines.split(",") if name]
        for name in options.engines or [""]:
            if name not in ENGINES:
                raise UsageError(f"--engines: got {name!r}; needs any of {','.join(ENGINES)}")
        if "mpidl" not in options.engines:
            raise UsageError("--engines: needs mpidl, whose files are copied to compare with")
        if comm.rank == 0:
            check_writable(options.json)
            try:
                options.dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--dir {options.dir}: {error.strerror}") from None

    return parser.parse_on_all_ranks(check)


def main() -> None:
    """Runs the chosen ones and prints a table."""
    comm = mpidl.init()
    options = parse(comm)
    tiny = GPT2Config(vocab_size=64, block_size=16, layers=2, heads=2, embd=32)
    config = tiny if options.model == "tiny" else SIZES[options.model]
    folder = options.dir / "bench-checkpoint"
    bench = Bench(comm, options.rounds)
    with torch.device("meta"):
        params = parameter_count(GPT2(config))
    size = bench_mpidl(bench, folder, config, options.stage, "torch.save" in options.engines)
    gc.collect()
    if "dcp" in options.engines:
        from collectives.bench.peers import start_gloo, stop_gloo

        start_gloo(comm)
        bench_dcp(bench, folder, config)
        stop_gloo()
    comm.barrier()
    if comm.rank:
        return
    shutil.rmtree(folder)
    copied = statistics.median(bench.seconds["copy"])
    rows = []
    for name, seconds in bench.seconds.items():
        median = statistics.median(seconds)
        extra = bench.extra.get(name, 0.0)
        rows.append(Row(name, comm.size, params, size, median, size / median / 1e9, median / copied, extra))
    print(
        f"# {params / 1e6:.1f} M parameters with AdamW's state, {size / 1e6:.1f} MB, {comm.size} ranks, {options.dir}"
    )
    print(f"# {'operation':34} {'seconds':>8} {'GB/s':>7} {'of copy':>8} {'extra MiB':>10}")
    for row in rows:
        print(f"  {row.operation:34} {row.seconds:8.3f} {row.gb_s:7.2f} {row.of_copy:8.2f} {row.extra_mib:10.1f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
