"""Evaluation against the metrics of all predictions at once, on every kind of loader."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from abnn.baselines import Conformal, DeepEnsemble, Single
from abnn.evaluate import evaluate
from abnn.evaluation import Evaluation
from abnn.metrics import Detection, accuracy, auroc, brier, detect, ece, nll
from abnn.prediction import Prediction
from abnn.scores import SCORES
from abnn.statistics import compare_seeds, over_seeds

IDENTITY = Single(nn.Identity())
FIGURES = ("n", "accuracy", "nll", "brier", "ece")


def labelled(seed: int, *rest: int, n: int = 64, K: int = 5) -> tuple[Tensor, Tensor]:
    """Logits `[n, K, ...]`, and labels `[n, ...]` that they are often right about."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, K, *rest, generator=g)
    noisy = logits + 2 * torch.randn(logits.shape, generator=g)
    return logits, noisy.argmax(1)


def batches(*tensors: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def figures(evaluation: Evaluation) -> dict[str, float]:
    return {name: getattr(evaluation, name) for name in FIGURES}


class Members(nn.Module):
    """A predictor whose members are in the data, `[B, S, K, ...]`; it counts its calls."""

    calls = 0

    def predict(self, x: Tensor, **options: Any) -> Prediction:
        self.calls += 1
        return Prediction.from_logits(x.movedim(1, 0), **options)


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_the_metrics_of_all_predictions_in_percent(seed: int) -> None:
    x, y = labelled(seed)
    p = IDENTITY.predict(x)
    result = evaluate(IDENTITY, batches(x, y, size=10))
    assert result.n == 64
    assert result.accuracy == pytest.approx(100 * accuracy(p.probs, y))
    assert result.nll == pytest.approx(nll(p.log_probs, y))
    assert result.brier == pytest.approx(brier(p.probs, y))
    assert result.ece == pytest.approx(100 * ece(p.confidence, p.label == y))
    assert result.ood == {}


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_batch_size_changes_nothing(size: int) -> None:
    (x, y), (o, _) = labelled(0), labelled(1)
    parts = evaluate(IDENTITY, batches(x, y, size=size), {"far": torch.split(o, size)})
    whole = evaluate(IDENTITY, [(x, y)], {"far": [o]})
    assert figures(parts) == pytest.approx(figures(whole))
    assert parts.ood["far"]["entropy"].auroc == pytest.approx(whole.ood["far"]["entropy"].auroc)


@pytest.mark.parametrize("name", SCORES)
def test_every_score_is_detected_with_higher_as_more_ood(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, o = torch.randn(40, 3, 5, generator=g), torch.randn(30, 3, 5, generator=g)
    y = torch.randint(5, (40,), generator=g)
    model = Members()
    result = evaluate(model, batches(x, y, size=16), {"far": [o]})
    expected = detect(SCORES[name](model.predict(x)), SCORES[name](model.predict(o)))
    assert result.ood["far"][name] == expected.percent()


@pytest.mark.parametrize("name", SCORES)
def test_every_score_finds_members_that_waver_and_disagree(name: str) -> None:
    sure = 9 * torch.eye(4)[torch.zeros(20, 3, dtype=torch.long)]
    waver = torch.eye(4)[torch.arange(3)].expand(20, 3, 4)
    result = evaluate(Members(), [(sure, torch.zeros(20).long())], {"far": [waver]})
    assert result.ood["far"][name].auroc == 100


def test_entropy_is_split_into_aleatoric_and_epistemic_scores() -> None:
    contradict = Members().predict(torch.tensor([[[50.0, 0.0], [0.0, 50.0]]]))
    waver = Members().predict(torch.zeros(1, 2, 2))
    entropies = {name: [SCORES[name](p).item() for p in (contradict, waver)] for name in SCORES}
    assert entropies["entropy"] == pytest.approx([math.log(2), math.log(2)])
    assert entropies["aleatoric"] == pytest.approx([0, math.log(2)])
    assert entropies["epistemic"] == pytest.approx([math.log(2), 0])


def test_data_the_wrong_way_round_have_the_mirrored_auroc() -> None:
    (x, y), (o, p) = labelled(0), labelled(1)
    right = evaluate(IDENTITY, [(x, y)], {"far": [o / 9]}).ood["far"]
    wrong = evaluate(IDENTITY, [(o / 9, p)], {"far": [x]}).ood["far"]
    for name, found in right.items():
        assert found.auroc + wrong[name].auroc == pytest.approx(100)
    assert right["msp"].auroc > 90


def test_equal_predictions_have_the_values_of_chance() -> None:
    flat, y = torch.zeros(40, 5), torch.arange(40) % 5
    result = evaluate(IDENTITY, [(flat, y)], {"far": [flat]})
    assert (result.accuracy, result.ece) == pytest.approx((20, 0), abs=1e-5)
    assert result.ood["far"]["msp"] == Detection(50, 50, 100, 50, 100)
    assert result.selective is not None
    assert (result.selective.aurc, result.selective.augrc) == pytest.approx((0.8, 0.4))


def test_labels_of_a_single_class_are_scored_like_any() -> None:
    logits, y = torch.eye(5)[torch.arange(40) % 5], torch.full((40,), 2)
    result = evaluate(IDENTITY, [(logits, y)])
    assert result.accuracy == pytest.approx(20)
    assert result.classwise_ece is not None
    assert 0 < result.classwise_ece < 100
    with pytest.raises(ValueError, match="The logits have 1 class"):
        evaluate(IDENTITY, [(logits[:, :1], y * 0)])


def test_several_datasets_are_told_apart() -> None:
    (x, y), (o, _) = labelled(0), labelled(1)
    result = evaluate(IDENTITY, [(x, y)], {"same": [x], "flat": [0 * o]})
    assert result.ood["same"]["msp"].auroc == 50
    assert result.ood["flat"]["msp"].auroc == 100


@pytest.mark.parametrize("kind", ["tensor", "pair", "list of one", "mapping"])
def test_ood_data_needs_no_labels(kind: str) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    (x, y), (o, _) = labelled(0), labelled(1)
    given: Any = {"tensor": o, "pair": (o, "ignored"), "list of one": [o], "mapping": {"x": o}}
    result = evaluate(Single(Named()), [{"x": x, "labels": y}], {"far": [given[kind]]})
    expected = 100 * auroc(1 - IDENTITY.predict(x).confidence, 1 - IDENTITY.predict(o).confidence)
    assert result.ood["far"]["msp"].auroc == pytest.approx(expected)


def test_several_inputs_are_passed_as_arguments() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    x, y = labelled(0)
    result = evaluate(Single(Sum()), [(x / 4, 3 * x / 4, y)])
    assert figures(result) == pytest.approx(figures(evaluate(IDENTITY, [(x, y)])))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_void_pixels_count_in_nothing(dtype: torch.dtype) -> None:
    (x, y), (o, _) = labelled(0, 3, 4, n=6), labelled(1, 2, 2, n=6)
    void = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    marked = y.masked_fill(void, 255).to(dtype)
    result = evaluate(IDENTITY, batches(x, marked, size=4), {"far": [o]}, ignore_index=255)
    flat = x.movedim(1, -1)[~void]
    expected = evaluate(IDENTITY, [(flat, y[~void])], {"far": [o.movedim(1, -1).flatten(0, -2)]})
    assert result.n == (~void).sum()
    assert figures(result) == pytest.approx(figures(expected))
    assert vars(result.ood["far"]["energy"]) == pytest.approx(vars(expected.ood["far"]["energy"]))


def test_a_class_that_looks_like_ignore_index_in_a_narrow_type_is_kept() -> None:
    # -100 and 156 are the same byte.
    x = torch.zeros(2, 200)
    assert evaluate(IDENTITY, [(x, torch.tensor([156, 3], dtype=torch.uint8))]).n == 2


def test_options_reach_predict(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = torch.randn(6, 3, 4), torch.zeros(6).long()
    model = Members()
    evaluate(model, batches(x, y, size=2), {"far": [x]}, keep_members=True)
    assert model.calls == 4
    assert capsys.readouterr().err == ""
    with pytest.raises(TypeError, match="nonsense"):
        evaluate(model, [(x, y)], nonsense=1)


@pytest.mark.parametrize("given", [{"coverages": [90]}, {"risks": [-0.1]}])
def test_shares_out_of_range_are_refused_before_the_work(given: dict[str, Any]) -> None:
    model = Members()
    with pytest.raises(
        ValueError, match=r"coverage is 90; give a share|risk is -0.1; give a share"
    ):
        evaluate(model, [(torch.randn(6, 3, 4), torch.zeros(6).long())], **given)
    assert model.calls == 0


def test_a_plain_network_is_told_how_to_become_a_predictor() -> None:
    with pytest.raises(TypeError, match=r"abnn\.baselines\.Single"):
        evaluate(nn.Identity(), [])  # type: ignore[arg-type]


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = torch.randn(6, 3, 4), torch.zeros(6).long()
    evaluate(Members(), list(batches(x, y, size=2)), {"far": iter([x])}, progress=True)
    err = capsys.readouterr().err
    assert "evaluate in-distribution 3/3" in err
    assert "evaluate far 1" in err


def test_inputs_follow_the_predictor_to_its_device() -> None:
    class OnMeta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1, device="meta"))

        def predict(self, x: Tensor) -> Prediction:
            assert x.device.type == "meta"
            return IDENTITY.predict(torch.zeros(x.shape))

    x, y = labelled(0)
    assert evaluate(OnMeta(), [(x, y)], {"far": [x]}).n == 64


def test_an_ensemble_is_evaluated_like_a_network() -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(5, 5) for _ in range(3)]
    x, y = labelled(0)
    result = evaluate(DeepEnsemble(nets), [(x, y)])
    mean = torch.stack([net(x).softmax(1) for net in nets]).mean(0)
    assert result.brier == pytest.approx(brier(mean.detach(), y), rel=1e-5)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "loader of the in-distribution data is empty"),
        ([(torch.full((2, 3), math.nan), torch.tensor([0, 1]))], "batch 1 .* contain NaN"),
        ([(torch.zeros(2, 3), torch.tensor([0, 3]))], "run from 0 to 3.*ignore_index"),
        ([(torch.zeros(2, 3), torch.tensor([0, -1]))], "run from -1 to 0"),
        ([(torch.zeros(2, 3), torch.tensor([0]))], r"Labels of shape \[1\] do not fit"),
        ([(torch.zeros(2, 3), torch.tensor([-100, -100]))], "Every in-distribution label is"),
        ([torch.zeros(2, 3)], "no labels were found"),
    ],
)
def test_labelled_data_that_cannot_be_scored_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(IDENTITY, loader)


