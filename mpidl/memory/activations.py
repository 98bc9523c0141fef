"""Activations: what autograd keeps from forward until backward has used it.

    with measure_activations(model) as saved:
        loss = model(x)          saved.nbytes grows with every layer
        ...                      saved.nbytes is what is held now
        loss.backward()          ... and falls as backward gives it up; saved.peak stays

Each distinct storage counts once, however many operations saved a view of it, and parameters do not count at all: they
are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import ConfigurationError
from ..tensor.sum_memory import SumMemory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by the names of options
RECOMPUTE = ("none", "selective", "full")


def activation_bytes(
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    layers: int,
    dtype: str = "bf16",
    recompute: str = "none",
    partition: int = 1,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    dropout: bool = True,
) -> int:
    """Bytes of activations of a transformer, a rank: `layers` times s b h (34 + 5 a s / h) in half precision.

    batch: sequences of a micro-step.
    sequence: tokens of each.
    hidden: width.
    heads: of attention.
    dtype: "fp32", "bf16" or "fp16". Embeddings and the output layer are not counted.
    recompute: "selective" computes the scores of attention again in backward, as fused attention does by itself, and
        leaves 34 s b h; "full" keeps a layer's input alone (2 s b h), and one layer at a time whole.
    partition: with "full", over how many ranks the layers' inputs are cut (mpidl.activations, ZeRO-R).
    tp: how many ranks have parts of the layers: of the rank with the most heads, as the features are cut too.
    sequence_parallel: what lies between the cut layers is cut over these as well.
    dropout: with its masks.

    The 34 are 16 values of 2 bytes and two dropout masks of 1 byte; the 5 are two values and a mask for each score. Of
    the 16 values tp cuts 12: queries, keys, values, what attention returns, and twice the 4 of the feed-forward
    network; sequence parallelism cuts the inputs of both norms and what they return, and the masks.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4.1 and
    4.2; of `partition`: Rajbhandari et al. 2020 (ZeRO), section 6.1.
    """
    given = {
        "batch": batch,
        "sequence": sequence,
        "hidden": hidden,
        "heads": heads,
        "layers": layers,
        "partition": partition,
        "tp": tp,
    }
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name}: got {value!r}; needs a whole number of at least 1")
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype: got {dtype!r}; needs one of {', '.join(DTYPES)}")
    if recompute not in RECOMPUTE:
        raise ConfigurationError(f"recompute: got {recompute!r}; needs one of {', '.join(RECOMPUTE)}")
    if partition > 1 and recompute != "full":
        raise ConfigurationError(f"partition: got {partition} with recompute={recompute!r}; needs 'full'")
    if partition > 1 and sequence_parallel:
        raise ConfigurationError(f"partition: got {partition} with sequence_parallel, which cuts inputs; needs one")
    if tp > heads:
        raise ConfigurationError(f"tp: got {tp} with {heads} heads; needs at least one for each rank")
    itemsize, masks = DTYPES[dtype].itemsize, int(dropout)
    length = -(-sequence // tp) if sequence_parallel else sequence  # tokens between the cut layers
    own_heads = -(-heads // tp)
    between = length * batch * hidden
    inside = sequence * batch * (4 * (hidden * own_heads // heads) + 2 * -(-4 * hidden // tp))
    kept = between * (4 * itemsize + 2 * masks) + inside * itemsize
    if recompute != "selective":
        kept += sequence * batch * own_heads * sequence * (2 * itemsize + masks)
    if recompute == "full":
        return layers * -(-between // partition) * itemsize + kept
    return layers * kept


def slot_bytes(
    batch: int,
    sequence: int,
    hidden: int,
    dtype: str = "bf16",
    *,
    tp: int,
    sequence_parallel: bool = False,
    node_ranks: int | None = None,
) -> int:
    """Bytes a rank of the memory by which the ranks of tp exchange activations; none for tp of 1.

    Arguments as those of `activation_bytes`.

    node_ranks: how many ranks of a tp group are on a node; by default all.

    Each rank has one slot for a summand, s b h elements, and two more in which summands become the outputs of
    row-parallel layers, if those are large (`mpidl.tensor.sum_memory`). Under sequence parallelism the ranks of a node
    share two in place of these, in which what they gather becomes whole.
    """
    if tp == 1:
        return 0
    whole = sequence * batch * hidden * DTYPES[dtype].itemsize
    if sequence_parallel:
        return whole + 2 * whole // (node_ranks or tp)
    return SumMemory.nbytes_for(whole)


class SavedActivations:
    """The findings of `measure_activations`.

    nbytes: held now.
    peak: the most that was held at a time. Bytes.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._times: dict[int, int] = {}  # how many operations saved a view of this storage
        self._sizes: dict[int, int] = {}
        self.nbytes = self.peak = 0

    @property
    def storages(self) -> dict[int, int]:
        """The storages that are held now, and their bytes."""
        return dict(self._sizes)

    def pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        """Called by autograd for each tensor that it saves."""
        tensor = tensor.detach()  # an operation that keeps its own output would keep itself alive
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._times and self._is_parameter(key):
            return tensor
        if key not in self._times:
            self._times[key], self._sizes[key] = 0, storage.nbytes()
            self.nbytes += self._sizes[key]
            self.peak = max(self.peak, self.nbytes)
        self._times[key] += 1
        return _Saved(self, tensor, key)

    def _is_parameter(self, key: int) -> bool:
        # Looked up anew: sharded parameters are whole, in storage of their own, only while their unit runs.
        return self._model is not None and any(p.untyped_storage()._cdata == key for p in self._model.parameters())

    def forget(self, key: int) -> None:
        """Notes that an operation has dropped a storage."""
        self._times[key] -= 1
        if not self._times[key]:
            del self._times[key]
            self.nbytes -= self._sizes.pop(key)


class _Saved:
    """A saved tensor; it lives as long as autograd needs it."""

    __slots__ = ("_key", "_seen_by", "tensor")

    def __init__(self, seen_by: SavedActivations, tensor: torch.Tensor, key: int) -> None:
        self._seen_by, self.tensor, self._key = seen_by, tensor, key

    def __del__(self) -> None:
        self._seen_by.forget(self._key)


def _unpack(saved: _Saved | torch.Tensor) -> torch.Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


@contextmanager
def measure_activations(model: torch.nn.Module | None = None) -> Iterator[SavedActivations]:
    """Counts what forward passes inside save for backward, which may come inside or later.

    model: whose parameters, also where an operation saves views of them, are no activations.

    What `torch.utils.checkpoint` computes again in backward (use_reentrant=False) is not seen, only the inputs that it
    keeps. Each saved tensor costs a call into Python, and autograd no longer notices that one was changed in place:
    this is for measuring, not for training.
    """
    saved = SavedActivations(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack):
        yield saved
