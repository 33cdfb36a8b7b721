"""`abnn compare`: every method on the same data, networks and seeds, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import abnn
from abnn.batches import inputs_of, split
from abnn.cli import CommandError
from abnn.cli.options import NETWORK, mistakes_told, numbers, whole_numbers
from abnn.compare import ENTRIES, Comparison, Setting, compare
from abnn.data import (
    View,
    classes_of,
    has_test,
    open_data,
    open_ood,
    train_and_validation,
    training_loader,
)
from abnn.folding import first_tensor
from abnn.train import FROM_SCRATCH
from abnn.zoo import build

_Data = Dataset[Any] | DataLoader[Any]

_DATA = "npz:PATH, folder:PATH, cifar10, hf:NAME, module:PACKAGE.MODULE:BUILDER; see docs/data.md."


def command(
    model: Annotated[str, typer.Option(help=NETWORK)],
    data: Annotated[str, typer.Option(help=_DATA)],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="The run directory; the table lands there.")
    ],
    ood: Annotated[
        list[str] | None,
        typer.Option(help="Out-of-distribution data, as letters=npz:PATH; once for each."),
    ] = None,
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
    epochs: Annotated[float | None, typer.Option(help="Of training from scratch.")] = None,
    lr: Annotated[float | None, typer.Option(help="Of training from scratch.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples a step.")] = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Mirror half of the training images.")
    ] = False,
    mean: Annotated[str | None, typer.Option(help="Of the channels, as 0.49,0.48,0.45.")] = None,
    std: Annotated[str | None, typer.Option(help="Of the channels, as 0.25,0.24,0.26.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at once, which share the cores.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate the first so many inputs of each set only.")
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html beside the table.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Compare methods: train what is needed, evaluate all, print the paper's table.

    What is done is kept, so the same command goes on where it was stopped, and methods or
    seeds can be added to it later. The table is written as text, CSV, LaTeX and JSON.

    Example: abnn compare --model zoo:small_resnet --data npz:mnist.npz --out runs/compare
    """
    overrides = {"epochs": epochs, "lr": lr, "batch_size": batch_size}
    with mistakes_told("Stopped; the same command goes on from here.", ImportError, RuntimeError):
        chosen = abnn.Recipe.load(recipe) if recipe else FROM_SCRATCH
        chosen = chosen.with_(**{key: v for key, v in overrides.items() if v is not None})
        if flip:
            chosen = chosen.with_(augmentation=("hflip",))
        fitting = abnn.Recipe.load(fit_recipe) if fit_recipe else abnn.Recipe()
        scale = numbers("--mean", mean), numbers("--std", std)
        sources = _Sources(data, test or data, validation, _named(ood or []), *scale, limit)
        setting = sources.setting(model, chosen, fitting, members, samples)
        names = "all" if methods == "all" else [name.strip() for name in methods.split(",")]
        result = compare(
            setting, out, methods=names, seeds=whole_numbers("--seeds", seeds), jobs=jobs
        )
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

    def setting(
        self, model: str, recipe: abnn.Recipe, fit: abnn.Recipe, members: int, samples: int
    ) -> Setting:
        """What they and a network are to be compared on; says what was done to the data."""
        train, validation = self._training(recipe)
        test = self._test()
        evaluation = {"in-distribution": test}
        for name, source in self.ood.items():
            evaluation[name], note = open_ood(source, test, self._view())
            typer.echo(f"{name}: {note}", err=True)
        loaders = {name: self._loader(found) for name, found in evaluation.items()}
        image = first_tensor(inputs_of(_first(test)))
        classes, channels = _classes(train), image.shape[0] if image.ndim == 3 else None
        if not isinstance(train, DataLoader):
            train = training_loader(train, recipe.batch_size, recipe.augmentation, classes)
        return Setting(
            partial(build, model, classes, channels),
            train,
            self._loader(validation),
            loaders.pop("in-distribution"),
            loaders,
            recipe=recipe,
            fit=fit,
            members=members,
            samples=samples,
            mean=self.mean or None,
            std=self.std or None,
        )

    def _training(self, recipe: abnn.Recipe) -> tuple[_Data, _Data]:
        if self.validation is not None:
            train = open_data(self.data, "train", self._view(recipe.augmentation))
            return train, open_data(self.validation, "validation", self._view())
        train, held_out, note = train_and_validation(self.data, self._view(recipe.augmentation))
        typer.echo(note, err=True)
        return train, held_out

    def _test(self) -> _Data:
        test = open_data(self.test, "test", self._view())
        if self.test == self.data and not has_test(self.data):
            raise ValueError(
                f"{self.data} has no test data of its own; name it by --test, or the network would "
                "be tested on what it was trained on."
            )
        return test

    def _view(self, augmentation: tuple[str, ...] = ()) -> View:
        return View(mean=self.mean, std=self.std, augmentation=augmentation)

    def _loader(self, data: _Data) -> DataLoader[Any]:
        if isinstance(data, DataLoader):
            return data
        if self.limit is not None and not isinstance(data, IterableDataset):
            data = Subset(data, range(min(self.limit, len(data))))  # type: ignore[arg-type]
        return DataLoader(data, 256)


def _first(data: _Data) -> Any:
    if isinstance(data, DataLoader):
        data = data.dataset
    return next(iter(data)) if isinstance(data, IterableDataset) else data[0]


def _classes(data: _Data) -> int:
    """How many classes there are: those that have names, or one more than the largest label."""
    names = classes_of(data)
    if names and len(names) > 1:
        return len(names)
    largest = -1
    with torch.no_grad():
        for batch in data if isinstance(data, DataLoader) else DataLoader(data, 256):
            largest = max(largest, int(split(batch)[1].max()))
    if largest < 1:
        raise ValueError("All training labels are of one class; give data of two or more.")
    return largest + 1


def _named(ood: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in ood:
        name, equals, source = text.partition("=")
        if not (name and equals and source) or name in found:
            raise CommandError(
                f"--ood {text} is not a new name and a source; write it as letters=npz:PATH."
            )
        found[name] = source
    return found


def _report(result: Comparison, page: Path) -> None:
    try:
        from abnn.report import write_report

        title = f"{len(result.evaluations)} methods compared"
        write_report(result.records, page, title=title, detailed=1)
    except ImportError as error:
        typer.echo(f"No page was written: {error}", err=True)