def test_ood_data_that_cannot_be_scored_is_refused_by_name() -> None:
    x, y = labelled(0)
    with pytest.raises(ValueError, match="loader of the svhn data is empty"):
        evaluate(IDENTITY, [(x, y)], {"svhn": []})
    with pytest.raises(ValueError, match="batch 2 of the svhn data contain NaN"):
        evaluate(IDENTITY, [(x, y)], {"svhn": [x, x * math.nan]})
    with pytest.raises(ValueError, match="ood must map names to loaders"):
        evaluate(IDENTITY, [(x, y)], [x])  # type: ignore[arg-type]


def full() -> Evaluation:
    (x, y), (o, _) = labelled(0), labelled(1)
    return evaluate(IDENTITY, [(x, y)], {"svhn": [o / 2], "textures": [o / 9]})


def test_json_brings_every_figure_back() -> None:
    result = full()
    assert Evaluation.from_json(result.to_json()) == result
    assert json.loads(result.to_json())["ood"]["svhn"]["msp"]["auroc"] > 50


def test_json_brings_sets_diversity_and_cost_back() -> None:
    x, y = torch.randn(20, 3, 5), torch.arange(20) % 5
    sets = Conformal(Members(), 0.5).fit([(x, y)])
    result = evaluate(sets, [(x, y)], {"far": [9 * x]})
    again = Evaluation.from_json(result.to_json())
    assert (again, again.cost) == (result, result.cost)
    assert result.sets is not None
    assert result.sets.coverage >= 50
    assert result.ood_diversity["far"].disagreement > 0


