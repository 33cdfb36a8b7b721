"""The predictive distribution: closed forms, and streaming against all at once."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from abnn.prediction import Prediction, PredictionStream


def random_logits(seed: int, *shape: int) -> Tensor:
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fields(prediction: Prediction) -> dict[str, Tensor]:
    names = ["log_probs", "aleatoric", "epistemic", "total", "variation_ratio", "max_logit"]
    return {name: getattr(prediction, name) for name in [*names, "energy"]}


def test_members_that_agree_have_no_epistemic_uncertainty() -> None:
    prediction = Prediction.from_logits(torch.tensor([0.8, 0.2]).log().expand(5, 1, 2))
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert prediction.aleatoric.item() == pytest.approx(entropy, rel=1e-6)
    assert prediction.total.item() == pytest.approx(entropy, rel=1e-6)
    assert prediction.epistemic.item() == pytest.approx(0, abs=1e-6)


def test_sure_members_that_contradict_each_other_are_all_epistemic() -> None:
    prediction = Prediction.from_logits(torch.tensor([[[100.0, 0.0]], [[0.0, 100.0]]]))
    assert prediction.total.item() == pytest.approx(math.log(2))
    assert prediction.aleatoric.item() == pytest.approx(0, abs=1e-12)
    assert prediction.epistemic.item() == pytest.approx(math.log(2))
    assert prediction.variation_ratio.item() == 0.5


def test_known_members_have_the_uncertainty_of_the_closed_form() -> None:
    members = torch.tensor([[[0.7, 0.2, 0.1]], [[0.1, 0.3, 0.6]]], dtype=torch.float64)
    prediction = Prediction.from_logits(members.log() + 3)
    mean = members.mean(0)
    assert torch.allclose(prediction.probs, mean)
    assert prediction.total.item() == pytest.approx(-(mean * mean.log()).sum().item())
    assert prediction.aleatoric.item() == pytest.approx(-(members * members.log()).sum().item() / 2)
    assert prediction.label.item() == 0
    assert prediction.confidence.item() == pytest.approx(0.4)
    assert prediction.max_logit.item() == pytest.approx(3 + (math.log(0.7) + math.log(0.6)) / 2)
    assert prediction.energy.item() == pytest.approx(-3)


def test_the_variation_ratio_counts_the_members_outside_the_majority() -> None:
    votes = torch.eye(3)[torch.tensor([0, 1, 1, 2, 1])].unsqueeze(1)
    assert Prediction.from_logits(votes).variation_ratio.item() == pytest.approx(2 / 5)


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [2, 5], [4, 1, 2]])
@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3, 5)])
def test_streaming_in_any_chunks_equals_all_at_once(
    sizes: list[int], shape: tuple[int, ...]
) -> None:
    logits = random_logits(len(sizes), 7, *shape)
    stream = PredictionStream()
    for chunk in torch.split(logits, sizes):
        stream.update(chunk)
    streamed, whole = fields(stream.result()), fields(Prediction.from_logits(logits))
    for name in whole:
        assert torch.allclose(streamed[name], whole[name], atol=1e-5), name


def test_a_chunk_is_not_changed_by_streaming() -> None:
    logits = random_logits(0, 2, 3, 4)
    before = logits.clone()
    stream = PredictionStream(keep_members=True)
    stream.update(logits)
    stream.update(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(5))
def test_one_member_has_the_log_softmax_bit_for_bit(seed: int) -> None:
    logits = random_logits(seed, 1, 8, 10, 2)
    prediction = Prediction.from_logits(logits)
    assert torch.equal(prediction.log_probs, logits[0].log_softmax(1))
    assert torch.equal(prediction.epistemic, torch.zeros(8, 2))


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_extreme_logits_give_finite_log_probabilities(size: float) -> None:
    stream = PredictionStream()
    for _ in range(3):
        stream.update(torch.tensor([[[size, -size, 0.0]]]))
    assert all(values.isfinite().all() for values in fields(stream.result()).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_single(dtype: torch.dtype) -> None:
    logits = random_logits(0, 6, 4, 10).to(dtype)
    prediction, single = Prediction.from_logits(logits), Prediction.from_logits(logits.float())
    assert prediction.log_probs.dtype == torch.float32
    assert torch.equal(prediction.log_probs, single.log_probs)


def test_double_precision_is_kept() -> None:
    assert Prediction.from_logits(random_logits(0, 2, 3, 4).double()).total.dtype == torch.float64


def test_every_pixel_is_predicted_as_if_it_were_an_example() -> None:
    logits = random_logits(0, 3, 2, 5, 4, 6)
    maps = fields(Prediction.from_logits(logits))
    flat = fields(Prediction.from_logits(logits.movedim(2, -1).reshape(3, -1, 5)))
    assert maps["total"].shape == (2, 4, 6)
    for name in maps:
        values = maps[name].movedim(1, -1) if name == "log_probs" else maps[name]
        assert torch.allclose(values.reshape(flat[name].shape), flat[name], atol=1e-5), name


def test_members_are_kept_only_when_asked_for() -> None:
    logits = random_logits(0, 6, 3, 4)
    assert Prediction.from_logits(logits).members is None
    members = Prediction.from_logits(logits, keep_members=True).members
    assert members is not None
    assert torch.equal(members, logits.log_softmax(2).exp())


def test_a_prediction_of_no_members_is_refused() -> None:
    with pytest.raises(ValueError, match="No member was added yet"):
        PredictionStream().result()


# Rows


@pytest.mark.parametrize("shape", [(9, 4), (9, 4, 3, 5)])
def test_rows_are_the_prediction_of_those_inputs(shape: tuple[int, ...]) -> None:
    logits = random_logits(0, 6, *shape)
    whole, rows = Prediction.from_logits(logits, keep_members=True), torch.tensor([7, 0, 2])
    some = Prediction.from_logits(logits[:, rows], keep_members=True)
    for name, values in fields(whole[rows]).items():
        torch.testing.assert_close(values, fields(some)[name])
    assert whole[rows].members is not None
    assert whole[rows].samples_used == 6
    mask = torch.zeros(9, dtype=torch.bool).index_fill(0, rows, True)
    assert torch.equal(whole[mask].energy, whole.energy[[0, 2, 7]])


def test_joined_predictions_are_those_of_the_joined_inputs() -> None:
    logits = random_logits(0, 6, 9, 4)
    parts = [Prediction.from_logits(part, keep_members=True) for part in logits.split(4, dim=1)]
    joined, whole = Prediction.cat(parts), Prediction.from_logits(logits, keep_members=True)
    assert joined.samples_used == 6
    torch.testing.assert_close(joined.members, whole.members)
    for name, values in fields(joined).items():
        torch.testing.assert_close(values, fields(whole)[name])


def test_joined_predictions_tell_how_many_members_each_input_had() -> None:
    few, many = (Prediction.from_logits(random_logits(0, S, 2, 3)) for S in (4, 6))
    joined = Prediction.cat([few, many, Prediction.cat([many, few])])
    assert isinstance(joined.samples_used, Tensor)
    assert joined.samples_used.tolist() == [4, 4, 6, 6, 6, 6, 4, 4]
    assert joined[3:5].used_by_input().tolist() == [6, 6]
    assert "samples_used=5.0 on average" in repr(joined)


@pytest.mark.parametrize("shape", [(9, 4), (9, 4, 3, 5)])
def test_sets_stay_with_their_inputs(shape: tuple[int, ...]) -> None:
    plain = Prediction.from_logits(random_logits(0, 6, *shape))
    whole = dataclasses.replace(plain, sets=plain.probs > 0.2)
    joined = Prediction.cat([whole[:4], whole[torch.arange(4, 9)].cpu()])
    assert joined.sets is not None
    assert torch.equal(joined.sets, joined.probs > 0.2)
    assert Prediction.cat([whole, plain]).sets is plain[:2].sets is plain.cpu().sets is None
    assert f"mean set size {4 * joined.sets.double().mean():.2f})" in repr(joined)


def test_in_main_memory_it_is_the_same_prediction() -> None:
    few, many = (Prediction.from_logits(random_logits(0, S, 2, 3), True) for S in (4, 6))
    for prediction in (few, Prediction.cat([few, many])):
        for name, value in vars(prediction.cpu()).items():
            torch.testing.assert_close(value, getattr(prediction, name))


def test_a_stream_goes_on_with_some_of_its_inputs() -> None:
    logits, rows = random_logits(0, 6, 9, 4), torch.tensor([7, 0, 2])
    stream = PredictionStream(keep_members=True)
    stream.update(logits[:2])
    stream.keep(rows)
    stream.update(logits[2:, rows])
    expected = Prediction.from_logits(logits[:, rows])
    for name, values in fields(stream.result()).items():
        assert torch.allclose(values, fields(expected)[name], atol=1e-5), name


def test_what_is_no_row_is_refused() -> None:
    with pytest.raises(TypeError, match=r"as pred\[:1\]"):
        Prediction.from_logits(torch.zeros(1, 2, 3))[0]  # type: ignore[index]
    with pytest.raises(ValueError, match="at least one"):
        Prediction.cat([])
