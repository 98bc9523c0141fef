"""The methods of `bench_slow_network.py`: how each is built, and how many bytes it sends by formula.

To add one is a line in METHODS. A compressor needs none: its name is what `compress=` takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import mpidl
from bench_training import SETTINGS, Engine, plain
from collectives import Communicator
from mpidl.comm_hooks import bf16_compress
from mpidl.ddp.arguments import BUCKET_CAP_MB
from mpidl.errors import ConfigurationError, UsageError
from mpidl.gradients.buckets import FIRST_BUCKET_MB, MIB, assign
from mpidl.gradients.compression import Compressor
from mpidl.gradients.compression.auto import PASSES
from mpidl.gradients.compression.low_rank import LowRank
from mpidl.gradients.compression.sign import Sign
from mpidl.models.gpt2 import GPT2
from mpidl.optim import (
    DiLoCo,
    Dion,
    DionState,
    OneBitAdam,
    OneBitLamb,
    PeriodicAverager,
    PostLocalSGDOptimizer,
    ZeroOneAdam,
    dion_hook,
    one_bit_hook,
)

BASE, ALONE = "ddp", "single"
Adam = torch.optim.AdamW
RANK_FRACTION = 0.25  # of Dion's factors


@dataclass(frozen=True)
class Shape:
    """A model, and the ranks that train it.

    total: bytes of its gradients in fp32.
    blocks: of them, each unit's.
    """

    total: float
    blocks: Sequence[float]
    sizes: Sequence[torch.Size]
    nodes: int
    ranks: int

    def all_reduced(self, nbytes: float) -> float:
        """Bytes that a node sends to sum so many over the nodes."""
        return 2 * nbytes * (self.nodes - 1) / self.nodes

    def in_rings(self, nbytes: float) -> float:
        """Bytes that a node sends if the ranks of all nodes are one ring."""
        return 2 * nbytes * (self.ranks - 1) / self.ranks if self.nodes > 1 else 0

    def zero3_gathers(self, whole: int) -> float:
        """Bytes that ZeRO-3 gathers in a step. whole: blocks that stay from forward to backward."""
        return self.total + sum(self.blocks[: max(0, len(self.blocks) - whole)])

    def zero3(self, whole: int) -> float:
        """Bytes that a node sends in ZeRO-3."""
        return self.all_reduced(self.zero3_gathers(whole) + self.total) / 2

    def zero3_int8(self, whole: int) -> float:
        """Bytes that a node sends in ZeRO-3 by int8: parameters and gradients in blocks of 256 with a 4-byte scale."""
        return self.zero3(whole) * (1 + 4 / 256) / 4

    def in_bits(self) -> float:
        """Bytes of all values in one bit each, both ways of an all-reduce."""
        return Sign().sent_bytes(round(self.total / 4), self.nodes, True)

    def in_int8(self) -> float:
        """Bytes of all values in blocks of integers of 8 bits, both ways of an all-reduce."""
        return mpidl.Compression("int8").compressor().sent_bytes(round(self.total / 4), self.nodes, True)

    def dion(self) -> float:
        """Bytes of Dion's factors and of the gradients that are no matrices'."""
        matrices = [size for size in self.sizes if len(size) == 2]
        rest = self.total / 4 - sum(size.numel() for size in matrices)
        return 4 * (rest + sum(sum(size) * max(1, round(RANK_FRACTION * min(size))) for size in matrices))

    def buckets(self, cap: float, first: float | None) -> list[list[torch.Size]]:
        """Shapes of the gradients in each bucket. cap, first: bytes of a bucket, and of the first one, at most."""
        parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in reversed(self.sizes)]
        return [[p.shape for p in bucket] for bucket in assign(parameters, cap, first)]

    def power_sgd(self, rank: int, min_rate: float = 2) -> float:
        """Bytes of PowerSGD's factors and of the tensors that they would not make smaller."""
        elements = 0
        for size in self.sizes:
            n, m = size[0], size.numel() // size[0]
            factors = (n + m) * rank
            elements += factors if factors * min_rate < n * m else n * m
        return 4.0 * elements


@dataclass(frozen=True)
class Method:
    """Method of the benchmark. make: builds the engine around a model.

    sends: bytes that a node sends in a step, by formula.
    is_peer: it is torch.distributed's.
    period: steps of one cycle; times are means over a cycle.
    warmup: steps that it needs before it is timed.
    """

    make: Callable[[GPT2, Communicator], Engine]
    sends: Callable[[Shape], float]
    is_peer: bool = False
    period: int = 1
    warmup: int = 0


