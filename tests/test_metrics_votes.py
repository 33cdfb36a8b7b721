"""Which class comes first: top-k accuracy, and how far the members of an ensemble disagree."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from sklearn.metrics import top_k_accuracy_score
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

from abnn.metrics import (
    accuracy,
    disagreement,
    disagreement_matrix,
    label_rank,
    top_k_accuracy,
)


def members(seed: int, size: int, *rest: int) -> Tensor:
    return torch.randn(size, 20, 4, *rest, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 2, 5, 6])
@pytest.mark.parametrize("seed", range(5))
def test_top_k_accuracy_equals_scikit_learn_and_torchmetrics(seed: int, k: int) -> None:
    g = torch.Generator().manual_seed(seed)
    scores, labels = torch.randn(80, 7, generator=g), torch.randint(7, (80,), generator=g)
    found = top_k_accuracy(scores, labels, k)
    expected = top_k_accuracy_score(labels.numpy(), scores.numpy(), k=k, labels=range(7))
    assert found == pytest.approx(expected, abs=1e-12)
    micro = multiclass_accuracy(scores, labels, 7, top_k=k, average="micro")
    assert found == pytest.approx(micro.item(), abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_equal_scores_are_ranked_by_their_index(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    scores, labels = torch.randint(3, (50, 6), generator=g), torch.randint(6, (50,), generator=g)
    order = scores.argsort(dim=1, descending=True, stable=True)
    assert label_rank(scores, labels).equal((order == labels.unsqueeze(1)).int().argmax(1))
    assert top_k_accuracy(scores, labels, 1) == accuracy(scores, labels)


def test_all_ties_give_the_first_classes() -> None:
    assert label_rank(torch.zeros(4, 4), torch.arange(4)).tolist() == [0, 1, 2, 3]
    assert top_k_accuracy(torch.full((4, 4), -float("inf")), torch.arange(4), k=3) == 0.75


def test_as_many_guesses_as_classes_are_always_right() -> None:
    scores, labels = torch.randn(9, 3), torch.arange(9) % 3
    assert top_k_accuracy(scores, labels, 3) == top_k_accuracy(scores, labels) == 1


def test_pixels_have_ranks() -> None:
    scores, labels = members(0, 1, 3, 2)[0], torch.randint(4, (20, 3, 2))
    ranks = label_rank(scores, labels)
    assert ranks.shape == labels.shape
    assert ranks.flatten().equal(
        label_rank(scores.movedim(1, -1).reshape(-1, 4), labels.flatten().to(torch.uint8))
    )


def test_guesses_that_cannot_be_scored_are_refused() -> None:
    scores, labels = torch.randn(2, 3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="k is 0"):
        top_k_accuracy(scores, labels, k=0)
    for bad, message in [
        (scores * float("nan"), "contain NaN"),
        (scores[:1], "do not fit"),
        (scores[:, :1], "have 1 classes"),
    ]:
        with pytest.raises(ValueError, match=message):
            top_k_accuracy(bad, labels)
        with pytest.raises(ValueError, match=message):
            label_rank(bad, labels)
    with pytest.raises(ValueError, match="no examples"):
        top_k_accuracy(scores[:0], labels[:0])


@pytest.mark.parametrize("rest", [(), (3, 2)])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_disagreement_is_the_share_of_pairs_that_differ(size: int, rest: tuple[int, ...]) -> None:
    logits = members(size, size, *rest)
    votes = logits.argmax(2)
    pairs = torch.stack([(a != b).float() for a, b in combinations(votes, 2)])
    torch.testing.assert_close(disagreement(logits), pairs.mean(0))


@pytest.mark.parametrize("rest", [(), (3, 2)])
def test_the_matrix_compares_every_two_members(rest: tuple[int, ...]) -> None:
    logits = members(0, 5, *rest)
    votes = logits.argmax(2)
    matrix = disagreement_matrix(logits)
    assert matrix.equal(matrix.T)
    assert matrix.diagonal().tolist() == [0] * 5
    for s, t in combinations(range(5), 2):
        assert matrix[s, t] == (votes[s] != votes[t]).double().mean()
    # Both are means over the same pairs and examples.
    assert matrix.sum().item() / 20 == pytest.approx(disagreement(logits).mean().item(), rel=1e-6)


def test_members_that_agree_and_a_single_member_do_not_disagree() -> None:
    one = members(0, 1)
    for logits in (one, one.expand(6, -1, -1), torch.zeros(6, 20, 4)):
        assert disagreement(logits).eq(0).all()
        assert disagreement_matrix(logits).eq(0).all()


def test_members_that_all_differ_disagree_in_full() -> None:
    logits = torch.eye(4).unsqueeze(1)
    assert disagreement(logits).tolist() == [1]
    assert disagreement_matrix(logits).equal(1 - torch.eye(4).double())


@pytest.mark.parametrize("metric", [disagreement, disagreement_matrix])
def test_members_that_cannot_be_compared_are_refused(metric: object) -> None:
    assert callable(metric)
    for bad, message in [
        (torch.zeros(3, 4), r"have shape \[3, 4\]; give \[S, B, K, ...\]"),
        (torch.zeros(0, 3, 4), "nothing to compare"),
        (torch.zeros(2, 0, 4), "nothing to compare"),
        (torch.full((2, 3, 4), float("nan")), "contain NaN"),
    ]:
        with pytest.raises(ValueError, match=message):
            metric(bad)
