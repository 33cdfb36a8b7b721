"""Recipe: the hyper-parameters of a training, validated; a TOML file where they are to be kept."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from abnn.files import write
from abnn.prior import RandomPrior

Schedule = Literal["constant", "multistep", "polynomial"]
Optimizer = Literal["sgd", "adamw"]
Amp = Literal["bf16", "fp16"]


@dataclass(frozen=True)
class Recipe:
    """How to fit an ABNN; the defaults are the paper's for CIFAR-10 and a ResNet-50.

    Args:
        epochs: passes over the training data; a fraction stops within one.
        steps: number of steps instead of epochs, for a loader without a length.
        lr: learning rate at the start.
        momentum: of SGD; for "adamw" it is the first beta.
        weight_decay: the Gaussian prior on gamma and beta.
        schedule: "constant"; "multistep", times `lr_factor` at every milestone; or "polynomial",
            times `(1 - step / steps) ** power`.
        milestones: epochs at which the multi-step schedule acts.
        prior: the random class prior; None turns it off.
        modes_at_once: modes that are fitted in one pass over the data; None: all.
        amp: train in mixed precision, "bf16" or "fp16".
        seed: of the data order, the noise and the random prior.
        alpha, noise, stats, modes: what the network must have been converted with; None: anything.
        batch_size, augmentation: what the loader is to do; recorded, not enforced.
        model, data: what it was made for, as a command line names it; recorded, not enforced.

    >>> Recipe(lr=0.05, prior=RandomPrior(classes=2, weight=6)).lr
    0.05
    >>> Recipe.load("cifar10-resnet50").epochs
    2
    """

    epochs: float = 2.0
    steps: int | None = None
    lr: float = 0.0057
    momentum: float = 0.9
    weight_decay: float = 5e-4
    optimizer: Optimizer = "sgd"
    nesterov: bool = False
    schedule: Schedule = "constant"
    milestones: tuple[float, ...] = ()
    lr_factor: float = 0.1
    power: float = 0.9
    prior: RandomPrior | None = field(default_factory=RandomPrior)
    modes_at_once: int | None = None
    amp: Amp | None = None
    seed: int = 0
    alpha: float | None = None
    noise: str | None = None
    stats: str | None = None
    modes: int | None = None
    batch_size: int = 128
    augmentation: tuple[str, ...] = ()
    model: str | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        for name, is_right, kind in _LISTS:
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or not all(map(is_right, value)):
                raise ValueError(f"Recipe {name}={value!r} must be a list of {kind}.")
            object.__setattr__(self, name, tuple(value))
        for name, low in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value >= low):
                raise ValueError(f"Recipe {name}={value!r} must be a number of at least {low}.")
        for name in ("epochs", "lr", "power"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Recipe {name}={getattr(self, name)!r} must be more than 0.")
        for name in ("model", "data"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"Recipe {name}={value!r} must be a name.")
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"Recipe nesterov={self.nesterov!r} must be true or false.")
        for name in ("steps", "modes_at_once", "modes", "batch_size", "seed"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"Recipe {name}={value!r} must be a whole number.")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"Recipe {name}={value!r} is unknown{nearest(value, choices)}")
        if not self.momentum < 1:
            raise ValueError(f"Recipe momentum={self.momentum} must be less than 1.")
        if self.prior is not None and not isinstance(self.prior, RandomPrior):
            raise ValueError(f"Recipe prior={self.prior!r} must be a RandomPrior or None.")
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError(f"Recipe milestones={self.milestones} must go up.")
        if self.schedule == "multistep" and not self.milestones:
            raise ValueError("Recipe schedule='multistep' needs milestones, in epochs.")

    @property
    def scratch(self) -> bool:
        """Whether it is of training from scratch: it has neither noise nor a random prior.

        >>> Recipe.load("cifar10-resnet50-scratch").scratch, Recipe.load("cifar10-resnet50").scratch
        (True, False)
        """
        return self.prior is None and self.alpha is None

    def with_(self, **overrides: Any) -> Recipe:
        """The same recipe with some values replaced.

        >>> Recipe().with_(lr=0.1).lr
        0.1
        """
        _check_names("A recipe", overrides, self)
        return replace(self, **overrides)

    def lr_at(self, step: int, steps: int, epoch: float) -> float:
        """Learning rate of a step, counted from 0, out of `steps`, at a time in epochs.

        >>> Recipe(lr=1.0, schedule="multistep", milestones=[5], lr_factor=0.5).lr_at(60, 100, 6.0)
        0.5
        """
        if self.schedule == "multistep":
            return self.lr * self.lr_factor ** sum(epoch >= m for m in self.milestones)
        if self.schedule == "polynomial":
            return float(self.lr * (1 - step / steps) ** self.power)
        return self.lr

    @classmethod
    def load(cls, source: str | PathLike[str]) -> Recipe:
        """A recipe of the paper by its name, or one from a TOML file.

        >>> Recipe.load("imagenet-vit").alpha
        0.00035
        """
        path = Path(source)
        if path.suffix != ".toml":
            if str(source) not in names():
                raise ValueError(
                    f"There is no recipe {str(source)!r}{nearest(str(source), names())}"
                )
            text = (_folder() / f"{source}.toml").read_text()
        elif path.is_file():
            text = path.read_text()
        else:
            raise FileNotFoundError(f"There is no recipe file {path}.")
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not valid TOML: {error}.") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values; a prior of `False` is none, `True` is the usual one.

        >>> Recipe.from_dict({"prior": False}).prior is None
        True
        """
        values = dict(values)
        prior = values.get("prior")
        if isinstance(prior, Mapping):
            _check_names("A random prior", prior, RandomPrior)
            values["prior"] = RandomPrior(**prior)
        elif isinstance(prior, bool):
            values["prior"] = RandomPrior() if prior else None
        return cls().with_(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without those that are None.

        >>> Recipe.from_dict(Recipe(lr=0.1).to_dict()) == Recipe(lr=0.1)
        True
        """
        values = {k: v for k, v in asdict(self).items() if v is not None}
        values |= {k: list(v) for k, v in values.items() if isinstance(v, tuple)}
        return values | {"prior": False if self.prior is None else asdict(self.prior)}

    def to_toml(self) -> str:
        """The recipe as the text of a TOML file.

        >>> Recipe(lr=0.1).to_toml().splitlines()[1]
        'lr = 0.1'
        """
        values = self.to_dict()
        prior = values.pop("prior")
        # Numbers, strings, booleans and lists of them are written alike in JSON and TOML.
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        if prior is False:
            lines.append("prior = false")
        else:
            lines += ["", "[prior]", *(f"{k} = {json.dumps(v)}" for k, v in prior.items())]
        return "\n".join(lines) + "\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the recipe to a TOML file.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run:
        ...     Recipe(lr=0.1).save(f"{run}/mine.toml")
        ...     Recipe.load(f"{run}/mine.toml").lr
        0.1
        """
        write(Path(path), self.to_toml().encode())


def overridden(recipe: Recipe, assignments: Sequence[str]) -> Recipe:
    """A recipe with some values replaced, each as `KEY=VALUE` of a TOML file.

    Quotes around a word may be left out, which a shell would take away.

    >>> changed = overridden(Recipe(), ["lr=0.1", "schedule=polynomial", "prior.weight=6"])
    >>> changed.lr, changed.schedule, changed.prior
    (0.1, 'polynomial', RandomPrior(classes='sqrt', weight=6.0))
    """
    values = recipe.to_dict()
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not (name and equals and text):
            raise ValueError(f"{assignment!r} sets no value; write KEY=VALUE, as lr=0.1.")
        if name.startswith("prior."):
            before = values["prior"] if isinstance(values["prior"], Mapping) else {}
            values["prior"] = {**before, name.removeprefix("prior."): _toml_value(text)}
        else:
            values[name] = _toml_value(text)
    return Recipe.from_dict(values)


def names() -> list[str]:
    """Names of the recipes that come with the library.

    >>> "cifar10-resnet50" in names()
    True
    """
    return sorted(p.name.removesuffix(".toml") for p in _folder().iterdir() if ".toml" in p.name)


def nearest(value: str, known: Any) -> str:
    """The end of an error message that names the nearest valid value."""
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}."


def _check_names(what: str, values: Mapping[str, Any], cls: Any) -> None:
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            raise TypeError(f"{what} has no {name!r}{nearest(name, known)}")


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text[0] in "[{\"'":
            raise ValueError(f"{text} is no value of TOML: {error}.") from error
        return text  # a word without quotes, which is wrong where a number is wanted


def _folder() -> Any:
    return resources.files("abnn") / "recipes"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_LISTS = [
    ("milestones", _is_number, "numbers, as [60, 120]"),
    ("augmentation", _is_text, 'names, as ["hflip"]'),
]
_AT_LEAST = {
    "epochs": 0,
    "steps": 1,
    "lr": 0,
    "momentum": 0,
    "weight_decay": 0,
    "lr_factor": 0,
    "power": 0,
    "modes_at_once": 1,
    "alpha": 0,
    "modes": 1,
    "batch_size": 1,
    "seed": 0,
}
_CHOICES = {
    "schedule": get_args(Schedule),
    "optimizer": get_args(Optimizer),
    "amp": get_args(Amp),
    "noise": ("channel", "example", "element"),
    "stats": ("per_mode", "frozen"),
}