def ddp(
    hook: Callable[..., Any] | None = None, optimizer: type[torch.optim.Optimizer] = Adam, **settings: Any
) -> Callable[[GPT2, Communicator], Engine]:
    """This project's DDP."""

    def make(model: GPT2, comm: Communicator) -> Engine:
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm, **settings)
        if hook is not None:
            wrapped.register_comm_hook(comm, hook)
        return plain(wrapped, optimizer(model.parameters(), **SETTINGS))

    return make


def zero(
    stage: int, optimizer: type[torch.optim.Optimizer] = Adam, **settings: Any
) -> Callable[[GPT2, Communicator], Engine]:
    """This project's ZeRO."""
    return lambda model, comm: plain(
        model, mpidl.ZeroOptimizer(model, optimizer, stage=stage, process_group=comm, **settings, **SETTINGS)
    )


def torch_ddp(hook: str | None = None, rank: int = 4) -> Callable[[GPT2, Communicator], Engine]:
    """PyTorch's DDP over gloo."""

    def make(model: GPT2, comm: Communicator) -> Engine:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        # The hook's all-reduces of several buckets meet each other over gloo, which has no order for them.
        cap = 1024 if hook == "powersgd" else None
        wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
        if hook == "bf16":
            # By another function, as DDP refuses this one without NCCL, although gloo can do what it asks for.
            wrapped.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=STARTS)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return plain(wrapped, Adam(model.parameters(), **SETTINGS))

    return make


def one_bit(
    optimizer_class: Callable[..., torch.optim.Optimizer], **settings: Any
) -> Callable[[GPT2, Communicator], Engine]:
    """DDP, and an optimizer that sends one bit an element in the counted steps."""

    def make(model: GPT2, comm: Communicator) -> Engine:
        wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
        optimizer = optimizer_class(model.parameters(), process_group=comm, **settings, **SETTINGS)
        wrapped.register_comm_hook(optimizer, one_bit_hook)
        return plain(wrapped, optimizer)

    return make


def dion(model: GPT2, comm: Communicator) -> Engine:
    """DDP, and Dion, whose ranks average factors of the matrices' momenta, and gradients of all else."""
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "rule": "dion"},
        {"params": [p for p in model.parameters() if p.dim() != 2], "rule": "adamw"},
    ]
    optimizer = Dion(groups, rank_fraction=RANK_FRACTION, process_group=comm)
    wrapped.register_comm_hook(DionState(optimizer), dion_hook)
    return plain(wrapped, optimizer)


def post_local(model: GPT2, comm: Communicator) -> Engine:
    """Local steps on each rank, which averages the weights at every PERIOD-th step."""
    averager = PeriodicAverager(model.parameters(), comm, PERIOD)
    return plain(model, PostLocalSGDOptimizer(Adam(model.parameters(), **SETTINGS), averager))


def diloco(**settings: Any) -> Callable[[GPT2, Communicator], Engine]:
    """Each rank alone, with an outer step at every PERIOD-th one."""

    def make(model: GPT2, comm: Communicator) -> Engine:
        return plain(model, DiLoCo(Adam(model.parameters(), **SETTINGS), PERIOD, comm, **settings))

    return make


def automatic(*allow: str) -> Callable[[GPT2, Communicator], Engine]:
    """DDP that measures and chooses among none, bf16 and these methods."""
    return ddp(compress=mpidl.Compression("auto", allow=allow))


