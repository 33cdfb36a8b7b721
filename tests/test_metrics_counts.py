"""Counts are exact while they fit, and never depend on order, batches or merges."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from abnn.metrics import Counts, auroc, auroc_bound, detect, detect_counts
from abnn.metrics.counts import LEAST_CAPACITY, dot

INF = float("inf")


def counted(values: Tensor, capacity: int = LEAST_CAPACITY) -> Counts:
    counts = Counts(capacity=capacity)
    counts.update(values)
    return counts


def numbers(seed: int, n: int) -> Tensor:
    """Numbers of both signs and of all magnitudes, some of them often, in float64."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(-320, 300, (n,), generator=g).double()
    wide = torch.randn(n, generator=g).double() * 10.0**powers
    values = torch.where(
        torch.rand(n, generator=g) < 0.5, wide, torch.randn(n, generator=g).double()
    )
    values[: n // 5] = values[n // 5]
    values[-6:] = torch.tensor([INF, -INF, 0.0, -0.0, 5e-324, -5e-324], dtype=torch.float64)
    return values[torch.randperm(n, generator=g)]


def in_pieces(values: Tensor, columns: Tensor, seed: int, capacity: int) -> Counts:
    """The same values in random order, random batches, and random merges of several states."""
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(len(values)))
    states = [Counts(2, capacity) for _ in range(rng.integers(1, 6))]
    cuts = np.sort(rng.integers(0, len(values), rng.integers(0, 30))).tolist()
    for rows in order.tensor_split(cuts):
        state = states[rng.integers(len(states))]
        state.update(values[rows], columns[rows])
        if rng.random() < 0.3:
            state.table()  # looking must change nothing
    while len(states) > 1:
        taken = states.pop(rng.integers(len(states)))
        states[rng.integers(len(states))].merge(taken)
    return states[0]


def same(a: Counts, b: Counts) -> bool:
    x, y = a.state(), b.state()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def test_distinct_values_are_kept_in_order_with_their_counts() -> None:
    values, counts = counted(torch.tensor([[2.0, -1.5], [2.0, INF], [-INF, 0.0]])).table()
    assert values.tolist() == [-INF, -1.5, 0, 2, INF]
    assert counts.flatten().tolist() == [1, 1, 1, 2, 1]


def test_a_negative_zero_is_a_zero() -> None:
    values, counts = counted(torch.tensor([0.0, -0.0])).table()
    assert (values.tolist(), counts.tolist()) == ([0.0], [[2]])


def test_columns_are_counted_apart() -> None:
    counts = Counts(columns=2)
    counts.update(torch.tensor([1.0, 1.0, 2.0]), column=torch.tensor([False, True, True]))
    counts.update(torch.tensor([3]), column=1)
    assert counts.table()[1].tolist() == [[1, 1], [0, 1], [0, 1]]
    assert counts.n == (1, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int16])
def test_any_type_of_number_is_counted_as_it_is(dtype: torch.dtype) -> None:
    values = (10 * torch.randn(100)).to(dtype).requires_grad_(dtype.is_floating_point)
    assert counted(values).table()[0].tolist() == sorted(set(values.tolist()))


def test_up_to_its_capacity_the_table_is_exact() -> None:
    values = torch.randn(LEAST_CAPACITY).double()
    assert counted(values).exact
    assert counted(values).table()[0].equal(values.unique())
    assert not counted(torch.cat([values, torch.tensor([9.0])])).exact


@pytest.mark.parametrize("seed", range(12))
def test_order_batches_and_merges_do_not_matter(seed: int) -> None:
    n = [3000, 6000, 20000][seed % 3]
    values, columns = numbers(seed, n), torch.arange(n) % 2
    expected = Counts(2, LEAST_CAPACITY)
    expected.update(values, columns)
    assert expected.exact == (n == 3000)
    for again in range(5):
        assert same(in_pieces(values, columns, 100 * seed + again, LEAST_CAPACITY), expected)


