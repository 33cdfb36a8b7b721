"""What a training achieved: its losses, and figures of held-out data on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from abnn.evaluate import evaluate
from abnn.recipe import Recipe

# The table of a training has a row for every step: its loss, and where there is a validation after
# it, the figures of that; else NaN.
COLUMNS = ("loss", "nll", "accuracy", "ece")


class Validated(NamedTuple):
    """What a network achieves on validation data after so many steps; two of them in percent."""

    steps: int
    nll: float
    accuracy: float
    ece: float


@dataclass(frozen=True, eq=False)
class TrainResult:
    """What a training did.

    Args:
        recipe: its hyper-parameters.
        losses: of every step, `[steps]`.
        seconds: how long it took.
        validation: figures of validation data, if there was any, in the order of the steps.

    >>> print(TrainResult(Recipe(), torch.tensor([2.0, 1.0, 0.5]), seconds=1.0))
    3 steps in 1 s; the loss went from 2.0000 to 0.5000.
    """

    recipe: Recipe
    losses: Tensor
    seconds: float
    validation: tuple[Validated, ...] = ()

    def __str__(self) -> str:
        tail = self.losses[-max(1, len(self.losses) // 20) :].mean()
        steps = "1 step" if len(self.losses) == 1 else f"{len(self.losses)} steps"
        text = (
            f"{steps} in {self.seconds:.0f} s; the loss went from "
            f"{self.losses[0]:.4f} to {tail:.4f}."
        )
        if self.validation:
            _, nll, accuracy, ece = self.validation[-1]
            text += (
                f" On validation data: NLL {nll:.4f}, accuracy {accuracy:.2f} %, ECE {ece:.2f} %."
            )
        return text


class Validation:
    """Measures on held-out data what is being trained, as it is used: in evaluation mode.

    Args:
        predictor: makes what predicts.
        ignore_index: label of what does not count.
        loader: the held-out batches; None: nothing is measured.
    """

    def __init__(
        self, predictor: Callable[[], Any], ignore_index: int, loader: Iterable[Any] | None
    ) -> None:
        self.predictor, self.ignore_index, self.loader = predictor, ignore_index, loader
        self.columns = COLUMNS if loader is not None else COLUMNS[:1]

    def into(self, row: Tensor) -> None:
        """Write the figures to a row of the table."""
        if self.loader is None:
            return
        found = evaluate(
            self.predictor(), self.loader, ignore_index=self.ignore_index, progress=False
        )
        row[1:] = torch.tensor([found.nll, found.accuracy, found.ece])


def validated(table: Tensor) -> tuple[Validated, ...]:
    """The steps after which there was a validation."""
    done = (~table[:, 1].isnan()).nonzero().flatten().tolist()
    return tuple(Validated(step + 1, *table[step, 1:].tolist()) for step in done)
