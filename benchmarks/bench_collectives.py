"""Times collectives: this project's algorithms, the MPI library's own and gloo, side by side in one job.

    mpirun -n 4 python benchmarks/bench_collectives.py --ops all_reduce --algorithms symmetric,ring,mpi,gloo

For each operation and size the algorithms take turns, repetition by repetition and in random order, so that drift of
the machine and the state of its caches hit all equally. A repetition's time is the slowest rank's, between a barrier
and its own end; a row's is their median. "bytes" is the operation's larger buffer (the gathered, the scattered, the
reduced whole). algbw is bytes / time; busbw what the links carry: algbw times 2 (p - 1) / p for all_reduce, (p - 1) / p
for reduce_scatter, all_gather, all_to_all, gather and scatter, 1 for broadcast, reduce, scan and exscan. Every
combination's result is checked; "wrong" counts elements.

buffer: "user" is any array, "symmetric" one of Communicator.empty; of all_gather the output is then one for the node
(Communicator.shared), and the input lies in it. "copy" is no collective but the memory's limit: each rank copies as
many bytes as the one-copy algorithm reads and writes in this operation.

--device cuda: arrays on a GPU, which ranks take in turn, timed by its events, with its cache cleared before each call.
Algorithms are then the ways of this project (ipc, aware, staged), "mpi" where the library takes device addresses,
"gloo" on CUDA tensors, and "nccl" where each rank has a GPU of its own. "limit" is the memory's time as a share of the
row's (`gpu_limits`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import gpu_limits
import mpidl
from collectives import Communicator
from collectives.algorithms import ALGORITHMS
from collectives.backends.cuda.transports import TRANSPORTS
from collectives.backends.mpi import datatype
from collectives.buffers import describe
from collectives.timing import Clock, measure, repetitions
from mpidl.cli import ArgumentParser, at_least, bytes_text, check_writable, names
from mpidl.errors import UsageError

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "scan", "exscan")
OPERATIONS = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all"),
    *("broadcast", "reduce", "gather", "scatter", "scan", "exscan"),
)
PEERS = ("mpi", "gloo", "copy")
GPU_PEERS = (*PEERS, "nccl")
COMPOSED = ("symmetric", "hierarchical")
GPU_REPETITIONS = 30
BUFFERS = ("user", "symmetric")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8")
DEFAULTS = {
    "cpu": {"algorithms": "auto,symmetric,hierarchical,ring,pairwise,mpi,gloo", "min_bytes": "1K", "max_bytes": "64M"},
    "cuda": {"algorithms": "ipc,aware,staged,mpi,gloo,nccl,copy", "min_bytes": "64M", "max_bytes": "256M"},
}
NAMES = ("auto", *COMPOSED, *sorted({name for family in ALGORITHMS.values() for name in family}), *PEERS)


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    op: str
    algorithm: str
    dtype: str
    ranks: int
    bytes: int
    buffer: str
    time_us: float
    algbw_gbs: float
    busbw_gbs: float


@dataclass(frozen=True)
class GpuRow(Row):
    """One line of those on GPUs. limit_us: what the memory needs at least, where that is known."""

    limit_us: float | None


@dataclass
class Arrays:
    """One operation's arrays on this rank: x goes in, out comes out (the same for operations in place)."""

    x: torch.Tensor
    out: torch.Tensor


