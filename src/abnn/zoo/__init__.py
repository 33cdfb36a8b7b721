"""The paper's networks, and how to load weights into any network."""

from abnn.zoo.cifar_resnet import CifarResNet, cifar_resnet
from abnn.zoo.weights import load_weights

__all__ = ["CifarResNet", "cifar_resnet", "load_weights"]
