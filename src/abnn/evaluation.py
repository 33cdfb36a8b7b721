"""What a predictor achieved, and what it cost: plain numbers, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from abnn.metrics import Detection
from abnn.table import aligned


@dataclass(frozen=True)
class Selective:
    """What is gained by leaving the least confident predictions to someone else.

    Args:
        aurc: area under the risk-coverage curve, from 0 to 1.
        augrc: area under the generalised risk-coverage curve, from 0 to 1/2.
        accuracy: by coverage: accuracy of the most confident share of the predictions, in percent.
        coverage: by risk: the largest share with at most so many errors among it, in percent.
    """

    aurc: float
    augrc: float
    accuracy: dict[float, float]
    coverage: dict[float, float]


@dataclass(frozen=True)
class Sets:
    """What prediction sets hold.

    Args:
        coverage: share of the labels that are in their set, in percent.
        size: mean number of classes in a set.
        empty: share of the sets that are empty, in percent.
        by_class: coverage of every class, in percent; `None` of a class without examples.
    """

    coverage: float
    size: float
    empty: float
    by_class: list[float | None]


@dataclass(frozen=True)
class Diversity:
    """How much the members of a predictor differ.

    Args:
        disagreement: share of the pairs of members that vote for different classes, in percent.
        epistemic: mean mutual information of label and weights, in nats.
        ratio: of OOD data, how many times the epistemic uncertainty of the labelled data it is.
    """

    disagreement: float
    epistemic: float
    ratio: float | None = None


@dataclass(frozen=True)
class Cost:
    """What a predictor costs beyond the one original network; `None` where it does not say.

    Args:
        parameters: number of parameters added.
        bytes: what has to be stored beside the network.
        fit_seconds: time of its training.
        milliseconds: time of a prediction of one input, in the batches of the loader; what the
            predictor's own attribute of this name says, if it has one.
        passes: forward passes for one input, a mean.
    """

    parameters: int | None = None
    bytes: int | None = None
    fit_seconds: float | None = None
    milliseconds: float | None = None
    passes: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """What a predictor achieved.

    Accuracies, calibration errors, coverages and all detection figures are in percent, as the paper
    prints them; NLL, Brier score and the areas under risk-coverage curves are plain numbers.

    Args:
        n: number of labelled examples (pixels or tokens, if these carry the labels).
        accuracy: share of right labels, in percent.
        nll: negative log-likelihood, in nats.
        brier: Brier score over all classes, from 0 to 2.
        ece: expected calibration error over 15 bins, in percent.
        ood: for each OOD dataset and each of `abnn.scores`, the detection figures, in percent.
        top5: share of labels among the five most probable classes, in percent, if there are more.
        adaptive_ece: calibration error over bins of equally many examples, in percent.
        classwise_ece: calibration error of every class's probability, their mean, in percent.
        selective: what leaving out the least confident predictions gains.
        sets: what prediction sets hold, if the predictor makes any.
        diversity: how much the members differ on the labelled data, if there are several.
        ood_diversity: the same of each OOD dataset.
        cost: what it costs; two evaluations are equal whatever they cost.
        auroc_bound: how far an AUROC can be from the exact one, in percent points. It is 0 up to
            262,144 distinct scores; beyond, these are kept with fewer bits.

    >>> result = Evaluation(n=100, accuracy=91.7, nll=0.373, brier=0.136, ece=5.3)
    >>> print(result)
    examples  accuracy %     nll   brier  ECE %
         100       91.70  0.3730  0.1360   5.30
    >>> Evaluation.from_json(result.to_json()) == result
    True
    """

    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float
    ood: dict[str, dict[str, Detection]] = field(default_factory=dict)
    top5: float | None = None
    adaptive_ece: float | None = None
    classwise_ece: float | None = None
    selective: Selective | None = None
    sets: Sets | None = None
    diversity: Diversity | None = None
    ood_diversity: dict[str, Diversity] = field(default_factory=dict)
    cost: Cost | None = field(default=None, compare=False)
    auroc_bound: float = 0.0

    def figures(self) -> dict[str, float]:
        """All figures of quality by name, as `abnn.statistics.over_seeds` takes them.

        >>> Evaluation(n=9, accuracy=50.0, nll=0.7, brier=0.5, ece=1.0).figures()["nll"]
        0.7
        """
        named = ("accuracy", "top5", "nll", "brier", "ece", "adaptive_ece", "classwise_ece")
        found = {name: getattr(self, name) for name in named}
        if self.selective:
            found |= {name: getattr(self.selective, name) for name in ("aurc", "augrc")}
            found |= {f"at_coverage/{c:g}/accuracy": v for c, v in self.selective.accuracy.items()}
            found |= {f"at_risk/{r:g}/coverage": v for r, v in self.selective.coverage.items()}
        if self.sets:
            found |= {"sets/coverage": self.sets.coverage, "sets/size": self.sets.size}
        for dataset, scores in self.ood.items():
            for score, detection in scores.items():
                found |= {f"ood/{dataset}/{score}/{k}": v for k, v in asdict(detection).items()}
        return {name: value for name, value in found.items() if value is not None}

    def to_json(self) -> str:
        """The evaluation as a JSON object."""
        data = asdict(self)
        # JSON has no infinity, which is the NLL when a label is given no probability at all.
        data["nll"] = "inf" if math.isinf(self.nll) else self.nll
        return json.dumps(data, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Evaluation:
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
            data["ood"] = {
                name: {score: Detection(**figures) for score, figures in scores.items()}
                for name, scores in data["ood"].items()
            }
            data["ood_diversity"] = {
                name: Diversity(**figures) for name, figures in data["ood_diversity"].items()
            }
            parts: dict[str, Callable[..., Any]] = {
                "selective": _selective,
                "sets": Sets,
                "diversity": Diversity,
                "cost": Cost,
            }
            for name, make in parts.items():
                data[name] = None if data[name] is None else make(**data[name])
            return cls(**{**data, "nll": float(data["nll"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                "The text is not an Evaluation in JSON; give what Evaluation.to_json wrote."
            ) from error

    def to_table(self) -> str:
        """The evaluation as aligned plain text: accuracy and calibration first, then the rest."""
        blocks = [
            _line({
                "examples": str(self.n),
                "accuracy %": f"{self.accuracy:.2f}",
                "nll": f"{self.nll:.4f}",
                "brier": f"{self.brier:.4f}",
                "ECE %": f"{self.ece:.2f}",
            }),
            _line({
                "top-5 %": _percent(self.top5),
                "adaptive ECE %": _percent(self.adaptive_ece),
                "class-wise ECE %": _percent(self.classwise_ece),
            }),
            *self._selective_block(),
            *self._sets_block(),
            *self._ood_blocks(),
            *self._diversity_block(),
            *self._cost_block(),
        ]  # fmt: skip
        return "\n\n".join(block for block in blocks if block)

    def _selective_block(self) -> list[str]:
        if self.selective is None:
            return []
        some = self.selective
        cells = {"AURC": f"{some.aurc:.4f}", "AUGRC": f"{some.augrc:.4f}"}
        cells |= {f"acc % at {100 * c:g} %": _percent(v) for c, v in some.accuracy.items()}
        cells |= {f"kept % at risk {100 * r:g} %": _percent(v) for r, v in some.coverage.items()}
        return ["Leaving out the least confident\n" + _line(cells)]

    def _sets_block(self) -> list[str]:
        if self.sets is None:
            return []
        worst = min((share for share in self.sets.by_class if share is not None), default=None)
        return [
            "Prediction sets\n"
            + _line({
                "coverage %": _percent(self.sets.coverage),
                "of the worst class": _percent(worst),
                "classes a set": f"{self.sets.size:.2f}",
                "empty %": _percent(self.sets.empty),
            })
        ]  # fmt: skip

    def _ood_blocks(self) -> Iterable[str]:
        paper = {name: scores["msp"] for name, scores in self.ood.items() if "msp" in scores}
        if paper:
            yield "OOD detection by maximum probability (msp), %\n" + aligned(
                ["dataset", "AUROC", "AUPR", "FPR95", "AUPR in", "FPR95 in"],
                *([name, *map(_percent, asdict(row).values())] for name, row in paper.items()),
                named=True,
            )
        if self.ood:
            names = list(dict.fromkeys(score for scores in self.ood.values() for score in scores))
            yield "AUROC by score, %\n" + aligned(
                ["dataset", *names],
                *(
                    [name, *(_percent(scores[s].auroc if s in scores else None) for s in names)]
                    for name, scores in self.ood.items()
                ),
                named=True,
            )
        if self.auroc_bound:
            yield f"The scores were rounded; an AUROC is exact to {self.auroc_bound:.1g} points."

    def _diversity_block(self) -> list[str]:
        if self.diversity is None:
            return []
        rows = {"in-distribution": self.diversity} | self.ood_diversity
        return [
            "Members\n"
            + aligned(
                ["dataset", "disagree %", "epistemic", "times"],
                *(
                    [
                        name,
                        _percent(row.disagreement),
                        f"{row.epistemic:.5f}",
                        "-" if row.ratio is None else f"{row.ratio:.2f}",
                    ]
                    for name, row in rows.items()
                ),
                named=True,
            )
        ]

    def _cost_block(self) -> list[str]:
        if self.cost is None:
            return []
        forms = {
            "parameters": ("parameters added", ",d"),
            "bytes": ("bytes", ",d"),
            "fit_seconds": ("fit s", ".1f"),
            "milliseconds": ("ms a prediction", ".3g"),
            "passes": ("passes", ".4g"),
        }
        cells = {
            head: format(value, form)
            for name, (head, form) in forms.items()
            if (value := getattr(self.cost, name)) is not None
        }
        return ["Cost\n" + _line(cells)] if cells else []

    def __str__(self) -> str:
        """The table."""
        return self.to_table()


def _selective(
    aurc: float, augrc: float, accuracy: Mapping[str, float], coverage: Mapping[str, float]
) -> Selective:
    """JSON has texts for keys."""
    by_coverage, by_risk = (
        {float(k): v for k, v in given.items()} for given in (accuracy, coverage)
    )
    return Selective(aurc, augrc, by_coverage, by_risk)


def _line(cells: Mapping[str, str]) -> str:
    """One row, without the figures that are not there."""
    given = {name: cell for name, cell in cells.items() if cell != "-"}
    return aligned(list(given), list(given.values())) if given else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
