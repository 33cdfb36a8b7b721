"""Labels that are probabilities of the classes, as Mixup, CutMix and label smoothing give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import abnn
from abnn import Recipe
from abnn.batches import split_soft
from abnn.train import cross_entropy
from fitting import data
from methods import KINDS, MAKERS
from nets import mlp

RECIPE = Recipe(steps=4, lr=0.05, prior=None)
TRAINED = [name for name in MAKERS if MAKERS[name](KINDS["mlp"].build()).shared is None]


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, 3).movedim(-1, 1).float()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2, 4)])
def test_the_loss_is_torchs_cross_entropy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits, labels = torch.randn(shape), torch.rand(shape).softmax(1).to(dtype)
    expected = F.cross_entropy(logits, labels.float())
    torch.testing.assert_close(cross_entropy(logits, labels), expected)


@pytest.mark.parametrize("kind", ["network", *TRAINED])
def test_certain_labels_train_as_their_indices_do(kind: str) -> None:
    ends = []
    for soft in (False, True):
        torch.manual_seed(5)
        model = mlp() if kind == "network" else MAKERS[kind](mlp())
        batches = [(x, one_hot(y) if soft else y) for x, y in data()]
        losses = abnn.train(model, batches, RECIPE).losses
        ends.append({**model.state_dict(), "losses": losses})
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value)


def test_mixed_labels_train_towards_the_mixture() -> None:
    net, mixed = mlp(), torch.tensor([0.7, 0.3, 0.0])
    batches = [(x, mixed.expand(len(x), 3)) for x, _ in data()]
    abnn.train(net, batches, epochs=20)
    probs = net(torch.cat([x for x, _ in data()])).softmax(1).mean(0)
    torch.testing.assert_close(probs, mixed, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.full((2, 4), 0.25), r"shape \(2, 4\), but the logits have the shape \(2, 3\)"),
        (torch.ones(2), r"shape \(2,\), but the logits"),
        (torch.ones(2, 3), "sums over the classes from 3 to 3; normalise them"),
        (torch.tensor([[1.5, -0.5, 0.0]] * 2), "they go from -0.5 to 1.5"),
        (torch.full((2, 3), torch.nan), "no probabilities"),
    ],
)
def test_what_are_no_probabilities_is_refused(labels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abnn.train(mlp(), [(torch.zeros(2, 4), labels)], RECIPE)


def test_a_fit_takes_class_indices_only() -> None:
    batches = [(x, one_hot(y)) for x, y in data()]
    with pytest.raises(ValueError, match="Mixup and CutMix give them, are for abnn.train alone"):
        abnn.fit(abnn.convert(mlp()), batches)


@pytest.mark.parametrize("labels", [[0, 1], "cat", torch.zeros(2, dtype=torch.complex64)])
def test_other_labels_are_refused_as_ever(labels: Any) -> None:
    with pytest.raises(ValueError, match="give a tensor of class indices"):
        split_soft((torch.zeros(2, 3), labels))
