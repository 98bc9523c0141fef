"""Memory of a rank's process while a model that is larger than its share is built."""

from __future__ import annotations

import json

import pytest

from tests.harness import launch

# What is freed goes back to the system at once, so that the resident set is what is held.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}
# Blocks of 3.1 MiB, 100 MiB in all. A process's peak never falls: what needs least comes first.
_PROGRAM = """
import gc, json, torch, mpidl
from mpidl.memory import MIB, peak_rss_mib, rss_mib
from mpidl.models.gpt2 import GPT2, GPT2Config
comm = mpidl.init()
small = GPT2Config(vocab_size=64, block_size=8, layers=2, heads=2, embd=16)
config = GPT2Config(vocab_size=64, block_size=8, layers=32, heads=4, embd=256)
def build(config, deferred, dtype):
    model = mpidl.deferred_init(GPT2, config) if deferred else GPT2(config)
    precision = None if dtype is None else mpidl.Precision(dtype)
    optimizer = mpidl.ZeroOptimizer(
        model, torch.optim.SGD, stage=3, share_in_node=False, precision=precision, lr=0.1
    )
    return sum(p.numel() * 4 for p in model.parameters()) / MIB
risen = {}
for name, deferred, dtype in (("fp32", True, None), ("bf16", True, torch.bfloat16), ("ordinary", False, None)):
    build(small, deferred, dtype)  # loads what is loaded once
    gc.collect()
    before = rss_mib()
    whole = build(config, deferred, dtype)
    risen[name] = max(mpidl.all_gather_object(comm, peak_rss_mib() - before))
if comm.rank == 0:
    print(json.dumps({"risen": risen, "whole": whole}))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    """Records of four ranks."""
    done = launch.mpirun(4, "-c", _PROGRAM, timeout=120, **MALLOC)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.job
@pytest.mark.parametrize("precise", ["fp32", "bf16"])
def test_a_rank_never_holds_the_whole_model(found: dict, precise: str) -> None:
    # A rank's share, and some units and what the allocator keeps.
    share = found["whole"] / 4 * (1.5 if precise == "bf16" else 1)
    assert found["risen"][precise] < share + 24 < 0.7 * found["whole"]


@pytest.mark.thorough
@pytest.mark.job
def test_an_ordinary_construction_holds_it(found: dict) -> None:
    """The judge of the test above."""
    assert found["risen"]["ordinary"] > found["whole"]
