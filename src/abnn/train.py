"""Train a network, or one of the methods of `abnn.baselines`, from whatever weights it has."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from abnn.batches import device_of
from abnn.digests import digest
from abnn.distributed import world
from abnn.files import write
from abnn.folding import channels_last
from abnn.journal import Journal, check_unwritten
from abnn.layout import keep_freed_memory, learns_channels_last
from abnn.order import randomness_kept
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.progress import Progress
from abnn.recipe import Recipe
from abnn.rundir import RunDirectory, TrainingState, data_digest
from abnn.steps import autocast, check_labels, chosen_recipe, optimizer_of
from abnn.store import structure_of
from abnn.trainplan import Batch, TrainPlan
from abnn.trainresult import COLUMNS, TrainResult, Validation, validated

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


def train(
    model: nn.Module,
    loader: Iterable[Any],
    recipe: str | PathLike[str] | Recipe | None = None,
    *,
    validation: Iterable[Any] | None = None,
    run: str | PathLike[str] | None = None,
    output: Output | None = None,
    class_dim: int = 1,
    ignore_index: int = -100,
    label: str = "train",
    progress: bool | None = None,
    checkpoint_seconds: float = 30.0,
    config: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
    **overrides: Any,
) -> TrainResult:
    """Train all that a module has to be trained, in place, from the weights that it has.

    If anything goes wrong, it is left as it was before. Under torchrun all processes share every
    batch, and start from the weights of process 0; see docs/training.md.

    Args:
        model: a network, whose loss is the cross-entropy of its logits; or a method of
            `abnn.baselines`, which says itself what its loss is.
        loader: batches `(x, y)`, `(x1, x2, ..., y)`, or mappings with "labels". Labels are class
            indices, or probabilities of the classes `[B, K, ...]`, as Mixup and CutMix give them.
        recipe: a `Recipe`, a TOML file, or a name; what it says of modes, noise and priors is for
            `abnn.fit`. Default: 30 epochs of SGD, whose learning rate falls from 0.1 to 0.
        validation: held-out batches, on which NLL, accuracy and ECE are measured after every epoch;
            of a method, and with a loader that has no length, once, at the end.
        run: a directory that is written as the training goes. The same call resumes a training that
            was killed, and ends with the very same numbers.
        output, class_dim: where the logits of a network are, as of `abnn.convert`.
        ignore_index: label of examples or pixels that do not count.
        label: what the line of progress calls it.
        progress: show a line of progress; default: on a terminal.
        checkpoint_seconds: how often the run directory gets a checkpoint.
        config: plain values that the run directory is to tell, such as the name of the data.
        tensorboard: write event files for TensorBoard to the run directory.
        overrides: values of the recipe to replace, as `lr=0.05`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> abnn.train(net, loader, epochs=2).losses.shape
    torch.Size([10])
    """
    with world().joined(device_of(model)) as everyone, ExitStack() as stack:
        with everyone.meeting():
            chosen = chosen_recipe(FROM_SCRATCH if recipe is None else recipe, overrides)
            if not isinstance(model, nn.Module):
                raise TypeError(f"train takes a network, not a {type(model).__name__}.")
            loss = _Loss(model, output, class_dim, ignore_index)
            check = Validation(loss.predictor, ignore_index, validation)
            groups = _groups(model)
            plan = TrainPlan(model, loader, chosen, ignore_index, everyone)
            same = _settings(model, plan)
        before = {name: tensor.clone() for name, tensor in _values(model).items()}
        was_training = [(part, part.training) for part in model.modules()]
        started, directory = time.monotonic(), None
        progress = progress if everyone.rank == 0 else False
        try:
            plan.agree(same | {"ignore_index": ignore_index, "run directory": run is not None})
            plan.take_from_first(_values(model))
            with everyone.meeting():
                directory = _directory(
                    run, model, plan, same, checkpoint_seconds, check.columns, config, tensorboard
                )
            if directory:
                stack.callback(directory.close)
                directory.share(everyone)
            with randomness_kept(loader), torch.enable_grad(), plan.whole_batch.attached():
                table = _run(loss, groups, plan, directory, check, label, progress)
        except BaseException:
            for name, tensor in _values(model).items():
                tensor.copy_(before[name])
            raise
        finally:
            for part, training in was_training:
                part.training = training
        seconds = time.monotonic() - started + (directory.seconds_before if directory else 0.0)
        result = TrainResult(
            chosen, table[:, 0].clone(), everyone.gather(seconds)[0], validated(table)
        )
        method = _trainable(model)
        if method is not None:
            method.fit_seconds = result.seconds
        with everyone.meeting():
            if directory:
                directory.finish(_saver(model), table[:, : len(check.columns)], str(result))
    return result


class _Loss:
    """The loss of a batch, which every module says of itself, or the cross-entropy."""

    def __init__(
        self, model: nn.Module, output: Output | None, class_dim: int, ignore_index: int
    ) -> None:
        self.model, self.output, self.class_dim = model, output, class_dim
        self.method, self.ignore_index = _trainable(model), ignore_index
        self.channels_last: bool | None = None

    def forward(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """All passes through the network: the logits, or the loss of a module that says it."""
        if self.channels_last is None:
            self.channels_last = learns_channels_last(
                self.model, lambda x: self._forward(x, labels), inputs
            )
        return self._forward(channels_last(inputs) if self.channels_last else inputs, labels)

    def _forward(self, inputs: Inputs, labels: Tensor) -> Tensor:
        if self.method is not None:
            return self.method.training_loss(inputs, labels, self.ignore_index)
        return logits_of(call(self.model, inputs), self.output, self.class_dim)

    def predictor(self) -> Any:
        """What predicts with the module as it is."""
        # Which trains methods by what is in here, and so can't be imported at the top.
        from abnn.baselines import Single

        return self.method or Single(self.model, output=self.output, class_dim=self.class_dim)

    def loss(self, forward: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar, from what `forward` gave."""
        if self.method is not None:
            return forward
        return cross_entropy(forward, labels, self.ignore_index)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean cross-entropy over the labels that count, of logits `[B, K, ...]` that fit the labels.

    Args:
        logits: what the network says.
        labels: class indices `[B, ...]`, or probabilities `[B, K, ...]`, which all count.
        ignore_index: the index of what does not count.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100]))
    tensor(1.3863)
    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([[0.8, 0.2]]))
    tensor(0.6931)
    """
    check_labels(labels, logits, ignore_index)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if labels.is_floating_point():
        return F.cross_entropy(wide, labels.to(wide.dtype))
    if not bool((labels != ignore_index).any()):
        return (0 * wide).sum()  # not 0 / 0: other processes may have labels of the batch
    return F.cross_entropy(wide, labels, ignore_index=ignore_index)


def _run(
    loss_of: _Loss,
    groups: Sequence[dict[str, Any]],
    plan: TrainPlan,
    directory: RunDirectory | None,
    check: Validation,
    label: str,
    progress: bool | None,
) -> Tensor:
    """All steps, or those that are still to do; the table of all, `[steps, columns]`."""
    model, method, recipe, steps = loss_of.model, loss_of.method, plan.recipe, plan.steps
    rates = [group.get("lr", recipe.lr) for group in groups]
    optimizer = optimizer_of(recipe, groups)
    scaler = torch.amp.GradScaler(plan.device.type, enabled=recipe.amp == "fp16")
    table = torch.full((steps, len(COLUMNS)), math.nan)
    state = TrainingState(_values(model), optimizer, scaler, table)
    keep_freed_memory()
    step, epoch, offset = directory.resume(state) if directory else (0, 0, 0)
    model.train()
    with Progress(steps, label, progress) as bar:
        while step < steps:
            for batch in plan.batches((step, epoch, offset), directory):
                part = plan.lr(step) / recipe.lr
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = part * rate
                with plan.randomness(step):
                    loss, total = _loss(plan, loss_of, batch)
                    _check_loss(total, step, recipe)
                    optimizer.zero_grad()
                    plan.whole_batch.run(scaler.scale(loss).backward)
                    plan.add_up(state.parameters)
                    scaler.step(optimizer)
                    scaler.update()
                    table[step, 0] = total
                    step += 1
                    if method is not None:
                        method.after_step(step, steps)
                bar.update(step, f"loss {total.item():.4f}")
                if method is None and (step == steps or batch.number == plan.epoch_length):
                    check.into(table[step - 1])
                if directory and batch.due:
                    digests = plan.world.gather(data_digest(batch.raw))
                    directory.checkpoint(state, (step, epoch, batch.number), digests)
                if step == steps:
                    break
            else:
                epoch, offset = epoch + 1, 0
    optimizer.zero_grad()
    if method is not None:
        with plan.world.meeting(), plan.randomness(steps):
            method.after_training(plan.all_inputs(epoch + 1))
    # What processes hold of their own, such as statistics of their rows, is that of the first.
    plan.take_from_first(_values(model))
    if method is not None:
        check.into(table[-1])
    return table


def _loss(plan: TrainPlan, loss_of: _Loss, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of a batch: this process's part of it, to be differentiated, and the whole."""
    forward = partial(loss_of.forward, batch.inputs, batch.labels)
    result = None
    # A process that fails where others wait for it leaves them; else it tells them why, below.
    if plan.exchanges:
        with autocast(plan.recipe, plan.device):
            result = plan.whole_batch.run(forward)
    with plan.world.meeting(1) as meeting:
        with autocast(plan.recipe, plan.device):
            result = forward() if result is None else result
            loss = loss_of.loss(result, batch.labels)
        if plan.world.size == 1 or loss.ndim:
            return loss, loss.detach()
        loss = loss * batch.part
        meeting.say(loss.item())
    return loss, meeting.heard.sum(0)[0]


def _directory(
    run: str | PathLike[str] | None,
    model: nn.Module,
    plan: TrainPlan,
    settings: dict[str, Any],
    every: float,
    columns: Sequence[str],
    config: Mapping[str, Any] | None,
    tensorboard: bool,
) -> RunDirectory | None:
    """The run directory of this process, if there is to be one."""
    if run is None:
        check_unwritten(config, tensorboard)
        return None
    rank, size = plan.world.rank, plan.world.size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = f"{type(model).__name__} of {parameters:,} parameters"
    journal = Journal(trained, plan.recipe, plan.lr, config, tensorboard and rank == 0, size)
    whole = settings | {"start": digest(_values(model))} | plan.processes
    return RunDirectory(run, whole, every, journal, columns, rank=rank)


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


def _settings(model: nn.Module, plan: TrainPlan) -> dict[str, Any]:
    """What decides how a training ends, but for the values that it starts from."""
    arguments = getattr(model, "arguments", {})
    settings = {
        "recipe": plan.recipe.to_dict(),
        "steps": plan.steps,
        "method": type(model).__name__,
        "arguments": arguments if isinstance(arguments, dict) else {},
        "network": structure_of(model),
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
