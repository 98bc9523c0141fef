"""ResNet and its checkpointed segments, against transformers' ResNet and a run that keeps all activations."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpidl
from mpidl.errors import ConfigurationError
from mpidl.models.resnet import SIZES, ResNet
from mpidl.models.segments import buffers_left_alone, split_blocks
from tests.mpidl.small_models import largest_difference

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def small(name: str = "resnet18", **settings: object) -> ResNet:
    """A narrow network for images of 8x8 and ten classes, always with the same weights."""
    torch.manual_seed(3)
    return ResNet(name, **{"num_classes": 10, "in_channels": 1, "width": 4, "stem": "small", **settings})


def batch(size: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 8, 8, generator=random), torch.randint(0, 10, (size,), generator=random)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_sizes_have_the_published_numbers_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = ResNet(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 8), ("resnet50", 16), ("resnet101", 33)])
def test_names_are_those_of_the_published_weights(name: str, blocks: int) -> None:
    with torch.device("meta"):
        model = ResNet(name)
    names = set(model.state_dict())
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {"conv1.weight", "fc.weight", "fc.bias", *(f"bn1.{part}" for part in norm)}
    convolutions = 2 if name == "resnet18" else 3
    for layer, depth in enumerate(SIZES[name][1], 1):
        for i in range(depth):
            for n in range(1, convolutions + 1):
                expected |= {f"layer{layer}.{i}.conv{n}.weight", *(f"layer{layer}.{i}.bn{n}.{p}" for p in norm)}
        if layer > 1 or name != "resnet18":
            expected |= {f"layer{layer}.0.downsample.0.weight", *(f"layer{layer}.0.downsample.1.{p}" for p in norm)}
    assert names == expected
    assert len(model.blocks) == blocks


def names_in_transformers(name: str) -> str:
    """A name of ours as transformers' ResNetForImageClassification has it."""
    if name.startswith("fc."):
        return name.replace("fc.", "classifier.1.")
    kinds = {"conv": "convolution", "bn": "normalization"}
    parts = name.split(".")
    if not name.startswith("layer"):
        return f"resnet.embedder.embedder.{kinds[parts[0].rstrip('1')]}.{parts[-1]}"
    block = f"resnet.encoder.stages.{int(parts[0][-1]) - 1}.layers.{parts[1]}"
    if parts[2] == "downsample":
        return f"{block}.shortcut.{['convolution', 'normalization'][int(parts[3])]}.{parts[-1]}"
    return f"{block}.layer.{int(parts[2][-1]) - 1}.{kinds[parts[2][:-1]]}.{parts[-1]}"


