"""The paper's networks and small ones, and how to load weights into any network."""

from collections.abc import Callable
from functools import partial

from torch import nn

from abnn.zoo.cifar_resnet import CifarResNet, cifar_resnet
from abnn.zoo.small_resnet import small_resnet
from abnn.zoo.weights import load_weights

# What a command line names as zoo:NAME.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet20": partial(cifar_resnet, 20),
    "resnet56": partial(cifar_resnet, 56),
    "small_resnet": small_resnet,
}

__all__ = ["NETWORKS", "CifarResNet", "cifar_resnet", "load_weights", "small_resnet"]
