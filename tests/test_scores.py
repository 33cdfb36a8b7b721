"""Scores of predictions against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from abnn import scores
from abnn.prediction import Prediction


def members(seed: int = 0) -> Tensor:
    return 2 * torch.randn(6, 9, 4, generator=torch.Generator().manual_seed(seed)).double()


def test_every_score_is_its_formula() -> None:
    logits = members()
    p = logits.softmax(2)
    entropies = -(p * p.log()).sum(2)
    mean = p.mean(0)
    total = -(mean * mean.log()).sum(1)
    votes = torch.nn.functional.one_hot(logits.argmax(2), 4).sum(0)
    expected = {
        "msp": 1 - mean.amax(1),
        "entropy": total,
        "epistemic": total - entropies.mean(0),
        "aleatoric": entropies.mean(0),
        "max_logit": -logits.amax(2).mean(0),
        "energy": -logits.logsumexp(2).mean(0),
        "variation_ratio": 1 - votes.amax(1) / 6,
    }
    prediction = Prediction.from_logits(logits)
    assert scores.SCORES.keys() == expected.keys()
    for name, score in scores.SCORES.items():
        torch.testing.assert_close(score(prediction).double(), expected[name].double())


@pytest.mark.parametrize("name", scores.SCORES)
def test_a_score_has_a_value_for_every_pixel(name: str) -> None:
    prediction = Prediction.from_logits(torch.randn(3, 2, 5, 4, 6))
    assert scores.SCORES[name](prediction).shape == (2, 4, 6)
