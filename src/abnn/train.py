"""Train a network, or one of the methods of `abnn.baselines`, from whatever weights it has."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from abnn.batches import device_of, length_of, split, to_device
from abnn.digests import digest
from abnn.draws import generator
from abnn.files import write
from abnn.order import random_states, randomness_kept, seed_all, seed_epoch, set_random_states
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.progress import Progress
from abnn.recipe import Recipe
from abnn.rundir import RunDirectory, TrainingState, data_digest
from abnn.steps import (
    autocast,
    check_epoch,
    check_labels,
    chosen_recipe,
    number_of_steps,
    optimizer_of,
)
from abnn.store import structure_of

WEIGHTS = "network.safetensors"
FROM_SCRATCH = Recipe(epochs=30, lr=0.1, schedule="polynomial", prior=None)


@runtime_checkable
class Trainable(Protocol):
    """What a module says of its own training, where it is more than the cross-entropy of logits."""

    fit_seconds: float | None

    def training_loss(self, inputs: Inputs, labels: Tensor, ignore_index: int) -> Tensor:
        """The mean loss of a batch."""

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """What is trained, in groups as `torch.optim` takes them."""

    def after_step(self, step: int, steps: int) -> None:
        """What follows a step of the optimiser; steps are counted from 1."""

    def after_training(self, batches: Iterable[Inputs]) -> None:
        """What follows the last step; `batches` goes through the training data once more."""

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to a directory."""


