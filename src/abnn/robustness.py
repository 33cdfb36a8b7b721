"""How a predictor stands common corruptions of its images: accuracy and calibration by severity."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from os import PathLike
from statistics import fmean
from typing import Any

from abnn.corruptions import CORRUPTIONS, SEVERITIES, Corrupted, require
from abnn.distributed import World, world
from abnn.draws import whole_number
from abnn.evaluate import Predictor, evaluate
from abnn.evaluation import Evaluation
from abnn.images import Statistic, images_of
from abnn.order import randomness_kept
from abnn.progress import Progress
from abnn.table import aligned
from abnn.turns import agree

_HEADS = {"accuracy": "accuracy %", "nll": "nll", "ece": "ECE %"}


@dataclass(frozen=True)
class Figures:
    """What a predictor achieved on clean or on corrupted images.

    Args:
        accuracy: share of right labels, in percent.
        nll: negative log-likelihood, in nats.
        ece: expected calibration error over 15 bins, in percent.

    >>> Figures(accuracy=91.7, nll=0.373, ece=5.3).accuracy
    91.7
    """

    accuracy: float
    nll: float
    ece: float

    def _plain(self) -> dict[str, float | str]:
        # JSON has no infinity, which is the NLL when a label is given no probability at all.
        return asdict(self) | {"nll": "inf" if math.isinf(self.nll) else self.nll}

    def _cells(self) -> list[str]:
        return [f"{self.accuracy:.2f}", f"{self.nll:.4f}", f"{self.ece:.2f}"]


@dataclass(frozen=True)
class Robustness:
    """The figures of a predictor on clean images, and for each corruption and severity.

    Args:
        n: number of labelled examples (pixels, if these carry the labels).
        clean: the figures without corruption.
        corrupted: those of each corruption, by severity, which are the same for all corruptions.
        skipped: the corruptions that were left out, and why.

    >>> clean, worse = Figures(91.7, 0.373, 5.3), Figures(64.2, 1.25, 14.0)
    >>> rows = {"fog": {1: clean, 5: worse}, "contrast": {1: worse, 5: worse}}
    >>> result = Robustness(100, clean, rows)
    >>> print(result)
    severity  accuracy %     nll  ECE %
       clean       91.70  0.3730   5.30
           1       77.95  0.8115   9.65
           5       64.20  1.2500  14.00
    <BLANKLINE>
    corruption  accuracy %     nll  ECE %
    fog              77.95  0.8115   9.65
    contrast         64.20  1.2500  14.00
    >>> Robustness.from_json(result.to_json()) == result
    True
    """

    n: int
    clean: Figures
    corrupted: dict[str, dict[int, Figures]]
    skipped: dict[str, str] = field(default_factory=dict)

    def by_severity(self) -> dict[int, Figures]:
        """For each severity, the mean over corruptions.

        >>> one, two = Figures(80.0, 0.5, 2.0), Figures(60.0, 1.5, 4.0)
        >>> Robustness(9, one, {"fog": {3: one}, "jpeg": {3: two}}).by_severity()
        {3: Figures(accuracy=70.0, nll=1.0, ece=3.0)}
        """
        rows = list(self.corrupted.values())
        return {severity: _mean(row[severity] for row in rows) for severity in rows[0]}

    def by_corruption(self) -> dict[str, Figures]:
        """For each corruption, the mean over severities.

        >>> one, two = Figures(80.0, 0.5, 2.0), Figures(60.0, 1.5, 4.0)
        >>> Robustness(9, one, {"fog": {1: one, 2: two}}).by_corruption()
        {'fog': Figures(accuracy=70.0, nll=1.0, ece=3.0)}
        """
        return {name: _mean(row.values()) for name, row in self.corrupted.items()}

    def to_json(self) -> str:
        """The figures as a JSON object."""
        corrupted = {
            name: {str(severity): figures._plain() for severity, figures in row.items()}
            for name, row in self.corrupted.items()
        }
        data = asdict(self) | {"clean": self.clean._plain(), "corrupted": corrupted}
        return json.dumps(data, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Robustness:
        """Read what `to_json` wrote."""
        levels = {str(severity): severity for severity in SEVERITIES}
        try:
            data = json.loads(text)
            given: dict[str, Any] = {
                "n": whole_number("n", data["n"], least=1),
                "clean": _figures(data["clean"]),
                "corrupted": {
                    name: {levels[severity]: _figures(figures) for severity, figures in row.items()}
                    for name, row in data["corrupted"].items()
                },
                "skipped": dict(data["skipped"].items()),
            }
            grids = {tuple(row) for row in given["corrupted"].values()}
            if len(grids) != 1 or grids == {()}:
                raise ValueError("the corruptions are not all of the same severities")
            if not all(isinstance(reason, str) for reason in given["skipped"].values()):
                raise ValueError("a reason is no text")
            return cls(**data | given)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                "The text is not a Robustness in JSON; give what Robustness.to_json wrote."
            ) from error

    def to_table(self) -> str:
        """A row for each severity, the mean over corruptions, and one for each corruption."""
        severities = {"clean": self.clean} | {str(s): row for s, row in self.by_severity().items()}
        blocks = {"severity": severities, "corruption": self.by_corruption()}
        return "\n\n".join(
            aligned(
                [head, *_HEADS.values()],
                *([name, *row._cells()] for name, row in rows.items()),
                named=head == "corruption",
            )
            for head, rows in blocks.items()
        )

    def __str__(self) -> str:
        """The table, and what was left out."""
        reasons = [f"Left out: {reason}" for reason in self.skipped.values()]
        return "\n\n".join([self.to_table(), *reasons])

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the figures over the severity to a file, as "robust.png"; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Plots need matplotlib: pip install 'abnn[plot]'.") from error
        picture = Figure(figsize=(3.2 * len(_HEADS) + 1.8, 3.4), layout="constrained")
        panels = picture.subplots(1, len(_HEADS), squeeze=False)[0]
        lines: dict[str, dict[int, Figures]] = {**self.corrupted, "mean": self.by_severity()}
        for panel, name in zip(panels, _HEADS, strict=True):
            for number, (label, row) in enumerate(lines.items()):
                style = {"color": "black", "linewidth": 2.5} if label == "mean" else {}
                values = [getattr(figures, name) for figures in (self.clean, *row.values())]
                # Beyond ten, colours come again.
                dashes = "-" if number < 10 or style else "--"
                panel.plot([0, *row], values, dashes, marker=".", label=label, **style)
            panel.set_xticks([0, *self.by_severity()])
            panel.set_xlabel("severity")
            panel.set_title(_HEADS[name])
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
        picture.savefig(path)


def robustness(
    predictor: Predictor,
    loader: Iterable[Any],
    corruptions: Iterable[str] | None = None,
    severities: Iterable[int] = SEVERITIES,
    *,
    mean: Statistic | None = None,
    std: Statistic | None = None,
    corruption_seed: int = 0,
    ignore_index: int = -100,
    progress: bool | None = None,
    **predict: Any,
) -> Robustness:
    """Evaluate a predictor on clean images, and on these under common corruptions.

    The loader is read once for the clean images and once for each corruption and severity, and
    must give the same images in every pass; noise belongs to their places, so one that shuffles
    pairs them anew. Under several processes, all call this with the same arguments.

    Args:
        predictor: anything with `predict(inputs) -> Prediction`.
        loader: labelled batches as for `evaluate`, with images `[B, C, H, W]` from 0 to 1 if they
            were not normalised.
        corruptions: some of `abnn.corruptions.CORRUPTIONS`; default: all that the images and this
            machine can have.
        severities: some of 1 to 5.
        mean, std: with which the images were normalised, a number or one a channel.
        corruption_seed: of the corruptions' noise.
        ignore_index: as of `evaluate`.
        progress: show a line of progress; default: on a terminal.
        predict: passed on to `predictor.predict`, such as `samples=8, seed=0`.

    >>> from abnn.baselines import Single
    >>> net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())  # which channel is brightest?
    >>> x = torch.rand(8, 3, 16, 16)
    >>> result = robustness(Single(net), [(x, net(x).argmax(1))], ["contrast", "fog"], [1, 5])
    >>> result.clean.accuracy, result.corrupted["contrast"][5].accuracy
    (100.0, 100.0)
    """
    if isinstance(loader, Iterator):
        raise ValueError(
            "The loader is an iterator, which is empty after one pass; give one that can be "
            "iterated again, such as a list or a DataLoader."
        )
    names, levels = _names(corruptions), _levels(severities)
    with (World() if predict.get("alone") else world()).joined() as team:
        given = {"corruptions": names, "severities": levels, "seed": corruption_seed}
        agree(team, predictor, [loader], given | {"mean": repr(mean), "std": repr(std)})
        with team.meeting():
            batch = _first(loader)
            skipped = {} if corruptions is not None else _unsuitable(batch)
            names = [name for name in names if name not in skipped]
            for name in names:  # what is wrong shows before the long work
                next(iter(Corrupted([batch], name, 0, mean, std, corruption_seed)))
    grid = [(name, level) for name in names for level in levels]
    clean = evaluate(predictor, loader, ignore_index=ignore_index, progress=False, **predict)
    corrupted: dict[str, dict[int, Figures]] = {name: {} for name in names}
    shown = progress if team.rank == 0 else False
    with Progress(len(grid), "robustness", shown) as bar:
        for done, (name, level) in enumerate(grid, start=1):
            batches = Corrupted(loader, name, level, mean, std, corruption_seed)
            result = evaluate(
                predictor, batches, ignore_index=ignore_index, progress=False, **predict
            )
            if result.n != clean.n:
                raise ValueError(
                    f"The loader gave {clean.n} labelled examples at first and {result.n} later; "
                    "give one that gives the same in every pass."
                )
            corrupted[name][level] = _of(result)
            bar.update(done, f"{name} {level}")
    return Robustness(clean.n, _of(clean), corrupted, skipped)


def _names(corruptions: Iterable[str] | None) -> list[str]:
    if corruptions is None:
        return list(CORRUPTIONS)
    names = [corruptions] if isinstance(corruptions, str) else list(dict.fromkeys(corruptions))
    if not names:
        raise ValueError("corruptions= is empty; name some, or leave it out for all.")
    return names


def _levels(severities: Iterable[int]) -> list[int]:
    levels = sorted({whole_number("a severity", severity) for severity in severities})
    if not levels or not set(levels) <= set(SEVERITIES):
        raise ValueError(f"severities={levels} are not some of 1 to 5; give these.")
    return levels


def _first(loader: Iterable[Any]) -> Any:
    """The first batch; the passes that follow shuffle as if it had not been looked at."""
    with randomness_kept(loader):
        batch = next(iter(loader), None)
    if batch is None:
        raise ValueError("The loader is empty; give at least one batch.")
    return batch


def _unsuitable(batch: Any) -> dict[str, str]:
    """The corruptions that the images of a batch, or this machine, can't have, and why."""
    channels, reasons = images_of(batch).shape[1], {}
    for name in CORRUPTIONS:
        try:
            require(name, channels)
        except (ImportError, ValueError) as error:
            reasons[name] = str(error)
    return reasons


def _of(result: Evaluation) -> Figures:
    return Figures(result.accuracy, result.nll, result.ece)


def _mean(rows: Iterable[Figures]) -> Figures:
    columns = zip(*((row.accuracy, row.nll, row.ece) for row in rows), strict=True)
    return Figures(*map(fmean, columns))


def _figures(data: dict[str, Any]) -> Figures:
    """What `Figures._plain` gave."""
    nll = data["nll"]
    numbers = [data["accuracy"], data["ece"], *([] if nll == "inf" else [nll])]
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ValueError("a figure is no number")
    return Figures(**data | {"nll": float(nll)})
