"""Tensor parallelism of PyTorch (DTensor) and of Megatron-Core over gloo, to compare with. Nothing else may use it.

Of Megatron-Core these run on CPUs: `ColumnParallelLinear`, `RowParallelLinear` and the autograd functions in them, with
`use_cpu_initialization` and its process groups over gloo: the sum of an input's gradient begins before the weight's
gradient is computed, as on GPUs. Its transformer layers, optimizer, clipping and sequence parallelism need CUDA, so
norms, attention, loss and AdamW are those of the other engines; embeddings and output layer are whole, as with these.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from linear_gpt import Attention, LinearGPT


def by_torch(model: LinearGPT) -> None:
    """Cuts the blocks by torch's parallelize_module.

    The attention's input becomes one DTensor for queries, keys and values, so their gradients of it are summed once.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = (
        ("attention.q", "attention.k", "attention.v", "feed_forward.up"),
        ("attention.o", "feed_forward.down"),
    )
    plan: dict[str, Any] = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
    plan["attention"] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    blocks: Any = model.blocks
    for block in blocks:
        parallelize_module(block, mesh, plan)
        block.attention.heads //= dist.get_world_size()


class _Layer(nn.Module):
    """A layer of Megatron-Core with this rank's part of whole ones, which returns its output alone.

    wholes: linear layers of one size whose features lie one behind the other, of which the rank has its part of each;
    of a row-parallel layer, one.
    """

    def __init__(self, *wholes: nn.Linear, column: bool) -> None:
        super().__init__()
        from megatron.core import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        ranks, rank, first = dist.get_world_size(), dist.get_rank(), wholes[0]
        common: dict[str, Any] = {
            "config": ModelParallelConfig(
                tensor_model_parallel_size=ranks, use_cpu_initialization=True, perform_initialization=False
            ),
            "init_method": nn.init.xavier_normal_,  # not called
            "bias": True,
            "skip_bias_add": False,
        }
        if column:
            out = len(wholes) * first.out_features
            self.layer = ColumnParallelLinear(first.in_features, out, gather_output=False, **common)
        else:
            self.layer = RowParallelLinear(first.in_features, first.out_features, input_is_parallel=True, **common)
        with torch.no_grad():
            dim = 0 if column else 1
            self.layer.weight.copy_(torch.cat([whole.weight.chunk(ranks, dim)[rank] for whole in wholes]))
            self.layer.bias.copy_(
                torch.cat([whole.bias.chunk(ranks)[rank] for whole in wholes]) if column else first.bias
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., in] -> [..., out], of which one is cut."""
        y = self.layer(x.flatten(0, -2))[
            0
        ]  # of rows: of three dimensions, the first of size 1, it takes a slower product
        result: torch.Tensor = y.unflatten(0, x.shape[:-1])
        return result


class _Attention(nn.Module):
    """The attention with one layer for queries, keys and values, as Megatron-Core has it; else as `linear_gpt`'s."""

    def __init__(self, whole: Attention) -> None:
        super().__init__()
        self.head_width = whole.head_width
        self.qkv, self.o = _Layer(whole.q, whole.k, whole.v, column=True), _Layer(whole.o, column=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, time, width] -> [batch, time, width]."""
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.o(y.transpose(1, 2).flatten(2))
        return result


def by_megatron(model: LinearGPT) -> None:
    """Puts Megatron-Core's column- and row-parallel layers in place of the blocks'. Raises ImportError without it."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # of no use on CPUs, where it warns all the same
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
    )
    blocks: Any = model.blocks
    for block in blocks:
        network = block.feed_forward
        block.attention = _Attention(block.attention)
        network.up, network.down = _Layer(network.up, column=True), _Layer(network.down, column=False)
