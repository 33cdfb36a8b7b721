"""`abnn train`: train a network from random weights, in one process or under torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import abnn
from abnn.cli import CommandError
from abnn.cli.options import (
    DATA,
    BatchSize,
    Checkpoints,
    Json,
    Mean,
    NetworkName,
    NoAugmentation,
    Set,
    Size,
    SkipBroken,
    Std,
    TensorBoard,
    WeightsFile,
    Workers,
    mistakes_told,
)
from abnn.cli.task import (
    Choices,
    Data,
    Making,
    Task,
    loader_of,
    say,
    task_of,
    training_loader,
)
from abnn.data import classes_of, held_out_split
from abnn.distributed import world
from abnn.recipe import Recipe, overridden
from abnn.train import FROM_SCRATCH


def command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", file_okay=False, help="The run directory; the network lands there."
        ),
    ],
    model: NetworkName = None,
    data: Annotated[str | None, typer.Option(help=DATA)] = None,
    weights: WeightsFile = None,
    validation: Annotated[
        str | None, typer.Option(help="Held-out data to look at after every epoch.")
    ] = None,
    hold_out: Annotated[
        float,
        typer.Option(min=0, max=1, help="Look at this share of the training data instead."),
    ] = 0.0,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="A name out of abnn recipes, or a TOML file; default: 30 epochs of SGD."),
    ] = None,
    changes: Set = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate at the start.")] = None,
    batch_size: BatchSize = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data order.")] = None,
    workers: Workers = 0,
    no_augmentation: NoAugmentation = False,
    skip_broken: SkipBroken = False,
    tensorboard: TensorBoard = False,
    checkpoint_seconds: Checkpoints = 30.0,
    as_json: Json = False,
) -> None:
    """Train a network, from random weights or those of a file.

    Classes and channels are those of the data. abnn fit and abnn evaluate take the
    run directory and know the network, its classes and its normalisation from it.
    The same command goes on where it was stopped. Works under torchrun.

    Example:
      abnn train --model zoo:small_resnet --data npz:data.npz --out runs/base
    """
    values = {"epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed}
    choices = Choices(model, weights, mean, std, size, skip_broken)
    stopped = "Stopped; the same command goes on from here."
    with mistakes_told(stopped, FloatingPointError, ImportError, RuntimeError):
        with world().joined() as everyone, everyone.meeting():
            chosen = Recipe.load(recipe) if recipe else FROM_SCRATCH
            chosen = overridden(chosen, changes or ())
            chosen = chosen.with_(**{name: v for name, v in values.items() if v is not None})
            if no_augmentation:
                chosen = chosen.with_(augmentation=())
            source = data or chosen.data
            if source is None:
                raise CommandError("It is not known what to train on; name it by --data.")
            # What the data has decides how the network is made, and that how the data is seen.
            making = Making.for_data(source, chosen.seed, skip_broken)
            task = task_of(choices, recipe=chosen, trained=False, making=making)
            train = task.open(source, "train", chosen.augmentation)
            train, held_out = _held_out(task, train, validation, hold_out, chosen)
            loader = training_loader(train, chosen, making.classes, workers, everyone)
            net = task.model.net.to(everyone.device)
            config = task.config(source, classes_of(train))
        result = abnn.train(
            net,
            loader,
            chosen.with_(model=task.model.source, data=config["data"]),
            validation=None if held_out is None else loader_of(held_out, workers=workers),
            run=out,
            output=task.model.output,
            checkpoint_seconds=checkpoint_seconds,
            config=config | {"weights": None, "making": None},  # the run directory has its own
            tensorboard=tensorboard,
        )
    if everyone.rank == 0:
        typer.echo(_json(result, out) if as_json else f"{result}\n{_next(out)}")


def _next(out: Path) -> str:
    return f"Written to {out}; abnn fit --weights {out} makes it Bayesian."


def _held_out(
    task: Task, train: Data, validation: str | None, share: float, recipe: Recipe
) -> tuple[Data, Data | None]:
    """What is trained on, and what is looked at after every epoch."""
    if validation is not None:
        return train, task.open(validation, "validation")
    if not share:
        return train, None
    rest, held_out = held_out_split(train, share, recipe.seed)  # type: ignore[arg-type]
    n = len(rest) + len(held_out)
    say(f"validation: {len(held_out)} of the {n} training examples, by seed {recipe.seed}")
    return rest, held_out


def _json(result: abnn.TrainResult, out: Path) -> str:
    last: dict[str, Any] = {"run": str(out), "steps": len(result.losses)}
    last |= {"loss": result.losses[-1].item(), "seconds": result.seconds}
    if result.validation:
        last["validation"] = result.validation[-1]._asdict()
    return json.dumps(last | {"recipe": result.recipe.to_dict()}, indent=2)
