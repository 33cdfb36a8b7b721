"""Score a predictor on labelled and on out-of-distribution (OOD) data with the paper's metrics."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from abnn.batches import device_of, inputs_of, length_of, split, to_device
from abnn.distributed import World, world
from abnn.metrics import Detection, detect, ece, log_likelihood, squared_error
from abnn.prediction import Prediction
from abnn.progress import Progress
from abnn.turns import agree, in_turns

# How out-of-distribution a prediction looks: higher is more so. The paper's own is "msp".
SCORES: dict[str, Callable[[Prediction], Tensor]] = {
    "msp": lambda p: 1 - p.confidence,
    "entropy": lambda p: p.total,
    "epistemic": lambda p: p.epistemic,
    "aleatoric": lambda p: p.aleatoric,
    "max_logit": lambda p: -p.max_logit,
    "energy": lambda p: p.energy,
    "variation_ratio": lambda p: p.variation_ratio,
}


class Predictor(Protocol):
    """Whatever turns inputs into a `Prediction`: an ABNN, a baseline, your own class."""

    def predict(self, *args: Any, **kwargs: Any) -> Prediction:
        """Predict a batch of inputs."""


@dataclass(frozen=True)
class Evaluation:
    """What a predictor achieved.

    Accuracy, ECE and all detection figures are in percent, as the paper prints them; NLL and
    Brier score are plain numbers.

    Args:
        n: number of labelled examples (pixels or tokens, if these carry the labels).
        accuracy: share of right labels, in percent.
        nll: negative log-likelihood, in nats.
        brier: Brier score over all classes, from 0 to 2.
        ece: expected calibration error over 15 bins, in percent.
        ood: for each OOD dataset and each of `SCORES`, the detection figures, in percent.

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
            ood = {
                name: {score: Detection(**figures) for score, figures in scores.items()}
                for name, scores in data["ood"].items()
            }
            return cls(**{**data, "nll": float(data["nll"]), "ood": ood})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                "The text is not an Evaluation in JSON; give what Evaluation.to_json wrote."
            ) from error

    def to_table(self) -> str:
        """The evaluation as aligned plain text: accuracy and calibration, then OOD detection."""
        blocks = [
            aligned(
                ["examples", "accuracy %", "nll", "brier", "ECE %"],
                [
                    str(self.n),
                    f"{self.accuracy:.2f}",
                    f"{self.nll:.4f}",
                    f"{self.brier:.4f}",
                    f"{self.ece:.2f}",
                ],
            )
        ]
        paper = {name: scores["msp"] for name, scores in self.ood.items() if "msp" in scores}
        if paper:
            blocks.append(
                "OOD detection by maximum probability (msp), %\n"
                + aligned(
                    ["dataset", "AUROC", "AUPR", "FPR95", "AUPR in", "FPR95 in"],
                    *([name, *_percents(asdict(row).values())] for name, row in paper.items()),
                )
            )
        if self.ood:
            names = list(dict.fromkeys(score for scores in self.ood.values() for score in scores))
            blocks.append(
                "AUROC by score, %\n"
                + aligned(
                    ["dataset", *names],
                    *(
                        [name, *_percents(scores[s].auroc if s in scores else None for s in names)]
                        for name, scores in self.ood.items()
                    ),
                )
            )
        return "\n\n".join(blocks)

    def __str__(self) -> str:
        """The table."""
        return self.to_table()


