"""ResNet-18, 34, 50, 101 and 152: blocks of convolutions with a shortcut, in four stages.

    stem -> layer1 -> layer2 -> layer3 -> layer4 -> mean over the image -> fc
            width     2 width   4 width   8 width      channels (4 times that in bottlenecks), at half the resolution
                                                       from stage to stage

Names of parameters and buffers are those of torchvision's ResNet (`layer1.0.conv1.weight`), so that its published
weights load with `load_state_dict`. Source: He et al. 2015, "Deep Residual Learning for Image Recognition"; the stride
of a bottleneck is in its 3x3 convolution ("v1.5"). Zeroing the last norm of each block, so that a block starts as
its shortcut: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 5.1.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ConfigurationError
from .segments import run_in_segments, split_blocks

STEMS = ("imagenet", "small")


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the resolution but for its stride, without bias: a norm follows."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """A residual block: relu(branch(x) + shortcut(x)). growth: channels that come out for each of its width."""

    growth = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.growth
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, inputs, h, w] -> [batch, outputs, h / stride, w / stride]."""
        raise NotImplementedError

    @property
    def last_norm(self) -> nn.Module:
        """The norm whose output is added to the shortcut."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, inputs, h, w] -> [batch, outputs, h / stride, w / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.branch(x) + shortcut)


class BasicBlock(Block):
    """Two 3x3 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        """Runs both convolutions, each with its norm."""
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))  # type: ignore[no-any-return]

    @property
    def last_norm(self) -> nn.Module:
        """The norm of the second convolution."""
        return self.bn2


class Bottleneck(Block):
    """A 1x1 convolution to fewer channels, a 3x3 one that may stride, a 1x1 one to four times as many."""

    growth = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        outputs = width * self.growth
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        """Runs all three convolutions, each with its norm."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return self.bn3(self.conv3(y))  # type: ignore[no-any-return]

    @property
    def last_norm(self) -> nn.Module:
        """The norm of the third convolution."""
        return self.bn3


# The kind of block, and how many of them the four stages have.
SIZES: dict[str, tuple[type[Block], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """Images to logits.

    name: one of SIZES.
    num_classes: logits.
    in_channels: of the images (1: grey, 3: colour).
    width: channels of the first stage's convolutions; 64 in the paper.
    stem: "imagenet", a 7x7 convolution and a pooling that leave a quarter of the resolution; "small", a 3x3
        convolution that leaves all of it, for images of 8x8 to 64x64.
    zero_init_residual: blocks start as their shortcuts.
    segments: while training, the residual blocks run in so many checkpointed segments; 0: without. An attribute, too,
        which may be changed at any time.
    use_reentrant: see torch.utils.checkpoint.

    Raises ConfigurationError for what is not in these ranges.
    """

    def __init__(
        self,
        name: str,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        stem: str = "imagenet",
        zero_init_residual: bool = False,
        segments: int = 0,
        use_reentrant: bool = False,
    ) -> None:
        super().__init__()
        if name not in SIZES:
            raise ConfigurationError(f"model: got {name!r}; needs one of {', '.join(SIZES)}")
        if stem not in STEMS:
            raise ConfigurationError(f"stem: got {stem!r}; needs one of {', '.join(STEMS)}")
        for setting, value in {"num_classes": num_classes, "in_channels": in_channels, "width": width}.items():
            if value < 1:
                raise ConfigurationError(f"{setting}: got {value}; needs at least 1")
        self.stem = stem
        self.conv1 = _conv(in_channels, width, 7, 2) if stem == "imagenet" else _conv(in_channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        kind, depths = SIZES[name]
        inputs = width
        stages = []
        for number, depth in enumerate(depths):
            outputs = width << number
            blocks = []
            for i in range(depth):
                blocks.append(kind(inputs, outputs, 2 if number and not i else 1))
                inputs = outputs * kind.growth
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, num_classes)
        self.use_reentrant = use_reentrant
        self.segments = segments
        self._initialise(zero_init_residual)

    @property
    def blocks(self) -> list[Block]:
        """The residual blocks in the order in which they run."""
        return list(chain(self.layer1, self.layer2, self.layer3, self.layer4))  # type: ignore[arg-type]

    @property
    def segments(self) -> int:
        """The number of checkpointed segments in which the blocks run while training; 0: none."""
        return self._segments

    @segments.setter
    def segments(self, number: int) -> None:
        if number != 0:
            split_blocks(self.blocks, number)
        self._segments = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps images [batch, in_channels, height, width] -> logits [batch, num_classes]."""
        x = F.relu(self.bn1(self.conv1(x)))
        if self.stem == "imagenet":
            x = F.max_pool2d(x, 3, 2, padding=1)
        if self._segments and self.training and torch.is_grad_enabled():
            x = run_in_segments(self.blocks, x, self._segments, self.use_reentrant)
        else:
            for block in self.blocks:
                x = block(x)
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits

    def _initialise(self, zero_init_residual: bool) -> None:
        """Convolutions as in He et al. 2015, "Delving Deep into Rectifiers", by fan-out; norms to the identity."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init_residual:
            for block in self.blocks:
                nn.init.zeros_(block.last_norm.weight)  # type: ignore[arg-type]
