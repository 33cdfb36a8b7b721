"""The random class prior and the loss of the paper."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from abnn.prior import RandomPrior, abnn_loss


@pytest.mark.parametrize("classes", [2, 3, 10, 100, 1000])
def test_the_root_of_k_classes_get_the_weight(classes: int) -> None:
    eta = RandomPrior(weight=6.0).draw(classes, seed=0, mode=0)
    assert eta.shape == (classes,)
    assert (eta == 6).sum() == math.isqrt(classes)
    assert (eta == 0).sum() == classes - math.isqrt(classes)


def test_every_mode_draws_its_own_once() -> None:
    prior = RandomPrior()
    draws = [prior.draw(100, seed=0, mode=mode) for mode in range(4)]
    assert torch.equal(draws[2], prior.draw(100, seed=0, mode=2))
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], prior.draw(100, seed=1, mode=0))


def test_every_class_is_equally_likely() -> None:
    counts = sum(RandomPrior(classes=2).draw(10, seed=0, mode=mode) for mode in range(2000))
    assert isinstance(counts, torch.Tensor)
    assert (counts - 400).abs().max() < 100


def test_a_weight_of_numpy_is_a_number() -> None:
    weight: Any = np.float32(6)
    assert RandomPrior(weight=weight).draw(4, seed=0, mode=0).sum() == 12


def test_more_classes_than_there_are_means_all() -> None:
    assert RandomPrior(classes=9).draw(3, seed=0, mode=0).tolist() == [1, 1, 1]


def test_the_loss_is_cross_entropy_plus_the_weighted_one() -> None:
    """L = CE + E, each a mean over the batch."""
    logits, labels = torch.randn(2, 7, 5), torch.randint(5, (7,))
    eta = torch.stack([RandomPrior(weight=3.0).draw(5, 0, mode) for mode in range(2)])
    for mode in range(2):
        ce = F.cross_entropy(logits[mode], labels)
        perturbation = F.cross_entropy(logits[mode], labels, eta[mode], reduction="sum") / 7
        torch.testing.assert_close(abnn_loss(logits, labels, eta)[mode], ce + perturbation)


def test_without_a_prior_it_is_cross_entropy() -> None:
    logits, labels = torch.randn(1, 7, 5, 3, 2), torch.randint(5, (7, 3, 2))
    loss = abnn_loss(logits, labels, torch.zeros(1, 5))[0]
    torch.testing.assert_close(loss, F.cross_entropy(logits[0], labels))


@pytest.mark.parametrize("ignore_index", [-100, 255])
def test_ignored_labels_do_not_count(ignore_index: int) -> None:
    logits, labels, eta = torch.randn(2, 7, 5), torch.randint(5, (7,)), torch.rand(2, 5)
    void = torch.cat([labels, torch.tensor([ignore_index] * 3)])
    more = torch.cat([logits, torch.randn(2, 3, 5)], 1)
    expected = abnn_loss(logits, labels, eta)
    torch.testing.assert_close(abnn_loss(more, void, eta, ignore_index), expected)
    nothing = torch.full((7,), ignore_index)
    assert abnn_loss(logits, nothing, eta, ignore_index).tolist() == [0, 0]


def test_half_precision_logits_are_widened() -> None:
    loss = abnn_loss(torch.randn(1, 4, 3).bfloat16(), torch.tensor([0, 1, 2, 0]), torch.zeros(1, 3))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    "arguments",
    [{"classes": -1}, {"classes": "all"}, {"weight": -1.0}, {"weight": math.nan}, {"weight": "6"}],
)
def test_impossible_priors_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="RandomPrior"):
        RandomPrior(**arguments)
