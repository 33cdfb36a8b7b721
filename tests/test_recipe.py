"""Recipes: the paper's rows, validation, and TOML."""

from pathlib import Path
from typing import Any

import pytest

import abnn
from abnn.recipe import names

# Dataset and network, epochs, batch size, lr, alpha, weight decay, as the paper prints them.
ROWS = {
    "cifar10-resnet50": (2, 128, 0.0057, 0.01, 5e-4),
    "cifar10-wrn28_10": (2, 128, 0.0091, 0.01, 5e-4),
    "cifar100-resnet50": (10, 128, 0.00139, 0.01, 5e-4),
    "cifar100-wrn28_10": (10, 128, 0.034, 0.01, 5e-4),
    "imagenet-resnet50": (1, 128, 0.00439, 0.01, 5e-4),
    "imagenet-vit": (0.25, 128, 7.33e-6, 0.00035, 7e-6),
    "streethazards-deeplabv3plus": (10, 4, 0.01, 0.01, 1e-4),
    "bdd_anomaly-deeplabv3plus": (10, 4, 0.01, 0.01, 1e-4),
    "muad-deeplabv3plus": (6, 4, 0.044, 0.01, 1e-4),
}


def test_every_row_of_the_papers_table_is_there() -> None:
    assert names() == sorted(ROWS)
    for name, row in ROWS.items():
        r = abnn.Recipe.load(name)
        assert (r.epochs, r.batch_size, r.lr, r.alpha, r.weight_decay) == row
        assert r.momentum == 0.9
        assert r.optimizer == "sgd"
        assert r.prior == abnn.RandomPrior()
    assert abnn.Recipe.load("cifar100-resnet50").lr_at(0, 1, epoch=5) == 0.00139 / 2


@pytest.mark.parametrize(
    "recipe",
    [
        abnn.Recipe(),
        abnn.Recipe(prior=None, steps=7, amp="bf16", modes=3),
        abnn.Recipe(prior=abnn.RandomPrior(2, 6.0), schedule="multistep", milestones=(1, 2.5)),
        *map(abnn.Recipe.load, ROWS),
    ],
)
def test_a_recipe_survives_its_file(recipe: abnn.Recipe, tmp_path: Path) -> None:
    recipe.save(tmp_path / "recipe.toml")
    assert abnn.Recipe.load(tmp_path / "recipe.toml") == recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0}, "lr=0 must be more than 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": "0.1"}, "lr='0.1'"),
        ({"epochs": -1}, "epochs=-1"),
        ({"momentum": 1.0}, "less than 1"),
        ({"weight_decay": -1e-4}, "weight_decay"),
        ({"steps": 2.5}, "whole number"),
        ({"steps": True}, "steps=True"),
        ({"schedule": "cosine"}, "schedule='cosine' is unknown"),
        ({"schedule": "polynomal"}, "did you mean 'polynomial'"),
        ({"schedule": "multistep"}, "needs milestones"),
        ({"milestones": (3, 1)}, "must go up"),
        ({"amp": "fp8"}, "amp='fp8'"),
        ({"prior": "sqrt"}, "RandomPrior or None"),
        ({"modes_at_once": 0}, "modes_at_once=0"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abnn.Recipe(**values)


def test_unknown_names_point_to_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="did you mean 'weight_decay'"):
        abnn.Recipe().with_(weightdecay=0.1)
    with pytest.raises(TypeError, match="random prior has no 'clases'; did you mean 'classes'"):
        abnn.Recipe.from_dict({"prior": {"clases": 2}})
    with pytest.raises(ValueError, match="did you mean 'imagenet-vit'"):
        abnn.Recipe.load("imagenet_vit")
    with pytest.raises(FileNotFoundError, match=r"no recipe file .*mine.toml"):
        abnn.Recipe.load(tmp_path / "mine.toml")
    (tmp_path / "bad.toml").write_text("lr == 1")
    with pytest.raises(ValueError, match="not valid TOML"):
        abnn.Recipe.load(tmp_path / "bad.toml")
