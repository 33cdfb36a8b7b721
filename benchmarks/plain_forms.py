"""The networks that are timed, their fastest plain form, and other plain forms of their draws."""

from __future__ import annotations

import copy
from collections.abc import Callable

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import abnn
from abnn.zoo import cifar_resnet

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ResNet-20, 32 px": (lambda: cifar_resnet(20), 32),
    "ResNet-18, 32 px": (lambda: torchvision.models.resnet18(num_classes=10), 32),
    "ViT-Ti/16, 224 px": (lambda: timm.create_model("vit_tiny_patch16_224", num_classes=10), 224),
}


def network(name: str) -> tuple[nn.Module, int]:
    """A network with random weights and running statistics that are not those of a new one."""
    torch.manual_seed(0)
    build, pixels = NETWORKS[name]
    net = build().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    return net, pixels


def fastest_form(net: nn.Module) -> nn.Module:
    """The plain network with every batch norm folded into its convolution, channels last."""
    has_batch_norm = any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    plain = fuse(copy.deepcopy(net)) if has_batch_norm else copy.deepcopy(net)
    return plain.to(memory_format=torch.channels_last)


def in_batches(net: nn.Module, images: Tensor, rows: int) -> Callable[[], None]:
    """Passes of a plain network over all images, so many at a time."""
    images = images.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def run() -> None:
        for batch in images.split(rows):
            net(batch)

    return run


def loop(bnn: abnn.ABNN, x: Tensor, samples: int) -> Callable[[], None]:
    """One pass after the other, of the plain networks of all draws, made beforehand."""
    nets = [bnn.draw(mode, 0, index) for mode in range(bnn.modes) for index in range(samples)]

    @torch.no_grad()
    def run() -> None:
        torch.stack([net(x).softmax(1) for net in nets]).mean(0)

    return run
