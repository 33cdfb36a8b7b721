"""Data to fit to, and what a fit moves."""

import torch
from torch import Tensor

import abnn
from abnn.artifact import bank_tensors

Data = list[tuple[Tensor, Tensor]]


def data(batches: int = 6, size: int = 8, classes: int = 3) -> Data:
    torch.manual_seed(1)
    centres = 2 * torch.randn(classes, 4)
    labels = torch.randint(classes, (batches, size))
    return [(centres[y] + torch.randn(size, 4), y) for y in labels]


def banks(bnn: abnn.ABNN) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in bank_tensors(bnn).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())
