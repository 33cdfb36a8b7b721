"""What a report shows, as plain values: made by `gather`, drawn by `page` and `figures`.

Figures of quality have the names of `abnn.statistics`: "accuracy", "nll", "ece", "aurc",
"ood/svhn/msp/auroc" and so on; accuracy, ECE and detection figures are in percent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from abnn.curve import SamplesCurve
from abnn.evaluation import Cost
from abnn.robustness import Robustness
from abnn.statistics import Comparison
from abnn.trajectory import Trajectory


@dataclass(frozen=True)
class Curve:
    """A line; `x` never falls."""

    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Thresholds:
    """One score of uncertainty: what is flagged if all that scores above a threshold is.

    Args:
        values: thresholds in ascending order.
        right, wrong: for each threshold, how many right and wrong predictions are kept: those that
            score at most so much. The last keeps all.
        ood: the same of each OOD dataset.
        edges: of the bins of the histograms, one more than there are bins.
        right_bins, wrong_bins: right and wrong predictions in each bin.
        ood_bins: the same of each OOD dataset.
    """

    values: list[float]
    right: list[int]
    wrong: list[int]
    ood: dict[str, list[int]]
    edges: list[float]
    right_bins: list[int]
    wrong_bins: list[int]
    ood_bins: dict[str, list[int]]


@dataclass(frozen=True)
class Dots:
    """Some examples of one kind: "right", "wrong", or the name of an OOD dataset."""

    kind: str
    confidence: list[float]
    epistemic: list[float]


@dataclass(frozen=True)
class Example:
    """One input and what was predicted.

    Args:
        index: its place in its dataset, from 0.
        image: a PNG as a data URI, if the inputs are images.
        label: the right class, where there is one.
        predicted: the predicted class.
        confidence, total, epistemic: as of `Prediction`; uncertainties in nats.
        classes: the classes shown, the most probable first.
        probs: their mean probabilities.
        members: their probabilities by mode and draw, `[modes][draws][classes shown]`; empty where
            they were not kept.
    """

    index: int
    image: str | None
    label: str | None
    predicted: str
    confidence: float
    total: float
    epistemic: float
    classes: list[str]
    probs: list[float]
    members: list[list[list[float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Gallery:
    """The inputs that are most worth looking at, the most striking first."""

    mistakes: list[Example]
    uncertain: list[Example]
    ood: dict[str, list[Example]]


@dataclass(frozen=True)
class Fit:
    """The loss of every mode over the steps of a fit; `None` where a mode was not trained.

    Args:
        steps: numbers of the steps.
        losses: one list a mode, smoothed and thinned out to some hundred steps.
        validation: rows of "original", "mode 0", ..., "all modes" with "nll", "accuracy", "ece".
        seconds: time of the fit.
    """

    steps: list[int]
    losses: list[list[float | None]]
    validation: dict[str, dict[str, float]]
    seconds: float | None = None


@dataclass(frozen=True)
class Method:
    """One method in one run.

    Args:
        name: what it is called, such as "ABNN".
        run: the run it is from, in short; empty if it is the only one of its name.
        reference: whether all others are compared with it; one method is.
        figures: quality, by name.
        intervals: a confidence interval of some of them.
        verdicts: of some of them, beside the reference; none of the reference itself.
        cost: what it costs.
        reliability: mean confidence, accuracy and number of examples of every bin that has any.
        thresholds: by score ("msp", "entropy", ...).
        roc: for each OOD dataset, false against true positive rate (OOD positive, score "msp").
        pr: recall against precision, the same.
        risk_coverage: coverage against risk, by confidence.
        dots: some examples, for a scatter plot.
        disagreement: share of the inputs on which two members differ, `[members][members]`;
            members are modes if there are several, else draws; empty if there is but one.
        gallery: inputs to look at.
        robustness, samples_curve, fit, trajectory: where they were measured.
    """

    name: str
    run: str
    reference: bool
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    verdicts: dict[str, Comparison]
    cost: Cost
    reliability: list[tuple[float, float, int]]
    thresholds: dict[str, Thresholds]
    roc: dict[str, Curve]
    pr: dict[str, Curve]
    risk_coverage: Curve
    dots: list[Dots]
    disagreement: list[list[float]] = field(default_factory=list)
    gallery: Gallery | None = None
    robustness: Robustness | None = None
    samples_curve: SamplesCurve | None = None
    fit: Fit | None = None
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class Spread:
    """A figure of one method over several runs, which are taken for seeds.

    Args:
        mean, sd: over the runs.
        n: number of runs.
        verdict: beside the reference's runs, by a paired t-test; `None` of the reference.
    """

    mean: float
    sd: float
    n: int
    verdict: str | None


@dataclass(frozen=True)
class ReportData:
    """All that a report shows.

    Args:
        title: of the page.
        made: date and time.
        version: of abnn.
        n: number of labelled examples.
        classes: number of classes.
        ood: number of examples of each OOD dataset.
        methods: the reference first.
        seeds: by name of the method and of the figure, where several runs have the same methods.
        notes: what the reader should know, such as that only some pixels were kept.
        parameters: of the network alone, where it is known.
    """

    title: str
    made: str
    version: str
    n: int
    classes: int
    ood: dict[str, int]
    methods: list[Method]
    seeds: dict[str, dict[str, Spread]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parameters: int | None = None