def allocate(comm: Communicator, op: str, nbytes: int, dtype: torch.dtype, buffer: str, device: str = "cpu") -> Arrays:
    """Arrays for an operation whose larger buffer has nbytes, cut down to a multiple of the ranks."""
    each = max(1, nbytes // dtype.itemsize // comm.size)

    def make(size: int, *, shared: bool = False) -> torch.Tensor:
        if buffer == "user":
            return torch.empty(size, dtype=dtype, device=device)
        made: torch.Tensor = (comm.shared if shared else comm.empty)(size, dtype, device=device)
        return made

    large = make(each * comm.size, shared=op == "all_gather")
    if op == "all_gather" and buffer == "symmetric":
        return Arrays(large[comm.rank * each :][:each], large)
    if op in ("all_gather", "gather"):
        return Arrays(make(each), large)
    if op in ("reduce_scatter", "scatter"):
        return Arrays(large, make(each))
    if op == "all_to_all":
        return Arrays(large, make(each * comm.size))
    return Arrays(large, large)


def pattern(size: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's input: small numbers whose sums every dtype holds exactly."""
    return ((torch.arange(size) + rank) % 5).to(dtype)


def fill(comm: Communicator, arrays: Arrays, synchronize: Callable[[], None] = lambda: None) -> None:
    """Sets the input; no rank goes on before all have, as they may read each other's."""
    comm.barrier()
    if arrays.out is not arrays.x:
        arrays.out.zero_()
        synchronize()
        comm.barrier()  # it may be one array for all
    arrays.x.copy_(pattern(arrays.x.numel(), comm.rank, arrays.x.dtype))


def wrong_elements(comm: Communicator, op: str, arrays: Arrays) -> int:
    """Elements of out that differ from what every rank can compute from all ranks' known inputs."""
    size, dtype, rank, ranks = arrays.x.numel(), arrays.x.dtype, comm.rank, range(comm.size)
    mine = slice(rank * arrays.out.numel(), (rank + 1) * arrays.out.numel())
    match op:
        case "scan" | "exscan":
            before = rank + (op == "scan")
            if not before:
                return int((arrays.out != pattern(size, 0, dtype)).sum())
            expected = torch.stack([pattern(size, r, torch.float64) for r in range(before)]).sum(0).to(dtype)
        case "all_reduce" | "reduce" | "reduce_scatter":
            if op == "reduce" and rank:
                return 0
            total = sum(pattern(size, r, torch.float64) for r in ranks)
            assert isinstance(total, torch.Tensor)
            expected = (total[mine] if op == "reduce_scatter" else total).to(dtype)
        case "all_gather" | "gather":
            if op == "gather" and rank:
                return 0
            expected = torch.cat([pattern(size, r, dtype) for r in ranks])
        case "all_to_all":
            each = size // comm.size
            expected = torch.cat([pattern(size, r, dtype)[rank * each :][:each] for r in ranks])
        case "broadcast":
            expected = pattern(size, 0, dtype)
        case _:
            expected = pattern(size, 0, dtype)[mine]
    return int((arrays.out != expected.to(arrays.out.device)).sum())


def call_of(comm: Communicator, op: str, algorithm: str, arrays: Arrays, buffer: str) -> Callable[[], Any] | None:
    """The call to time, or None where the algorithm does not serve the operation, the dtype or the buffer."""
    if algorithm in PEERS and (buffer == "symmetric") != (algorithm == "copy"):
        return None
    if algorithm == "gloo":
        return _gloo(comm, op, arrays) if comm.size > 1 and op not in ("scan", "exscan") else None
    if algorithm == "mpi":
        return _library(comm, op, arrays)
    if algorithm == "copy":
        return _copy(comm, op, arrays)
    if algorithm not in comm.algorithms(op) or (buffer == "symmetric" and algorithm not in ("auto", *COMPOSED)):
        return None
    return ours(comm, op, arrays, algorithm=algorithm)


def call_on_gpu(
    setting: Setting, comm: Communicator, op: str, name: str, arrays: Arrays, buffer: str
) -> Callable[[], Any] | None:
    """Makes the call of an algorithm that serves GPUs; see `call_of`."""
    if name in setting.groups:
        return None if buffer == "symmetric" and name != "ipc" else ours(setting.groups[name], op, arrays)
    if (buffer == "symmetric") != (name == "copy"):
        return None
    if name == "copy":
        return _copy(comm, op, arrays)
    if name == "mpi":
        return _library(comm, op, arrays) if "aware" in setting.groups else None
    if name == "gloo":
        return _tried(comm, _gloo(comm, op, arrays)) if comm.size > 1 else None
    return _gloo(comm, op, arrays, setting.nccl) if name == "nccl" and setting.nccl is not None else None


def _tried(comm: Communicator, call: Callable[[], Any]) -> Callable[[], Any] | None:
    """The call, if it works on all ranks: of gloo's operations some take CUDA tensors."""
    failed = np.zeros(1)
    try:
        call()
    except RuntimeError:
        failed[0] = 1
    comm.all_reduce(failed)
    return None if failed[0] else call


def ours(comm: Communicator, op: str, arrays: Arrays, **settings: Any) -> Callable[[], Any]:
    """Makes the call of this project's operation."""
    method, x, out = getattr(comm, op), arrays.x, arrays.out
    if op in ("all_reduce", "broadcast", "reduce", "scan", "exscan"):
        return lambda: method(x, **settings)
    root_out = out if comm.rank == 0 else None
    root_x = x if comm.rank == 0 else None
    if op == "gather":
        return lambda: method(root_out, x, **settings)
    if op == "scatter":
        return lambda: method(out, root_x, **settings)
    return lambda: method(out, x, **settings)


def _copy(comm: Communicator, op: str, arrays: Arrays) -> Callable[[], Any] | None:
    """Plain copies of the bytes that the one-copy algorithm moves; half of them are read and half are written."""
    size = max(arrays.x.numel(), arrays.out.numel())
    moved = gpu_limits.moved_bytes(op, size * arrays.x.element_size(), comm.size)
    if moved is None:
        return None
    if arrays.x.is_cuda:
        given, taken = (torch.zeros(moved // 2, dtype=torch.uint8, device=arrays.x.device) for _ in range(2))
        return lambda: taken.copy_(given)
    both = np.zeros(moved, np.uint8)
    source, target = both[: both.size // 2], both[both.size // 2 :][: both.size // 2]
    return lambda: np.copyto(target, source)


def seen(tensor: torch.Tensor) -> Any:
    """Converts a tensor to an argument of mpi4py; on a GPU by its address."""
    if not tensor.is_cuda:
        return tensor.numpy()
    return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), datatype(describe(tensor.dtype))]


def _library(comm: Communicator, op: str, arrays: Arrays) -> Callable[[], Any] | None:
    """The MPI library's own operation, straight through mpi4py's upper-case call."""
    dtype = arrays.x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        if op in REDUCTIONS:
            return None
        x, out = seen(arrays.x.view(torch.int16)), seen(arrays.out.view(torch.int16))
    else:
        x, out = seen(arrays.x), seen(arrays.out)
    mpi, root = comm.mpi, comm.rank == 0
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, x),
        "reduce_scatter": lambda: mpi.Reduce_scatter_block(x, out),
        "all_gather": lambda: mpi.Allgather(x, out),
        "all_to_all": lambda: mpi.Alltoall(x, out),
        "broadcast": lambda: mpi.Bcast(x),
        "reduce": lambda: mpi.Reduce(MPI.IN_PLACE if root else x, x if root else None),
        "gather": lambda: mpi.Gather(x, out if root else None),
        "scatter": lambda: mpi.Scatter(x if root else None, out),
        "scan": lambda: mpi.Scan(MPI.IN_PLACE, x),
        "exscan": lambda: mpi.Exscan(MPI.IN_PLACE, x),
    }
    call = calls[op]
    if not arrays.x.is_cuda:
        return call

    def after_the_stream() -> None:  # which the library does not know
        torch.cuda.current_stream().synchronize()
        call()

    return after_the_stream


def _gloo(comm: Communicator, op: str, arrays: Arrays, group: Any = None) -> Callable[[], Any]:
    """torch.distributed's operation, on its gloo group or on another one."""
    import torch.distributed as dist

    x, out, root = arrays.x, arrays.out, comm.rank == 0
    pieces = list((out if op == "gather" else x).chunk(comm.size)) if root else None
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(out, x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "reduce": lambda: dist.reduce(x, 0, group=group),
        "gather": lambda: dist.gather(x, pieces, group=group),
        "scatter": lambda: dist.scatter(out, pieces, group=group),
    }
    return calls[op]


def bus_factor(op: str, ranks: int) -> float:
    """Bytes that links carry for a byte of the larger buffer."""
    share = (ranks - 1) / ranks
    whole = ("broadcast", "reduce", "scan", "exscan")
    return 2 * share if op == "all_reduce" else 1.0 if op in whole else share


def parse(comm: Communicator) -> argparse.Namespace:
    """The options."""
    parser = ArgumentParser(comm, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", type=names(OPERATIONS), default=",".join(OPERATIONS[:4]), help="which operations")
    told = {key: ", ".join(f"{found[key]} ({device})" for device, found in DEFAULTS.items()) for key in DEFAULTS["cpu"]}
    parser.add_argument("--device", choices=list(DEFAULTS), default="cpu", help="where the arrays are")
    parser.add_argument("--algorithms", help=f"which; by default {told['algorithms']}")
    parser.add_argument("--buffers", type=names(BUFFERS), default="user,symmetric", help="which kinds of arrays")
    parser.add_argument("--min-bytes", type=bytes_text, help=f"smallest size; by default {told['min_bytes']}")
    parser.add_argument("--max-bytes", type=bytes_text, help=f"largest size; by default {told['max_bytes']}")
    parser.add_argument("--factor", type=at_least(2), default=4, help="from one size to the next")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the elements")
    parser.add_argument("--iters", type=at_least(1), help="repetitions; by default fewer for larger sizes")
    parser.add_argument("--warmup", type=at_least(0), default=3, help="repetitions before the counted ones")
    parser.add_argument("--no-check", action="store_true", help="do not check the results")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw time and busbw against bytes there")

    def check(options: argparse.Namespace) -> None:
        on_gpu = options.device == "cuda"
        if on_gpu and gpu_limits.missing():
            raise UsageError(f"--device cuda: {gpu_limits.missing()}")
        defaults = DEFAULTS[options.device]
        try:
            chosen = names((*TRANSPORTS, *GPU_PEERS) if on_gpu else NAMES)(
                defaults["algorithms"] if options.algorithms is None else options.algorithms
            )
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--algorithms: {error}") from None
        options.algorithms = chosen
        options.min_bytes = options.min_bytes or bytes_text(defaults["min_bytes"])
        options.max_bytes = options.max_bytes or bytes_text(defaults["max_bytes"])
        if options.min_bytes > options.max_bytes:
            raise UsageError(f"--min-bytes {options.min_bytes} is more than --max-bytes {options.max_bytes}")
        if comm.rank == 0:
            check_writable(options.json)
            check_writable(options.plot)

    return parser.parse_on_all_ranks(check)


@dataclass
class Setting:
    """The device of a measurement, and its tools.

    synchronize: waits for queued work. groups: on a GPU, by way. nccl: a group of torch.distributed, or None. sharing:
    ranks on a GPU. bandwidth: of a copy there, bytes read and written a second.
    """

    device: str = "cpu"
    clock: Clock = field(default_factory=Clock)
    synchronize: Callable[[], None] = lambda: None
    groups: dict[str, Communicator] = field(default_factory=dict)
    nccl: Any = None
    sharing: int = 1
    bandwidth: float | None = None

    @classmethod
    def on_gpu(cls, comm: Communicator, options: argparse.Namespace) -> Setting:
        """Collective."""
        gpu = gpu_limits.Gpu(comm)
        groups = gpu_limits.groups(comm, options.algorithms, gpu.device)
        nccl = None
        if "nccl" in options.algorithms and gpu.own and comm.size > 1:
            from peers import nccl_group

            nccl = nccl_group()
        return cls(gpu.device, gpu.clock, gpu.synchronize, groups, nccl, gpu.sharing, gpu.copy_bandwidth(comm))

    def limit(self, op: str, nbytes: int, ranks: int) -> float | None:
        """Seconds that the memory needs at least."""
        moved = gpu_limits.moved_bytes(op, nbytes, ranks)
        return None if moved is None or self.bandwidth is None else moved * self.sharing / self.bandwidth


def one_size(
    comm: Communicator, options: argparse.Namespace, op: str, nbytes: int, setting: Setting
) -> Iterator[tuple[Row, str] | str]:
    """Rows of one operation and size, each with the number of wrong elements; and what serves it not."""
    dtype, on_gpu = getattr(torch, options.dtype), options.device == "cuda"
    owner = setting.groups.get("ipc", comm)
    arrays = {buffer: allocate(owner, op, nbytes, dtype, buffer, setting.device) for buffer in options.buffers}
    calls: dict[str, Callable[[], Any]] = {}
    wrong: dict[str, str] = {}
    for buffer, (name, pair) in ((b, (n, a)) for b, a in arrays.items() for n in options.algorithms):
        call = call_on_gpu(setting, comm, op, name, pair, buffer) if on_gpu else call_of(comm, op, name, pair, buffer)
        if call is None:
            continue
        key = f"{name} {buffer}"
        calls[key], wrong[key] = call, "-"
        if not options.no_check and name != "copy":
            fill(comm, pair, setting.synchronize)
            call()
            found = np.array([wrong_elements(comm, op, pair)])
            comm.all_reduce(found)
            wrong[key] = str(found[0])
    yield from sorted(set(options.algorithms) - {key.split()[0] for key in calls})
    for pair in arrays.values():
        pair.x.zero_()  # sums of sums would overflow
    large = max(pair.x.numel() for pair in arrays.values()), max(pair.out.numel() for pair in arrays.values())
    size = max(large) * dtype.itemsize
    count = options.iters or (GPU_REPETITIONS if on_gpu else repetitions(size))
    times = measure(comm, calls, count, options.warmup, setting.clock)
    for key, seconds in times.items():
        name, buffer = key.split()
        algbw = size / seconds / 1e9
        busbw = algbw * bus_factor(op, comm.size)
        row = Row(op, name, options.dtype, comm.size, size, buffer, seconds * 1e6, algbw, busbw)
        if on_gpu:
            limit = setting.limit(op, size, comm.size)
            row = GpuRow(**vars(row), limit_us=None if limit is None else limit * 1e6)
        yield row, wrong[key]


def main() -> None:
    """Measures, prints, writes."""
    comm = mpidl.init()
    options = parse(comm)
    say = print if comm.rank == 0 else lambda *_, **__: None
    torch.set_num_threads(1)
    meets = {"gloo", "nccl"} & set(options.algorithms) and comm.size > 1
    if meets:
        from peers import start_gloo

        start_gloo(comm)
    rows: list[Row] = []
    on_gpu = options.device == "cuda"
    setting = Setting.on_gpu(comm, options) if on_gpu else Setting()
    say(f"# {comm.size} ranks on {comm.nodes} node(s), {options.dtype}, {MPI.Get_library_version().splitlines()[0]}")
    if setting.bandwidth is not None:
        say(f"# {setting.sharing} rank(s) on a GPU, which copies {setting.bandwidth / 1e9:.0f} GB/s (read and written)")
    head = f"{'bytes':>9} {'count':>10} {'type':>8} {'op':>14} {'algorithm':>18} {'buffer':>9} {'time':>10}"
    share = f" {'limit':>6}" if on_gpu else ""
    say(f"# {head} {'algbw':>7} {'busbw':>7}{share} {'wrong':>6}\n# {'us':>{len(head)}} {'GB/s':>7} {'GB/s':>7}")
    for op in options.ops:
        absent: set[str] = set()
        nbytes = options.min_bytes
        while nbytes <= options.max_bytes:
            of_size: list[Row] = []
            for found in one_size(comm, options, op, nbytes, setting):
                if isinstance(found, str):
                    absent.add(found)
                    continue
                row, wrong = found
                of_size.append(row)
                if isinstance(row, GpuRow):
                    share = f" {row.limit_us / row.time_us:>6.2f}" if row.limit_us else f" {'-':>6}"
                say(
                    f"  {row.bytes:>9} {row.bytes // getattr(torch, options.dtype).itemsize:>10} {row.dtype:>8} "
                    f"{op:>14} {row.algorithm:>18} {row.buffer:>9} {row.time_us:>10.1f} {row.algbw_gbs:>7.2f} "
                    f"{row.busbw_gbs:>7.2f}{share} {wrong:>6}",
                    flush=True,
                )
            if on_gpu and of_size:
                for line in gpu_limits.told(of_size):
                    say(line, flush=True)
            rows += of_size
            nbytes *= options.factor
        if absent:
            say(f"# {op} of {options.dtype}: not served by {', '.join(sorted(absent))}", flush=True)
    if comm.rank == 0 and options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if comm.rank == 0 and options.plot:
        plot(rows, options.plot)
        say(f"# plot: {options.plot}")
    if meets:
        from peers import stop_gloo

        stop_gloo()


def plot(rows: list[Row], path: Path) -> None:
    """A column an operation: time above, busbw below, a line for each algorithm and kind of buffer."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    ops = list(dict.fromkeys(row.op for row in rows))
    figure, axes = plt.subplots(2, len(ops), figsize=(4.5 * len(ops), 7), sharex=True, squeeze=False)
    names = list(dict.fromkeys((row.algorithm, row.buffer) for row in rows))
    for column, op in enumerate(ops):
        for number, (algorithm, buffer) in enumerate(names):
            points = [row for row in rows if (row.op, row.algorithm, row.buffer) == (op, algorithm, buffer)]
            label = f"{algorithm}, {buffer} buffer" if buffer == "symmetric" else algorithm
            style = {"color": f"C{number % 10}", "linestyle": "--" if buffer == "symmetric" else "-", "marker": "."}
            for axis, attribute in ((axes[0][column], "time_us"), (axes[1][column], "busbw_gbs")):
                axis.loglog([r.bytes for r in points], [getattr(r, attribute) for r in points], label=label, **style)
        axes[0][column].set_title(f"{op}, {rows[0].ranks} ranks, {rows[0].dtype}")
        axes[1][column].set_xlabel("bytes")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("time, us")
    axes[1][0].set_ylabel("busbw, GB/s")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
