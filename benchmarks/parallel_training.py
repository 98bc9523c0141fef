"""A job of `bench_parallelism.py` that trains `LinearGPT` by one engine, a step whenever it is called."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from turns import Caller

MEGATRON, PARTS = "megatron", "parts"
ENGINES = ("threads", "tp", "tp-sp", PARTS, "ddp", "zero3", "torch-tp", MEGATRON)
DATA = ("ddp", "zero3")  # engines of which each rank has a part of the batch
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """Shape of what is trained: sequences a step and their length; the model's width and layers."""

    batch: int
    time: int
    width: int
    layers: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """Reads BATCHxTIMExWIDTHxLAYERS."""
        try:
            shape = cls(*map(int, text.split("x")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(
                f"got {text!r}; needs BATCHxTIMExWIDTHxLAYERS, such as 1x32x512x8"
            ) from None
        if min(shape.batch, shape.time, shape.layers) < 1 or shape.width < HEAD_WIDTH or shape.width % HEAD_WIDTH:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; needs positive sizes and a multiple of {HEAD_WIDTH} as width"
            )
        return shape

    def __str__(self) -> str:
        return f"{self.batch}x{self.time}x{self.width}x{self.layers}"


def has_megatron() -> bool:
    """Returns whether Megatron-Core is installed."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def train(options: argparse.Namespace) -> None:
    """Trains, a step a turn. The turn after the last step answers with memory, loss and number of parameters."""
    import torch

    import mpidl
    from linear_gpt import LinearGPT, batch

    shape, name = options.shapes[0], options.engines[0]
    comm = mpidl.init()
    torch.set_num_threads(options.ranks if name == "threads" else 1)
    torch.manual_seed(0)
    parts = comm.size if name == PARTS else 1
    model = LinearGPT(shape.width, shape.layers, shape.width // HEAD_WIDTH, shape.time, parts)
    run, optimizer = _engine(name, model, comm)
    peak, losses = 0.0, []
    with Caller(options.called, comm.size) as caller:
        for step in range(options.warmup + options.steps):
            x, y = batch(step, shape.batch, shape.time)
            if name in DATA:
                x, y = (tokens.chunk(comm.size)[comm.rank] for tokens in (x, y))
            measured = step < options.warmup
            with caller.turn() as answer:
                comm.barrier()
                begin = time.perf_counter()
                loss = run(x, y)
                peak = max(peak, mpidl.memory.pss_mib()) if measured else peak  # activations are all there
                loss.backward()
                optimizer.step()
                peak = max(peak, mpidl.memory.pss_mib()) if measured else peak
                optimizer.zero_grad()
                answer["seconds"] = time.perf_counter() - begin
                losses.append(loss.item())
        with caller.turn() as answer:
            total = np.array([peak, losses[-1] / comm.size])
            comm.all_reduce(total)
            answer |= {"peak": total[0], "loss": total[1], "params": sum(p.numel() for p in model.parameters())}


def _engine(name: str, model: Any, comm: Any) -> tuple[Callable[..., Any], Any]:
    """Makes the engine: what computes the loss, and the optimizer."""
    import torch

    import mpidl

    settings: dict[str, Any] = {"lr": 3e-4}
    if name in ("torch-tp", MEGATRON):
        import peer_tensor_parallel
        from collectives.bench.peers import start_gloo

        start_gloo(comm)
        (peer_tensor_parallel.by_torch if name == "torch-tp" else peer_tensor_parallel.by_megatron)(model)
    elif name in ("tp", "tp-sp"):
        mpidl.parallelize(model, mpidl.Mesh(tp=comm.size), plan_of(), sequence_parallel=name == "tp-sp")
    elif name == "ddp":
        return mpidl.DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), **settings)
    elif name == "zero3":
        return model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, **settings)
    return model, torch.optim.AdamW(model.parameters(), **settings)


def plan_of() -> Any:
    """The plan of `LinearGPT`. A vocabulary of 256 is not worth cutting."""
    from mpidl.tensor import AttentionParallel, FeedForwardParallel, SequenceBegins, SequenceEnds, SequenceParallel

    return {
        "blocks.0": SequenceBegins("x"),
        "blocks.*.norm_1": SequenceParallel(),
        "blocks.*.attention": AttentionParallel(
            query="q", key="k", value="v", output="o", heads="heads", scaled=("heads",), input="x"
        ),
        "blocks.*.norm_2": SequenceParallel(),
        "blocks.*.feed_forward": FeedForwardParallel(inputs=("up",), output="down", input="x"),
        "norm": (SequenceParallel(), SequenceEnds()),
    }
