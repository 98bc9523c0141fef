"""Tensor parallelism of PyTorch (DTensor) and of Megatron-Core over gloo, to compare with. Nothing else may use it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from linear_gpt import LinearGPT


def by_torch(model: LinearGPT) -> None:
    """Cuts the blocks by torch's parallelize_module."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = (
        ("attention.q", "attention.k", "attention.v", "feed_forward.up"),
        ("attention.o", "feed_forward.down"),
    )
    plan: dict[str, Any] = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
    blocks: Any = model.blocks
    for block in blocks:
        parallelize_module(block, mesh, plan)
        block.attention.heads //= dist.get_world_size()


class _Layer(nn.Module):
    """A layer of Megatron-Core, which returns its output alone. whole: whose values it takes its part of."""

    def __init__(self, whole: nn.Linear, *, column: bool) -> None:
        super().__init__()
        from megatron.core import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        config = ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True, perform_initialization=False
        )
        common: dict[str, Any] = {
            "config": config,
            "init_method": nn.init.xavier_normal_,
            "bias": True,
            "skip_bias_add": False,
        }
        if column:
            self.layer = ColumnParallelLinear(whole.in_features, whole.out_features, gather_output=False, **common)
        else:
            self.layer = RowParallelLinear(whole.in_features, whole.out_features, input_is_parallel=True, **common)
        dim, ranks, rank = 0 if column else 1, dist.get_world_size(), dist.get_rank()
        with torch.no_grad():
            self.layer.weight.copy_(whole.weight.chunk(ranks, dim)[rank])
            self.layer.bias.copy_(whole.bias.chunk(ranks)[rank] if column else whole.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], of which one is cut."""
        result: torch.Tensor = self.layer(x)[0]
        return result


def by_megatron(model: LinearGPT) -> None:
    """Cuts the blocks by Megatron-Core's column- and row-parallel layers. Raises ImportError without it."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    blocks: Any = model.blocks
    for block in blocks:
        attention, network = block.attention, block.feed_forward
        attention.q, attention.k, attention.v = (
            _Layer(layer, column=True) for layer in (attention.q, attention.k, attention.v)
        )
        attention.o = _Layer(attention.o, column=False)
        network.up, network.down = _Layer(network.up, column=True), _Layer(network.down, column=False)
