"""Expected results of every collective, computed by each rank alone in float64 from all ranks' known inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from collectives import Communicator

DTYPES = ["float64", "float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool"]
IN_ALL_DTYPES = {"auto", "mpi", "shared memory", "ring", "tree", "pairwise"}
OPERATORS = ["sum", "avg", "min", "max", "prod"]
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}


def dtypes(algorithm: str) -> list[str]:
    """All for one algorithm of each kind; for the others one that travels as it is and one that is widened."""
    return DTYPES if algorithm in IN_ALL_DTYPES else ["float32", "bfloat16"]


def sizes(ranks: int) -> list[int]:
    """Element counts that are awkward for so many ranks."""
    return sorted({0, 1, ranks - 1, ranks, ranks + 1, 1003})


def values(size: int, rank: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    """A rank's input: small integers, exact in every dtype, so that any order of reduction gives the same."""
    random = np.random.default_rng((seed, rank, size))
    return torch.from_numpy(random.integers(0, 3, size)).to(getattr(torch, dtype))


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of all inputs, rounded once to their dtype."""
    if op in BITWISE:
        return torch.from_numpy(np.asarray(BITWISE[op].reduce([x.numpy() for x in inputs])))
    wide = torch.stack([x.double() for x in inputs])
    result = {
        "sum": lambda: wide.sum(0),
        "avg": lambda: wide.sum(0) / len(inputs),
        "min": lambda: wide.min(0).values,
        "max": lambda: wide.max(0).values,
        "prod": lambda: wide.prod(0),
    }[op]()
    return result.to(inputs[0].dtype)


def named(comm: Communicator, operation: str, algorithm: str) -> str:
    """The algorithm to ask for: for "shared memory" the one that uses shared memory on as many nodes as there are.

    Where an operation has none, as over nodes of different sizes, that is "auto".
    """
    if algorithm != "shared memory":
        return algorithm
    found = {"symmetric", "hierarchical"}.intersection(comm.algorithms(operation))
    return found.pop() if found else "auto"


def serves(op: str, dtype: str, algorithm: str) -> bool:
    """Returns True for a valid combination: averages need floats, MPI reduces no 16-bit floats."""
    if op == "avg" and "float" not in dtype:
        return False
    return not (algorithm == "mpi" and dtype in ("float16", "bfloat16"))


def assert_equal(found: Any, expected: torch.Tensor, what: str) -> None:
    """Exactly equal, but for one unit in the last place where a division rounds in fp32 before fp16 or bf16."""
    found = torch.as_tensor(found)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}.get(expected.dtype, 1e-12)
    assert found.dtype == expected.dtype, what
    if expected.dtype.is_floating_point:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, msg=lambda m: f"{what}: {m}")
    else:
        assert torch.equal(found, expected), f"{what}: {found} is not {expected}"
