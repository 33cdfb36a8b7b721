"""What is kept of every example, so that any figure can be computed again from some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_TERMS = ("confidence", "correct", "log_likelihood", "squared_error")


@dataclass(frozen=True, eq=False)
class Examples:
    """What one method said of every example: the numbers that all figures are made of.

    Args:
        confidence: probability of the predicted class, `[n]`.
        correct: whether the predicted class is the label, `[n]`.
        log_likelihood: log-probability of the label, `[n]`: `abnn.metrics.log_likelihood`.
        squared_error: squared distance of the probabilities from the label, `[n]`:
            `abnn.metrics.squared_error`.
        scores: for each score, how out-of-distribution the examples look, `[n]`, higher is more so.
        ood: for each OOD dataset, the same scores of its examples, `[m]`.
        digest: anything that tells the examples and their order, such as a hash of the labels;
            `compare` checks that both methods have the same.

    >>> from abnn.metrics import log_likelihood, squared_error
    >>> p, y = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]]), torch.tensor([0, 1, 1])
    >>> likely, label = p.max(1)
    >>> said = Examples(likely, label == y, log_likelihood(p.log(), y), squared_error(p, y))
    >>> said.correct
    tensor([ True,  True, False])
    """

    confidence: Tensor
    correct: Tensor
    log_likelihood: Tensor
    squared_error: Tensor
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    ood: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    digest: str | None = None

    def __post_init__(self) -> None:
        terms = {name: _vector(name, getattr(self, name)) for name in _TERMS}
        scores = {name: _vector(f"score {name}", v) for name, v in self.scores.items()}
        ood = {
            dataset: {name: _vector(f"score {name} of {dataset}", v) for name, v in given.items()}
            for dataset, given in self.ood.items()
        }
        for name, value in {**terms, "scores": scores, "ood": ood}.items():
            object.__setattr__(self, name, value)
        _same_length("labelled data", terms | scores)
        for dataset, given in ood.items():
            _same_length(dataset, given)
            if missing := set(given) - set(scores):
                raise ValueError(
                    f"{dataset} has scores that the labelled data lack "
                    f"({', '.join(sorted(missing))}); give them in `scores`, too."
                )
        # Figures are named "ood/dataset/score/figure".
        if slashed := [name for name in scores if "/" in name]:
            raise ValueError(f"The name of the score {slashed[0]!r} has a slash; leave it out.")
        if ((self.confidence < 0) | (self.confidence > 1.001)).any():
            raise ValueError("A confidence is outside 0..1; give probabilities, not logits.")
        if not ((self.correct == 0) | (self.correct == 1)).all():
            raise ValueError("correct must hold True or False (1 or 0) for each example.")
        if (self.log_likelihood > 0.01).any():
            raise ValueError(
                "A log-likelihood is above 0; give logarithms of probabilities, not their negative."
            )
        if ((self.squared_error < 0) | (self.squared_error > 2.05)).any():
            raise ValueError(
                "A squared error is outside 0..2; give what abnn.metrics.squared_error returns."
            )


def _vector(name: str, values: Tensor) -> Tensor:
    values = torch.as_tensor(values).detach().cpu()
    if values.dim() != 1 or len(values) < 2:
        raise ValueError(
            f"{name} has shape {list(values.shape)}; give one number for each of at least 2 "
            "examples, since one alone tells nothing of the spread."
        )
    if values.isnan().any():
        raise ValueError(f"{name} contains NaN; check the predictions it is of.")
    return values


def _same_length(dataset: str, values: Mapping[str, Tensor]) -> None:
    lengths = {name: len(v) for name, v in values.items()}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{name}: {n}" for name, n in lengths.items()) or "none"
        raise ValueError(
            f"The {dataset} must have as many of each number as there are examples, but has "
            f"{found}."
        )