@pytest.mark.parametrize(("name", "kind"), [("resnet18", "basic"), ("resnet50", "bottleneck")])
def test_logits_equal_those_of_transformers(name: str, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    growth = 1 if kind == "basic" else 4
    model = small(name, in_channels=3, stem="imagenet")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():  # also the norms', which start as the identity
                tensor.add_(0.1 * torch.rand_like(tensor))
    config = transformers.ResNetConfig(
        num_channels=3,
        embedding_size=4,
        hidden_sizes=[4 * growth << i for i in range(4)],
        depths=list(SIZES[name][1]),
        layer_type=kind,
        num_labels=10,
    )
    other = transformers.ResNetForImageClassification(config)
    other.load_state_dict({names_in_transformers(key): tensor for key, tensor in model.state_dict().items()})
    x = torch.randn(3, 3, 40, 56)
    for mode in (True, False):  # the second time with running statistics that the first has moved
        model.train(mode)
        other.train(mode)
        torch.testing.assert_close(model(x), other(x).logits, rtol=1e-4, atol=1e-4)


def test_the_small_stem_keeps_the_resolution() -> None:
    sizes = []
    model = small()
    for block in model.blocks[::2]:
        block.register_forward_hook(lambda *taken: sizes.append(taken[2].shape[1:]))
    model(torch.zeros(2, 1, 8, 8))
    assert [tuple(size) for size in sizes] == [(4, 8, 8), (8, 4, 4), (16, 2, 2), (32, 1, 1)]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_zeroed_residuals_leave_the_shortcuts(name: str) -> None:
    model = small(name, zero_init_residual=True)
    x = torch.randn(4, 4 * (1 if name == "resnet18" else 4), 8, 8).relu()
    assert torch.equal(model.layer1[1](x), x)
    assert not torch.equal(small(name).layer1[1](x), x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet20"}, "model: got 'resnet20'; needs one of resnet18, resnet34"),
        ({"stem": "large"}, "stem: got 'large'; needs one of imagenet, small"),
        ({"width": 0}, "width: got 0; needs at least 1"),
        ({"num_classes": 0}, "num_classes: got 0"),
        ({"segments": -1}, "segments: got -1; needs 1 to 8"),
        ({"segments": 9}, "segments: got 9; needs 1 to 8, the number of blocks"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        small(**settings)


# ---- segments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "lengths"), [(1, [7]), (2, [4, 3]), (4, [2, 2, 2, 1]), (7, [1] * 7)])
def test_segments_are_of_nearly_the_same_length(number: int, lengths: list[int]) -> None:
    blocks = [nn.Identity() for _ in range(7)]
    parts = split_blocks(blocks, number)
    assert [len(part) for part in parts] == lengths
    assert [block for part in parts for block in part] == blocks


class OwnNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm that updates its statistics by assignment, whatever track_running_stats says."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        assert input.dim() == 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(x, (0, 2, 3))
        if self.training:
            self.num_batches_tracked = self.num_batches_tracked + 1
            self.running_mean = 0.9 * self.running_mean + 0.1 * mean.detach()
            self.running_var = 0.9 * self.running_var + 0.1 * var.detach()
        y = (x - mean[:, None, None]) * (var + self.eps).rsqrt()[:, None, None]
        return y * self.weight[:, None, None] + self.bias[:, None, None]


def with_own_norms(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, OwnNorm(child.num_features))
    return model


def with_cumulative_norms(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    return model


def with_a_frozen_stage(model: ResNet) -> ResNet:
    """Whose norms use their running statistics."""
    model.layer2.eval().requires_grad_(False)
    return model


CHANGES = [lambda model: model, with_own_norms, with_cumulative_norms, with_a_frozen_stage]


@pytest.mark.parametrize("segments", [1, 3, 8])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=["plain", "own", "cumulative", "frozen"])
def test_segments_change_no_loss_gradient_or_statistic(segments: int, use_reentrant: bool, change) -> None:
    plain, checkpointed = change(small()), change(small(segments=segments, use_reentrant=use_reentrant))
    for step in range(2):
        x, y = batch(seed=step)
        losses = []
        for model in (plain, checkpointed):
            # Two passes before backward: the second moves the statistics that the first one's recomputation sees.
            loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 1), y)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        gradients = [
            {name: p.grad for name, p in m.named_parameters() if p.requires_grad} for m in (plain, checkpointed)
        ]
        assert largest_difference(*gradients) <= (1e-5 if use_reentrant else 0)  # it adds the two in another order
        assert largest_difference(dict(plain.named_buffers()), dict(checkpointed.named_buffers())) == 0
    assert int(checkpointed.bn1.num_batches_tracked) == int(checkpointed.layer4[1].bn2.num_batches_tracked) == 4


def runs_of_blocks(model: ResNet) -> list[int]:
    """How often each block has begun to run in a forward and a backward pass."""
    counts = [0] * len(model.blocks)
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    return counts


def test_blocks_run_again_only_while_training_in_segments() -> None:
    model = small()
    assert runs_of_blocks(model) == [1] * 8
    model.segments = 3
    assert runs_of_blocks(model) == [2] * 8
    model.eval()
    assert runs_of_blocks(model) == [1] * 8


def test_a_segment_s_insides_are_freed_until_backward() -> None:
    """Counts what autograd keeps after the forward pass, outside the checkpoints, which hold inputs alone."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    totals = []
    for segments in (0, 2):
        kept.clear()
        model = small(width=8, segments=segments)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(batch(16)[0])
        totals.append(sum(kept.values()))
        del out
    assert totals[1] < 0.25 * totals[0]


def test_buffers_come_back_after_an_error() -> None:
    model = small()
    before = copy.deepcopy(dict(model.named_buffers()))
    own = {name: id(buffer) for name, buffer in model.named_buffers()}

    def fail() -> None:
        with buffers_left_alone([model]):
            model(batch()[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == own
    assert largest_difference(dict(model.named_buffers()), before) == 0


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_ddp_averages_the_gradients_of_segments(comm, name: str, use_reentrant: bool) -> None:
    model = mpidl.DistributedDataParallel(
        small(name, segments=3, use_reentrant=use_reentrant).double(), process_group=comm
    )
    parts = [(x.double(), y) for x, y in (batch(seed=rank) for rank in range(comm.size))]
    x, y = parts[comm.rank]
    F.cross_entropy(model(x), y).backward()

    alone = small(name).double()
    for x, y in parts:
        (F.cross_entropy(alone(x), y) / comm.size).backward()
    found, expected = ({key: p.grad for key, p in m.named_parameters()} for m in (model.module, alone))
    assert largest_difference(found, expected) < 1e-10
    assert int(model.module.layer3[0].bn1.num_batches_tracked) == 1
