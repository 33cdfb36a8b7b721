"""The exact mean, against fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from abnn.metrics import Mean


def filled(*parts: Tensor) -> Mean:
    mean = Mean()
    for part in parts:
        mean.update(part)
    return mean


def values(seed: int, n: int = 500) -> Tensor:
    """Numbers of all sizes and both signs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g, dtype=torch.float64)
    return x * torch.randint(-300, 300, (n,), generator=g).double().exp2()


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_float_nearest_to_the_true_mean(seed: int) -> None:
    x = values(seed)
    assert filled(x).value() == float(sum(map(Fraction, x.tolist())) / len(x))


@pytest.mark.parametrize("seed", range(5))
def test_order_batches_and_merges_do_not_matter(seed: int) -> None:
    x = values(seed)
    parts = x[torch.randperm(len(x))].split(77)
    merged = filled(*parts[:3])
    merged.merge(filled(*parts[3:]))
    assert merged.value() == filled(x).value()
    assert merged.n == len(x)


def test_the_least_and_the_greatest_numbers_are_summed() -> None:
    tiny, huge = 5e-324, torch.finfo(torch.float64).max
    assert filled(torch.tensor([tiny, -tiny, tiny], dtype=torch.float64)).value() == float(
        Fraction(tiny) / 3
    )
    assert filled(torch.tensor([huge, huge], dtype=torch.float64)).value() == huge


def test_many_values_do_not_overflow() -> None:
    assert filled(torch.full((10_000_000,), -0.7)).value() == torch.tensor(-0.7).item()


@pytest.mark.parametrize(
    "infinite, expected", [([math.inf], math.inf), ([-math.inf], -math.inf)], ids=["above", "below"]
)
def test_an_infinite_value_makes_the_mean_infinite(infinite: list[float], expected: float) -> None:
    assert filled(torch.tensor([1.0, *infinite])).value() == expected


def test_infinities_of_both_signs_have_no_mean() -> None:
    assert math.isnan(filled(torch.tensor([math.inf, -math.inf])).value())


def test_a_state_goes_on_where_it_was() -> None:
    x = values(0)
    again = Mean.from_state(filled(x[:100]).state())
    again.update(x[100:])
    assert again.value() == filled(x).value()


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="contain NaN; check the predictions"):
        filled(torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="no values to average"):
        Mean().value()
    with pytest.raises(ValueError, match=r"entries \['keys'\] is none of Mean"):
        Mean.from_state({"keys": torch.zeros(1)})
