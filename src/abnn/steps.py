"""What every training has: its recipe, steps and optimiser, and what can be wrong with a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from abnn.recipe import Recipe


def chosen_recipe(
    recipe: str | PathLike[str] | Recipe | None, overrides: Mapping[str, Any]
) -> Recipe:
    """A recipe however it is given, with some of its values replaced.

    >>> chosen_recipe("cifar10-resnet50", {"lr": 0.1}).lr
    0.1
    """
    chosen = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe) if recipe else Recipe()
    return chosen.with_(**overrides)


def number_of_steps(recipe: Recipe, epoch_length: int | None) -> int:
    """How many steps a training has; `epoch_length` is the number of batches, if it is known.

    >>> number_of_steps(Recipe(epochs=0.5), 10)
    5
    """
    if epoch_length == 0:
        raise ValueError("The training loader is empty: there is nothing to fit to.")
    if epoch_length is None and (recipe.steps is None or recipe.schedule == "multistep"):
        raise ValueError(
            "The training loader has no length, so epochs can't be counted; pass steps= and a "
            "schedule without milestones."
        )
    if recipe.steps is not None:
        return recipe.steps
    assert epoch_length is not None
    return max(1, round(recipe.epochs * epoch_length))


def lr_of_step(recipe: Recipe, step: int, steps: int, epoch_length: int | None) -> float:
    """The learning rate of a step, counted from 0; `epoch_length` as of `number_of_steps`.

    >>> halved = Recipe(lr=1.0, schedule="multistep", milestones=[5], lr_factor=0.5)
    >>> lr_of_step(halved, 49, 100, 10), lr_of_step(halved, 50, 100, 10)
    (1.0, 0.5)
    """
    epoch, batch = divmod(step, epoch_length) if epoch_length else (0, 0)
    return recipe.lr_at(step, steps, epoch + batch / epoch_length if epoch_length else 0.0)


def optimizer_of(recipe: Recipe, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimiser of a recipe, for parameters or groups of them.

    >>> optimizer_of(Recipe(optimizer="adamw"), nn.Linear(2, 2).parameters()).defaults["lr"]
    0.0057
    """
    if recipe.optimizer == "adamw":
        betas = (recipe.momentum, 0.999)
        return torch.optim.AdamW(parameters, recipe.lr, betas, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        parameters,
        recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov,
    )


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    """Mixed precision, where the recipe asks for it."""
    dtype = torch.float16 if recipe.amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=recipe.amp is not None)


def check_labels(labels: Tensor, logits: Tensor, ignore_index: int) -> None:
    """Refuse labels that the logits `[B, K, ...]` have no class or no place for.

    Labels are class indices `[B, ...]`, or probabilities of the classes `[B, K, ...]`.
    """
    if labels.is_floating_point():
        _check_probabilities(labels, logits)
        return
    expected, K = (logits.shape[0], *logits.shape[2:]), logits.shape[1]
    if tuple(labels.shape) != expected:
        raise ValueError(
            f"The labels have shape {tuple(labels.shape)}, but the logits ask for {expected}; "
            "check the loader, class_dim= and output=."
        )
    counted = labels[labels != ignore_index]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < K:
        raise ValueError(
            f"Labels go from {int(counted.min())} to {int(counted.max())}, but the network has "
            f"{K} classes, 0 to {K - 1}; map the labels, or mark the others with ignore_index=."
        )


def _check_probabilities(labels: Tensor, logits: Tensor) -> None:
    if labels.shape != logits.shape:
        raise ValueError(
            f"The labels are probabilities of the shape {tuple(labels.shape)}, but the logits have "
            f"the shape {tuple(logits.shape)}; give one for every class, or class indices "
            "(integers)."
        )
    sums = labels.float().sum(1)
    # Half precision keeps three digits.
    if not bool((labels >= 0).all() & ((sums - 1).abs() < 1e-2).all()):
        raise ValueError(
            f"The labels are floats, but no probabilities: they go from {labels.min():.3g} to "
            f"{labels.max():.3g}, and the sums over the classes from {sums.min():.3g} to "
            f"{sums.max():.3g}; normalise them, or give class indices (integers)."
        )


def check_epoch(seen: int, epoch: int, step: int, steps: int, length: int | None) -> None:
    """Refuse a loader that gave other batches than it said."""
    if seen == 0:
        raise ValueError(
            "The training loader is empty: there is nothing to fit to."
            if epoch == 0
            else f"The training loader gave no batch in epoch {epoch}, after {step} of {steps} "
            "steps; pass a loader that can be iterated again, not a generator."
        )
    if length is not None and seen != length:
        raise ValueError(
            f"The training loader has length {length} but gave {seen} batches; fix its length, or "
            "pass steps=."
        )
