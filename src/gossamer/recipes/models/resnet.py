"""Residual networks for small images (He et al. 2015, "Deep residual learning for image recognition").

The CIFAR variant of section 4.2: a 3x3 convolution, three stages of n basic blocks with 1, 2 and 4 times the width,
6n+2 layers, identity shortcuts (option A: strided, new channels zero, no parameters). Depth 50 is the four-stage
bottleneck network of section 4.1 behind the small-image stem.
"""

from torch import Tensor, nn
from torch.nn import functional as F

DEPTHS = (8, 14, 20, 26, 32, 38, 44, 50, 56)


class ResNet(nn.Module):
    def __init__(self, depth: int, *, channels: int, classes: int, width: int | None = None, norm: str = "batch"):
        super().__init__()
        bottleneck = depth == 50
        counts = (3, 4, 6, 3) if bottleneck else ((depth - 2) // 6,) * 3
        width = width or (64 if bottleneck else 16)
        self.stem = nn.Sequential(_conv(channels, width, 3), _norm(norm, width), nn.ReLU())
        blocks: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(counts):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                outputs = width * 2**stage
                block = Bottleneck if bottleneck else Basic
                blocks.append(block(inputs, outputs, stride=stride, norm=norm))
                inputs = outputs * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        return self.head(features.mean(dim=(-2, -1)))  # type: ignore[no-any-return]


class Basic(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, outputs, 3, stride),
            _norm(norm, outputs),
            nn.ReLU(),
            _conv(outputs, outputs, 3),
            _norm(norm, outputs),
        )
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.stride > 1:
            shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            shortcut = F.pad(shortcut, (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(self.body(x) + shortcut)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: str) -> None:
        super().__init__()
        wide = outputs * self.expansion
        self.body = nn.Sequential(
            _conv(inputs, outputs, 1),
            _norm(norm, outputs),
            nn.ReLU(),
            _conv(outputs, outputs, 3, stride),
            _norm(norm, outputs),
            nn.ReLU(),
            _conv(outputs, wide, 1),
            _norm(norm, wide),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != wide:
            self.shortcut = nn.Sequential(_conv(inputs, wide, 1, stride), _norm(norm, wide))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _norm(kind: str, channels: int) -> nn.Module:
    """Return batch normalization, or group normalization, which has no running statistics."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
    return nn.GroupNorm(groups, channels)
