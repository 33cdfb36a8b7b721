"""Two methods on the same examples: what is shown, how often by chance, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from abnn.statistics import Comparison, Examples, bootstrap, compare
from abnn.statistics.verdicts import holm_corrected


def task(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """How hard n examples are for everyone, and their labels."""
    g = torch.Generator().manual_seed(seed)
    logits = 1 + 1.5 * torch.randn(n, generator=g)
    return logits, torch.rand(n, generator=g) < logits.sigmoid()


def method(seed: int, noise: float, n: int = 300, of: int = 0, ood: float = 0.3) -> Examples:
    """A method whose logits are right but for noise, on task `of`."""
    g = torch.Generator().manual_seed(1 + seed)
    logits, labels = task(of, n)
    logits = logits + noise * torch.randn(n, generator=g)
    p, far = logits.sigmoid().clamp(1e-6, 1 - 1e-6), ood * torch.randn(n // 2, generator=g)
    own = torch.where(labels, p, 1 - p)
    return Examples(
        torch.maximum(p, 1 - p),
        (p > 0.5) == labels,
        own.log(),
        2 * (1 - own) ** 2,
        {"msp": torch.minimum(p, 1 - p)},
        {"far": {"msp": torch.minimum(far.sigmoid(), 1 - far.sigmoid())}},
        digest=str(of),
    )


def test_a_method_does_not_differ_from_itself() -> None:
    for row in compare(method(0, 1.0), method(0, 1.0)).values():
        assert (row.difference, row.low, row.high, row.p) == (0, 0, 0, 1)
        assert row.verdict == "no difference shown"


def test_what_is_better_is_called_better_and_the_other_way_round_worse() -> None:
    good, bad = method(0, 0.2, 1000), method(1, 3.0, 1000, ood=4.0)
    up, down = compare(bad, good), compare(good, bad)
    assert {row.verdict for row in up.values()} == {"better"}
    assert {row.verdict for row in down.values()} == {"worse"}


def test_swapping_the_methods_mirrors_the_result() -> None:
    a, b = method(0, 0.5), method(1, 1.5)
    there, back = compare(a, b), compare(b, a)
    assert {row.verdict for row in there.values()} == {"worse", "no difference shown"}
    for name, row in there.items():
        other = back[name]
        assert (row.a, row.b, row.difference) == (other.b, other.a, -other.difference)
        assert (row.low, row.high) == pytest.approx((-other.high, -other.low), rel=1e-9)
        assert row.p == pytest.approx(other.p, rel=1e-9)
        mirrored = {"better": "worse", "worse": "better"}.get(row.verdict, row.verdict)
        assert other.verdict == mirrored


def test_a_difference_of_means_is_that_of_a_paired_z_test() -> None:
    a, b = method(0, 0.5, 4000), method(1, 1.0, 4000)
    result = compare(a, b, ["accuracy", "nll"], replicates=8000, holm=False)
    terms = {
        "accuracy": 100 * (b.correct.double() - a.correct.double()),
        "nll": a.log_likelihood.double() - b.log_likelihood.double(),
    }
    for name, term in terms.items():
        row, error = result[name], term.std().item() / math.sqrt(4000)
        assert row.difference == pytest.approx(term.mean().item(), rel=1e-9)
        for end, z in ((row.low, -1.96), (row.high, 1.96)):
            assert end == pytest.approx(row.difference + z * error, abs=0.2 * error)
        # Of two standard normal tails, as far as 8000 replicates can tell.
        expected = 2 * stats.norm.sf(abs(row.difference) / error)
        assert row.p == pytest.approx(expected, rel=0.25, abs=5e-3)


def test_what_is_hard_for_both_cancels_out() -> None:
    a, b = method(0, 0.5), method(1, 0.5)
    row, alone = compare(a, b, ["nll"])["nll"], bootstrap(b, ["nll"])["nll"]
    assert row.high - row.low < 0.7 * (alone.high - alone.low)


def test_methods_that_are_equally_good_rarely_seem_to_differ() -> None:
    # Of 100 pairs 5 are to seem so by chance, with a standard deviation of 2.2.
    seeming = {"accuracy": 0, "nll": 0, "ece": 0, "ood/far/msp/auroc": 0}
    for seed in range(100):
        a, b = method(seed, 0.7, 200, seed), method(1000 + seed, 0.7, 200, seed)
        result = compare(a, b, list(seeming), replicates=200, holm=False, seed=seed)
        for name, row in result.items():
            seeming[name] += row.verdict != "no difference shown"
    assert all(found <= 12 for found in seeming.values()), seeming
    # That of the ECE is on the safe side.
    assert all(found >= 1 for name, found in seeming.items() if name != "ece"), seeming


def test_p_is_below_the_level_just_where_the_interval_leaves_0_out() -> None:
    for seed in range(10):
        a, b = method(seed, 0.5), method(100 + seed, 0.9)
        for row in compare(a, b, replicates=400, holm=False).values():
            if abs(row.p - 0.05) > 0.01:
                assert (row.p < 0.05) == (row.low > 0 or row.high < 0)


def test_p_is_corrected_for_the_number_of_figures() -> None:
    a, b = method(0, 0.5), method(1, 1.2)
    alone, together = compare(a, b, holm=False), compare(a, b)
    expected = holm_corrected({name: row.p for name, row in alone.items()})
    assert {name: row.p for name, row in together.items()} == expected
    assert expected["accuracy"] > alone["accuracy"].p
    assert together["nll"].low == alone["nll"].low


def test_figures_that_only_one_has_are_left_out() -> None:
    a, b = method(0, 1.0), replace(method(1, 1.0), ood={})
    assert list(compare(a, b)) == ["accuracy", "nll", "brier", "ece", "aurc"]
    assert list(compare(a, a, ["nll", "ece", "nll"])) == ["nll", "ece"]


def test_against_an_infinite_nll_nothing_is_shown() -> None:
    a = method(0, 1.0)
    b = replace(a, log_likelihood=torch.cat([a.log_likelihood[:-1], torch.tensor([-math.inf])]))
    result = compare(a, b, ["nll"])
    assert (result["nll"].difference, result["nll"].p) == (math.inf, 1)
    assert result["nll"].verdict == "no difference shown"
    assert json.loads(result.to_json())["nll"]["low"] == "nan"


def test_a_comparison_can_be_read() -> None:
    result = compare(method(0, 1.0), method(1, 1.0), ["accuracy", "nll"])
    header, first, second = str(result).splitlines()
    assert header.split() == list(Comparison.__dataclass_fields__)
    assert first.startswith("accuracy %  ")
    assert second.endswith("no difference shown")
    assert json.loads(result.to_json())["nll"]["p"] == result["nll"].p


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (method(1, 1.0, 200), "Of the labelled data, a has 300 examples and b has 200"),
        (method(1, 1.0, of=1), "different digests"),
        (
            replace(method(1, 1.0), ood={"far": {"msp": torch.ones(9)}}),
            "Of the far, a has 150 examples and b has 9",
        ),
    ],
)
def test_other_examples_are_refused(b: Examples, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(method(0, 1.0), b)


def test_a_digest_that_only_one_has_says_nothing() -> None:
    a = method(0, 1.0)
    assert compare(a, replace(a, digest=None), ["nll"])["nll"].p == 1


def test_tests_that_can_show_nothing_are_refused() -> None:
    a = method(0, 1.0)
    with pytest.raises(ValueError, match=r"300 replicates .* 8 figure\(s\); give at least 320"):
        compare(a, a, replicates=300)
    assert compare(a, a, replicates=300, holm=False)["nll"].p == 1
    with pytest.raises(ValueError, match="no figure auroc of both methods; choose from accuracy"):
        compare(a, a, ["auroc"])
    with pytest.raises(ValueError, match="figures is empty"):
        compare(a, a, [])
    with pytest.raises(ValueError, match="confidence is 1; give a share between 0 and 1"):
        compare(a, a, confidence=1)
