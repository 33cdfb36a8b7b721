"""The paper's networks and small ones, every other source of networks, and loading weights."""

from abnn.zoo.cifar_resnet import CifarResNet, cifar_resnet
from abnn.zoo.deeplabv3plus import deeplabv3plus
from abnn.zoo.model import Input, Model
from abnn.zoo.networks import NETWORKS
from abnn.zoo.opening import build, open_model
from abnn.zoo.resnet50 import resnet50, resnet50_imagenet
from abnn.zoo.small_resnet import small_resnet
from abnn.zoo.vit_b_16 import vit_b_16
from abnn.zoo.weights import load_weights
from abnn.zoo.wide_resnet import WideResNet, wide_resnet, wrn28_10

__all__ = [
    "NETWORKS",
    "CifarResNet",
    "Input",
    "Model",
    "WideResNet",
    "build",
    "cifar_resnet",
    "deeplabv3plus",
    "load_weights",
    "open_model",
    "resnet50",
    "resnet50_imagenet",
    "small_resnet",
    "vit_b_16",
    "wide_resnet",
    "wrn28_10",
]