def test_what_a_predictor_costs_is_measured_and_asked() -> None:
    nets = [nn.Linear(5, 5) for _ in range(3)]
    cost = evaluate(DeepEnsemble(nets, fit_seconds=7.0), [labelled(0)]).cost
    assert cost is not None
    assert (cost.parameters, cost.bytes, cost.fit_seconds, cost.passes) == (60, 240, 7, 3)
    assert cost.milliseconds is not None
    assert cost.milliseconds > 0


def test_what_a_predictor_says_of_its_time_goes_before_what_was_measured() -> None:
    class Stored(Single):
        milliseconds = 7.0

    cost = evaluate(Stored(nn.Identity()), [labelled(0)]).cost
    assert cost is not None
    assert cost.milliseconds == 7.0


def test_evaluations_are_equal_whatever_they_cost() -> None:
    assert evaluate(IDENTITY, [labelled(0)]) == evaluate(IDENTITY, [labelled(0)])


def test_figures_have_the_names_that_seeds_are_compared_by() -> None:
    runs = [evaluate(IDENTITY, [labelled(seed)], {"far": [labelled(9)[0]]}) for seed in range(3)]
    spread = over_seeds([run.figures() for run in runs])
    assert spread["ood/far/msp/auroc"].n == 3
    worse = [{k: v - 5 if k == "accuracy" else v for k, v in r.figures().items()} for r in runs]
    verdicts = compare_seeds([run.figures() for run in runs], worse)
    assert verdicts["accuracy"].verdict == "worse"
    assert verdicts["at_risk/0.05/coverage"].verdict == "no difference shown"


