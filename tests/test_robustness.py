"""Robustness against corruptions and metrics called one by one, and predictors known by heart."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import abnn
from abnn.baselines import Single
from abnn.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from abnn.metrics import accuracy, ece, nll
from abnn.robustness import Figures, Robustness, robustness
from nets import cnn

X = torch.rand(40, 3, 16, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3
LOADER = DataLoader(TensorDataset(X, Y), 16)
GOOD, BAD = Figures(90.0, 0.5, 2.0), Figures(60.0, 1.5, 6.0)


def some(**more: Any) -> Robustness:
    rows = {"fog": {1: GOOD, 3: BAD}, "motion_blur": {1: BAD, 3: BAD}}
    given: dict[str, Any] = {"n": 10, "clean": GOOD, "corrupted": rows} | more
    return Robustness(**given)


def figures(predictor: Any, x: Tensor, y: Tensor = Y, **predict: Any) -> Any:
    p = predictor.predict(x, **predict)
    found = [100 * accuracy(p.probs, y), nll(p.log_probs, y)]
    return pytest.approx([*found, 100 * ece(p.confidence, p.label == y)], rel=1e-5)


def values(given: Figures) -> list[float]:
    return [given.accuracy, given.nll, given.ece]


def test_figures_are_the_metrics_of_what_corrupt_gives() -> None:
    net = Single(cnn())
    result = robustness(net, LOADER, corruption_seed=5)
    assert (result.n, result.skipped) == (40, {})
    assert values(result.clean) == figures(net, X)
    assert list(result.corrupted) == list(CORRUPTIONS)
    for name, row in result.corrupted.items():
        assert list(row) == list(SEVERITIES)
        for severity, found in row.items():
            assert values(found) == figures(net, corrupt(X, name, severity, seed=5))


def test_options_reach_predict() -> None:
    bnn = abnn.convert(cnn(), modes=2, alpha=0.3)
    result = robustness(bnn, LOADER, "contrast", [4], samples=3)
    assert values(result.clean) == figures(bnn, X, samples=3)
    assert values(result.corrupted["contrast"][4]) == figures(
        bnn, corrupt(X, "contrast", 4), samples=3
    )


def test_normalised_images_are_corrupted_as_they_were_before() -> None:
    net = Single(cnn())
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.25])
    normal = [{"input": (X - mean[:, None, None]) / std[:, None, None], "labels": Y}]
    result = robustness(net, normal, ["gaussian_noise"], [2], mean=mean, std=std.tolist())
    noisy = (corrupt(X, "gaussian_noise", 2) - mean[:, None, None]) / std[:, None, None]
    assert values(result.corrupted["gaussian_noise"][2]) == figures(net, noisy)


def test_noise_hurts_who_looks_for_noise_and_brightness_does_not() -> None:
    class Rough(nn.Module):
        """Class 1 where neighbours differ by more than 0.04 on average."""

        def forward(self, x: Tensor) -> Tensor:
            rough = x.diff(dim=-1).abs().mean((1, 2, 3)) - 0.04
            return 300 * torch.stack([-rough, rough], 1)

    smooth = torch.full((30, 3, 16, 16), 0.5)
    data = [(smooth, torch.zeros(30).long())]
    result = robustness(Single(Rough()), data, ["gaussian_noise", "brightness"])
    assert result.clean.accuracy == 100
    # Differences of neighbours have a mean of 2 std / sqrt(pi), 0.045 for 0.04.
    assert [row.accuracy for row in result.corrupted["gaussian_noise"].values()] == [0] * 5
    assert [row.accuracy for row in result.corrupted["brightness"].values()] == [100] * 5
    assert [row.accuracy for row in result.by_severity().values()] == [50] * 5
    losses = [row.nll for row in result.corrupted["gaussian_noise"].values()]
    assert losses == sorted(losses)


def test_void_pixels_count_in_nothing() -> None:
    net = Single(nn.Conv2d(3, 2, 1))
    labels = torch.randint(2, (40, 16, 16)).where(torch.rand(40, 16, 16) < 0.7, 255)
    result = robustness(net, [(X, labels)], ["fog"], [3], ignore_index=255)
    p = net.predict(corrupt(X, "fog", 3))
    assert result.n == (labels != 255).sum()
    right = (p.label == labels)[labels != 255].double().mean().item()
    assert result.corrupted["fog"][3].accuracy == pytest.approx(100 * right)


def test_what_does_not_suit_the_images_is_left_out_and_told() -> None:
    grey = [(X[:, :1], Y)]
    net = Single(nn.Sequential(nn.Flatten(), nn.Linear(256, 3)))
    result = robustness(net, grey, severities=[1])
    assert set(CORRUPTIONS) - set(result.corrupted) == {"saturate"} == set(result.skipped)
    assert str(result).endswith(f"Left out: {result.skipped['saturate']}")
    with pytest.raises(ValueError, match="three channels, .* have 1; leave it out"):
        robustness(net, grey, ["fog", "saturate"])


def test_without_pillow_jpeg_is_left_out_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = robustness(Single(cnn()), LOADER, severities=[1])
    assert result.skipped == {"jpeg": "jpeg needs Pillow: pip install pillow."}
    with pytest.raises(ImportError, match="pip install pillow"):
        robustness(Single(cnn()), LOADER, ["jpeg"])


def test_a_loader_that_shuffles_gives_the_clean_figures_of_evaluate() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True, generator=generator)
    before = generator.get_state()
    expected = abnn.evaluate(Single(cnn()), loader)
    generator.set_state(before)
    result = robustness(Single(cnn()), loader, ["fog"], [1])
    assert values(result.clean) == [expected.accuracy, expected.nll, expected.ece]


def test_one_line_of_progress_is_over_all_corruptions_and_severities(
    capsys: pytest.CaptureFixture[str],
) -> None:
    robustness(Single(cnn()), LOADER, ["fog", "contrast"], [1, 5], progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("robustness 1/4  fog 1")
    assert lines[-1].startswith("robustness 4/4  contrast 5")
    robustness(Single(cnn()), LOADER, ["fog"], [1], progress=False)
    assert capsys.readouterr().err == ""


def test_means_are_over_corruptions_and_over_severities() -> None:
    assert some().by_severity() == {1: Figures(75.0, 1.0, 4.0), 3: BAD}
    assert some().by_corruption() == {"fog": Figures(75.0, 1.0, 4.0), "motion_blur": BAD}


def test_the_table_has_a_row_for_each_severity_and_each_corruption() -> None:
    assert some().to_table().splitlines() == [
        "severity  accuracy %     nll  ECE %",
        "   clean       90.00  0.5000   2.00",
        "       1       75.00  1.0000   4.00",
        "       3       60.00  1.5000   6.00",
        "",
        "corruption   accuracy %     nll  ECE %",
        "fog               75.00  1.0000   4.00",
        "motion_blur       60.00  1.5000   6.00",
    ]


@pytest.mark.parametrize("loss", [0.25, math.inf])
def test_json_gives_it_back(loss: float) -> None:
    result = some(clean=Figures(50.0, loss, 1.0), skipped={"jpeg": "no Pillow"})
    assert Robustness.from_json(result.to_json()) == result
    assert json.loads(result.to_json())["clean"]["nll"] == ("inf" if loss == math.inf else loss)


def changed(*path: str, to: Any) -> str:
    data = inner = json.loads(some().to_json())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        some().to_json()[:-1],
        changed("n", to=0),
        changed("n", to="10"),
        changed("more", to=1),
        changed("clean", to=None),
        changed("clean", "accuracy", to="90"),
        changed("clean", "accuracy", to="inf"),
        changed("clean", "ece", to=True),
        changed("clean", "nll", to="0.5"),
        changed("clean", "nll", to=math.nan),
        changed("clean", "nll", to=math.inf),
        changed("clean", "brier", to=0.1),
        changed("corrupted", to={}),
        changed("corrupted", to={"fog": {}}),
        changed("corrupted", "fog", "6", to=json.loads(some().to_json())["clean"]),
        changed("corrupted", "fog", "2", to=json.loads(some().to_json())["clean"]),
        changed("skipped", to=[]),
        changed("skipped", "jpeg", to=3),
    ],
)
def test_what_is_no_such_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a Robustness in JSON; give what Robustness.to_json"):
        Robustness.from_json(text)


@pytest.mark.parametrize("loss", [0.25, math.inf])
def test_it_is_drawn_to_a_file(tmp_path: Path, loss: float) -> None:
    pytest.importorskip("matplotlib")
    rows = {name: {1: Figures(50.0, loss, 1.0), 5: BAD} for name in CORRUPTIONS}
    some(corrupted=rows).plot(tmp_path / "robust.png")
    assert (tmp_path / "robust.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"abnn\[plot\]"):
        some().plot("robust.png")


class Draining:
    """What can be iterated again, but then has fewer batches to give."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[:8], Y[:8])] * self.sizes.pop(0))


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "The loader is empty"),
        (iter([(X, Y)]), {}, "is an iterator, which is empty after one pass; give one"),
        (((X, Y) for _ in range(2)), {}, "is an iterator, which is empty after one pass"),
        (Draining(4, 4, 0), {}, "empty, .* after its first pass; give one that can be iterated"),
        (Draining(4, 4, 2), {}, "gave 32 labelled examples at first and 16 later; give one that"),
        (LOADER, {"corruptions": ["forg"]}, "'forg'; the nearest is 'fog'"),
        (LOADER, {"corruptions": []}, "corruptions= is empty"),
        (LOADER, {"severities": []}, r"severities=\[\] are not some of 1 to 5"),
        (LOADER, {"severities": [0, 1]}, r"severities=\[0, 1\] are not some"),
        (LOADER, {"severities": [2.5]}, "a severity=2.5 is not a whole number"),
        (LOADER, {"corruption_seed": "a"}, "seed='a'"),
        (LOADER, {"mean": 0.5, "std": 0}, "std=0 is not above 0"),
        (LOADER, {"mean": (0.5, 0.5)}, "mean= has 2 values"),
        ([(X - 0.5, Y)], {}, "were normalised, give the mean= and std="),
        ([(X[:, :, :4], Y)], {}, "4×16 pixels"),
        ([(X[:, 0, 0], Y)], {}, "no images were found"),
        ([X], {}, "no labels were found"),
        ([(X, Y * 0 - 100)], {}, "ignore_index"),
    ],
)
def test_bad_requests_are_refused(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        robustness(Single(cnn()), loader, **{"corruptions": ["fog"], **options})