@pytest.mark.parametrize("seed", range(4))
def test_no_more_bits_are_dropped_than_needed(seed: int) -> None:
    values = numbers(seed, 9000)
    bits = (values + 0.0).numpy().view(np.int64)
    shift = int(counted(values).state()["shape"][2])
    # Positive and negative numbers never meet: dropping the bits of magnitudes does the same.
    pieces = [bits[bits >= 0], ~(bits[bits < 0] & (2**63 - 1))]

    def cells(shift: int) -> int:
        return sum(len(np.unique(piece >> shift)) for piece in pieces)

    assert cells(shift) == len(counted(values).table()[0]) <= LEAST_CAPACITY < cells(shift - 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_value_of_a_cell_is_the_mean_of_its_values(seed: int) -> None:
    values = numbers(seed, 9000)
    means, counts = counted(values).table()
    ordered, start = values.sort().values.tolist(), 0
    for mean, (n,) in zip(means.tolist(), counts.tolist(), strict=True):
        cell = ordered[start : start + n]
        start += n
        if cell[0] == cell[-1]:
            assert mean == cell[0]
        else:
            expected = float(sum(map(Fraction, cell)) / n)
            # The second is the distance of the smallest numbers.
            assert mean == pytest.approx(expected, rel=1e-15, abs=5e-324)
            assert cell[0] <= mean <= cell[-1]
    assert start == len(ordered)


def test_a_cell_of_one_value_keeps_it_however_often_it_came() -> None:
    counts = counted(5 + torch.rand(9000).double())
    counts.update(torch.full((100_003,), 1 / 3, dtype=torch.float64))
    values, n = counts.table()
    assert not counts.exact
    assert (values[0].item(), n[0].item()) == (1 / 3, 100_003)


def test_a_state_travels_as_tensors() -> None:
    counts = in_pieces(numbers(0, 9000), torch.arange(9000) % 2, 0, LEAST_CAPACITY)
    again = Counts.from_state(counts.state())
    assert same(again, counts)
    again.update(torch.ones(5))
    assert again.n == (counts.n[0] + 5, counts.n[1])


def test_merging_leaves_the_other_as_it_was() -> None:
    a, b = counted(torch.rand(9000)), counted(torch.rand(10))
    before = b.state()
    a.merge(b)
    assert all(before[name].equal(tensor) for name, tensor in b.state().items())
    assert (a.n, b.n, b.exact) == ((9010,), (10,), True)


def test_nothing_counted_is_an_empty_table() -> None:
    counts = counted(torch.rand(0))
    counts.merge(Counts(capacity=LEAST_CAPACITY))
    values, n = counts.table()
    assert (values.shape, n.shape, counts.n, counts.exact) == ((0,), (0, 1), (0,), True)


def test_values_that_cannot_be_counted_are_refused() -> None:
    counts = Counts(columns=2)
    with pytest.raises(ValueError, match="contain NaN"):
        counts.update(torch.tensor([1.0, float("nan")]))
    with pytest.raises(ValueError, match="complex"):
        counts.update(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="one whole number per value"):
        counts.update(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="one whole number per value"):
        counts.update(torch.zeros(2), torch.zeros(2))
    for column in (-1, 2, torch.tensor([0, 2]), torch.tensor([0, -1])):
        with pytest.raises(ValueError, match=r"There is no column (-1|2)"):
            counts.update(torch.zeros(2), column)
    assert counts.n == (0, 0)


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one column"):
        Counts(columns=0)
    with pytest.raises(ValueError, match="at least 4096 cells"):
        Counts(capacity=100)
    with pytest.raises(ValueError, match="make both alike"):
        Counts(columns=2).merge(Counts(columns=1))
    with pytest.raises(ValueError, match="make both alike"):
        Counts().merge(Counts(capacity=5000))
    with pytest.raises(ValueError, match=r"give what Counts.state\(\) returned"):
        Counts.from_state({"keys": torch.zeros(1)})


def test_products_of_counts_do_not_overflow() -> None:
    a, b = torch.tensor([2**38, 3, 2**20]), torch.tensor([2**39 + 1, 2**38, 7])
    assert dot(a, b) == sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_detection_from_exact_counts_is_that_from_the_scores(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    coarse = [0.1, 1, 3, 1000][seed % 4]
    known = (torch.randn(900, generator=g) * coarse).round()
    unknown = ((torch.randn(300, generator=g) + 1) * coarse).round()
    detection = detect_counts(counted(known), counted(unknown))
    assert detection == detect(known, unknown)
    assert auroc_bound(counted(known), counted(unknown)) == 0
    truth = np.repeat([0, 1], [900, 300]), torch.cat([known, unknown]).numpy()
    assert detection.auroc == pytest.approx(roc_auc_score(*truth), abs=1e-12)
    assert detection.aupr == pytest.approx(average_precision_score(*truth), abs=1e-12)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_dropped_bits_cost_no_more_auroc_than_the_bound_says(seed: int, both: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    known, unknown = torch.randn(50_000, generator=g), torch.randn(3000, generator=g) + 1
    if both:
        unknown = unknown.repeat(3) + 1e-3 * torch.randn(9000, generator=g)
    id_counts, ood_counts = counted(known), counted(unknown)
    assert (id_counts.exact, ood_counts.exact) == (False, not both)
    bound = auroc_bound(id_counts, ood_counts)
    exact = auroc(known, unknown)
    assert abs(detect_counts(id_counts, ood_counts).auroc - exact) <= bound
    assert 0 < bound < 1e-3


def test_the_bound_is_reached_when_each_tie_was_won() -> None:
    # All of a cell's OOD lies above all of its ID, so that every tie hides half a pair.
    low = 1 + torch.arange(5000).double() / 2**40
    high = low + 5000 / 2**40
    id_counts, ood_counts = counted(low.repeat(2)), counted(high)
    ood_counts.merge(counted(2 + torch.rand(9000).double() * 1e300))
    bound = auroc_bound(id_counts, ood_counts)
    error = 1 - detect_counts(id_counts, ood_counts).auroc
    assert error == pytest.approx(bound, rel=1e-12)
    assert error > 0


def test_all_ties_give_chance_from_counts_too() -> None:
    detection = detect_counts(counted(torch.zeros(30)), counted(torch.zeros(10)))
    assert (detection.auroc, detection.aupr, detection.fpr95) == (0.5, 0.25, 1.0)


def test_counts_that_cannot_be_ranked_are_refused() -> None:
    some, none, two = counted(torch.rand(3)), Counts(), Counts(columns=2)
    for metric in (detect_counts, auroc_bound):
        with pytest.raises(ValueError, match="no in-distribution scores"):
            metric(none, some)
        with pytest.raises(ValueError, match="no out-of-distribution scores"):
            metric(some, none)
        with pytest.raises(ValueError, match="have 2 columns; give one"):
            metric(some, two)
