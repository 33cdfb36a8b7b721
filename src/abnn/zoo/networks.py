"""The networks that a command line names as zoo:NAME, and the images they were made for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from abnn.zoo.cifar_resnet import cifar_resnet
from abnn.zoo.deeplabv3plus import deeplabv3plus
from abnn.zoo.model import IMAGENET_MEAN, IMAGENET_STD, Input, of_imagenet
from abnn.zoo.resnet50 import resnet50, resnet50_imagenet
from abnn.zoo.small_resnet import small_resnet
from abnn.zoo.vit_b_16 import vit_b_16
from abnn.zoo.wide_resnet import wrn28_10

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet20": partial(cifar_resnet, 20),
    "resnet56": partial(cifar_resnet, 56),
    "resnet50": resnet50,
    "resnet50_imagenet": resnet50_imagenet,
    "wrn28_10": wrn28_10,
    "vit_b_16": vit_b_16,
    "deeplabv3plus": deeplabv3plus,
    "small_resnet": small_resnet,
}

# Those for CIFAR have no normalisation of their own: every paper has another, so it is the data's.
INPUTS = {
    "resnet20": Input((32, 32)),
    "resnet56": Input((32, 32)),
    "resnet50": Input((32, 32)),
    "resnet50_imagenet": of_imagenet(),
    "wrn28_10": Input((32, 32)),
    "vit_b_16": of_imagenet(),
    "deeplabv3plus": Input(None, 3, IMAGENET_MEAN, IMAGENET_STD),
    "small_resnet": Input(None, channels=1),
}
