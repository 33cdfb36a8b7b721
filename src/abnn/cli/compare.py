"""`abnn compare`: every method on the same data, networks and seeds, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from abnn.cli.options import (
    DATA,
    NETWORK,
    BatchSize,
    Json,
    Limit,
    Mean,
    Ood,
    Set,
    SkipBroken,
    Std,
    mistakes_told,
    numbers,
    whole_numbers,
)
from abnn.cli.task import (
    Data,
    count_classes,
    loader_of,
    named,
    say,
    say_notes,
    shape_of,
    training_loader,
)
from abnn.compare import ENTRIES, Comparison, Setting, compare
from abnn.compare.methods import chosen as entries
from abnn.data import View, classes_of, has_test, open_data, open_ood, train_and_validation
from abnn.recipe import Recipe, overridden
from abnn.train import FROM_SCRATCH
from abnn.zoo import build


def command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", file_okay=False, help="The run directory; the table lands there."
        ),
    ],
    model: Annotated[str, typer.Option(help=NETWORK)],
    data: Annotated[str, typer.Option(help=DATA)],
    ood: Ood = None,
    test: Annotated[
        str | None, typer.Option(help="Test data, where it is not with --data; written alike.")
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(help="Held-out data; default: a tenth of the training data, by seed."),
    ] = None,
    methods: Annotated[str, typer.Option(help=f"all, or some of {','.join(ENTRIES)}.")] = "all",
    seeds: Annotated[str, typer.Option(help="Numbers, as 0,1,2.")] = "0,1,2",
    members: Annotated[int, typer.Option(min=1, help="Of every ensemble; modes of ABNN.")] = 4,
    samples: Annotated[
        int, typer.Option(min=1, help="Passes for an input, where members are drawn.")
    ] = 16,
    recipe: Annotated[
        str | None, typer.Option(help="Of training from scratch: a name, or a TOML file.")
    ] = None,
    fit_recipe: Annotated[
        str | None, typer.Option(help="Of ABNN's fit: a name of the paper's, or a TOML file.")
    ] = None,
    changes: Set = None,
    fit_changes: Annotated[
        list[str] | None, typer.Option("--fit-set", help="As --set, of ABNN's fit.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Of training from scratch.")] = None,
    lr: Annotated[float | None, typer.Option(help="Of training from scratch.")] = None,
    batch_size: BatchSize = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Mirror half of the training images.")
    ] = False,
    mean: Mean = None,
    std: Std = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at once, which share the cores.")] = 1,
    limit: Limit = None,
    skip_broken: SkipBroken = False,
    report: Annotated[bool, typer.Option(help="Write report.html beside the table.")] = True,
    as_json: Json = False,
) -> None:
    """Compare methods: train and evaluate all, print the table.

    What is done is kept, so the same command goes on where it was stopped, and methods or
    seeds can be added to it later. The table is written as text, CSV, LaTeX and JSON.

    Example:
      abnn compare --model zoo:small_resnet --data npz:data.npz --out runs/compare
    """
    overrides = {"epochs": epochs, "lr": lr, "batch_size": batch_size}
    with mistakes_told("Stopped; the same command goes on from here.", ImportError, RuntimeError):
        # What was mistyped is told before data is read.
        names = entries("all" if methods == "all" else [m.strip() for m in methods.split(",")])
        numbered = whole_numbers("--seeds", seeds)
        chosen = overridden(Recipe.load(recipe) if recipe else FROM_SCRATCH, changes or ())
        chosen = chosen.with_(**{key: v for key, v in overrides.items() if v is not None})
        if flip:
            chosen = chosen.with_(augmentation=("hflip",))
        fitting = overridden(Recipe.load(fit_recipe) if fit_recipe else Recipe(), fit_changes or ())
        scale = numbers("--mean", mean), numbers("--std", std)
        sources = _Sources(
            data, test or data, validation, named("--ood", ood), *scale, limit, skip_broken
        )
        setting = sources.setting(model, chosen, fitting, members, samples)
        result = compare(setting, out, methods=list(names), seeds=numbered, jobs=jobs)
        typer.echo(result.table.to_json() if as_json else str(result))
        if report:
            _report(result, out / "report.html")
    typer.echo(f"Written to {out}.", err=as_json)
    if result.failed:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Sources:
    """The data sets that a command line names."""

    data: str
    test: str
    validation: str | None
    ood: dict[str, str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    limit: int | None
    skip_broken: bool

    def setting(
        self, model: str, recipe: Recipe, fit: Recipe, members: int, samples: int
    ) -> Setting:
        """What they and a network are to be compared on; says what was done to the data."""
        train, validation = self._training(recipe)
        test = self._test()
        evaluation = {"in-distribution": test}
        for name, source in self.ood.items():
            skip = self.skip_broken
            evaluation[name], note = open_ood(source, test, self._view(), skip_broken=skip)
            say(f"{name}: {note}")
        loaders = {name: loader_of(d, 256, limit=self.limit) for name, d in evaluation.items()}
        shape = shape_of(test)
        classes, channels = count_classes(train), shape[0] if len(shape) == 3 else None
        return Setting(
            partial(build, model, classes, channels),
            training_loader(train, recipe, classes),
            loader_of(validation, 256),
            loaders.pop("in-distribution"),
            loaders,
            recipe=recipe,
            fit=fit,
            members=members,
            samples=samples,
            classes=classes_of(test),
            mean=self.mean or None,
            std=self.std or None,
        )

    def _training(self, recipe: Recipe) -> tuple[Data, Data]:
        view = self._view(recipe.augmentation)
        if self.validation is not None:
            held_out = open_data(
                self.validation, "validation", self._view(), skip_broken=self.skip_broken
            )
            return open_data(self.data, "train", view, skip_broken=self.skip_broken), held_out
        train, held_out, note = train_and_validation(self.data, view, skip_broken=self.skip_broken)
        say(note)
        return train, held_out

    def _test(self) -> Data:
        test = open_data(self.test, "test", self._view(), skip_broken=self.skip_broken)
        say_notes("test", test)
        if self.test == self.data and not has_test(self.data):
            raise ValueError(
                f"{self.data} has no test data of its own; name it by --test, or the network would "
                "be tested on what it was trained on."
            )
        return test

    def _view(self, augmentation: tuple[str, ...] = ()) -> View:
        return View(mean=self.mean, std=self.std, augmentation=augmentation)


def _report(result: Comparison, page: Path) -> None:
    try:
        from abnn.report import write_report

        title = f"{len(result.evaluations)} methods compared"
        write_report(result.records, page, title=title, detailed=1)
    except ImportError as error:
        typer.echo(f"No page was written: {error}", err=True)
