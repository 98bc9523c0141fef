"""Bytes that compressors of gradients send, and the time of their arithmetic, without a network.

    python benchmarks/compression_table.py                              # the ratios of PowerSGD
    python benchmarks/compression_table.py --time powersgd:4 gradzip:4  # arithmetic of a step, one thread

The ratios are fp32 bytes by the bytes of `Compressor.sent_bytes`, on the shapes of GPT-2 small and ResNet-50, for the
whole model as one bucket and for buckets of 25 MiB. The time is that of reducing GPT-2 of 25.5 M parameters on one
rank, so that operations move nothing: products, the update of remainders and the message's copies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from collectives import Communicator
from mpidl.cli import at_least
from mpidl.errors import ConfigurationError
from mpidl.gradients.buckets import MIB, assign
from mpidl.gradients.compression import Compression, Exchange, Matrix, Section
from mpidl.gradients.compression.pipeline import Pipeline
from mpidl.models.gpt2 import GPT2, GPT2Config
from mpidl.models.resnet import ResNet

SEEDS = {
    "PowerSGD": "powersgd:1",
    "FP16 + PowerSGD": "powersgd:1,fp16",
    "Batched PowerSGD": "powersgd:1,batched",
    "FP16 + batched PowerSGD": "powersgd:1,fp16,batched",
}


def ratio(method: str, buckets: Sequence[Sequence[torch.Size]]) -> float:
    """Bytes of fp32 by those of the method, each for an all-reduce."""
    compressor = Compression(method).compressor()
    sizes = [sum(shape.numel() for shape in shapes) for shapes in buckets]
    sent = sum(compressor.sent_bytes(size, 2, True, shapes) for size, shapes in zip(sizes, buckets, strict=True))
    return 4 * sum(sizes) / sent


def models() -> Iterator[tuple[str, list[torch.nn.Parameter]]]:
    """GPT-2 small and ResNet-50, without memory for their values."""
    with torch.device("meta"):
        yield "GPT-2 small", list(GPT2(GPT2Config()).parameters())
        yield "ResNet-50", list(ResNet("resnet50").parameters())


def show_ratios() -> None:
    """Prints the table of ratios."""
    print("| model | parameters | one bucket of | " + " | ".join(SEEDS) + " |")
    print("|---|---|---|" + "---|" * len(SEEDS))
    for name, parameters in models():
        for said, cap in (("the model", float("inf")), ("25 MiB", 25 * MIB)):
            buckets = [[p.shape for p in bucket] for bucket in assign(parameters[::-1], cap)]
            ratios = " | ".join(f"{ratio(method, buckets):,.0f}" for method in SEEDS.values())
            print(f"| {name} | {sum(p.numel() for p in parameters):,} | {said} | {ratios} |")


def arithmetic(method: str, repeats: int) -> list[float]:
    """Milliseconds of each reduction."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameters = list(GPT2(GPT2Config(vocab_size=256, block_size=256, layers=8, heads=8, embd=512)).parameters())
    starts = [0]
    for p in parameters:
        starts.append(starts[-1] + -(-p.numel() // 16) * 16)
    compressor, comm = Compression(method).compressor(), Communicator()
    exchange = Exchange([comm.duplicate() for _ in range(compressor.phases)])
    gradient, values, result = (torch.randn(starts[-1]), torch.zeros(starts[-1]), torch.empty(starts[-1]))
    arrays, times = [torch.zeros(starts[-1]) for _ in compressor.arrays], []
    for step in range(repeats + 2):
        values += compressor.absorb(gradient, arrays, True, 1, 1)
        section = Section(
            key=compressor,
            values=values,
            result=result,
            pieces=[(0, starts[-1])],
            parameters=[Matrix(p, at, str(at)) for p, at in zip(parameters, starts, strict=False)],
            contributions=1,
            needs_all=True,
            keeps_remainder=True,
            step=step,
            arrays=arrays,
        )
        start = time.perf_counter()
        Pipeline().start(compressor.reduce(section, exchange), lambda: None).wait()
        times.append((time.perf_counter() - start) * 1e3)
    return times[2:]


def compressor(text: str) -> str:
    """An argparse type: the name of a compressor."""
    try:
        Compression(text).compressor()
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main() -> None:
    """Reads the arguments and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--time", nargs="+", metavar="METHOD", type=compressor, help="time the arithmetic of these")
    parser.add_argument("--repeats", type=at_least(1), default=7)
    options = parser.parse_args()
    if not options.time:
        show_ratios()
        return
    for method in options.time:
        times = arithmetic(method, options.repeats)
        print(f"{method}: median {statistics.median(times):.1f} ms, from {min(times):.1f} to {max(times):.1f}")


if __name__ == "__main__":
    main()
