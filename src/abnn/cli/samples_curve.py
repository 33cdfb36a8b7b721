"""`abnn samples-curve`: how many draws of an ABNN are enough."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import abnn
from abnn.cli import CommandError
from abnn.cli.options import (
    Batch,
    Json,
    Limit,
    Mean,
    NetworkName,
    Seed,
    Size,
    SkipBroken,
    Std,
    WeightsFile,
    Workers,
    mistakes_told,
)
from abnn.cli.task import Choices, check_run, loader_of, task_of
from abnn.distributed import world
from abnn.files import write


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The --out of abnn fit.")],
    data: Annotated[
        str, typer.Option(help="Held-out data, written as for abnn fit; never its test part.")
    ],
    most: Annotated[
        int, typer.Option("--max-samples", min=2, help="Most draws of every mode.")
    ] = 32,
    tolerance: Annotated[
        float, typer.Option(min=0, help="What more draws may change by and still be needless.")
    ] = 0.01,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A picture of it, .png or .svg.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", dir_okay=False, help="A file for the JSON.")
    ] = None,
    model: NetworkName = None,
    weights: WeightsFile = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    seed: Seed = 0,
    batch_size: Batch = 128,
    workers: Workers = 0,
    limit: Limit = None,
    skip_broken: SkipBroken = False,
    as_json: Json = False,
) -> None:
    """Find out how many draws of every mode are enough.

    Measures what 1, 2, 4 and so on are worth.

    Example:
      abnn samples-curve runs/mine --data npz:val.npz --plot curve.png
    """
    choices = Choices(model, weights, mean, std, size, skip_broken)
    with mistakes_told("Stopped; nothing was written.", ImportError, RuntimeError):
        check_run(run)
        task = task_of(choices, run=run)
        bnn = task.predictor(run, world().device)
        if not isinstance(bnn, abnn.ABNN):
            raise CommandError(
                f"{run} holds no ABNN, but a {type(bnn).__name__}; give the --out of abnn fit."
            )
        loader = loader_of(task.open(data, "validation"), batch_size, workers, limit)
        curve = bnn.samples_curve(loader, most, seed=seed, tolerance=tolerance)
        if plot is not None:
            curve.plot(plot)
        if out is not None:
            write(out, (curve.to_json() + "\n").encode())
    typer.echo(curve.to_json() if as_json else str(curve))
