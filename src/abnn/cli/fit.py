"""`abnn fit`: make a trained network Bayesian, in one process or under torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from torch.utils.data import DataLoader

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
from abnn.cli.task import Choices, Data, Task, fitted_task, loader_of, training_loader
from abnn.data import MIXING, classes_of
from abnn.distributed import World, world
from abnn.recipe import Recipe, overridden


def command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", file_okay=False, help="The run directory; the result lands there."
        ),
    ],
    model: NetworkName = None,
    data: Annotated[str | None, typer.Option(help=DATA)] = None,
    weights: WeightsFile = None,
    validation: Annotated[
        str | None, typer.Option(help="Held-out data, written as --data; never its test part.")
    ] = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    recipe: Annotated[
        str | None, typer.Option(help="A name out of abnn recipes, or a TOML file.")
    ] = None,
    changes: Set = None,
    modes: Annotated[int | None, typer.Option(help="Number of modes.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Scale of the noise.")] = None,
    noise: Annotated[str | None, typer.Option(help="channel, example or element.")] = None,
    stats: Annotated[str | None, typer.Option(help="per_mode or frozen.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    batch_size: BatchSize = None,
    seed: Annotated[int | None, typer.Option(help="Of data order, noise and prior.")] = None,
    split: Annotated[
        str | None, typer.Option(help="What processes share: data or modes; default: what fits.")
    ] = None,
    workers: Workers = 0,
    no_augmentation: NoAugmentation = False,
    skip_broken: SkipBroken = False,
    tensorboard: TensorBoard = False,
    checkpoint_seconds: Checkpoints = 30.0,
    snapshots: Annotated[
        int, typer.Option(min=0, help="How many times the modes are kept on their way.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Make a trained network Bayesian: fit modes of its norms.

    The network may be the folder of a training (--weights), whose data and
    normalisation are then known. The same command goes on where it was stopped.
    Works under torchrun, as torchrun --nproc-per-node 4 -m abnn fit ...

    Example:
      abnn fit --weights runs/base --out runs/mine
      abnn fit --model zoo:resnet56 --weights net.pt --data cifar10 -o runs/mine
    """
    values = {
        "modes": modes, "alpha": alpha, "noise": noise, "stats": stats, "epochs": epochs,
        "steps": steps, "lr": lr, "batch_size": batch_size, "seed": seed,
    }  # fmt: skip
    overrides: dict[str, Any] = {name: v for name, v in values.items() if v is not None}
    if no_augmentation:
        overrides["augmentation"] = ()
    choices = Choices(model, weights, mean, std, size, skip_broken)
    stopped = "Stopped; the same command goes on from here."
    with mistakes_told(stopped, FloatingPointError, ImportError, RuntimeError):
        with world().joined() as everyone, everyone.meeting():
            chosen = overridden(Recipe.load(recipe) if recipe else Recipe(), changes or ())
            chosen = chosen.with_(**overrides)
            task, source = fitted_task(choices, chosen, data)
            bnn = _converted(task, everyone, chosen)
            train = _training(task, source, chosen, workers, everyone, batch_size is not None)
            held_out = None
            if validation is not None:
                found = task.open(validation, "validation")
                held_out = loader_of(found, chosen.batch_size, workers)
        result = abnn.fit(
            bnn,
            train,
            chosen,
            validation=held_out,
            run=out,
            split=split,  # type: ignore[arg-type]
            checkpoint_seconds=checkpoint_seconds,
            snapshots=snapshots,
            config=task.config(source, classes_of(train)),
            tensorboard=tensorboard,
        )
    if everyone.rank == 0:
        typer.echo(_as_json(result, out) if as_json else f"{result}\n{_next(out)}")


def _next(out: Path) -> str:
    return f"Written to {out}; abnn evaluate {out} scores it."


def _as_json(result: abnn.FitResult, out: Path) -> str:
    """Where the result is, the last losses, and what an ABNN remembers of its fit."""
    values = {"run": str(out), "losses": result.losses[-1].tolist(), "verdict": result.verdict}
    return json.dumps(values | result.provenance(), indent=2)


def _converted(task: Task, everyone: World, recipe: Recipe) -> abnn.ABNN:
    names = ("modes", "alpha", "noise", "stats")
    values: dict[str, Any] = {name: getattr(recipe, name) for name in names}
    values = {name: v for name, v in values.items() if v is not None}
    net = task.model.net.to(everyone.device)
    return abnn.convert(net, output=task.model.output, **values)


def _training(
    task: Task, source: str, recipe: Recipe, workers: int, everyone: World, own_size: bool
) -> DataLoader[Any]:
    mixed = [name for name in recipe.augmentation if name in MIXING]
    if mixed:
        raise CommandError(
            f"The recipe asks for {mixed[0]}, which mixes labels, and a fit needs one label an "
            "example; use that to train the network, and leave it out here by --no-augmentation."
        )
    found: Data = task.open(source, "train", recipe.augmentation)
    if isinstance(found, DataLoader) and own_size:
        raise CommandError(f"{source} is a DataLoader and has a batch size; set it there.")
    return training_loader(found, recipe, workers=workers, team=everyone)
