"""SyncBatchNorm equals nn.BatchNorm over the whole batch in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpidl
from collectives import Communicator
from tests.mpidl.zero.ways import WAYS

pytestmark = pytest.mark.mpi

CHANNELS = 3
SHAPES = {"1d": (), "1d-sequences": (4,), "2d": (3, 2), "3d": (2, 1, 3)}
PLAIN: dict[str, type[nn.Module]] = {
    "1d": nn.BatchNorm1d,
    "1d-sequences": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}
SPLITS = {"even": (4,) * 6, "ragged": (5, 1, 2, 4, 3, 1), "one rank has none": (3, 0, 2, 0, 1, 0)}


@pytest.fixture(scope="module")
def comm() -> Iterator[Communicator]:
    """One for the file, as each one gets a duplicate for these layers."""
    made = Communicator()
    yield made
    made.close()


def batch(counts: tuple[int, ...], shape: tuple[int, ...], step: int = 0, dtype: Any = torch.float64) -> torch.Tensor:
    """A whole batch, every channel with its own mean and spread."""
    random = torch.Generator().manual_seed(step)
    x = torch.randn(sum(counts), CHANNELS, *shape, generator=random, dtype=torch.float64)
    wide = torch.arange(1.0, CHANNELS + 1, dtype=torch.float64).view(-1, *[1] * len(shape))
    return (x * wide + 10 * wide).to(dtype)


def make(kind: str, dtype: Any = torch.float64, **settings: Any) -> nn.Module:
    layer = PLAIN[kind](CHANNELS, **settings).to(dtype)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2.0, CHANNELS))
            layer.bias.copy_(torch.linspace(-1.0, 1.0, CHANNELS))
    return layer


def synced(layer: nn.Module, comm: Communicator) -> nn.Module:
    return mpidl.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer), comm)


def mine(whole: torch.Tensor, counts: tuple[int, ...], comm: Communicator) -> torch.Tensor:
    return whole.split(counts)[comm.rank].detach().clone()


def run(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and input gradient of a loss that is a sum over the samples."""
    x = x.requires_grad_()
    y = layer(x)
    (y.float() if y.dtype.itemsize < 4 else y).pow(3).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def check_same(plain: nn.Module, ours: nn.Module, comm: Communicator, **tolerances: float) -> None:
    """The states, and the parameters' gradients, of which ours are sums over a rank's samples."""
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, **tolerances)
    for name, p in plain.named_parameters():
        total = ours.get_parameter(name).grad.clone()
        comm.all_reduce(total)
        torch.testing.assert_close(total, p.grad, **tolerances)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", SHAPES)
