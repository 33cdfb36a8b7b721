"""The search for a learning rate and an alpha: what it chooses, why, and how it goes on."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import abnn
from abnn import Recipe
from abnn.cli import run
from abnn.tune import difference, pairs_of, rounds
from fitting import Data, banks, data, equal
from nets import mlp

RECIPE = Recipe(steps=27, lr=0.01)


def shifted(count: int = 6) -> Data:
    """Data whose scale the network's norms do not fit, which a fit can put right."""
    return [(4 * x + 1, y) for x, y in data(count)]


def trained() -> nn.Module:
    net = mlp()
    abnn.train(net, data(), epochs=10)
    return net


def tune(folder: Path, loader: Any = None, **arguments: Any) -> abnn.TuneResult:
    given: dict[str, Any] = {"trials": 6, "samples": 2, "lr": (1e-3, 0.3)} | arguments
    net = given.pop("net", None) or trained()
    held_out = given.pop("validation", shifted(3))
    return abnn.tune(net, loader or shifted(), held_out, RECIPE, run=folder, **given)


def test_the_best_of_the_longest_fits_is_chosen(tmp_path: Path) -> None:
    net = trained()
    found = tune(tmp_path, net=net)
    longest = [t for t in found.trials if t.steps == 27]
    assert len(longest) == 2
    assert longest[0].nll <= longest[1].nll
    assert (found.recipe.lr, found.recipe.alpha) == longest[0][:2]
    assert found.recipe.steps == 27
    assert Recipe.load(tmp_path / "recipe.toml") == found.recipe
    assert (tmp_path / "tune.txt").read_text() == f"{found}\n"
    bnn = abnn.convert(net, alpha=longest[0].alpha)
    abnn.fit(bnn, shifted(), found.recipe)
    probs = torch.cat([bnn.predict(x, samples=2).log_probs for x, _ in shifted(3)])
    nll = F.nll_loss(probs, torch.cat([y for _, y in shifted(3)])).item()
    assert longest[0].nll == pytest.approx(nll, rel=1e-5)


def test_the_best_third_goes_on_longer(tmp_path: Path) -> None:
    trials = tune(tmp_path, trials=9).trials
    by_steps = {steps: [t for t in trials if t.steps == steps] for steps in (3, 9, 27)}
    assert [len(found) for found in by_steps.values()] == [9, 3, 2]
    for short, long in ((3, 9), (9, 27)):
        best = sorted(by_steps[short], key=lambda t: t.nll)[: len(by_steps[long])]
        assert {t[:2] for t in best} == {t[:2] for t in by_steps[long]}


def test_the_choice_is_explained_against_original_and_runner_up(tmp_path: Path) -> None:
    net = trained()
    found = tune(tmp_path, net=net)
    x, y = (torch.cat(part) for part in zip(*shifted(3), strict=True))
    assert found.original == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-5)
    assert found.better
    best, second = found.trials[:2]
    assert f"Chosen: lr={best.lr:g} and alpha={best.alpha:g}" in found.why
    assert f"{best.nll:.4f} against {found.original:.4f} of the original network" in found.why
    assert f"The runner-up, lr={second.lr:g}" in found.why
    assert "±" in found.why


def test_it_says_so_if_nothing_beats_the_original(tmp_path: Path) -> None:
    wrong = [(x, (y + 1) % 3) for x, y in data()]
    found = tune(tmp_path, wrong, trials=2, validation=data(3))
    assert not found.better
    assert "Nothing that was tried beats the original network" in str(found)
    assert "keep the original" in found.why


def test_a_fit_that_diverges_is_the_worst_and_no_more(tmp_path: Path) -> None:
    found = tune(tmp_path, lr=(1e30, 1e38), trials=3)
    assert [t.nll < math.inf for t in found.trials if t.steps == 9] == [True, False, False]
    assert (found.recipe.lr, len([t for t in found.trials if t.steps == 27])) == (0.01, 1)
    assert "diverged" in str(found)
    assert found.to_dict()["trials"][-1]["nll"] is None
    with pytest.raises(FloatingPointError, match="No fit of 27 steps has a finite.*lower learning"):
        abnn.tune(
            trained(), shifted(), data(2), RECIPE.with_(lr=1e38), run=tmp_path / "all", trials=1
        )


