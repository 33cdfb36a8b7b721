"""Fit all modes of an ABNN: the paper's Algorithm 1.

Every mode starts from the same checkpoint, draws its own class prior, and trains its gamma and
beta alone. Modes do not touch each other, so several train in one pass over the data, and the
result is the same as one after the other.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from abnn.artifact import bank_tensors, load_banks
from abnn.batches import device_of, split, to_device
from abnn.draws import Draw, generator
from abnn.model import ABNN
from abnn.norm import BayesNorm
from abnn.prior import abnn_loss
from abnn.progress import Progress
from abnn.recipe import Recipe
from abnn.rundir import GroupState, RunDirectory
from abnn.validation import FitResult, validate, validate_original


def fit(
    bnn: ABNN,
    loader: Iterable[Any],
    recipe: str | PathLike[str] | Recipe | None = None,
    *,
    validation: Iterable[Any] | None = None,
    run: str | PathLike[str] | None = None,
    ignore_index: int = -100,
    progress: bool | None = None,
    checkpoint_seconds: float = 30.0,
    **overrides: Any,
) -> FitResult:
    """Fine-tune gamma and beta of every mode, each under a random class prior of its own.

    Nothing else is trained. If anything goes wrong the modes are left as they were before.

    Args:
        bnn: what `abnn.convert` made.
        loader: batches `(x, y)`, `(x1, x2, ..., y)`, or mappings with "labels".
        recipe: a recipe of the paper by name, a TOML file, or a `Recipe`.
        validation: held-out batches; the result then tells NLL, accuracy and ECE before and
            after, for every mode and for all together.
        run: a directory that is written as the fit goes. The same call resumes a fit that was
            killed, and ends with the very same numbers.
        ignore_index: label of examples or pixels that do not count.
        progress: show a line of progress; default: on a terminal.
        checkpoint_seconds: how often the run directory gets a checkpoint.
        overrides: values of the recipe to replace, as `lr=0.05`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> bnn = abnn.convert(net, modes=2)
    >>> result = abnn.fit(bnn, loader, epochs=1, lr=0.05)
    >>> result.losses.shape  # steps, modes
    torch.Size([5, 2])
    """
    chosen = _recipe(recipe, overrides)
    _check_arguments(bnn, loader, chosen)
    plan = _Plan(bnn, loader, chosen, ignore_index)
    before = {name: tensor.clone() for name, tensor in bank_tensors(bnn).items()}
    directory = RunDirectory(run, bnn, chosen, plan.steps, checkpoint_seconds) if run else None
    original = validate_original(bnn, validation, ignore_index, progress)
    started, was_training = time.monotonic(), bnn.training
    losses = torch.full((plan.steps, bnn.modes), math.nan)
    try:
        with _global_randomness_kept(loader), _gradients_watched(bnn), torch.enable_grad():
            for group in plan.groups:
                _fit_group(plan, group, losses, directory, progress)
    except BaseException:
        load_banks(bnn, before)
        raise
    finally:
        bnn.train(was_training)
    seconds = time.monotonic() - started + (directory.seconds_before if directory else 0.0)
    result = FitResult(
        recipe=chosen,
        losses=losses,
        seconds=seconds,
        original=original,
        whole=validate(bnn, validation, ignore_index, progress),
        modes=tuple(
            validate(bnn, validation, ignore_index, progress, mode) for mode in range(bnn.modes)
        ),
    )
    bnn.fitted = result.provenance()
    if directory:
        directory.finish(bnn, result)
    return result


class _Plan:
    """What does not change during a fit: data, number of steps, groups of modes, priors."""

    def __init__(self, bnn: ABNN, loader: Iterable[Any], recipe: Recipe, ignore_index: int) -> None:
        self.bnn, self.loader, self.recipe, self.ignore_index = bnn, loader, recipe, ignore_index
        self.epoch_length = len(loader) if isinstance(loader, Sized) else None
        self.steps = _steps(recipe, self.epoch_length)
        self.device = device_of(bnn) or torch.device("cpu")
        k = min(recipe.modes_at_once or bnn.modes, bnn.modes)
        self.groups = [range(i, min(i + k, bnn.modes)) for i in range(0, bnn.modes, k)]
        self.batch_statistics = [
            name
            for name, layer in bnn.bayes_layers.items()
            if layer.bank.mean is not None and layer.bank.form.family == "batch"
        ]
        _check_last_batch(loader, self.batch_statistics)

    def eta(self, group: range, classes: int) -> Tensor:
        """The class weights of the random prior of every mode in a group, `[S, K]`."""
        prior, seed = self.recipe.prior, self.recipe.seed
        if prior is None:
            return torch.zeros(len(group), classes, device=self.device)
        return torch.stack([prior.draw(classes, seed, mode) for mode in group]).to(self.device)


def _fit_group(
    plan: _Plan,
    group: range,
    losses: Tensor,
    directory: RunDirectory | None,
    progress: bool | None,
) -> None:
    """Train some modes in one pass over the data."""
    bnn, recipe, steps = plan.bnn, plan.recipe, plan.steps
    banks = list(bnn.trainable_parameters())
    # The optimiser sees only the rows of this group, which are views of the banks' memory:
    # weight decay and momentum never reach another mode.
    rows = [nn.Parameter(bank.data[group.start : group.stop]) for bank in banks]
    optimizer = _optimizer(recipe, rows)
    scaler = torch.amp.GradScaler(plan.device.type, enabled=recipe.amp == "fp16")
    step, epoch, offset = 0, 0, 0
    state = GroupState(bnn, group, optimizer, scaler, losses)
    if directory:
        step, epoch, offset = directory.resume(state)
    label = "fit" if len(plan.groups) == 1 else f"fit modes {group.start}-{group.stop - 1}"
    bnn.train()
    with Progress(steps, label, progress) as bar:
        while step < steps:
            _seed_epoch(plan.loader, recipe.seed, epoch)
            seen = 0
            for batch in plan.loader:
                seen += 1
                if seen <= offset:  # done before the fit was interrupted
                    if directory and seen == offset:
                        directory.check_data(batch)
                    continue
                inputs, labels = split(batch)
                labels = labels.to(plan.device)
                _check_batch(plan, labels)
                now = epoch + (seen - 1) / plan.epoch_length if plan.epoch_length else 0.0
                for param_group in optimizer.param_groups:
                    param_group["lr"] = recipe.lr_at(step, steps, now)
                draws = [Draw(recipe.seed, mode, step, "fit") for mode in group]
                with _autocast(recipe, plan.device):
                    logits = bnn.logits(to_device(inputs, plan.device), draws)
                _check_labels(labels, logits, plan.ignore_index)
                eta = plan.eta(group, logits.shape[2])
                loss = abnn_loss(logits, labels, eta, plan.ignore_index)
                _check_loss(loss, group, step, recipe)
                scaled = scaler.scale(loss.sum())
                grads = torch.autograd.grad(scaled, banks, allow_unused=True)
                for row, grad in zip(rows, grads, strict=True):
                    row.grad = None if grad is None else grad[group.start : group.stop]
                scaler.step(optimizer)
                scaler.update()
                losses[step, group.start : group.stop] = loss.detach().cpu()
                step += 1
                bar.update(step, f"loss {loss.mean().item():.4f}")
                if directory:
                    directory.checkpoint(state, (step, epoch, seen), batch)
                if step == steps:
                    break
            else:
                _check_epoch(seen, epoch, step, steps, plan.epoch_length)
                epoch, offset = epoch + 1, 0


def _recipe(recipe: str | PathLike[str] | Recipe | None, overrides: dict[str, Any]) -> Recipe:
    chosen = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe) if recipe else Recipe()
    return chosen.with_(**overrides)


def _optimizer(recipe: Recipe, rows: list[nn.Parameter]) -> torch.optim.Optimizer:
    if recipe.optimizer == "adamw":
        betas = (recipe.momentum, 0.999)
        return torch.optim.AdamW(rows, recipe.lr, betas, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        rows,
        recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov,
    )


def _autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    dtype = torch.float16 if recipe.amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=recipe.amp is not None)


# Data order and augmentation are a function of (seed, epoch), so that a resumed fit sees the same
# batches; the numbers of the noise never come from these generators.


def _seed_epoch(loader: Iterable[Any], seed: int, epoch: int) -> None:
    numbers = generator("data", seed, epoch)
    random.seed(int(numbers.integers(2**32)))
    np.random.seed(int(numbers.integers(2**32)))  # noqa: NPY002  (what augmentations use)
    torch.manual_seed(int(numbers.integers(2**32)))
    for own in _generators(loader):
        own.manual_seed(int(numbers.integers(2**32)))
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def _samplers(loader: Iterable[Any]) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler]
    return [s for s in (*found, getattr(batch_sampler, "sampler", None)) if s is not None]


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    owners = (loader, *_samplers(loader))
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


@contextmanager
def _global_randomness_kept(loader: Iterable[Any]) -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    own = [(g, g.get_state()) for g in _generators(loader)]
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        for g, state in own:
            g.set_state(state)


# What can be wrong, said where it is noticed


@contextmanager
def _gradients_watched(bnn: ABNN) -> Iterator[None]:
    """Refuse what would train a mode on wrong gradients, or on none, without a word."""

    def watch(name: str, layer: BayesNorm, _: Any) -> None:
        active = layer.bank.active
        if active is None:  # a backward pass calls it, when its draws are gone
            raise RuntimeError(
                f"The network runs {name!r} again in the backward pass (activation "
                "checkpointing), where it has no draw; turn that off, as by "
                "net.set_grad_checkpointing(False), and save memory by fit(..., modes_at_once=1)."
            )
        if active.weight.requires_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                f"The network runs {name!r} without gradients (torch.no_grad, or activation "
                "checkpointing that is reentrant), so its modes can't be trained; turn that off, "
                "or convert other norms only, by layers=."
            )

    with ExitStack() as stack:
        for name, layer in bnn.bayes_layers.items():
            stack.callback(layer.register_forward_pre_hook(partial(watch, name)).remove)
        yield


def _steps(recipe: Recipe, epoch_length: int | None) -> int:
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


def _check_arguments(bnn: ABNN, loader: Iterable[Any], recipe: Recipe) -> None:
    if not isinstance(bnn, ABNN):
        raise TypeError(f"fit takes what abnn.convert returns, not a {type(bnn).__name__}.")
    if not isinstance(loader, Iterable):
        raise TypeError(f"fit takes a loader of batches, not a {type(loader).__name__}.")
    if any(tensor.is_inference() for tensor in bnn.state_dict().values()):
        raise ValueError(
            "The network was made under torch.inference_mode(), so no gradient passes through it; "
            "build it and load its weights outside of that."
        )
    for name in ("alpha", "noise", "stats", "modes"):
        wanted, has = getattr(recipe, name), getattr(bnn, name)
        if wanted is not None and wanted != has:
            raise ValueError(
                f"The recipe wants {name}={wanted!r}, but the network was converted with "
                f"{name}={has!r}; convert it with {name}={wanted!r}, or pass fit(..., {name}="
                f"{has!r})."
            )


def _check_last_batch(loader: Iterable[Any], batch_statistics: list[str]) -> None:
    """A last batch of one would stop the fit at the end of the epoch: say so at its start."""
    size, data = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    if not batch_statistics or not isinstance(size, int) or not isinstance(data, Sized):
        return
    if not getattr(loader, "drop_last", False) and len(data) % size == 1:
        raise _batch_of_one(batch_statistics)


def _batch_of_one(batch_statistics: list[str]) -> ValueError:
    return ValueError(
        f"A batch of one example has no batch statistics, which {batch_statistics[0]!r} needs; "
        "use a larger batch size, DataLoader(..., drop_last=True), or convert with stats='frozen'."
    )


def _check_batch(plan: _Plan, labels: Tensor) -> None:
    if len(labels) == 1 and plan.batch_statistics:
        raise _batch_of_one(plan.batch_statistics)


def _check_labels(labels: Tensor, logits: Tensor, ignore_index: int) -> None:
    expected, K = (logits.shape[1], *logits.shape[3:]), logits.shape[2]
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


def _check_loss(loss: Tensor, group: range, step: int, recipe: Recipe) -> None:
    if not bool(loss.isfinite().all()):
        mode = group[int((~loss.isfinite()).nonzero()[0])]
        raise FloatingPointError(
            f"The loss of mode {mode} is {loss[mode - group.start].item()} at step {step}; lower "
            f"the learning rate (now {recipe.lr:g}), check the inputs for NaN, or turn off amp=. "
            "The modes are as they were before the fit."
        )


def _check_epoch(seen: int, epoch: int, step: int, steps: int, length: int | None) -> None:
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