def test_forward_backward_and_states_equal_the_whole_batch(comm, kind: str, split: str) -> None:
    counts = SPLITS[split][: comm.size]
    plain = make(kind)
    ours = synced(plain, comm)
    for step in range(3):
        whole = batch(counts, SHAPES[kind], step)
        expected = run(plain, whole.clone())
        found = run(ours, mine(whole, counts, comm))
        for theirs, our in zip(expected, found, strict=True):
            torch.testing.assert_close(our, mine(theirs, counts, comm), rtol=1e-11, atol=1e-11)
    check_same(plain, ours, comm, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "settings",
    [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.9, "eps": 0.1}],
    ids=str,
)
def test_settings_are_those_of_torch(comm, settings: dict[str, Any]) -> None:
    counts = SPLITS["ragged"][: comm.size]
    plain = make("2d", **settings)
    ours = synced(plain, comm)
    for step in range(3):
        whole = batch(counts, SHAPES["2d"], step)
        expected, found = run(plain, whole.clone()), run(ours, mine(whole, counts, comm))
        for theirs, our in zip(expected, found, strict=True):
            torch.testing.assert_close(our, mine(theirs, counts, comm), rtol=1e-11, atol=1e-11)
    check_same(plain, ours, comm, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_small_variance_far_from_zero_is_kept(comm, layout: torch.memory_format) -> None:
    """E[x^2] - E[x]^2 in fp32 would be off by 1, twice the variance; a plain fp32 sum would move the mean."""
    if comm.size == 1:  # torch's own layer, which does not keep it in channels_last
        return
    counts = (16,) * comm.size
    x = batch(counts, (16, 16)) * 0.5 + 5000
    whole = x.float().contiguous(memory_format=layout)
    ours = synced(make("2d", torch.float32, momentum=1.0), comm)
    y, dx = run(ours, mine(whole, counts, comm).contiguous(memory_format=layout))
    assert y.is_contiguous(memory_format=layout)
    assert dx.is_contiguous(memory_format=layout)
    exact = whole.double()
    torch.testing.assert_close(ours.running_mean.double(), exact.mean((0, 2, 3)), rtol=2e-7, atol=0)
    torch.testing.assert_close(ours.running_var.double(), exact.var((0, 2, 3)), rtol=1e-5, atol=0)
    plain = make("2d")
    expected = run(plain, exact.clone())
    # x itself has a spacing of 5e-4, in units of the smallest channel's spread of 0.5
    torch.testing.assert_close(y.double(), mine(expected[0], counts, comm), rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(dx.double(), mine(expected[1], counts, comm), rtol=5e-3, atol=5e-2)


@pytest.mark.parametrize("parameters", ["fp32", "16-bit"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_of_16_bit_inputs_are_fp32(comm, dtype: torch.dtype, parameters: str) -> None:
    if comm.size == 1:  # torch's own layer, which rounds 16-bit parameters' statistics
        return
    counts = SPLITS["ragged"][: comm.size]
    whole = batch(counts, (8, 8), dtype=dtype)
    exact = make("2d")
    y, dx = run(exact, whole.double())
    ours = synced(make("2d", torch.float32 if parameters == "fp32" else dtype), comm)
    found = run(ours, mine(whole, counts, comm))
    assert found[0].dtype == found[1].dtype == dtype
    tiny = torch.finfo(dtype).eps
    torch.testing.assert_close(found[0].double(), mine(y, counts, comm), rtol=2 * tiny, atol=2 * tiny)
    torch.testing.assert_close(found[1].double(), mine(dx, counts, comm), rtol=8 * tiny, atol=16 * tiny)
    if parameters == "fp32":
        torch.testing.assert_close(ours.running_var.double(), exact.running_var, rtol=1e-6, atol=0)
    assert ours.weight.grad.dtype == ours.weight.dtype


def test_autocast_leaves_the_dtype_and_the_statistics_as_torch_does(comm) -> None:
    counts = (4,) * comm.size
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(counts), 2, 6, 6, generator=random)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, CHANNELS, 3), nn.BatchNorm2d(CHANNELS))
    ours = synced(plain, comm)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(whole), ours(mine(whole, counts, comm))
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, mine(expected, counts, comm), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours[1].running_var, plain[1].running_var, rtol=1e-5, atol=1e-6)


def test_eval_mode_asks_no_other_rank(comm) -> None:
    plain = make("2d").eval()
    ours = synced(plain, comm)
    x = batch((4,), SHAPES["2d"])
    if comm.rank == 0:
        assert torch.equal(ours(x), plain(x))


