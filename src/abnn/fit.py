"""Fit all modes of an ABNN: the paper's Algorithm 1.

Every mode starts from the same checkpoint, draws its own class prior, and trains its gamma and
beta alone. Modes do not touch each other, so several train in one pass over the data, and the
result is the same as one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from abnn.artifact import bank_tensors, load_banks
from abnn.batches import device_of, split, to_device
from abnn.distributed import World, world
from abnn.draws import Draw
from abnn.fitplan import FitPlan, Split
from abnn.model import ABNN
from abnn.norm import BayesNorm
from abnn.order import randomness_kept, seed_epoch
from abnn.outputs import Inputs
from abnn.prior import abnn_loss
from abnn.progress import Progress
from abnn.recipe import Recipe
from abnn.rundir import Place, RunDirectory, TrainingState, data_digest
from abnn.shares import check_pieces
from abnn.steps import autocast, check_epoch, check_labels, chosen_recipe, optimizer_of
from abnn.syncnorm import example_statistics
from abnn.validation import FitResult, validate_all, validate_original


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
    snapshots: int = 0,
    split: Split | None = None,
    config: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
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
        snapshots: how many times the modes are kept on their way, in the run directory: evenly
            over the steps, the last at the end, and the start besides. A fit of fewer steps keeps
            every step. No other number of the fit depends on it, but a fit must be resumed with
            the same. `abnn.snapshots.snapshots_of` reads them, `abnn.trajectory` draws them.
        split: what the processes of torchrun share: "data", every batch, or "modes"; default:
            the modes where every process gets as many, else the data. See docs/scale.md.
        config: plain values that the run directory is to tell, such as the name of the data.
        tensorboard: write event files for TensorBoard to the run directory.
        overrides: values of the recipe to replace, as `lr=0.05`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> bnn = abnn.convert(net, modes=2)
    >>> result = abnn.fit(bnn, loader, epochs=1, lr=0.05)
    >>> result.losses.shape  # steps, modes
    torch.Size([5, 2])
    """
    with world().joined(device_of(bnn)) as everyone, ExitStack() as stack:
        with everyone.meeting():
            chosen = chosen_recipe(recipe, overrides)
            plan = FitPlan(bnn, loader, chosen, ignore_index, everyone, split)
            directory = plan.directory(run, checkpoint_seconds, snapshots, config, tensorboard)
        if directory:
            stack.callback(directory.close)
        plan.agree(directory, validation)
        progress = progress if everyone.rank == 0 else False
        check = (validation, ignore_index, progress, everyone)
        original = validate_original(bnn, *check)
        started = time.monotonic()
        losses = _fit_modes(plan, directory, progress)
        seconds = time.monotonic() - started + (directory.seconds_before if directory else 0.0)
        whole, modes = validate_all(bnn, *check)
        result = FitResult(chosen, losses, everyone.gather(seconds)[0], original, whole, modes)
        bnn.fitted = result.provenance()
        with everyone.meeting():
            if directory:
                directory.finish(bnn.save, result.losses, str(result))
    return result


def _fit_modes(plan: FitPlan, directory: RunDirectory | None, progress: bool | None) -> Tensor:
    """Fit all modes, those of other processes too; the losses of all, `[steps, M]`."""
    bnn, was_training = plan.bnn, plan.bnn.training
    before = {name: tensor.clone() for name, tensor in bank_tensors(bnn).items()}
    losses = torch.full((plan.steps, bnn.modes), math.nan)
    try:
        with ExitStack() as stack:
            for context in (randomness_kept(plan.loader), _gradients_watched(bnn)):
                stack.enter_context(context)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(plan.whole_batch.attached())
            # Processes with modes of their own meet at the end; those that share batches, always.
            owners = stack.enter_context(plan.owners())
            with owners.meeting():
                for group in plan.groups:
                    _fit_group(plan, group, losses, directory, progress)
            _collect(plan, losses, owners)
            if directory:
                directory.collect(plan.everyone, plan.all_groups)
    except BaseException:
        load_banks(bnn, before)
        raise
    finally:
        bnn.train(was_training)
    return losses


def _collect(plan: FitPlan, losses: Tensor, owners: World) -> None:
    """Give every process the modes that others have fitted."""
    banks, own = bank_tensors(plan.bnn), slice(plan.own.start, plan.own.stop)
    rows = {name: bank[own].cpu() for name, bank in banks.items()}
    for theirs, tensors, lost in owners.gather((own, rows, losses[:, own].clone())):
        losses[:, theirs] = lost
        for name, tensor in tensors.items():
            banks[name][theirs].copy_(tensor)


@dataclass(frozen=True)
class _Batch:
    """A batch, or a process's share of it, on the device.

    Args:
        raw: what the loader gave.
        inputs, labels: of this share.
        number: which batch of the epoch, from 1.
        first: rows of the batch that other processes have before these.
        part: this share of all rows.
        count: how many labels of the whole batch count; None if this is the whole batch.
        at_once: how many modes run together.
        due: whether a checkpoint follows.
    """

    raw: Any
    inputs: Inputs
    labels: Tensor
    number: int
    first: int
    part: float
    count: int | None
    at_once: int
    due: bool


