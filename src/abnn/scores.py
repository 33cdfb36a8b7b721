"""How unusual an input looks: one function a score, of any `Prediction`.

All are higher for what is more out-of-distribution (OOD) or more likely to be wrong. The paper's
own score is the maximum probability.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from abnn.prediction import Prediction


def max_probability(prediction: Prediction) -> Tensor:
    """One minus the probability of the predicted class, `[B, ...]`.

    >>> max_probability(Prediction.from_logits(torch.tensor([[[0.0, 0.0]]])))
    tensor([0.5000])
    """
    return 1 - prediction.confidence


def max_logit(prediction: Prediction) -> Tensor:
    """Minus the largest logit, averaged over the members, `[B, ...]`.

    >>> max_logit(Prediction.from_logits(torch.tensor([[[3.0, 0.0]]])))
    tensor([-3.])
    """
    return -prediction.max_logit


def energy(prediction: Prediction) -> Tensor:
    """Minus the log-sum-exp of the logits, averaged over the members, `[B, ...]`.

    >>> energy(Prediction.from_logits(torch.tensor([[[0.0, 0.0]]])))
    tensor([-0.6931])
    """
    return prediction.energy


def entropy(prediction: Prediction) -> Tensor:
    """Entropy of the mean probabilities, the total uncertainty, `[B, ...]`.

    >>> entropy(Prediction.from_logits(torch.tensor([[[0.0, 0.0]]])))
    tensor([0.6931])
    """
    return prediction.total


def mutual_information(prediction: Prediction) -> Tensor:
    """What the members disagree about, the epistemic uncertainty, `[B, ...]`.

    >>> mutual_information(Prediction.from_logits(torch.tensor([[[0.0, 0.0]]])))
    tensor([0.])
    """
    return prediction.epistemic


def expected_entropy(prediction: Prediction) -> Tensor:
    """Mean entropy of the members, the aleatoric uncertainty, `[B, ...]`.

    >>> expected_entropy(Prediction.from_logits(torch.tensor([[[0.0, 0.0]]])))
    tensor([0.6931])
    """
    return prediction.aleatoric


def variation_ratio(prediction: Prediction) -> Tensor:
    """Share of the members that do not vote for the most voted class, `[B, ...]`.

    >>> members = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    >>> variation_ratio(Prediction.from_logits(members))
    tensor([0.2500])
    """
    return prediction.variation_ratio


# By the names that evaluations use.
SCORES: dict[str, Callable[[Prediction], Tensor]] = {
    "msp": max_probability,
    "entropy": entropy,
    "epistemic": mutual_information,
    "aleatoric": expected_entropy,
    "max_logit": max_logit,
    "energy": energy,
    "variation_ratio": variation_ratio,
}