def test_without_a_bias_weights_of_16_bits_go_with_fp32_statistics_in_eval_mode(comm) -> None:
    ours = mpidl.SyncBatchNorm(CHANNELS, process_group=comm, bias=False).eval()
    x = batch((4,), SHAPES["2d"], dtype=torch.bfloat16)
    expected = nn.functional.batch_norm(x.double(), ours.running_mean.double(), ours.running_var.double())
    ours.weight.data = ours.weight.data.bfloat16()
    torch.testing.assert_close(ours(x).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_in_a_world_of_one_it_is_torchs_layer_to_the_bit(comm, momentum: float | None) -> None:
    alone = comm.split(comm.rank)
    plain = make("2d", torch.float32, momentum=momentum)
    ours = synced(plain, alone)
    for step in range(3):
        x = batch((4,), SHAPES["2d"], step, torch.float32)
        for theirs, our in zip(run(plain, x.clone()), run(ours, x.clone()), strict=True):
            assert torch.equal(our, theirs)
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    alone.close()


def test_training_without_gradients_moves_the_statistics(comm) -> None:
    counts = SPLITS["ragged"][: comm.size]
    whole = batch(counts, SHAPES["2d"])
    plain = make("2d")
    ours = synced(plain, comm)
    with torch.no_grad():
        expected, found = plain(whole), ours(mine(whole, counts, comm))
    torch.testing.assert_close(found, mine(expected, counts, comm))
    torch.testing.assert_close(ours.running_var, plain.running_var)


def test_an_empty_batch_on_all_ranks_changes_nothing(comm) -> None:
    ours = synced(make("2d"), comm)
    y, dx = run(ours, torch.zeros(0, CHANNELS, 2, 2, dtype=torch.float64))
    assert y.shape == dx.shape == (0, CHANNELS, 2, 2)
    assert (ours.running_mean == 0).all()
    assert (ours.running_var == 1).all()
    assert (ours.weight.grad == 0).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_give_the_same_gradients(comm, reentrant: bool) -> None:
    counts = SPLITS["ragged"][: comm.size]
    torch.manual_seed(0)
    model = synced(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS), nn.Tanh()), comm).double()
    second = copy.deepcopy(model)
    x = mine(batch(counts, SHAPES["2d"]), counts, comm).requires_grad_()
    again = x.detach().clone().requires_grad_()
    model(x).sum().backward()
    checkpoint(second, again, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(again.grad, x.grad)
    for p, q in zip(model.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_on_one_rank_is_seen_on_all(comm, bad: float) -> None:
    ours = synced(make("1d"), comm)
    x = batch((4,), ())
    if comm.rank == comm.size - 1:
        x[0, 1] = bad
    y, dx = run(ours, x)
    assert y[:, 1].isnan().all()
    assert dx[:, 1].isnan().all()
    assert y[:, 0].isfinite().all()
    assert ours.running_var[1].isnan()


def test_one_value_a_channel_over_all_ranks_is_refused_on_all(comm) -> None:
    ours = synced(make("1d"), comm)
    x = torch.ones(1 if comm.rank == comm.size - 1 else 0, CHANNELS, dtype=torch.float64)
    message = r"Expected more than 1 value per channel when training, got input size torch.Size\(\[1, 3\]\)"
    with pytest.raises(ValueError, match=message):
        ours(x)
    assert torch.isfinite(ours(torch.ones(2, CHANNELS, dtype=torch.float64))).all()  # and goes on


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x[:, :2], "2 channels on rank {last}; needs 3 channels"),
        (lambda x: x[0], "fewer than 2 dimensions on rank {last}"),
        (lambda x: x.to(torch.int64), "another dtype on rank {last}; needs float32"),
        (lambda x: x.requires_grad_(), "a gradient on rank {last} and one that does not on rank 0"),
    ],
    ids=["channels", "dimensions", "dtype", "gradient"],
)
def test_an_input_that_does_not_fit_on_one_rank_is_refused_on_all(comm, wrong: Any, message: str) -> None:
    if comm.size == 1:
        return
    ours = synced(make("1d"), comm)
    x = batch((4,), ())
    if comm.rank == comm.size - 1:
        x = wrong(x)
    with pytest.raises(mpidl.ConfigurationError, match=message.format(last=comm.size - 1)):
        ours(x)
    run(ours, batch((4,), ()))


# ---- conversion -------------------------------------------------------------------------------------------------


def test_conversion_keeps_what_layers_are_and_replaces_tied_ones_once(comm) -> None:
    shared = nn.BatchNorm1d(2, eps=0.5, momentum=None).eval()
    shared.weight.requires_grad_(False)
    calls: list[int] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    model = nn.ModuleDict(
        {"a": shared, "deep": nn.Sequential(nn.Linear(2, 2), shared, nn.BatchNorm3d(4, affine=False))}
    )
    model["deep"].register_module("again", shared)
    before = {name: (id(p), p.requires_grad) for name, p in [*model.named_parameters(), *model.named_buffers()]}
    result = mpidl.SyncBatchNorm.convert_sync_batchnorm(model, comm)
    assert result is model
    after = {name: (id(p), p.requires_grad) for name, p in [*model.named_parameters(), *model.named_buffers()]}
    assert after == before
    layer = model["a"]
    assert type(layer) is mpidl.SyncBatchNorm
    assert layer is model["deep"][1] is model["deep"].again
    assert (layer.eps, layer.momentum, layer.training, layer.process_group) == (0.5, None, False, comm)
    assert type(model["deep"][2]) is mpidl.SyncBatchNorm
    assert model["deep"][2].training
    assert model["deep"][2].weight is None
    assert type(model["deep"][0]) is nn.Linear
    layer(torch.ones(1, 2))
    assert calls == [1]