def evaluate(
    predictor: Predictor,
    id_loader: Iterable[Any],
    ood: Mapping[str, Iterable[Any]] | None = None,
    *,
    ignore_index: int = -100,
    alone: bool = False,
    progress: bool | None = None,
    **predict: Any,
) -> Evaluation:
    """Score a predictor on labelled data and, if given, on out-of-distribution datasets.

    Each loader is read once, and only a few numbers per example are kept. Under torchrun, or in a
    process group of yours, all processes call this with the same arguments, share the batches, and
    get the same figures.

    Args:
        predictor: anything with `predict(inputs) -> Prediction`.
        id_loader: batches `(x, y)`, `(x1, x2, ..., y)` or mappings with "labels".
        ood: loaders by the name of their dataset; labels are not needed, and not looked at.
        ignore_index: the label of what is left out, such as void pixels or padding.
        alone: evaluate all of it in this process, whatever other processes there are.
        progress: show a line of progress; default: on a terminal.
        predict: passed on to `predictor.predict`, such as `samples=8, seed=0`.

    >>> from abnn.baselines import Single
    >>> x, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    >>> result = evaluate(Single(torch.nn.Identity()), [(x, y)], ood={"blank": [x * 0]})
    >>> result.accuracy
    50.0
    >>> result.ood["blank"]["msp"].auroc
    100.0
    """
    if not hasattr(predictor, "predict"):
        raise TypeError(
            f"A {type(predictor).__name__} has no predict(x); give an ABNN, or wrap a plain "
            "network as abnn.baselines.Single(net)."
        )
    if ood is not None and not isinstance(ood, Mapping):
        raise ValueError('ood must map names to loaders; give ood={"name": loader}.')
    given = predict | {"ignore_index": ignore_index, "ood": list(ood or ())}
    with (World() if alone else world()).joined() as team:
        agree(team, predictor, [id_loader, *(ood or {}).values()], given)
        run = partial(_run, team, predictor, predict=predict, progress=progress)
        known = run(
            id_loader,
            "in-distribution",
            lambda batch, prediction: terms_of(
                prediction, split(batch)[1], ignore_index, bool(ood)
            ),
        )
        n = known["correct"].numel()
        if n == 0:
            raise ValueError(
                f"Every in-distribution label is ignore_index ({ignore_index}); give labelled data."
            )
        detections: dict[str, dict[str, Detection]] = {}
        for dataset, loader in (ood or {}).items():
            unknown = run(loader, dataset, lambda _, prediction: _scores(prediction))
            detections[dataset] = {
                name: detect(known[name], scores).percent() for name, scores in unknown.items()
            }
    return Evaluation(
        n=n,
        accuracy=100 * _mean(known["correct"]),
        nll=-_mean(known["log_likelihood"]),
        brier=_mean(known["squared_error"]),
        ece=100 * ece(known["confidence"], known["correct"]),
        ood=detections,
    )


def _run(
    team: World,
    predictor: Predictor,
    loader: Iterable[Any],
    dataset: str,
    terms: Callable[[Any, Prediction], dict[str, Tensor]],
    *,
    predict: dict[str, Any],
    progress: bool | None,
) -> dict[str, Tensor]:
    """A few numbers per example of a loader, in its order."""
    device = device_of(predictor)
    found: dict[str, list[Tensor]] = defaultdict(list)

    def work(number: int, batch: Any) -> tuple[int, dict[str, Tensor]]:
        prediction = predictor.predict(to_device(inputs_of(batch), device), **predict)
        if prediction.log_probs.isnan().any():
            raise ValueError(
                f"The predictions on batch {number} of the {dataset} data contain NaN; check "
                "these inputs and the network's weights."
            )
        return number, {name: values.cpu() for name, values in terms(batch, prediction).items()}

    def take(result: tuple[int, dict[str, Tensor]]) -> None:
        number, values = result
        for name, value in values.items():
            found[name].append(value)
        bar.update(number)

    total = length_of(loader)
    shown = progress if team.rank == 0 else False
    with Progress(total, f"evaluate {dataset}", shown) as bar:
        if in_turns(team, predictor, loader, _one_by_one, work, take) == 0:
            raise ValueError(f"The loader of the {dataset} data is empty; give at least one batch.")
    return {name: torch.cat(values) for name, values in found.items()}


def _one_by_one(loader: Iterable[Any]) -> Generator[Any, None, None]:
    yield from loader


def _scores(prediction: Prediction) -> dict[str, Tensor]:
    return {name: score(prediction).flatten() for name, score in SCORES.items()}


def terms_of(
    prediction: Prediction, labels: Tensor, ignore_index: int, with_scores: bool
) -> dict[str, Tensor]:
    """The few numbers per labelled example that all metrics are made of."""
    labels = labels.to(prediction.log_probs.device)
    keep = labels != ignore_index
    safe = labels.where(keep, 0)  # any class will do: these terms are dropped
    maps = {
        "log_likelihood": log_likelihood(prediction.log_probs, safe),
        "squared_error": squared_error(prediction.probs, safe),
        "confidence": prediction.confidence,
        "correct": prediction.label == labels,
    }
    if with_scores:
        maps |= {name: score(prediction) for name, score in SCORES.items()}
    return {name: values[keep] for name, values in maps.items()}


def _mean(terms: Tensor) -> float:
    return terms.double().mean().item()


def _percents(values: Iterable[float | None]) -> list[str]:
    return ["-" if value is None else f"{value:.2f}" for value in values]


def aligned(header: list[str], *rows: list[str]) -> str:
    """Columns of equal width, numbers to the right; a column of names goes to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    named = header[0] == "dataset"
    return "\n".join(
        "  ".join(
            cell.ljust(width) if named and i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    )
