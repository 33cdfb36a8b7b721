"""`abnn fit`: make a trained network Bayesian, in one process or under torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from torch.utils.data import DataLoader

import abnn
from abnn.cli import CommandError, is_first
from abnn.cli.options import NETWORK, WEIGHTS, mistakes_told, numbers
from abnn.data import MIXING, Part, View, notes_of, open_data, training_loader
from abnn.distributed import World, world
from abnn.zoo import Model, open_model

_DATA = "npz:PATH, folder:PATH, cifar10, hf:NAME, module:PACKAGE.MODULE:BUILDER; see docs/data.md."


def command(
    model: Annotated[str, typer.Option(help=NETWORK)],
    data: Annotated[str, typer.Option(help=_DATA)],
    out: Annotated[
        Path,
        typer.Option(file_okay=False, help="The run directory; the result lands there."),
    ],
    weights: Annotated[Path | None, typer.Option(help=WEIGHTS)] = None,
    validation: Annotated[
        str | None, typer.Option(help="Held-out data, written as --data; never its test part.")
    ] = None,
    mean: Annotated[str | None, typer.Option(help="Of the channels, as 0.49,0.48,0.45.")] = None,
    std: Annotated[str | None, typer.Option(help="Of the channels, as 0.25,0.24,0.26.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe of the paper by name, or a TOML file.")
    ] = None,
    modes: Annotated[int | None, typer.Option(help="Number of modes.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Scale of the noise.")] = None,
    noise: Annotated[str | None, typer.Option(help="channel, example or element.")] = None,
    stats: Annotated[str | None, typer.Option(help="per_mode or frozen.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples a step, over all processes.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of data order, noise and prior.")] = None,
    split: Annotated[
        str | None, typer.Option(help="What processes share: data or modes; default: what fits.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load data.")] = 0,
    no_augmentation: Annotated[
        bool,
        typer.Option("--no-augmentation", help="Leave out what the recipe asks for."),
    ] = False,
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0, help="How often a checkpoint is written.")
    ] = 30.0,
    snapshots: Annotated[
        int, typer.Option(min=0, help="How many times the modes are kept on their way.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make a trained network Bayesian: fit the modes of its norms to data.

    The same command goes on where a fit was stopped. Under torchrun, all
    processes share the work: torchrun --nproc-per-node 4 -m abnn fit ...

    Example: abnn fit --model timm:resnet18 --weights net.pt --data npz:train.npz --out run
    """
    values = {
        "modes": modes, "alpha": alpha, "noise": noise, "stats": stats, "epochs": epochs,
        "steps": steps, "lr": lr, "batch_size": batch_size, "seed": seed,
    }  # fmt: skip
    overrides: dict[str, Any] = {name: v for name, v in values.items() if v is not None}
    if no_augmentation:
        overrides["augmentation"] = ()
    channels = {"mean": numbers("--mean", mean), "std": numbers("--std", std)}
    stopped = "Stopped; the same command goes on from here."
    with mistakes_told(stopped, FloatingPointError, ImportError, RuntimeError):
        with world().joined() as everyone, everyone.meeting():
            chosen = (abnn.Recipe.load(recipe) if recipe else abnn.Recipe()).with_(**overrides)
            opened = open_model(model, weights=weights, seed=chosen.seed)
            bnn = _converted(opened, everyone, chosen)
            own_size = batch_size is not None
            train = _loader(data, "train", channels, chosen, workers, everyone, own_size)
            held_out = None
            if validation is not None:
                held_out = _loader(validation, "validation", channels, chosen, workers)
        result = abnn.fit(
            bnn,
            train,
            chosen,
            validation=held_out,
            run=out,
            split=split,  # type: ignore[arg-type]
            checkpoint_seconds=checkpoint_seconds,
            snapshots=snapshots,
        )
    if everyone.rank == 0:
        typer.echo(_as_json(result, out) if as_json else f"{result}\nWritten to {out}.")


def _as_json(result: abnn.FitResult, out: Path) -> str:
    """Where the result is, the last losses, and what an ABNN remembers of its fit."""
    values = {"run": str(out), "losses": result.losses[-1].tolist(), "verdict": result.verdict}
    return json.dumps(values | result.provenance(), indent=2)


def _converted(model: Model, everyone: World, recipe: abnn.Recipe) -> abnn.ABNN:
    names = ("modes", "alpha", "noise", "stats")
    values: dict[str, Any] = {name: getattr(recipe, name) for name in names}
    values = {name: v for name, v in values.items() if v is not None}
    return abnn.convert(model.net.to(everyone.device), output=model.output, **values)


def _loader(
    source: str,
    part: Part,
    channels: dict[str, tuple[float, ...]],
    recipe: abnn.Recipe,
    workers: int,
    everyone: World | None = None,
    own_size: bool = False,
) -> DataLoader[Any]:
    training = part == "train"
    augmentation = recipe.augmentation if training else ()
    mixed = [name for name in augmentation if name in MIXING]
    if mixed:
        raise CommandError(
            f"The recipe asks for {mixed[0]}, which mixes labels, and a fit needs one label an "
            "example; use that to train the network, and leave it out here by --no-augmentation."
        )
    found = open_data(
        source, part, View(augmentation=augmentation, mean=channels["mean"], std=channels["std"])
    )
    if isinstance(found, DataLoader):
        if own_size:
            raise CommandError(f"{source} is a DataLoader and has a batch size; set it there.")
        return found
    if is_first():
        for note in notes_of(found):
            typer.echo(f"{part}: {note}", err=True)
    if not training:
        return DataLoader(found, recipe.batch_size, num_workers=workers)
    # A last batch that is too small for batch statistics, or to be shared, is left out.
    least = max(2, everyone.size if everyone else 1)
    return training_loader(found, recipe.batch_size, workers=workers, least=least)
