"""`abnn tune`: the learning rate and alpha of a network that has no recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import abnn
from abnn.cli import CommandError
from abnn.cli.network import build
from abnn.cli.options import mistakes_told, numbers
from abnn.data import open_data, train_and_validation
from abnn.distributed import World
from abnn.recipe import Recipe, overridden
from abnn.zoo import load_weights

_DATA = "npz:PATH, with x_train and y_train or x and y; or module:PACKAGE.MODULE:BUILDER."


def command(
    model: Annotated[
        str, typer.Option(help="zoo:NAME, torchvision:NAME, timm:NAME or module:PACKAGE:BUILDER.")
    ],
    data: Annotated[str, typer.Option(help=_DATA)],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="The run directory; recipe.toml lands there.")
    ],
    weights: Annotated[
        Path | None, typer.Option(help="The network's trained weights, .safetensors or .pt.")
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(help="Data the network has not seen; default: a tenth of --data, by seed."),
    ] = None,
    mean: Annotated[str | None, typer.Option(help="Of the channels, as 0.49,0.48,0.45.")] = None,
    std: Annotated[str | None, typer.Option(help="Of the channels, as 0.25,0.24,0.26.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="All other values: a recipe by name, or a TOML file.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Replace a value of the recipe, as epochs=0.5; once for each."),
    ] = None,
    lr: Annotated[str, typer.Option(help="Lowest and highest learning rate.")] = "1e-4,0.1",
    alpha: Annotated[str, typer.Option(help="Lowest and highest alpha.")] = "3e-4,0.1",
    trials: Annotated[int, typer.Option(min=1, help="How many pairs are tried.")] = 9,
    samples: Annotated[int, typer.Option(min=1, help="Draws per mode of a prediction.")] = 8,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load data.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find the learning rate and alpha with the best validation NLL.

    Many short fits, of which the best third goes on three times as long. Test
    and out-of-distribution data are never looked at. The same command goes on
    where a search was stopped.

    Example: abnn tune --model timm:resnet18 --weights net.pt --data npz:train.npz --out tuned
    """
    with mistakes_told("Stopped; the same command goes on from here.", FloatingPointError):
        base = overridden(Recipe.load(recipe) if recipe else Recipe(), changes or ())
        base = base.with_(model=model, data=data)
        channels = numbers("--mean", mean), numbers("--std", std)
        train, held_out = _data(data, validation, *channels, base)
        found = abnn.tune(
            _network(model, weights),
            _loader(train, base, workers, training=True),
            _loader(held_out, base, workers),
            base,
            run=out,
            lr=_range("--lr", lr),
            alpha=_range("--alpha", alpha),
            trials=trials,
            samples=samples,
        )
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    typer.echo(f"Written to {out / 'recipe.toml'}.", err=as_json)


def _network(model: str, weights: Path | None) -> nn.Module:
    if weights is None and not model.startswith("module:"):
        raise CommandError(f"{model} has random weights; give its trained ones by --weights FILE.")
    net = build(model)
    if weights is not None:
        load_weights(net, weights)
    return net.eval().to(World().device)


def _data(
    source: str,
    validation: str | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    recipe: Recipe,
) -> tuple[Any, Any]:
    """Training data and held-out data."""
    if validation is None:
        train, held_out, note = train_and_validation(source, mean, std, recipe.augmentation)
        seen = "if the network was trained on these, name other data by --validation"
        typer.echo(f"{note}; {seen}", err=True)
        return train, held_out
    own = open_data(source, "train", mean, std, recipe.augmentation)
    return own, open_data(validation, "validation", mean, std)


def _loader(
    data: Dataset[Any] | DataLoader[Any], recipe: Recipe, workers: int, training: bool = False
) -> DataLoader[Any]:
    if isinstance(data, DataLoader):
        return data
    if isinstance(data, IterableDataset):
        return DataLoader(data, recipe.batch_size, num_workers=workers)
    # A last batch of one has no batch statistics; in the next epoch its example is another.
    lone = len(data) % recipe.batch_size == 1 < len(data)  # type: ignore[arg-type]
    return DataLoader(
        data,
        recipe.batch_size,
        shuffle=training,
        num_workers=workers,
        drop_last=training and lone,
    )


def _range(option: str, text: str) -> tuple[float, float]:
    ends = numbers(option, text)
    if len(ends) != 2:
        raise CommandError(f"{option} {text} is not the lowest and the highest value, as 1e-4,0.1.")
    return ends[0], ends[1]