def _fit_group(
    plan: FitPlan,
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
    optimizer = optimizer_of(recipe, rows)
    scaler = torch.amp.GradScaler(plan.device.type, enabled=recipe.amp == "fp16")
    step, epoch, offset = 0, 0, 0
    state = TrainingState(bank_tensors(bnn), optimizer, scaler, losses, group)
    if directory:
        step, epoch, offset = directory.resume(state)
        directory.snapshot(bnn, group, step)
    label = "fit" if len(group) == bnn.modes else f"fit modes {group.start}-{group.stop - 1}"
    bnn.train()
    with Progress(steps, label, progress) as bar:
        while step < steps:
            for batch in _batches(plan, group, (step, epoch, offset), directory):
                now = epoch + (batch.number - 1) / plan.epoch_length if plan.epoch_length else 0.0
                for param_group in optimizer.param_groups:
                    param_group["lr"] = recipe.lr_at(step, steps, now)
                for start in range(group.start, group.stop, batch.at_once):
                    some = range(start, min(start + batch.at_once, group.stop))
                    loss, total = _loss(plan, some, batch, step)
                    _check_loss(total, some, step, recipe)
                    grads = torch.autograd.grad(scaler.scale(loss.sum()), banks, allow_unused=True)
                    _take(rows, grads, group, some)
                    losses[step, some.start : some.stop] = total
                _add_up(plan, group, rows, batch.part)
                scaler.step(optimizer)
                scaler.update()
                mean = losses[step, group.start : group.stop].mean().item()
                step += 1
                bar.update(step, f"loss {mean:.4f}")
                if directory:
                    directory.snapshot(bnn, group, step)
                if directory and batch.due:
                    digests = plan.world.gather(data_digest(batch.raw))
                    directory.checkpoint(state, (step, epoch, batch.number), digests)
                if step == steps:
                    return
            epoch, offset = epoch + 1, 0


def _batches(
    plan: FitPlan, group: range, place: Place, directory: RunDirectory | None
) -> Iterator[_Batch]:
    """The batches of an epoch that are still to do; processes that share them agree on each."""
    step, epoch, offset = place
    seed_epoch(plan.loader, plan.recipe.seed, epoch)
    pieces, number = iter(plan.pieces), 0
    while True:
        with plan.world.meeting(6) as meeting:
            piece = next(pieces, None)
            while piece is not None and number < offset:  # done before the fit was interrupted
                number += 1
                if directory and number == offset:
                    directory.check_data(piece[0])
                piece = next(pieces, None)
            number += 1
            if piece is not None:
                inputs, labels = split(piece[0])
                inputs, labels = to_device(inputs, plan.device), labels.to(plan.device)
                counted = int((labels != plan.ignore_index).sum()) if plan.shares_data else 0
                exchanges = plan.shares_data and bool(plan.whole_batch.layers)
                at_once = plan.bnn._sampler().at_once(inputs, len(group), exchanges)
                due = directory is not None and directory.is_due(step + 1 == plan.steps)
                meeting.say(1, len(labels), counted, piece[1], at_once, due)
        given, lengths, counts, checksums, at_onces, due_there = meeting.heard.T
        check_pieces(given, checksums, epoch, number)
        if piece is None:
            check_epoch(number - 1, epoch, step, plan.steps, plan.epoch_length)
            return
        first, rows = int(lengths[: plan.world.rank].sum()), int(lengths.sum())
        plan.check_rows(rows)
        count = int(counts.sum()) if plan.shares_data else None
        part, due = len(labels) / rows, bool(due_there[0])
        together = int(at_onces.min())  # all processes must run the network alike
        yield _Batch(piece[0], inputs, labels, number, first, part, count, together, due)
        step += 1


def _loss(plan: FitPlan, group: range, batch: _Batch, step: int) -> tuple[Tensor, Tensor]:
    """The loss of every mode: this process's part of it, and that of the whole batch."""
    share = (batch.first, len(batch.labels)) if plan.shares_data else None
    draws = [Draw(plan.recipe.seed, mode, step, "fit", share) for mode in group]
    sampler = plan.bnn._sampler()
    with autocast(plan.recipe, plan.device):
        logits = plan.whole_batch.run(lambda: sampler.training_logits(batch.inputs, draws))
    with plan.world.meeting(len(group)) as meeting:
        check_labels(batch.labels, logits[0], plan.ignore_index)
        eta = plan.eta(group, logits.shape[2])
        loss = abnn_loss(logits, batch.labels, eta, plan.ignore_index, batch.count)
        meeting.say(*loss.tolist())
    return loss, meeting.heard.sum(0).float()


def _take(
    rows: list[nn.Parameter], grads: Sequence[Tensor | None], group: range, some: range
) -> None:
    """Keep the gradients of some of the modes of a group."""
    for row, grad in zip(rows, grads, strict=True):
        if some.start == group.start:  # the first of a step: a row without a gradient has none
            row.grad = None if grad is None else torch.zeros_like(row)
        if row.grad is not None and grad is not None:
            own = slice(some.start - group.start, some.stop - group.start)
            row.grad[own] = grad[some.start : some.stop]


def _add_up(plan: FitPlan, group: range, rows: list[nn.Parameter], part: float) -> None:
    """Make the gradients those of the whole batch, where processes have a part of it each."""
    if not plan.shares_data:
        return
    grads = [row.grad for row in rows if row.grad is not None]
    statistics = example_statistics(plan.bnn.bayes_layers.values(), group)
    tensors = [*grads, *(part * statistic for statistic in statistics)]
    flat = plan.world.sum_(torch.cat([tensor.flatten() for tensor in tensors]))
    pieces = flat.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip([*grads, *statistics], pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


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


def _check_loss(loss: Tensor, group: range, step: int, recipe: Recipe) -> None:
    if not bool(loss.isfinite().all()):
        mode = group[int((~loss.isfinite()).nonzero()[0])]
        raise FloatingPointError(
            f"The loss of mode {mode} is {loss[mode - group.start].item()} at step {step}; lower "
            f"the learning rate (now {recipe.lr:g}), check the inputs for NaN, or turn off amp=. "
            "The modes are as they were before the fit."
        )