def test_a_layer_is_converted_copied_and_pickled(comm) -> None:
    plain = nn.BatchNorm2d(2)
    layer = mpidl.SyncBatchNorm.convert_sync_batchnorm(plain, comm)
    assert type(layer) is mpidl.SyncBatchNorm
    assert layer.weight is plain.weight
    other = copy.deepcopy(nn.Sequential(layer))[0]
    assert other.process_group is comm
    assert other.weight is not layer.weight
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded.process_group is None
    assert loaded.state_dict().keys() == layer.state_dict().keys()
    assert layer.process_group is comm


def test_lazy_layers_are_refused(comm) -> None:
    with pytest.raises(mpidl.ConfigurationError, match="lazy layer"):
        mpidl.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()), comm)


def test_a_layer_made_by_itself_is_over_the_world() -> None:
    layer = mpidl.SyncBatchNorm(CHANNELS, bias=False)
    rank, ranks = mpidl.init().rank, mpidl.init().size
    layer(torch.full((2, CHANNELS), float(rank)))
    assert layer.bias is None
    torch.testing.assert_close(layer.running_mean, torch.full((CHANNELS,), 0.1 * (ranks - 1) / 2))


# ---- in models --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions with batch normalization between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(5 * 16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).flatten(1))


def pictures(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole batch of 12 pictures of three classes."""
    random = torch.Generator().manual_seed(step)
    y = torch.randint(0, 3, (12,), generator=random)
    return torch.randn(12, 1, 8, 8, generator=random, dtype=torch.float64) + y.view(-1, 1, 1, 1), y


@pytest.mark.parametrize("engine", ["ddp", "stage 1", "stage 3"])
def test_training_equals_a_single_process_on_the_whole_batch(comm, engine: str) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    ours = mpidl.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), comm)
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    reference = torch.optim.SGD(plain.parameters(), **settings)
    call: nn.Module = ours
    if engine == "ddp":
        call = mpidl.DistributedDataParallel(ours, process_group=comm, bucket_cap_mb=0.001)
        optimizer: Any = torch.optim.SGD(ours.parameters(), **settings)
    else:
        optimizer = mpidl.ZeroOptimizer(
            ours, torch.optim.SGD, process_group=comm, bucket_cap_mb=0.001, **WAYS[engine], **settings
        )
    for step in range(5):
        x, y = pictures(step)
        reference.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        reference.step()
        optimizer.zero_grad()
        F.cross_entropy(call(x.chunk(comm.size)[comm.rank]), y.chunk(comm.size)[comm.rank]).backward()
        optimizer.step()
    weights = ours.state_dict() if engine == "ddp" else optimizer.model_state_dict()
    if comm.rank == 0 or engine == "ddp":
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10)


class LayerPerRank(nn.Module):
    """After the shared normalized part every rank goes through a layer of its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank = rank
        self.first, self.norm = nn.Linear(2, 4), nn.BatchNorm1d(4)
        self.own = nn.ModuleList([nn.Linear(4, 4) for _ in range(ranks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own[self.rank](self.norm(self.first(x))).square().sum()


@pytest.mark.limit(30)
def test_buckets_that_fill_at_other_times_on_other_ranks_do_not_get_in_the_way(comm) -> None:
    """Rank 0's first bucket is under way before its normalization's backward, the last rank's only after it."""
    torch.manual_seed(0)
    model = mpidl.SyncBatchNorm.convert_sync_batchnorm(LayerPerRank(comm.rank, comm.size), comm)
    wrapped = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        wrapped(torch.full((2, 2), comm.rank + 1.0)).backward()
    total = model.norm.weight.grad.clone()
    comm.all_reduce(total, "max")
    assert torch.equal(total, model.norm.weight.grad)
