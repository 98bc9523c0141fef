"""Tests of training that need a GPU: autocast, compiled models, streams and graphs of CUDA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpidl
from collectives import Communicator
from tests.mpidl.cuda.models import placed
from tests.mpidl.small_models import MODELS, Recipe, fresh, largest_difference, sequences, train
from tests.mpidl.zero.ways import ENGINES, WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture
def device(comm: Communicator) -> Any:
    return mpidl.pick_device(comm, "cuda")


def engine_of(kind: str, model: nn.Module) -> tuple[Any, Any]:
    if kind == "ddp":
        return mpidl.DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, mpidl.ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, **WAYS[kind])


def losses(comm: Communicator, call: Any, optimizer: Any, dtype: torch.dtype | None, count: int = 4) -> list[float]:
    """Loss of this rank's share in each step, forward in autocast if there is a dtype."""
    found = []
    scaler = mpidl.GradScaler("cuda", enabled=dtype == torch.float16)
    for step in range(count):
        x, y = (part.chunk(comm.size)[comm.rank] for part in sequences(step, 0))
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = call(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ENGINES)
def test_autocast_follows_full_precision(comm: Communicator, device: Any, kind: str, dtype: torch.dtype) -> None:
    expected = losses(comm, *engine_of(kind, placed(fresh(MODELS["gpt2"]), device)), None)
    found = losses(comm, *engine_of(kind, placed(fresh(MODELS["gpt2"]), device)), dtype)
    assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("kind", ENGINES)
def test_compiled_models_train_the_same(comm: Communicator, device: Any, kind: str) -> None:
    expected = losses(comm, *engine_of(kind, placed(fresh(MODELS["gpt2"]), device)), None)
    call, optimizer = engine_of(kind, placed(fresh(MODELS["gpt2"]), device))
    assert losses(comm, torch.compile(call), optimizer, None) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ENGINES)
def test_training_on_a_stream_of_its_own(comm: Communicator, device: Any, kind: str) -> None:
    expected = losses(comm, *engine_of(kind, placed(fresh(MODELS["gpt2"]), device)), None, 10)
    call, optimizer = engine_of(kind, placed(fresh(MODELS["gpt2"]), device))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        found = losses(comm, call, optimizer, None, 10)
    torch.cuda.current_stream(device).wait_stream(stream)
    assert found == pytest.approx(expected, rel=1e-5)


class TwoStreams(nn.Module):
    """Its halves compute side by side, and so do their backward passes, which fill one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            x.record_stream(other)
            left = self.halves[0](x).relu()
        right = self.halves[1](x).relu()
        current.wait_stream(other)
        left.record_stream(current)
        return left + right


@pytest.mark.parametrize("kind", ENGINES)
def test_a_bucket_that_several_streams_fill(comm: Communicator, device: Any, kind: str) -> None:
    weights = []
    for engine in ("stage 1" if kind == "ddp" else "ddp", kind):
        torch.manual_seed(1)
        model = TwoStreams().to(device)
        call, optimizer = engine_of(engine, model)
        for step in range(5):
            x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(step)).to(device)
            call(x * (comm.rank + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = optimizer.model_state_dict() if engine != "ddp" else model.state_dict()
        weights.append({name: t.cpu() for name, t in whole.items()} if comm.rank == 0 else {})
    if comm.rank == 0:
        assert largest_difference(*weights) < 1e-5


@pytest.mark.parametrize("kind", ENGINES)
def test_a_graph_that_is_captured_is_refused(comm: Communicator, device: Any, kind: str) -> None:
    call, optimizer = engine_of(kind, placed(fresh(MODELS["gpt2"]), device))
    losses(comm, call, optimizer, None, 1)
    x, y = (part.to(device) for part in sequences(0, 0))

    def step() -> None:
        # Only this thread's calls count: another one may still be at the all-gather of the last step.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            call(x, y).backward()
            optimizer.step()

    with pytest.raises(Exception, match="while a CUDA graph is captured"):
        step()
    comm.barrier()


def test_ranks_on_one_gpu_hold_one_copy(comm: Communicator, device: Any) -> None:
    """All ranks together hold the parameters of stage 3 once."""
    model = placed(fresh(MODELS["gpt2"]), device)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, 3, lr=1e-2)
    held = mpidl.memory.measure(model, optimizer).parameters
    together = sum(mpidl.all_gather_object(comm, held))
    assert nbytes <= together <= 1.1 * nbytes + 4096
    assert optimizer.traffic().gathers == 0


def test_memory_is_given_back(comm: Communicator, device: Any) -> None:
    """With offload and gathered units, from step to step."""
    recipe = Recipe(steps=3, engine={"offload": "cpu"})
    trained = train(placed(fresh(MODELS["gpt2"]), device), recipe, "stage 3 gathered", comm)
    before = torch.cuda.memory_allocated(device)
    for _ in range(5):
        losses(comm, trained.model, trained.optimizer, None, 2)
    assert torch.cuda.memory_allocated(device) <= before + (1 << 20)


def test_random_numbers_of_the_gpu_go_on_from_a_checkpoint(comm: Communicator, device: Any, tmp_path: Path) -> None:
    folder = mpidl.broadcast_object(comm, str(tmp_path))
    call, optimizer = engine_of("ddp", placed(fresh(MODELS["gpt2"]), device))
    losses(comm, call, optimizer, None, 1)
    mpidl.checkpoint.save(folder, call, optimizer, step=1)
    expected = torch.rand(5, device=device)
    torch.rand(3, device=device)
    mpidl.checkpoint.load(mpidl.checkpoint.named(Path(folder))[-1], call, optimizer)
    assert torch.equal(torch.rand(5, device=device), expected)


EXAMPLES = {
    "gpt2_zero3.py": [
        *("--steps", 10, "--sample", 20, "--layers", 2, "--heads", 2, "--embd", 32, "--block-size", 16),
    ],
    "bert_mlm.py": ["--steps", 10, "--sequence-length", 32, "--eval-sequences", 8],
    "resnet_ddp.py": ["--epochs", 1, "--width", 4, "--no-progress"],
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_train_on_a_gpu(comm: Communicator, tmp_path: Path, example: str) -> None:
    """In jobs of its own, started by rank 0."""
    from tests.harness.launch import mpirun

    losses = []
    for device in ("cpu", "cuda") if comm.rank == 0 else ():
        path = tmp_path / f"{device}.json"
        options = [*EXAMPLES[example], "--device", device, "--json", path]
        done = mpirun(comm.size, f"examples/{example}", *options, timeout=300)
        assert done.returncode == 0, done.stderr
        found = json.loads(path.read_text())
        losses.append(found["epochs"][-1]["train_loss"] if "epochs" in found else found["steps"][-1]["loss"])
    if losses:
        assert losses[1] == pytest.approx(losses[0], rel=5e-2)
    comm.barrier()