@dataclass(frozen=True, eq=False)
class TrainResult:
    """What a training did.

    Args:
        recipe: its hyper-parameters.
        losses: of every step, `[steps]`.
        seconds: how long it took.

    >>> print(TrainResult(Recipe(), torch.tensor([2.0, 1.0, 0.5]), seconds=1.0))
    3 steps in 1 s; the loss went from 2.0000 to 0.5000.
    """

    recipe: Recipe
    losses: Tensor
    seconds: float

    def __str__(self) -> str:
        tail = self.losses[-max(1, len(self.losses) // 20) :].mean()
        return (
            f"{len(self.losses)} steps in {self.seconds:.0f} s; the loss went from "
            f"{self.losses[0]:.4f} to {tail:.4f}."
        )


def train(
    model: nn.Module,
    loader: Iterable[Any],
    recipe: str | PathLike[str] | Recipe | None = None,
    *,
    run: str | PathLike[str] | None = None,
    output: Output | None = None,
    class_dim: int = 1,
    ignore_index: int = -100,
    label: str = "train",
    progress: bool | None = None,
    checkpoint_seconds: float = 30.0,
    **overrides: Any,
) -> TrainResult:
    """Train all that a module has to be trained, in place, from the weights that it has.

    If anything goes wrong, it is left as it was before.

    Args:
        model: a network, whose loss is the cross-entropy of its logits; or a method of
            `abnn.baselines`, which says itself what its loss is.
        loader: batches `(x, y)`, `(x1, x2, ..., y)`, or mappings with "labels".
        recipe: a `Recipe`, a TOML file, or a name; what it says of modes, noise and priors is for
            `abnn.fit`. Default: 30 epochs of SGD, whose learning rate falls from 0.1 to 0.
        run: a directory that is written as the training goes. The same call resumes a training that
            was killed, and ends with the very same numbers.
        output, class_dim: where the logits of a network are, as of `abnn.convert`.
        ignore_index: label of examples or pixels that do not count.
        label: what the line of progress calls it.
        progress: show a line of progress; default: on a terminal.
        checkpoint_seconds: how often the run directory gets a checkpoint.
        overrides: values of the recipe to replace, as `lr=0.05`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> abnn.train(net, loader, epochs=2).losses.shape
    torch.Size([10])
    """
    chosen = chosen_recipe(FROM_SCRATCH if recipe is None else recipe, overrides)
    if not isinstance(model, nn.Module):
        raise TypeError(f"train takes a network, not a {type(model).__name__}.")
    groups = _groups(model)
    steps = number_of_steps(chosen, length_of(loader))
    directory = None
    if run is not None:
        settings = _settings(model, chosen, steps)
        directory = RunDirectory(run, settings, checkpoint_seconds)
    before = {name: tensor.clone() for name, tensor in _values(model).items()}
    was_training = [(part, part.training) for part in model.modules()]
    started = time.monotonic()
    loss = _Loss(model, output, class_dim, ignore_index)
    try:
        with randomness_kept(loader), torch.enable_grad():
            losses = _run(loss, groups, loader, chosen, steps, directory, label, progress)
    except BaseException:
        for name, tensor in _values(model).items():
            tensor.copy_(before[name])
        raise
    finally:
        for part, training in was_training:
            part.training = training
    seconds = time.monotonic() - started + (directory.seconds_before if directory else 0.0)
    result = TrainResult(chosen, losses, seconds)
    method = _trainable(model)
    if method is not None:
        method.fit_seconds = seconds
    if directory:
        directory.finish(_saver(model), losses.unsqueeze(1), str(result))
    return result


class _Loss:
    """The loss of a batch, which every module says of itself, or the cross-entropy."""

    def __init__(
        self, model: nn.Module, output: Output | None, class_dim: int, ignore_index: int
    ) -> None:
        self.model, self.output, self.class_dim = model, output, class_dim
        self.method, self.ignore_index = _trainable(model), ignore_index
        self.device = device_of(model) or torch.device("cpu")

    def __call__(self, inputs: Inputs, labels: Tensor) -> Tensor:
        if self.method is not None:
            return self.method.training_loss(inputs, labels, self.ignore_index)
        logits = logits_of(call(self.model, inputs), self.output, self.class_dim)
        return cross_entropy(logits, labels, self.ignore_index)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean cross-entropy over the labels that count, of logits `[B, K, ...]` that fit the labels.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100]))
    tensor(1.3863)
    """
    check_labels(labels, logits, ignore_index)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels, ignore_index=ignore_index)


def _run(
    loss_of: _Loss,
    groups: Sequence[dict[str, Any]],
    loader: Iterable[Any],
    recipe: Recipe,
    steps: int,
    directory: RunDirectory | None,
    label: str,
    progress: bool | None,
) -> Tensor:
    """All steps, or those that are still to do; the losses of all, `[steps]`."""
    model, method, device = loss_of.model, loss_of.method, loss_of.device
    length = length_of(loader)
    rates = [group.get("lr", recipe.lr) for group in groups]
    optimizer = optimizer_of(recipe, groups)
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")
    losses = torch.full((steps, 1), math.nan)
    state = TrainingState(_values(model), optimizer, scaler, losses)
    step, epoch, offset = directory.resume(state) if directory else (0, 0, 0)
    model.train()
    with Progress(steps, label, progress) as bar:
        while step < steps:
            number = 0
            for number, batch in _batches(loader, recipe, epoch):
                if number <= offset:  # done before the training was interrupted
                    if directory and number == offset:
                        directory.check_data(batch)
                    continue
                now = epoch + (number - 1) / length if length else 0.0
                part = recipe.lr_at(step, steps, now) / recipe.lr
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = part * rate
                inputs, labels = split(batch)
                inputs, labels = to_device(inputs, device), labels.to(device)
                with _randomness_of("train", recipe.seed, step):
                    with autocast(recipe, device):
                        loss = loss_of(inputs, labels)
                    _check_loss(loss, step, recipe)
                    optimizer.zero_grad()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    losses[step] = loss.detach()
                    step += 1
                    if method is not None:
                        method.after_step(step, steps)
                bar.update(step, f"loss {losses[step - 1].item():.4f}")
                if directory and directory.is_due(step == steps):
                    place = (step, epoch, number)
                    directory.checkpoint(state, place, [data_digest(batch)])
                if step == steps:
                    break
            else:
                check_epoch(number, epoch, step, steps, length)
                epoch, offset = epoch + 1, 0
    optimizer.zero_grad()
    if method is not None:
        with _randomness_of("train", recipe.seed, steps):
            batches = _batches(loader, recipe, epoch + 1)
            method.after_training(to_device(split(batch)[0], device) for _, batch in batches)
    return losses.squeeze(1)


def _batches(loader: Iterable[Any], recipe: Recipe, epoch: int) -> Iterator[tuple[int, Any]]:
    """The batches of an epoch, numbered from 1."""
    seed_epoch(loader, recipe.seed, epoch)
    yield from enumerate(loader, start=1)


@contextmanager
def _randomness_of(stream: str, seed: int, step: int) -> Iterator[None]:
    """Let what is random in a step depend on the step alone, and the loader's randomness not."""
    states = random_states()
    seed_all(generator(stream, seed, step))
    try:
        yield
    finally:
        set_random_states(states)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """What the optimiser is to train, without what is frozen."""
    method = _trainable(model)
    found = method.parameter_groups() if method else [{"params": list(model.parameters())}]
    groups = [
        group | {"params": [p for p in group["params"] if p.requires_grad]} for group in found
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(
            f"The {type(model).__name__} has nothing to train: none of its parameters wants a "
            "gradient; call requires_grad_(True) on what is to be trained."
        )
    return groups


def _trainable(model: object) -> Trainable | None:
    return model if isinstance(model, Trainable) else None


def _values(model: nn.Module) -> dict[str, Tensor]:
    """All that a training changes, each once: parameters and buffers that are saved."""
    values = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and (tensor.data_ptr(), tensor.shape) not in seen:
            values[name] = tensor
            if tensor.numel():
                seen.add((tensor.data_ptr(), tensor.shape))
    return values


def _settings(model: nn.Module, recipe: Recipe, steps: int) -> dict[str, Any]:
    arguments = getattr(model, "arguments", {})
    settings = {
        "recipe": recipe.to_dict(),
        "steps": steps,
        "method": type(model).__name__,
        "arguments": arguments if isinstance(arguments, dict) else {},
        "network": structure_of(model),
        "start": digest(_values(model)),
    }
    # What was written before is compared as JSON, which has no tuples.
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _saver(model: nn.Module) -> Callable[[Path], object]:
    method = _trainable(model)
    if method is not None:
        return method.save

    def save(folder: Path) -> None:
        weights = {name: tensor.contiguous() for name, tensor in _values(model).items()}
        write(folder / WEIGHTS, safetensors.torch.save(weights))

    return save


def _check_loss(loss: Tensor, step: int, recipe: Recipe) -> None:
    if loss.ndim or not bool(loss.isfinite()):
        raise FloatingPointError(
            f"The loss is {loss.detach().cpu().tolist()} at step {step}; lower the learning rate "
            f"(now {recipe.lr:g}), check the inputs for NaN, or turn off amp=. The network is as "
            "it was before."
        )
