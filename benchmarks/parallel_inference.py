"""Jobs of `bench_parallelism.py` without training: text by a cut model, and the sums of its activations alone."""

from __future__ import annotations

import argparse
import time
from typing import Any

from parallel_training import HEAD_WIDTH
from turns import Caller

PROMPT = 16  # tokens
_SETTLES = 10  # all-reduces before those that count


def generate(options: argparse.Namespace) -> None:
    """Generates a text greedily, with a cache of keys and values, whenever it is called. batch 1.

    Answers with the seconds of prompt and tokens together, and with the tokens.
    """
    import torch

    import mpidl
    from mpidl.models.gpt2 import GPT2, GPT2Config

    width, layers = options.models[0]
    comm = mpidl.init()
    torch.set_num_threads(options.ranks if options.engines[0] == "threads" else 1)
    torch.manual_seed(0)
    heads = width // HEAD_WIDTH
    model = GPT2(GPT2Config(layers=layers, heads=heads, embd=width, block_size=max(1024, PROMPT + options.tokens)))
    if options.engines[0] == "tp":
        mpidl.parallelize(model, mpidl.Mesh(tp=comm.size))
    model.eval()
    prompt = torch.randint(0, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    with Caller(options.called, comm.size) as caller:
        for _ in range(options.warmup + options.steps):
            with caller.turn() as answer:
                comm.barrier()
                begin = time.perf_counter()
                text = model.generate(prompt, options.tokens, top_k=1)
                answer["seconds"] = time.perf_counter() - begin
        with caller.turn() as answer:
            answer["text"] = text[0, PROMPT:].tolist()


def sum_activations(options: argparse.Namespace) -> None:
    """Sums one tensor of [batch, time, width] over the ranks, as a bare all-reduce and as the layers do, in turn.

    bare: `all_reduce` of an array in symmetric memory, in place. layers: what a row-parallel layer does around its
    product: it takes memory for the summand, and has the sum as a tensor that autograd may keep. Both summands are
    written just before. Answers with the seconds of each repetition.
    """
    import torch

    import mpidl
    from mpidl.tensor.communication import TensorGroup

    shape = options.shapes[0]
    comm = mpidl.init()
    torch.set_num_threads(1)
    group, sizes = TensorGroup(comm), (shape.batch, shape.time, shape.width)
    like = torch.empty(0)
    bare = comm.empty(sizes, torch.float32)
    seconds: dict[str, list[float]] = {"bare": [], "layers": []}

    def by_layers() -> tuple[float, Any]:
        begin = time.perf_counter()
        partial = group.summand(sizes, like)
        seconds_before = time.perf_counter() - begin
        partial.fill_(comm.rank + 1)
        comm.barrier()
        begin = time.perf_counter()
        y = group.all_reduce(partial)
        return seconds_before + time.perf_counter() - begin, y

    def by_itself() -> tuple[float, Any]:
        bare.fill_(comm.rank + 1)
        comm.barrier()
        begin = time.perf_counter()
        comm.all_reduce(bare)
        return time.perf_counter() - begin, bare

    right = True
    with Caller(options.called, comm.size) as caller, torch.no_grad(), caller.turn() as answer:
        for repetition in range(_SETTLES + options.repetitions):
            order = [("bare", by_itself), ("layers", by_layers)]
            for name, summing in order if repetition % 2 else reversed(order):
                taken, y = summing()
                right = right and bool((y == comm.size * (comm.size + 1) // 2).all())
                if repetition >= _SETTLES:
                    seconds[name].append(taken)
        answer |= {"seconds": seconds, "right": right}