AHEAD, PERIOD = 3, 50
FRAGMENTS, OVERLAP = 5, 4  # of DiLoCo: a fragment is reduced during 4 steps of every 10
STARTS = 2  # steps before a method sends less
CHOOSES = 2 * PASSES + 1  # steps until "auto" has chosen, and reduced once by its choice
CHOOSES_LOSSY = LowRank.start_step + PASSES + 1  # likewise where it may choose PowerSGD
LOSSY = ("int8", "powersgd:4")  # what "auto-lossy" may choose besides bf16
INT8: dict[str, Any] = {"compress": "int8", "compress_parameters": "int8"}
METHODS: dict[str, Method] = {
    "single": Method(lambda model, _: plain(model, Adam(model.parameters(), **SETTINGS)), lambda s: 0),
    "ddp": Method(ddp(), lambda s: s.all_reduced(s.total)),
    "zero1": Method(zero(1), lambda s: s.all_reduced(s.total)),
    "zero2": Method(zero(2), lambda s: s.all_reduced(s.total)),
    "zero3": Method(zero(3), lambda s: s.zero3(2)),
    "zero3-ahead": Method(zero(3, prefetch=AHEAD), lambda s: s.zero3(AHEAD + 1)),
    "zero3-keep": Method(zero(3, reshard_after_forward=False), lambda s: s.all_reduced(s.total)),
    "zero3-int8": Method(zero(3, **INT8), lambda s: s.zero3_int8(2)),
    "zero3-ahead-int8": Method(zero(3, prefetch=AHEAD, **INT8), lambda s: s.zero3_int8(AHEAD + 1)),
    "zero3-node": Method(zero(3, shard_group="node"), lambda s: s.all_reduced(s.total)),
    "bf16": Method(ddp(bf16_compress), lambda s: s.all_reduced(s.total / 2)),
    "onebit": Method(one_bit(OneBitAdam, freeze_step=STARTS), lambda s: s.in_bits()),
    "onebit-lamb": Method(one_bit(OneBitLamb, freeze_step=STARTS), lambda s: s.in_bits()),
    # Local steps, with an exchange at each.
    "zero-one": Method(one_bit(ZeroOneAdam, local_after=STARTS, max_local_interval=1), lambda s: s.in_bits()),
    "dion": Method(dion, lambda s: s.all_reduced(s.dion())),
    "post-local": Method(post_local, lambda s: s.all_reduced(s.total) / PERIOD, period=PERIOD),
    "diloco": Method(diloco(), lambda s: s.all_reduced(s.total) / PERIOD, period=PERIOD),
    "diloco-int8": Method(diloco(compress="int8"), lambda s: s.in_int8() / PERIOD, period=PERIOD),
    "diloco-streaming": Method(
        diloco(fragments=FRAGMENTS, overlap=OVERLAP), lambda s: s.all_reduced(s.total) / PERIOD, period=PERIOD
    ),
    # By the formula of what it chooses where the network is what takes time.
    "auto": Method(automatic(), lambda s: s.all_reduced(s.total / 2), warmup=CHOOSES),
    "auto-lossy": Method(automatic(*LOSSY), lambda s: s.all_reduced(s.power_sgd(4)), warmup=CHOOSES_LOSSY),
    "torch-ddp": Method(torch_ddp(), lambda s: s.in_rings(s.total), is_peer=True),
    "torch-bf16": Method(torch_ddp("bf16"), lambda s: s.in_rings(s.total / 2), is_peer=True),
    "torch-powersgd": Method(torch_ddp("powersgd"), lambda s: s.in_rings(s.power_sgd(4)), is_peer=True),
}


def names_of(text: str) -> list[str]:
    """The names that an option lists, each once. Between them are commas; or semicolons, as some names have commas."""
    return list(dict.fromkeys(name for name in text.split(";" if ";" in text else ",") if name))


def method_of(name: str) -> Method:
    """The method of a name; of another than those of METHODS, an engine with `compress=`. Raises UsageError."""
    if name in METHODS:
        return METHODS[name]
    engine, plus, compress = name.rpartition("+")
    stage = int(engine[-1]) if re.fullmatch("zero[123]", engine) else 0
    is_known = compress.partition(":")[0] in mpidl.COMPRESSORS
    if (plus and not stage and engine != BASE) or not is_known:
        raise UsageError(
            f"--methods: got {name!r}; needs any of {','.join(METHODS)}, a compressor, or ENGINE+compressor "
            "with ddp, zero1, zero2 or zero3"
        )

    def sends(shape: Shape) -> float:
        cap, first = (BUCKET_CAP_MB, None) if stage else (made.bucket_cap_mb, FIRST_BUCKET_MB * MIB)
        reduced = sum(
            made.sent_bytes(sum(size.numel() for size in sizes), shape.nodes, not stage, sizes)
            for sizes in shape.buckets(cap * MIB, first)
        )
        gathered = (0, shape.total, shape.total, shape.zero3_gathers(2))[stage]
        return reduced + shape.all_reduced(gathered) / 2

    made = _compressor(compress)
    starts = None if made.arrays else STARTS  # one with arrays compresses from the first step on
    settings: dict[str, Any] = {"compress": mpidl.Compression(compress, start_step=starts)}
    settings["optimizer"] = torch.optim.SGD if made.momentum else Adam
    return Method(zero(stage, **settings) if stage else ddp(**settings), sends)


def _compressor(name: str) -> Compressor:
    try:
        return mpidl.Compression(name).compressor()
    except ConfigurationError as error:
        raise UsageError(f"--methods: {error}") from None