class Dying:
    """A loader that is interrupted after so many batches in all."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        for batch in shifted():
            self.good -= 1
            if self.good < 0:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.parametrize("good", [2, 40, 80])
def test_a_search_that_was_killed_goes_on(tmp_path: Path, good: int) -> None:
    straight = tune(tmp_path / "straight", trials=4)
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "killed", Dying(good), trials=4)
    left = Dying(90 - good + 27)  # what is left of all steps, and the fit that was interrupted
    again = tune(tmp_path / "killed", left, trials=4)
    assert str(again) == str(straight)
    assert str(tune(tmp_path / "killed", Dying(0), trials=4)) == str(straight)


def test_another_search_does_not_go_into_the_same_directory(tmp_path: Path) -> None:
    tune(tmp_path, trials=1)
    for changes, message in (
        ({"lr": (1e-3, 1.0)}, "holds a search with other settings .lr was"),
        ({"trials": 2}, "trials was 1 and now is 2"),
        ({"net": mlp(nn.LayerNorm)}, "another network"),
        ({"validation": data(1)}, "other validation data"),
        ({"momentum": 0.5}, "momentum was 0.9 and now is 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            tune(tmp_path, **{"trials": 1, **changes})


def test_the_network_and_the_random_numbers_are_left_alone(tmp_path: Path) -> None:
    net, loader, validation = trained(), shifted(), shifted(3)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    abnn.tune(net, loader, validation, RECIPE, run=tmp_path, trials=2)
    assert torch.equal(torch.rand(2), expected)
    assert equal(dict(net.state_dict()), before)


def test_pixels_that_do_not_count_are_left_out(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)).eval()
    x, y = torch.randn(5, 2, 6, 6), torch.randint(3, (5, 6, 6))
    y[:2, 1:] = 255
    found = abnn.tune(
        net, [(x, y)], [(x, y)], RECIPE, run=tmp_path, trials=1, steps=2, ignore_index=255
    )
    expected = F.cross_entropy(net(x), y, ignore_index=255).item()
    assert found.original == pytest.approx(expected, rel=1e-5)


def test_pairs_are_spread_over_both_ranges() -> None:
    pairs = pairs_of(RECIPE, (1e-4, 0.1), (1e-3, 1.0), trials=10)
    assert pairs[0] == (0.01, 0.01)
    for i, low in enumerate((1e-4, 1e-3)):
        parts = sorted(int(3 * math.log10(pair[i] / low)) for pair in pairs[1:])
        assert parts == list(range(9))
    assert pairs == pairs_of(RECIPE, (1e-4, 0.1), (1e-3, 1.0), trials=10)
    assert pairs != pairs_of(RECIPE.with_(seed=1), (1e-4, 0.1), (1e-3, 1.0), trials=10)


def test_rounds_end_with_two_to_compare() -> None:
    assert [rounds(n, 27) for n in (1, 3)] == [[(1, 27)], [(3, 9), (2, 27)]]
    assert rounds(27, 270) == [(27, 10), (9, 30), (3, 90), (2, 270)]


def test_rounds_of_equal_length_are_one() -> None:
    assert rounds(9, 2) == [(9, 1), (2, 2)]
    assert rounds(9, 1) == [(9, 1)]


def test_noise_is_two_standard_errors_of_the_mean_difference() -> None:
    a, b = torch.rand(40, dtype=torch.float64), torch.rand(40, dtype=torch.float64)
    one = torch.ones(40, dtype=torch.float64)
    mean, noise = difference(torch.stack([a, one], 1), torch.stack([b, one], 1))
    assert mean == pytest.approx((a - b).mean().item())
    assert noise == pytest.approx(2 * (a - b).std().item() / math.sqrt(40))


def test_a_single_example_says_nothing_of_the_noise() -> None:
    a, b = torch.tensor([[0.7, 1.0], [0.0, 0.0]]), torch.tensor([[0.2, 1.0], [0.0, 0.0]])
    mean, noise = difference(a, b)
    assert mean == pytest.approx(0.5)
    assert noise == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": (0.1, 0.01)}, "lr=.* must be the lowest and the highest"),
        ({"alpha": (0.0, 0.1)}, "alpha=.* above 0"),
        ({"trials": 0}, "trials=0"),
        ({"validation": []}, "gave no label that counts"),
    ],
)
def test_what_can_not_be_searched_is_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tune(tmp_path, **arguments)


# The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text("from test_tune import trained\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    x, y = (torch.cat(part).numpy() for part in zip(*shifted(9), strict=True))
    np.savez("rows.npz", x_train=x[:48], y_train=y[:48], x_val=x[48:], y_val=y[48:])
    return tmp_path


COMMAND = ["tune", "--model", "module:mine:trained", "--data", "npz:rows.npz", "--trials", "2"]
COMMAND += ["--set", "steps=6", "--set", "batch_size=8", "--set", "modes=2", "--out", "run"]


def test_the_command_writes_a_recipe_that_fit_takes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(COMMAND) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("Written to run/recipe.toml; abnn fit --recipe takes it.\n")
    assert "validation: that of npz:rows.npz" in printed.err
    assert run([*COMMAND, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    recipe = Recipe.load("run/recipe.toml")
    assert Recipe.from_dict(told["recipe"]) == recipe
    assert (recipe.model, recipe.data) == ("module:mine:trained", f"npz:{here / 'rows.npz'}")
    options = ["--model", recipe.model, "--data", recipe.data, "--recipe", "run/recipe.toml"]
    assert run(["fit", *map(str, options), "--out", "fitted"]) == 0
    assert len(banks(abnn.load("fitted", trained()))) > 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--model", "timm:resnet18"], "give its trained ones by --weights"),
        (["--lr", "0.1"], "not the lowest and the highest value"),
        (["--lr", "0.1,0.01"], "must be the lowest and the highest value"),
        (["--set", "lrr=1"], "did you mean 'lr'"),
        (["--data", "npz:none.npz"], "no file none.npz"),
        (["--set", "lr=1e38", "--trials", "1"], "lower learning rates"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    here: Path, changes: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMAND, *changes]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert sentence in errors[-1]