def test_an_infinite_nll_survives_strict_json() -> None:
    logits = torch.tensor([[0.0, -math.inf]])
    result = evaluate(IDENTITY, [(logits, torch.tensor([1]))])
    assert result.nll == math.inf

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(result.to_json(), parse_constant=refuse)
    assert Evaluation.from_json(result.to_json()) == result


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"n": 1, "ood": {}}', '{"ood": 3}'])
def test_foreign_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an Evaluation in JSON"):
        Evaluation.from_json(text)


def test_the_table_is_aligned_and_holds_the_papers_figures() -> None:
    result = full()
    blocks = [block.splitlines() for block in str(result).split("\n\n")]
    titles = [lines.pop(0) for lines in blocks[2:]]
    assert titles == [
        "Leaving out the least confident",
        "OOD detection by maximum probability (msp), %",
        "AUROC by score, %",
        "Cost",
    ]
    for lines in blocks:
        assert len({len(line) for line in lines}) == 1
    first, more, selective, paper, scores, _ = blocks
    assert first[1].split()[1] == f"{result.accuracy:.2f}"
    assert more[1].split()[0] == f"{result.adaptive_ece:.2f}"
    assert result.selective is not None
    assert selective[1].split()[0] == f"{result.selective.aurc:.4f}"
    svhn, fpr95 = result.ood["svhn"], result.ood["textures"]["msp"].fpr95
    assert paper[1].split()[:2] == ["svhn", f"{svhn['msp'].auroc:.2f}"]
    assert paper[2].split()[3] == f"{fpr95:.2f}"
    assert scores[1].split()[1:] == [f"{svhn[name].auroc:.2f}" for name in SCORES]


def test_the_table_does_without_scores_it_was_not_given() -> None:
    some = {"energy": Detection(90, 80, 40, 70, 50)}
    table = Evaluation(10, 50, 1, 1, 5, {"a": some, "b": {"msp": some["energy"]}}).to_table()
    assert table.splitlines()[-2:] == ["a         90.00      -", "b             -  90.00"]
