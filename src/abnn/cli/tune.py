"""`abnn tune`: the learning rate and alpha of a network that has no recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import abnn
from abnn.cli import CommandError
from abnn.cli.options import (
    DATA,
    BatchSize,
    Json,
    Mean,
    NetworkName,
    NoAugmentation,
    Set,
    Size,
    SkipBroken,
    Std,
    WeightsFile,
    Workers,
    mistakes_told,
    numbers,
)
from abnn.cli.task import Choices, Data, Task, fitted_task, loader_of, placed, say, training_loader
from abnn.data import train_and_validation
from abnn.distributed import World
from abnn.recipe import Recipe, overridden


def command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", file_okay=False, help="The run directory; recipe.toml lands there."
        ),
    ],
    model: NetworkName = None,
    data: Annotated[str | None, typer.Option(help=DATA)] = None,
    weights: WeightsFile = None,
    validation: Annotated[
        str | None,
        typer.Option(help="Data the network has not seen; default: a tenth of --data, by seed."),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    recipe: Annotated[
        str | None, typer.Option(help="All other values: a recipe by name, or a TOML file.")
    ] = None,
    changes: Set = None,
    no_augmentation: NoAugmentation = False,
    lr: Annotated[str, typer.Option(help="Lowest and highest learning rate.")] = "1e-4,0.1",
    alpha: Annotated[str, typer.Option(help="Lowest and highest alpha.")] = "3e-4,0.1",
    batch_size: BatchSize = None,
    seed: Annotated[int | None, typer.Option(help="Of the pairs, and as of abnn fit.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many pairs are tried.")] = 9,
    samples: Annotated[int, typer.Option(min=1, help="Draws per mode of a prediction.")] = 8,
    workers: Workers = 0,
    skip_broken: SkipBroken = False,
    as_json: Json = False,
) -> None:
    """Find a learning rate and alpha by validation NLL.

    Many short fits, of which the best third goes on three times as long. Test
    and out-of-distribution data are never looked at. The same command goes on
    where a search was stopped.

    Example:
      abnn tune --weights runs/base --out runs/tuned
      abnn fit --weights runs/base --recipe runs/tuned/recipe.toml --out runs/mine
    """
    choices = Choices(model, weights, mean, std, size, skip_broken)
    stopped = "Stopped; the same command goes on from here."
    with mistakes_told(stopped, FloatingPointError, ImportError, RuntimeError):
        base = overridden(Recipe.load(recipe) if recipe else Recipe(), changes or ())
        values = {"batch_size": batch_size, "seed": seed}
        base = base.with_(**{name: v for name, v in values.items() if v is not None})
        if no_augmentation:
            base = base.with_(augmentation=())
        task, source = fitted_task(choices, base, data)
        base = base.with_(model=task.model.source, data=placed(source))
        train, held_out = _data(task, source, validation, base)
        found = abnn.tune(
            task.model.net.to(World().device),
            training_loader(train, base, workers=workers),
            loader_of(held_out, base.batch_size, workers),
            base,
            run=out,
            lr=_range("--lr", lr),
            alpha=_range("--alpha", alpha),
            trials=trials,
            samples=samples,
            options=None if task.model.output is None else {"output": task.model.output},
        )
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    typer.echo(f"Written to {out / 'recipe.toml'}; abnn fit --recipe takes it.", err=as_json)


def _data(task: Task, source: str, validation: str | None, recipe: Recipe) -> tuple[Data, Data]:
    """Training data and held-out data."""
    if validation is not None:
        train = task.open(source, "train", recipe.augmentation)
        return train, task.open(validation, "validation")
    view = task.view(recipe.augmentation)
    train, held_out, note = train_and_validation(source, view, **task.rules)
    say(f"{note}; if the network was trained on these, name other data by --validation")
    return train, held_out


def _range(option: str, text: str) -> tuple[float, float]:
    ends = numbers(option, text)
    if len(ends) != 2:
        raise CommandError(f"{option} {text} is not the lowest and the highest value, as 1e-4,0.1.")
    return ends[0], ends[1]
