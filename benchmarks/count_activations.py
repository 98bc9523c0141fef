"""Bytes that a rank keeps of activations between forward and backward, counted: plain, checkpointed, cut, on disk.

    mpirun -n 4 python benchmarks/count_activations.py

All ranks have the same sequences, as the ranks of a model-parallel group have the same activations.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import mpidl
from mpidl.activations import CheckpointStore, checkpoint_modules
from mpidl.memory import MIB, activation_bytes, measure_activations
from mpidl.models.gpt2 import GPT2, GPT2Config

Make = Callable[[], CheckpointStore | None]


def counted(model: GPT2, tokens: torch.Tensor, every: int, make: Make) -> tuple[float, float, float]:
    """MiB that autograd keeps, that the store keeps in memory, and that it has on disk, after a forward pass."""
    store = make()
    handle = checkpoint_modules(model, every=every, store=store) if every else None
    with measure_activations(model) as saved:
        loss = model(tokens, tokens)
    found = saved.nbytes, store.nbytes if store else 0, store.bytes_on_disk if store else 0
    loss.backward()
    model.zero_grad()
    if handle is not None:
        handle.remove()
    autograds, memory, disk = (nbytes / MIB for nbytes in found)
    return autograds, memory, disk


def main() -> None:
    """Prints a table."""
    comm = mpidl.init()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="27m", help="size")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of each")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config.named(options.model, vocab_size=256, dropout=0.1)
    model, tokens = GPT2(config), torch.randint(0, config.vocab_size, (options.batch, options.sequence))
    folder = tempfile.gettempdir()
    rows: dict[str, tuple[int, Make]] = {
        "plain": (0, lambda: None),
        "every second block": (2, lambda: None),
        "every block": (1, lambda: None),
        "in one piece of memory": (1, CheckpointStore),
        f"cut over {comm.size} ranks": (1, lambda: CheckpointStore(comm)),
        "on disk": (1, lambda: CheckpointStore(offload=folder)),
        f"cut over {comm.size} ranks, on disk": (1, lambda: CheckpointStore(comm, folder)),
    }
    sizes: dict[str, Any] = {"batch": options.batch, "sequence": options.sequence, "layers": config.layers}
    sizes |= {"hidden": config.embd, "heads": config.heads, "dtype": "fp32", "recompute": "full"}
    one = activation_bytes(**{**sizes, "layers": 1, "recompute": "none"})
    results = {name: counted(model, tokens, *row) for name, row in rows.items()}
    if comm.rank == 0:
        print("MiB a rank          | autograd | memory of the store | file |")
        for name, row in results.items():
            print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
        for cut in (1, comm.size):
            inputs = activation_bytes(**sizes, partition=cut) - one
            print(f"by formula, inputs of blocks cut over {cut}: {inputs / MIB:.2f}")


if __name__ == "__main__":
    main()
