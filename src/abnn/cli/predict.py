"""`abnn predict`: labels and uncertainties of files, as a table."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

import abnn
from abnn.cli import CommandError
from abnn.cli.options import (
    Batch,
    Json,
    Mean,
    NetworkName,
    Samples,
    Seed,
    Size,
    SkipBroken,
    Std,
    WeightsFile,
    Workers,
    mistakes_told,
    samples_of,
)
from abnn.cli.predictions import FORMATS, Rule, Table, format_of
from abnn.cli.task import Choices, Data, Task, check_run, loader_of, say_notes, task_of
from abnn.data import Images, pictures
from abnn.data.dataset import whole
from abnn.data.sources import SOURCES
from abnn.distributed import world


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The --out of abnn fit, or of abnn train.")
    ],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUTS", help="Image files, folders of them, or data such as npz:PATH."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help=f"A file that ends with {', '.join(FORMATS)}; default: print CSV.",
        ),
    ] = None,
    abstain: Annotated[
        str,
        typer.Option(help="When to abstain: confidence, total, aleatoric or epistemic beyond it."),
    ] = "confidence<0.5",
    probabilities: Annotated[
        bool, typer.Option("--probs", help="Add a column for the probability of every class.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out.")] = False,
    as_json: Json = False,
    model: NetworkName = None,
    weights: WeightsFile = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    samples: Samples = "8",
    seed: Seed = 0,
    batch_size: Batch = 128,
    workers: Workers = 0,
    skip_broken: SkipBroken = False,
) -> None:
    """Predict files: labels, uncertainties, whether to abstain.

    The threshold to abstain at is best found on the page of abnn report. Works
    under torchrun, which shares the files among processes.

    Example:
      abnn predict runs/mine photos/ --out predictions.csv
      abnn predict runs/mine photos/ --abstain "confidence<0.8"
    """
    choices = Choices(model, weights, mean, std, size, skip_broken)
    team = world()
    with mistakes_told("Stopped; nothing was written.", ImportError, RuntimeError):
        rule = Rule.of(abstain)
        kind = format_of(out, as_json)
        if out is not None and out.exists() and not overwrite:
            raise CommandError(f"{out} exists; give another --out, or --overwrite to replace it.")
        if out is not None:  # known before an hour of work, not after it
            above = next(folder for folder in out.absolute().parents if folder.exists())
            if not (above.is_dir() and os.access(above, os.W_OK)):
                raise CommandError(f"{above} can't be written to; give another --out.")
        drawn: dict[str, Any] = {"samples": samples_of(samples), "seed": seed}
        check_run(run)
        task = task_of(choices, run=run)
        predictor = task.predictor(run, team.device)
        data, names = _inputs(task, inputs)
        more = drawn if isinstance(predictor, abnn.ABNN) else {}
        loader = loader_of(data, batch_size, workers)
        with tempfile.TemporaryDirectory() as folder:
            # Columns on disk, so that memory does not grow with the number of files.
            saved = abnn.predict_loader(predictor, loader, out=f"{folder}/columns", **more)
            if team.rank == 0:
                table = Table(saved, names, task.model.classes, rule, probabilities)
                table.write(out, kind)
                _tell(table, out, as_json)


def _inputs(task: Task, inputs: list[str]) -> tuple[Data, list[str] | None]:
    """What to predict, and what to call it; numbers, if nothing has names."""
    sources = [text for text in inputs if text.partition(":")[0] in SOURCES]
    sources = [text for text in sources if not Path(text).exists()]
    if sources and len(inputs) > 1:
        raise CommandError(f"{sources[0]} is a data set; predict it by itself.")
    if sources:
        data = task.open(sources[0], "test")
    else:
        data = pictures(inputs, task.view(), skip_broken=task.choices.skip_broken)
        say_notes("inputs", data)
    images = whole(data)
    return data, list(images.paths) if isinstance(images, Images) else None


def _tell(table: Table, out: Path | None, as_json: bool) -> None:
    if out is None:
        sys.stdout.flush()
    elif as_json:
        told = {"out": str(out), "inputs": table.rows, "abstained": table.abstained}
        typer.echo(json.dumps(told | {"abstain": str(table.rule)}))
    else:
        typer.echo(
            f"{table.rows} inputs, {table.abstained} of them to abstain from ({table.rule}). "
            f"Written to {out}."
        )
