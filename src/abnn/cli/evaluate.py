"""`abnn evaluate`: how good the predictions of a run are, and those of its network alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import abnn
from abnn.baselines import Single, TemperatureScaling
from abnn.cli import CommandError
from abnn.cli.options import (
    Batch,
    Json,
    Limit,
    Mean,
    NetworkName,
    Ood,
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
from abnn.cli.task import Choices, Data, Task, check_run, loader_of, named, say, task_of
from abnn.compare import table_of
from abnn.data import classes_of, has_test
from abnn.distributed import world
from abnn.evaluation import Evaluation
from abnn.record import Record


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The --out of abnn fit, or of abnn train.")
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Test data; default: the test part of what was trained on."),
    ] = None,
    ood: Ood = None,
    temperature: Annotated[
        str | None,
        typer.Option(help="Held-out data, to evaluate with a temperature fitted to it, too."),
    ] = None,
    model: NetworkName = None,
    weights: WeightsFile = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    samples: Samples = "8",
    seed: Seed = 0,
    batch_size: Batch = 128,
    workers: Workers = 0,
    limit: Limit = None,
    skip_broken: SkipBroken = False,
    details: Annotated[
        bool, typer.Option("--details", help="Print all figures, not only the usual ones.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Score a run on test data, and on out-of-distribution data.

    An ABNN is scored beside its network alone. What was predicted is kept in
    RUN/evaluation, which abnn report shows. Works under torchrun.

    Example:
      abnn evaluate runs/mine --ood svhn=svhn
    """
    choices = Choices(model, weights, mean, std, size, skip_broken)
    found: dict[str, Evaluation] = {}
    stopped = "Stopped; what was evaluated is kept."
    with mistakes_told(stopped, ImportError, RuntimeError):
        drawn = {"samples": samples_of(samples), "seed": seed}
        check_run(run)
        task = task_of(choices, run=run)
        predictor = task.predictor(run, world().device)
        test = _test(task, data)
        loader = loader_of(test, batch_size, workers, limit)
        foreign = {
            name: loader_of(source, batch_size, workers, limit)
            for name, source in task.open_ood(named("--ood", ood), test).items()
        }
        predictors: dict[str, tuple[Any, dict[str, Any]]] = {}
        if not isinstance(predictor, Single):
            # The network has moved to where the predictor is.
            predictors["Network"] = Single(task.model.net, output=task.model.output), {}
        what = type(predictor).__name__
        arguments = drawn if isinstance(predictor, abnn.ABNN) else {}
        predictors["Network" if what == "Single" else what] = predictor, arguments
        if temperature is not None:
            held_out = loader_of(task.open(temperature, "validation"), batch_size, workers)
            for name, (one, more) in list(predictors.items()):
                scaled = TemperatureScaling(one).fit(held_out, **more)
                predictors[f"{name}, temperature"] = scaled, more
        for name, (one, more) in predictors.items():
            record = Record(
                run / "evaluation" / name.lower().replace(", ", "-"),
                name=name,
                classes=task.model.classes or classes_of(test),
                mean=task.expected.mean or None,
                std=task.expected.std or None,
            )
            found[name] = abnn.evaluate(one, loader, foreign, record=record, **more)
    if world().rank > 0:
        return
    if as_json:
        typer.echo(json.dumps({name: json.loads(e.to_json()) for name, e in found.items()}))
        return
    if details:
        typer.echo("\n\n".join(f"{name}\n{evaluation}" for name, evaluation in found.items()))
    else:
        typer.echo(table_of({name: [e] for name, e in found.items()}, list(foreign)).to_text())
    typer.echo(f"\nKept in {run / 'evaluation'}; abnn report {run} shows it.")


def _test(task: Task, data: str | None) -> Data:
    if data is None:
        if task.source is None or not has_test(task.source):
            raise CommandError(
                "It is not known what to test on"
                + (f", as {task.source} has no test data of its own" if task.source else "")
                + "; name it by --data."
            )
        return task.open(task.source, "test")
    if data == task.source and not has_test(data):
        say(f"test: {data} was trained on, so these figures are better than those of new data")
    return task.open(data, "test")
