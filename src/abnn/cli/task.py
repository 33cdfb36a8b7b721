"""What a command works on: a network, and how data reaches it; also as a run directory tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import abnn
from abnn.baselines import Method, Single, load
from abnn.baselines.method import KIND
from abnn.batches import inputs_of, split
from abnn.cli import CommandError, is_first
from abnn.cli.options import numbers, whole_numbers
from abnn.data import Part, View, classes_of, notes_of, open_data, open_ood
from abnn.data import training_loader as batches_of
from abnn.distributed import World, world
from abnn.folding import first_tensor
from abnn.journal import RUN
from abnn.recipe import Recipe
from abnn.store import CONFIG
from abnn.train import WEIGHTS
from abnn.zoo import Input, Model, open_model
from abnn.zoo.opening import RANDOM

Data = Dataset[Any] | DataLoader[Any]
Predictor = abnn.ABNN | Method


@dataclass(frozen=True)
class Choices:
    """What a command line says of a network and of its input; what is None, others may know.

    Args:
        model, weights: as of `abnn.zoo.open_model`.
        mean, std: lists of numbers, as they are typed.
        size: one number, or height and width.
        skip_broken: leave out images that can't be read.
    """

    model: str | None = None
    weights: str | None = None
    mean: str | None = None
    std: str | None = None
    size: str | None = None
    skip_broken: bool = False

    def input(self, known: Input) -> Input:
        """What a network expects, with what the command line says instead.

        >>> Choices(mean="0.5", std="0.2", size="28").input(Input()).size
        (28, 28)
        """
        mean, std = numbers("--mean", self.mean), numbers("--std", self.std)
        if len(mean) != len(std):
            raise CommandError("Give both --mean and --std, with as many numbers each, or neither.")
        changes: dict[str, Any] = {"mean": mean, "std": std, "channels": len(mean)} if mean else {}
        if self.size is not None:
            sides = whole_numbers("--size", self.size)
            if len(sides) > 2:
                raise CommandError(f"--size {self.size} is not one number, or height,width.")
            changes["size"] = (sides[0], sides[-1])
        return known.with_(**changes)


@dataclass(frozen=True)
class Task:
    """A network, and how data reaches it.

    Args:
        model: the network, and what came with it.
        expected: the images that it takes.
        choices: what the command line said.
        memory: what a run directory remembers: see `config`.
        making: how it was made, if its weights are random.
    """

    model: Model
    expected: Input
    choices: Choices
    memory: Mapping[str, Any] = field(default_factory=dict)
    making: Making | None = None

    def view(self, augmentation: Sequence[str] = ()) -> View:
        """How images become inputs."""
        known = self.expected
        return View(
            known.size,
            known.mean,
            known.std,
            known.interpolation,
            known.crop,
            tuple(augmentation),
            known.squash,
        )

    @property
    def source(self) -> str | None:
        """The data that was trained on, where that is remembered."""
        found = self.memory.get("data")
        return found if isinstance(found, str) else None

    @property
    def rules(self) -> dict[str, Any]:
        """What `open_data` has to know beside the view."""
        # A scale that comes with the network is not for inputs that are no images.
        return {
            "skip_broken": self.choices.skip_broken,
            "as_is": self.choices.mean is None,
        }

    def open(self, source: str, part: Part, augmentation: Sequence[str] = ()) -> Data:
        """A part of the data that a command line names; says what there is to know of it."""
        found = open_data(source, part, self.view(augmentation), **self.rules)
        say_notes(part, found)
        return found

    def open_ood(self, named: Mapping[str, str], like: Data) -> dict[str, Data]:
        """Out-of-distribution data by name, in the shape of the other."""
        found: dict[str, Data] = {}
        for name, source in named.items():
            skip = self.choices.skip_broken
            found[name], note = open_ood(source, like, self.view(), skip_broken=skip)
            say(f"{name}: {note}")
        return found

    def predictor(self, run: Path | None, device: torch.device) -> Predictor:
        """What a run directory holds, on the network; without one, the network itself."""
        net, output = self.model.net.to(device), self.model.output
        kind = None
        if run is not None and (run / CONFIG).is_file():
            kind = json.loads((run / CONFIG).read_bytes()).get("format")
        if kind == "abnn":
            return abnn.load(run, net, output=output)  # type: ignore[arg-type]
        if kind == KIND:
            return load(run, net, output=output)  # type: ignore[arg-type]
        return Single(net, output=output)

    def config(self, source: str, classes: Sequence[str] | None) -> dict[str, Any]:
        """What a run directory is to remember, as plain values.

        Args:
            source: the data.
            classes: the names of its classes, where the network brings none.
        """
        weights = self.choices.weights or self.memory.get("weights")
        if weights is not None and Path(weights).exists():
            weights = str(Path(weights).absolute())
        names = self.model.classes or classes
        return {
            "model": self.model.source,
            "weights": weights,
            "making": None if self.making is None else asdict(self.making),
            "input": asdict(self.expected),
            "classes": None if names is None else list(names),
            "data": placed(source),
        }


@dataclass(frozen=True)
class Making:
    """How a network with random weights is made; None leaves it to the network.

    Args:
        classes, channels: those of the data.
        seed: of the weights.
    """

    classes: int | None = None
    channels: int | None = None
    seed: int | None = None

    @classmethod
    def for_data(cls, source: str, seed: int, skip_broken: bool) -> Making:
        """What the training data of a source asks for."""
        raw = open_data(source, "train", View(), skip_broken=skip_broken, as_is=True)
        shape = shape_of(raw)
        return cls(count_classes(raw), shape[0] if len(shape) == 3 else None, seed)


def task_of(
    choices: Choices,
    *,
    run: Path | None = None,
    recipe: Recipe | None = None,
    trained: bool = True,
    making: Making | None = None,
) -> Task:
    """Open the network that a command line, a run directory or a recipe names, in this order.

    Args:
        choices: what the command line says.
        run: a run directory, of a training or of a fit.
        recipe: may say what it was made for.
        trained: as of `open_model`.
        making: of random weights; default: as the run directory remembers it.
    """
    memory = remembered(run)
    if run is not None and (run / WEIGHTS).is_file():
        memory["weights"] = str(run)  # a training ends with weights of its own
    if choices.model is None and choices.weights is not None:
        # The folder of a training knows its network.
        memory |= remembered(Path(choices.weights))
    spec = choices.model or memory.get("model") or (recipe.model if recipe else None)
    if spec is None:
        raise CommandError(
            "It is not known which network this is about; name it by --model, as "
            "--model timm:resnet18 --weights net.pt."
        )
    if choices.model is not None and choices.model != memory.get("model"):
        memory = {key: value for key, value in memory.items() if key in ("data", "weights")}
    before = Input(**memory["input"]) if memory.get("input") else None
    making = making or Making(**memory.get("making") or {})
    if before is not None and making.channels is None:
        making = replace(making, channels=before.channels)
    weights = choices.weights or memory.get("weights")
    model = open_model(spec, weights=weights, trained=trained, **asdict(making))
    names = memory.get("classes")
    if names and model.classes is None:
        model = replace(model, classes=tuple(names))
    expected = choices.input(before or model.input or Input())
    return Task(model, expected, choices, memory, None if model.trained else making)


def fitted_task(choices: Choices, recipe: Recipe, data: str | None) -> tuple[Task, str]:
    """A trained network, and the data that it is to be fitted to.

    Args:
        choices: what the command line says.
        recipe: of the fit; may say what it was made for.
        data: what the command line names; default: what the network was trained on.
    """
    making = None
    if choices.weights == RANDOM and (source := data or recipe.data):
        making = Making.for_data(source, recipe.seed, choices.skip_broken)
    task = task_of(choices, recipe=recipe, making=making)
    source = data or task.source or recipe.data
    if source is None:
        raise CommandError("It is not known what to fit to; name it by --data.")
    return task, source


def remembered(run: Path | None) -> dict[str, Any]:
    """What a run directory remembers of its network and data; nothing if it is none.

    >>> remembered(Path("nowhere"))
    {}
    """
    if run is None or not (run / RUN).is_file():
        return {}
    try:
        found = json.loads((run / RUN).read_bytes())["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{run / RUN} was not written by abnn, or is damaged.") from error
    return found if isinstance(found, dict) else {}


def placed(source: str) -> str:
    """A source that is found from any other directory too."""
    kind, _, name = source.partition(":")
    return f"{kind}:{Path(name).absolute()}" if name and Path(name).exists() else source


def check_run(run: Path) -> None:
    """Refuse what is no directory of a training or of a fit that has ended."""
    if not any((run / name).is_file() for name in (CONFIG, WEIGHTS)):
        begun = "; the fit there has not ended, its command goes on with it" * (run / RUN).is_file()
        raise CommandError(
            f"{run} holds no result of abnn fit or abnn train{begun or '; give the --out of one'}."
        )


def say(text: str) -> None:
    """Tell a user what is no result."""
    if is_first():
        typer.echo(text, err=True)


def say_notes(what: str, data: Data) -> None:
    """Tell what there is to know of some data."""
    for note in notes_of(data):
        say(f"{what}: {note}")


def loader_of(
    data: Data, batch_size: int = 128, workers: int = 0, limit: int | None = None
) -> DataLoader[Any]:
    """Batches in the order of the data, all or the first so many examples."""
    if isinstance(data, DataLoader):
        return data
    if limit is not None and not isinstance(data, IterableDataset):
        data = Subset(data, range(min(limit, len(data))))  # type: ignore[arg-type]
    return DataLoader(data, batch_size, num_workers=workers)


def training_loader(
    data: Data,
    recipe: Recipe,
    classes: int | None = None,
    workers: int = 0,
    team: World | None = None,
) -> DataLoader[Any]:
    """Batches to train on, as a recipe asks for them."""
    if isinstance(data, DataLoader):
        return data
    # A last batch that is too small for batch statistics, or to be shared, is left out.
    least = max(2, (team or world()).size)
    return batches_of(data, recipe.batch_size, recipe.augmentation, classes, workers, least=least)


def named(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Sources by name, as `--ood letters=npz:PATH` gives them.

    >>> named("--ood", ["letters=npz:letters.npz"])
    {'letters': 'npz:letters.npz'}
    """
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, source = text.partition("=")
        if not (name and equals and source) or name in found:
            raise CommandError(
                f"{option} {text} is not a new name and a source; write it as letters=npz:PATH."
            )
        found[name] = source
    return found


def shape_of(data: Data) -> tuple[int, ...]:
    """The shape of an example's first input."""
    if isinstance(data, DataLoader):
        data = data.dataset
    example = next(iter(data)) if isinstance(data, IterableDataset) else data[0]
    return tuple(first_tensor(inputs_of(example)).shape)


def count_classes(data: Data) -> int:
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
