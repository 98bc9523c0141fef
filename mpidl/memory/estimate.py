"""Bytes a rank by formula, before anything is allocated.

Psi parameters, N ranks; fp32 Adam, and mixed precision with K = 12 bytes a parameter for fp32 masters and Adam's state:

| stage | fp32 | 16-bit |
|---|---|---|
| 0 (DDP) | 4 + 4 + 8 | 2 + 2 + K |
| 1 | 4 + 4 + 8 / N | 2 + 2 + K / N |
| 2 | 4 + (4 + 8) / N | 2 + (2 + K) / N |
| 3 | (4 + 4 + 8) / N | (2 + 2 + K) / N |

where the second summand, gradients, follows the dtype in which stages 1 to 3 reduce them (`zero.Precision`), and N is
the number of ranks over which state is cut: all, or those of a `shard_group` (hybrid sharding, Zhao et al. 2023,
"PyTorch FSDP", section 3.2.2). The estimate adds the gradient buckets and, for stage 3 over several nodes, the units
that are whole. Under tensor parallelism Psi are the parameters that a rank has by the model's plan, and N ranks of dp.
Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3 and
5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ConfigurationError
from ..gradients.buckets import FIRST_BUCKET_MB, assign
from ..gradients.compression import Compression
from ..gradients.compression.settings import compression, parameter_compressor
from ..optim.rank_mean import METHODS
from ..tensor import Plan
from ..tensor.counting import cut_on_meta
from ..zero.gradients.buffer_pool import ROTATING
from ..zero.offload.settings import PLACES
from ..zero.parameters.units import cut_into_units
from ..zero.slices import HALVES
from .activations import DTYPES
from .optimizer_state import WHOLE, StateBytes, name_of, state_of
from .process import MIB

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Estimate:
    """Bytes a rank.

    optimizer: its state and fp32 masters.
    buckets: gradients in flight, and units of stage 3 that are whole.
    offloaded: what of the optimizer lies elsewhere, in CPU memory or on disk; not in any total.
    tp: of the ranks, how many hold parts of the same layers.
    slots: memory by which these exchange activations.
    compression: what `compress=` has not sent, and its compressor's states; the place for messages of
        `compress_parameters=`.
    """

    stage: int
    ranks: int
    nodes: int
    parameters: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int = 0
    offloaded: int = 0
    tp: int = 1
    slots: int = 0
    compression: int = 0

    @property
    def model_state(self) -> int:
        """Parameters, gradients and optimizer state: what the formulas are about."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All categories."""
        return self.model_state + self.buckets + self.activations + self.slots + self.compression

    @property
    def node_total(self) -> int:
        """The total of a node's ranks."""
        return self.total * (self.ranks // self.nodes)


@dataclass(frozen=True)
class _UncutBytes:
    """Bytes of a model that no engine has cut.

    buckets: of the gradient buckets of stage 2 that are there at a time.
    ddp_buckets: of those of DDP that steps in the backward pass: the one that fills and the two largest of each dtype.
    unit: of the largest unit of stage 3.
    own: of the parameters outside all units.
    unit_gradients: of the gradient buckets of stage 3 that are there at a time. Gradients and their buckets in the
        dtype in which they are reduced.
    trained: how many parameters, and shapes: theirs, if they are known.
    gathered: elements of what stage 3 gathers in one operation at most.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    buckets: int
    ddp_buckets: int
    unit: int
    own: int
    unit_gradients: int
    trained: int
    shapes: Sequence[torch.Size]
    gathered: int


def estimate(
    model: torch.nn.Module | float,
    ranks: int,
    nodes: int = 1,
    stage: int = 3,
    dtype: str | None = None,
    offload: str | bool = False,
    *,
    optimizer: str | float | type[torch.optim.Optimizer] = "adam",
    masters: bool = True,
    activations: int = 0,
    unit: float = 0,
    bucket_cap_mb: float = 25.0,
    shard_ranks: int | None = None,
    reduce_dtype: str | None = None,
    step_in_backward: bool = False,
    tp: int = 1,
    tp_rank: int | None = None,
    plan: Plan | str | None = None,
    slots: int = 0,
    compress: Compression | str | None = None,
    prefetch: int = 1,
    compress_parameters: str | None = None,
) -> Estimate:
    """Bytes a rank needs to train a model, by category.

    model: a whole model, also on the meta device, of which frozen parameters have no gradients and no state; or how
        many parameters, all trained and, under tp, all cut evenly.
    ranks: of all nodes together, equally many on each.
    stage: of ZeRO; 0 is DDP.
    dtype: "fp32", "bf16" or "fp16", of parameters; by default the model's own, fp32 for a number.
    offload: "cpu" or "disk": optimizer state and masters lie there.
    optimizer: a name in STATE_BYTES, a class of torch.optim or mpidl.optim of that name, or bytes of state a parameter.
        Those that send one bit cut nothing, and share their errors among the ranks of a node where there are several.
    masters: 16-bit parameters have fp32 copies, and their state is fp32, as in ZeroOptimizer; else it is 16-bit.
    activations: bytes, as from `activation_bytes`.
    unit: for a number of parameters: how many of them the largest unit of stage 3 has, a layer's. Left at 0, stage 3's
        buckets and whole units are not counted.
    bucket_cap_mb: of stage 2, in MiB of gradients; where `reduce_dtype` is given without a 16-bit `dtype`, in MiB of
        parameters, as by ZeroOptimizer without a `param_dtype`.
    shard_ranks: over how many neighbours state is cut, in hybrid sharding; by default over all ranks.
    reduce_dtype: as `dtype`, of gradients and their buckets in stages 1 to 3 (`zero.Precision`); by default that of the
        parameters.
    step_in_backward: the backward pass makes the step, so that no gradients are kept but the buckets by which they
        pass: `DistributedDataParallel.step_in_backward`, or ZeroOptimizer's argument.
    tp: how many ranks hold parts of the same layers; over the others state is cut.
    tp_rank: which of them; by default the one that needs most, as heads and vocabularies are cut unevenly.
    plan: how tp cuts the model, as for `mpidl.parallelize`; by default the ready one of its class.
    slots: bytes, as from `slot_bytes`.
    compress: as of the engines; with `Compression(undo=True)` what undoes a skipped step is counted too, and between
        nodes what a rank has of its node's sums. States of a compressor are counted of a model, not of a number.
    prefetch: units of stage 3 that may be whole ahead of the one that computes, over several nodes.
    compress_parameters: as of ZeroOptimizer, in stage 3 over several nodes.

    In stage 3 on the CPUs of one node, or on one GPU, nothing is gathered, since the ranks share one copy of the
    parameters; over several nodes the whole units lie once in each node, the rank's share of which is counted. Padding
    to cache lines is not counted.
    Raises ConfigurationError.
    """
    _check(ranks, nodes, stage, dtype, reduce_dtype, offload, activations, unit, bucket_cap_mb, prefetch)
    data_ranks, data_nodes = _without_tp(ranks, nodes, tp, tp_rank, slots)
    methods: list[Compression | None] = [None] if compress is None else [*compression(compress).candidates()]
    of_parameters = None if compress_parameters is None else parameter_compressor(compress_parameters)
    if step_in_backward and offload:
        raise ConfigurationError("step_in_backward: got offload with it; what is offloaded is stepped after the pass")
    over = data_ranks if shard_ranks is None else shard_ranks
    local = min(over, data_ranks // data_nodes)  # of them, those on one node
    _check_groups(data_ranks, data_nodes, stage, over)
    whole_state = name_of(optimizer) in WHOLE
    state = state_of(optimizer, masters)
    if whole_state:
        _check_whole(name_of(optimizer), stage, offload, step_in_backward)
        inside = data_ranks // data_nodes if data_nodes > 1 else 1
        state = StateBytes(state.each - 4 + 4 / inside, scales=False, masters=False)
    elif name_of(optimizer) == "diloco":
        _check_diloco(stage, offload, step_in_backward, compress, over == data_ranks > 1)
        state, methods = replace(state, wide=state.wide + (0 if compress is None else 4)), [None]
    reduced = None if reduce_dtype is None else DTYPES[reduce_dtype]
    cap = bucket_cap_mb * MIB
    # MiB of reduced gradients become bytes of parameters, as in a ZeroOptimizer with this precision.
    if reduced is not None and dtype is not None and DTYPES[dtype] in HALVES:
        cap *= DTYPES[dtype].itemsize / reduced.itemsize
    if isinstance(model, torch.nn.Module):
        if unit:
            raise ConfigurationError("unit: got one together with a model, whose own units are known")
        parts = [model]
        if tp > 1:
            parts = [cut_on_meta(model, tp, rank, plan) for rank in (range(tp) if tp_rank is None else [tp_rank])]
        held = [_of_model(part, dtype, reduced, state, cap) for part in parts]
    else:
        held = [_of_number(model, DTYPES[dtype or "fp32"], reduced, state, cap, unit, tp)]

    def share(nbytes: int, cut_from: int) -> int:
        return -(-nbytes // over) if stage >= cut_from else nbytes

    def estimate_of(whole: _UncutBytes) -> Estimate:
        state_share = whole.optimizer if whole_state else share(whole.optimizer, 1)
        passing = {0: whole.ddp_buckets, 1: whole.buckets, 2: whole.buckets, 3: whole.unit_gradients}
        buckets = passing[stage] if step_in_backward or stage > 1 else 0  # else they are where the gradients lie
        if stage == 3 and over > local:
            units = min(whole.own + (1 + prefetch) * whole.unit, whole.parameters)
            buckets += units // local
        kept = max(_compression(each, whole, data_ranks, data_nodes, over) for each in methods)
        if of_parameters is not None and stage == 3 and over > local:
            kept += over * of_parameters.message_bytes(-(-whole.gathered // over)) // local
        return Estimate(
            stage,
            ranks,
            nodes,
            parameters=share(whole.parameters, 3) + whole.buffers,
            gradients=0 if step_in_backward else share(whole.gradients, 2),
            optimizer=0 if offload else state_share,
            buckets=buckets,
            activations=activations,
            offloaded=state_share if offload else 0,
            tp=tp,
            slots=slots,
            compression=kept,
        )

    return max(map(estimate_of, held), key=lambda each: each.total)


def _check(
    ranks: int,
    nodes: int,
    stage: int,
    dtype: str | None,
    reduce_dtype: str | None,
    offload: str | bool,
    activations: int,
    unit: float,
    bucket_cap_mb: float,
    prefetch: int,
) -> None:
    for name, value in {"ranks": ranks, "nodes": nodes}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name}: got {value!r}; needs a whole number of at least 1")
    if ranks % nodes:
        raise ConfigurationError(f"ranks: got {ranks} on {nodes} nodes; needs equally many on each")
    if stage not in STAGES or isinstance(stage, bool):
        raise ConfigurationError(f"stage: got {stage!r}; needs 0 (DDP), 1, 2 or 3")
    for name, given in {"dtype": dtype, "reduce_dtype": reduce_dtype}.items():
        if given is not None and given not in DTYPES:
            raise ConfigurationError(f"{name}: got {given!r}; needs one of {', '.join(DTYPES)}")
    if reduce_dtype is not None and stage == 0:
        raise ConfigurationError("reduce_dtype: got stage 0 with it; DDP reduces gradients in the parameters' dtype")
    if offload is not False and offload not in PLACES:
        raise ConfigurationError(f"offload: got {offload!r}; needs False or one of {', '.join(PLACES)}")
    for name, number in {"activations": activations, "unit": unit}.items():
        if not 0 <= number < math.inf:
            raise ConfigurationError(f"{name}: got {number!r}; needs a number of at least 0")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ConfigurationError(f"prefetch: got {prefetch!r}; needs how many units, 0 or more")
    if not 0 < bucket_cap_mb < math.inf:
        raise ConfigurationError(f"bucket_cap_mb: got {bucket_cap_mb!r}; needs a size above 0, in MiB")


def _without_tp(ranks: int, nodes: int, tp: int, tp_rank: int | None, slots: int) -> tuple[int, int]:
    """Returns the number of ranks of dp, and over how many nodes they lie. Raises ConfigurationError."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1 or ranks % tp:
        raise ConfigurationError(f"tp: got {tp!r}; needs a whole number that divides {ranks} ranks")
    ranks_per_node = ranks // nodes
    if tp % ranks_per_node and ranks_per_node % tp:
        raise ConfigurationError(
            f"tp: got {tp} with {ranks_per_node} ranks a node; needs a divisor of them, or whole nodes"
        )
    if tp_rank is not None and not 0 <= tp_rank < tp:
        raise ConfigurationError(f"tp_rank: got {tp_rank!r}; needs 0 to {tp - 1}")
    if not 0 <= slots < math.inf:
        raise ConfigurationError(f"slots: got {slots!r}; needs a number of at least 0")
    return ranks // tp, ranks // max(tp, ranks_per_node)


def _check_groups(ranks: int, nodes: int, stage: int, over: int) -> None:
    if isinstance(over, bool) or not isinstance(over, int) or over < 1 or ranks % over:
        raise ConfigurationError(f"shard_ranks: got {over!r}; needs a whole number that cuts {ranks} ranks evenly")
    ranks_per_node = ranks // nodes
    if ranks_per_node % over and over % ranks_per_node:
        raise ConfigurationError(
            f"shard_ranks: got {over!r} with {ranks_per_node} ranks a node; needs groups that cut nodes evenly, or "
            "whole nodes"
        )
    if over != ranks and stage == 0:
        raise ConfigurationError("shard_ranks: got stage 0 with it; DDP cuts nothing")


def _check_whole(name: str, stage: int, offload: str | bool, step_in_backward: bool) -> None:
    if stage > 1 or offload or step_in_backward:
        raise ConfigurationError(
            f"optimizer: got {name}, whose state is whole on every rank; needs stage 0 (DDP) or 1, without offload and "
            "step_in_backward"
        )


def _check_diloco(stage: int, offload: str | bool, step_in_backward: bool, compress: Any, over_all: bool) -> None:
    if offload or step_in_backward:
        raise ConfigurationError("optimizer: got diloco; needs no offload and no step_in_backward")
    if stage and over_all:
        raise ConfigurationError(
            f"optimizer: got diloco in stage {stage} over all ranks; needs shard_ranks, those of a node, or stage 0"
        )
    if compress is not None and compress not in METHODS:
        raise ConfigurationError(f"compress: got {compress!r} with diloco; needs one of {', '.join(METHODS)}, or None")


def _of_number(
    number: float, dtype: torch.dtype, reduced: torch.dtype | None, state: StateBytes, cap: float, unit: float, tp: int
) -> _UncutBytes:
    """Bytes of a model of so many parameters. cap: of buckets, in bytes of parameters."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number < math.inf:
        raise ConfigurationError(f"model: got {number!r}; needs a torch.nn.Module, or how many parameters it has")
    if unit > number:
        raise ConfigurationError(f"unit: got {unit!r} parameters of {number!r}; needs no more than all")
    number, unit = number / tp, unit / tp
    every, largest = round(number * dtype.itemsize), round(unit * dtype.itemsize)
    itemsize = (reduced or dtype).itemsize
    gradients = round(number * itemsize)
    return _UncutBytes(
        parameters=every,
        buffers=0,
        gradients=gradients,
        optimizer=round(number * state.of(dtype, number)),
        buckets=min(gradients, round(ROTATING * cap * itemsize / dtype.itemsize)),
        ddp_buckets=min(gradients, round(ROTATING * cap)),
        unit=largest,
        own=largest,
        unit_gradients=min(gradients, ROTATING * round(unit * itemsize)),
        trained=round(number),
        shapes=(),
        gathered=round(unit),
    )


def _of_model(
    model: torch.nn.Module, dtype: str | None, reduced: torch.dtype | None, state: StateBytes, cap: float
) -> _UncutBytes:
    """Bytes of this model. cap: of buckets, in bytes of parameters."""

    def stand_in(p: torch.Tensor) -> torch.Tensor:
        wanted = DTYPES[dtype] if dtype and p.is_floating_point() else p.dtype
        return torch.empty(p.shape, dtype=wanted, device="meta", requires_grad=p.requires_grad)

    of = {p: stand_in(p) for p in model.parameters()}
    trained = [q for q in of.values() if q.requires_grad]
    units = [[of[p] for p in unit.parameters] for unit in cut_into_units(model)]
    buckets = [_bytes(bucket, reduced) for bucket in assign(reversed(trained), cap)]  # type: ignore[arg-type]
    of_ddp = assign(reversed(trained), cap, min(cap, FIRST_BUCKET_MB * MIB))  # type: ignore[arg-type]
    flats = [_bytes([q for q in unit if q.requires_grad], reduced) for unit in units]
    return _UncutBytes(
        parameters=_bytes(list(of.values())),
        buffers=_bytes(list(model.buffers())),
        gradients=_bytes(trained, reduced),
        optimizer=round(sum(q.numel() * state.of(q.dtype, q.numel(), q.shape) for q in trained)),
        buckets=sum(sorted(buckets)[-ROTATING:]),
        ddp_buckets=_of_ddp(of_ddp),
        unit=max((_bytes(unit) for unit in units[:-1]), default=0),
        own=_bytes(units[-1]),
        unit_gradients=flats[-1] + sum(sorted(flats[:-1])[1 - ROTATING :]),
        trained=sum(q.numel() for q in trained),
        shapes=[q.shape for q in trained],
        gathered=max(map(_largest_flat, units)),
    )


def _largest_flat(unit: Sequence[torch.Tensor]) -> int:
    """Elements of a unit's largest flat group, of one dtype, all of which train or do not."""
    sizes: dict[tuple[torch.dtype, bool], int] = {}
    for p in unit:
        kind = p.dtype, p.requires_grad
        sizes[kind] = sizes.get(kind, 0) + p.numel()
    return max(sizes.values(), default=0)


def _compression(given: Compression | None, whole: _UncutBytes, ranks: int, nodes: int, over: int) -> int:
    """Bytes of remainders and states. over: the ranks of a shard group; gradients are compressed between the groups."""
    if given is None:
        return 0
    inside = 1
    if over < ranks:
        inside, peers = over, ranks // over
    elif nodes > 1 and given.where != "everywhere":
        inside, peers = ranks // nodes, nodes
    else:
        peers = 1 if given.where == "between_nodes" else ranks
    compressor = given.compressor()
    if peers == 1 and not compressor.arrays:
        return 0
    feeds_back = compressor.feeds_back if given.error_feedback is None else given.error_feedback
    remainders = 4 * (1 + len(compressor.arrays)) * -(-whole.trained // inside) if feeds_back else 0
    kept = remainders + -(-compressor.state_bytes(whole.shapes) // inside)
    return 2 * kept if given.undo else kept


def _of_ddp(buckets: Sequence[Sequence[torch.Tensor]]) -> int:
    """The bucket that fills, and two buffers of each dtype."""
    sizes: dict[torch.dtype, list[int]] = {}
    for bucket in buckets:
        sizes.setdefault(bucket[0].dtype, []).append(_bytes(bucket))
    return max(map(max, sizes.values()), default=0) + sum(sum(sorted(each)[-2:]) for each in sizes.values())


def _bytes(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> int:
    """The bytes of tensors in their own dtypes, or in this one."""
    return sum(t.numel() * (dtype or t.dtype).itemsize for t in tensors)
