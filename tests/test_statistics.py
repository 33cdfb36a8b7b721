"""Figures of resampled examples are those of `abnn.metrics`, and their intervals hold the truth."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from abnn import metrics
from abnn.metrics.counts import Floats
from abnn.statistics import Examples, bootstrap, figures_of
from abnn.statistics.weighted import Weighted, figure_names


def said(
    seed: int, n: int = 120, ties: bool = False, dtype: torch.dtype = torch.float32
) -> Examples:
    """A method on n labelled and on two sets of OOD examples."""
    g = torch.Generator().manual_seed(seed)

    def logits(rows: int, scale: float) -> Tensor:
        if ties:
            return torch.randint(3, (rows, 3), generator=g).to(dtype)
        return (scale * torch.randn(rows, 3, generator=g)).to(dtype)

    log_probs = logits(n, 3.0).log_softmax(1)
    labels = torch.multinomial(log_probs.float().exp(), 1, generator=g).squeeze(1)
    confidence, label = log_probs.exp().max(1)
    unknown = {"near": logits(n // 2, 2.0), "far/away": logits(n // 3 + 1, 1.0)}
    return Examples(
        confidence,
        label == labels,
        metrics.log_likelihood(log_probs, labels),
        metrics.squared_error(log_probs.exp(), labels),
        {"msp": 1 - confidence, "margin": -log_probs.sort().values.diff()[:, -1]},
        {
            name: {"msp": 1 - far.softmax(1).amax(1), "margin": -far.sort().values.diff()[:, -1]}
            for name, far in unknown.items()
        },
    )


def numbers(n: int, seed: int = 0) -> Examples:
    """Predictions of two classes that are calibrated."""
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(n, generator=g) / 2 + 0.5
    correct = torch.rand(n, generator=g) < p
    likelihood = torch.where(correct, p, 1 - p)
    return Examples(p, correct, likelihood.log(), 2 * (1 - likelihood) ** 2)


def repeated(x: Examples, times: Tensor, ood: Mapping[str, Tensor]) -> Examples:
    def each(values: Tensor, times: Tensor = times) -> Tensor:
        return values.repeat_interleave(times)

    return Examples(
        each(x.confidence),
        each(x.correct),
        each(x.log_likelihood),
        each(x.squared_error),
        {name: each(v) for name, v in x.scores.items()},
        {d: {name: each(v, ood[d]) for name, v in given.items()} for d, given in x.ood.items()},
    )


def by_metrics(x: Examples) -> dict[str, float]:
    """All figures, by `abnn.metrics`."""
    found = {
        "accuracy": 100 * x.correct.double().mean().item(),
        "nll": -x.log_likelihood.double().mean().item(),
        "brier": x.squared_error.double().mean().item(),
        "ece": 100 * metrics.ece(x.confidence, x.correct),
        "aurc": metrics.aurc(x.confidence, x.correct),
    }
    for dataset, given in x.ood.items():
        for name, scores in given.items():
            detection = metrics.detect(x.scores[name], scores).percent()
            for kind in ("auroc", "aupr", "fpr95"):
                found[f"ood/{dataset}/{name}/{kind}"] = getattr(detection, kind)
    return found


# Figures


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_figures_are_those_of_the_metrics(seed: int, ties: bool, dtype: torch.dtype) -> None:
    examples = said(seed, ties=ties, dtype=dtype)
    assert len(figures_of(examples)) == 5 + 2 * 2 * 3
    assert figures_of(examples) == pytest.approx(by_metrics(examples), rel=1e-12, abs=1e-12)


def test_the_terms_are_those_of_the_metrics_of_probabilities() -> None:
    logits, labels = torch.randn(50, 4).double(), torch.arange(50) % 4
    log_probs = logits.log_softmax(1)
    confidence, label = log_probs.exp().max(1)
    found = figures_of(
        Examples(
            confidence,
            label == labels,
            metrics.log_likelihood(log_probs, labels),
            metrics.squared_error(log_probs.exp(), labels),
        )
    )
    assert found["accuracy"] == pytest.approx(100 * metrics.accuracy(logits, labels), rel=1e-12)
    assert found["nll"] == pytest.approx(metrics.nll(log_probs, labels), rel=1e-12)
    assert found["brier"] == pytest.approx(metrics.brier(log_probs.exp(), labels), rel=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_repeated_examples(seed: int, ties: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    examples = said(seed, ties=ties)
    sizes = {dataset: len(given["msp"]) for dataset, given in examples.ood.items()}
    known = torch.randint(4, (5, 120), generator=g)
    # No more in all than there are examples, as in any resampled set.
    known = torch.where(known.cumsum(1) <= 120, known, 0)
    ood = {d: torch.randint(3, (5, m), generator=g) for d, m in sizes.items()}
    weighted = Weighted(examples, figure_names(examples)).figures(
        known.double().numpy(), {d: times.double().numpy() for d, times in ood.items()}
    )
    for row in range(5):
        again = repeated(examples, known[row], {d: times[row] for d, times in ood.items()})
        found = {name: values[row] for name, values in weighted.items()}
        assert found == pytest.approx(by_metrics(again), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_confidence_on_an_edge_is_in_the_bin_of_the_metrics(dtype: torch.dtype) -> None:
    confidence = (torch.arange(1, 16).double() / 15).to(dtype)
    correct = torch.arange(15) % 2
    found = figures_of(Examples(confidence, correct, -torch.ones(15), torch.ones(15)))
    assert found["ece"] == pytest.approx(100 * metrics.ece(confidence, correct), rel=1e-12)


def test_infinite_scores_are_ranked() -> None:
    two, inf = torch.tensor([0.5, 1.0]), math.inf
    scores = {"energy": torch.tensor([-inf, 1.0])}
    ood = {"far": {"energy": torch.tensor([inf, inf, -inf])}}
    examples = Examples(two, two == 1, two.log(), two, scores, ood)
    assert figures_of(examples) == pytest.approx(by_metrics(examples), rel=1e-12)


# Intervals


def by_scipy(*data: Floats, statistic: object) -> tuple[float, float]:
    result = stats.bootstrap(
        data, statistic, n_resamples=8000, method="BCa", rng=np.random.default_rng(1)
    )
    return result.confidence_interval.low, result.confidence_interval.high


def close(found: tuple[float, float], expected: tuple[float, float], share: float) -> bool:
    """Whether both ends agree to a share of the width."""
    width = expected[1] - expected[0]
    return max(abs(x - y) for x, y in zip(found, expected, strict=True)) < share * width


@pytest.mark.parametrize("figure", ["accuracy", "nll", "brier"])
def test_the_interval_of_a_mean_is_that_of_scipy(figure: str) -> None:
    x = numbers(190)
    terms = {
        "accuracy": 100 * x.correct.double(),
        "nll": -x.log_likelihood.double(),
        "brier": x.squared_error.double(),
    }
    row = bootstrap(x, [figure], replicates=8000)[figure]
    assert close((row.low, row.high), by_scipy(terms[figure].numpy(), statistic=np.mean), 0.06)


def test_the_interval_of_the_auroc_is_that_of_scipy() -> None:
    # Most of the skewness comes from the few OOD examples.
    g, name = torch.Generator().manual_seed(1), "ood/far/energy/auroc"
    known, unknown = torch.randn(150, generator=g), torch.rand(10, generator=g).log() + 2
    scores, ood = {"energy": known}, {"far": {"energy": unknown}}
    examples = replace(numbers(150), scores=scores, ood=ood)

    def auroc(a: Floats, b: Floats, axis: int) -> Floats:
        wins: Floats = (a[..., :, None] < b[..., None, :]).mean((-2, -1))
        return 100 * wins

    expected = by_scipy(known.numpy(), unknown.numpy(), statistic=auroc)
    row = bootstrap(examples, [name], replicates=8000)[name]
    assert close((row.low, row.high), expected, 0.03)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_intervals_of_many_examples_are_those_of_a_normal_distribution(confidence: float) -> None:
    x = numbers(5000)
    z = stats.norm.ppf((1 + confidence) / 2)
    result = bootstrap(x, ["accuracy", "nll"], replicates=4000, confidence=confidence)
    for figure, terms in (("accuracy", 100 * x.correct.double()), ("nll", -x.log_likelihood)):
        half = z * terms.double().std().item() / math.sqrt(5000)
        mean = terms.double().mean().item()
        row = result[figure]
        assert row.value == pytest.approx(mean, rel=1e-12)
        assert close((row.low, row.high), (mean - half, mean + half), 0.05)


def test_the_interval_of_accuracy_holds_the_truth_as_often_as_it_says() -> None:
    # The mean of p is 3/4. Of 200 intervals 190 should hold it, with a standard deviation of 3.1.
    held = 0
    for seed in range(200):
        row = bootstrap(numbers(150, seed), ["accuracy"], replicates=300, seed=seed)["accuracy"]
        held += row.low <= 75 <= row.high
    assert 180 <= held <= 199


def test_the_interval_of_the_ece_holds_what_as_many_examples_give() -> None:
    each = [figures_of(numbers(200, 1000 + seed))["ece"] for seed in range(300)]
    expected = sum(each) / 300
    held = 0
    for seed in range(60):
        row = bootstrap(numbers(200, seed), ["ece"], replicates=200, seed=seed)["ece"]
        held += 0 <= row.low <= expected <= row.high
    assert held >= 52


# What does and what does not matter


def test_a_resampling_can_be_had_again_and_depends_on_its_seed() -> None:
    examples = said(0)
    assert bootstrap(examples, replicates=50) == bootstrap(examples, replicates=50)
    assert bootstrap(examples, replicates=50) != bootstrap(examples, replicates=50, seed=1)


def test_a_figure_does_not_depend_on_what_else_is_looked_at() -> None:
    examples = said(0)
    every = bootstrap(examples, replicates=100)
    assert list(every) == figure_names(examples)
    for name, row in every.items():
        alone = bootstrap(examples, [name], replicates=100)
        assert list(alone) == [name]
        assert alone[name].low == pytest.approx(row.low, rel=1e-12)
        assert alone[name].high == pytest.approx(row.high, rel=1e-12)


def test_how_many_sets_are_resampled_at_a_time_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = bootstrap(said(0), replicates=50)
    monkeypatch.setattr("abnn.statistics.resampling._CHUNK", 1)
    for name, row in bootstrap(said(0), replicates=50).items():
        assert (row.low, row.high) == pytest.approx((before[name].low, before[name].high))


def test_what_is_certain_has_an_interval_of_no_width() -> None:
    sure = Examples(torch.ones(9), torch.ones(9), torch.zeros(9), torch.zeros(9))
    for name, row in bootstrap(sure).items():
        assert row.value == row.low == row.high == (100 if name == "accuracy" else 0)


def test_two_examples_are_enough() -> None:
    row = bootstrap(numbers(2))["nll"]
    assert row.low <= row.value <= row.high


def test_an_infinite_nll_has_no_interval_and_leaves_the_rest_alone() -> None:
    p = torch.tensor([0.5, 0.75, 1.0])
    log_likelihood = torch.tensor([-0.7, -0.3, -math.inf])
    result = bootstrap(Examples(p, p < 1, log_likelihood, 1 - p))
    assert (result["nll"].value, result["nll"].low, result["nll"].high) == (math.inf,) * 3
    assert result["brier"] == bootstrap(Examples(p, p < 1, -p, 1 - p))["brier"]
    assert json.loads(result.to_json())["nll"]["low"] == "inf"
    assert result.to_table().splitlines()[2].split() == ["nll", "inf", "inf", "inf"]


def test_examples_may_carry_gradients_and_come_as_arrays() -> None:
    x, of = numbers(9), numbers(9).confidence.requires_grad_()
    other = Examples(
        of,
        x.correct.numpy(),  # type: ignore[arg-type]
        x.log_likelihood.tolist(),  # type: ignore[arg-type]
        x.squared_error.double(),
    )
    assert figures_of(other) == pytest.approx(figures_of(x))


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": torch.ones(1)}, r"confidence has shape \[1\]; .* at least 2 examples"),
        ({"confidence": torch.ones(3, 1)}, r"confidence has shape \[3, 1\]; give one number"),
        ({"confidence": torch.ones(2)}, "labelled data must have as many .* confidence: 2, corr"),
        ({"squared_error": torch.tensor([0, 1, math.nan])}, "squared_error contains NaN"),
        ({"confidence": torch.tensor([0.5, 1, 2.0])}, "confidence is outside 0..1"),
        ({"correct": torch.tensor([0, 1, 2])}, "must hold True or False"),
        ({"log_likelihood": torch.ones(3)}, "log-likelihood is above 0"),
        ({"squared_error": torch.tensor([0, 1, math.inf])}, "squared error is outside 0..2"),
        ({"scores": {"msp": torch.ones(4)}}, "as many .* msp: 4"),
        ({"scores": {"msp": torch.tensor([0, 1, math.nan])}}, "score msp contains NaN"),
        ({"scores": {"a/b": torch.ones(3)}}, "'a/b' has a slash"),
        ({"ood": {"svhn": {"msp": torch.ones(3)}}}, r"labelled data lack \(msp\)"),
        ({"ood": {"svhn": {"msp": torch.ones(1)}}}, "score msp of svhn has shape"),
        ({"ood": {"svhn": {"a": torch.ones(3), "b": torch.ones(4)}}}, "svhn must have .* a: 3, b"),
        ({"ood": {"svhn": {}}}, "svhn must have as many .* but has none"),
    ],
)
def test_examples_that_make_no_figures_are_refused(change: dict[str, Tensor], message: str) -> None:
    given = {"confidence": torch.ones(3), "correct": torch.ones(3)}
    given |= {"log_likelihood": -torch.ones(3), "squared_error": torch.ones(3)}
    with pytest.raises(ValueError, match=message):
        Examples(**given | change)  # type: ignore[arg-type]


def test_a_resampling_that_tells_nothing_is_refused() -> None:
    examples = numbers(9)
    with pytest.raises(ValueError, match="39 replicates .* of 0.95 confidence; give at least 40"):
        bootstrap(examples, replicates=39)
    with pytest.raises(ValueError, match="replicates=40.5 is not a whole number"):
        bootstrap(examples, replicates=40.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed=-1 is not a whole number"):
        bootstrap(examples, seed=-1)
    with pytest.raises(ValueError, match="confidence is 95; give a share between 0 and 1"):
        bootstrap(examples, confidence=95)
    with pytest.raises(ValueError, match="no figure auroc of these examples; choose from accuracy"):
        bootstrap(examples, ["nll", "auroc"])
    with pytest.raises(ValueError, match="figures is empty"):
        bootstrap(examples, [])
