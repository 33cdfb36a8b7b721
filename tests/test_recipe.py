"""Recipes: the paper's rows, validation, and TOML."""

from pathlib import Path
from typing import Any

import pytest

import abnn
from abnn.recipe import names, overridden

R50, WRN, DEEPLAB = "zoo:resnet50", "zoo:wrn28_10", "zoo:deeplabv3plus"
HALVED, FIFTHS = ("multistep", (5,), 0.5), ("multistep", (60, 120, 160), 0.2)
CONSTANT, POLYNOMIAL = ("constant", (), 0.1), ("polynomial", (), 0.1)
HFLIP, STREETS = ("hflip",), ("hflip", "random_crop", "color_jitter", "random_scale")

# Network, epochs, batch size, lr, alpha, weight decay, schedule and augmentation, as the paper's
# two tables print them; momentum is 0.9 in every row.
ROWS: dict[str, tuple[Any, ...]] = {
    "cifar10-resnet50-scratch": (R50, 200, 128, 0.1, None, 5e-4, FIFTHS, HFLIP),
    "cifar10-wrn28_10-scratch": (WRN, 200, 128, 0.1, None, 5e-4, FIFTHS, HFLIP),
    "cifar100-resnet50-scratch": (R50, 200, 128, 0.1, None, 5e-4, FIFTHS, HFLIP),
    "cifar100-wrn28_10-scratch": (WRN, 200, 128, 0.1, None, 5e-4, FIFTHS, ("medium",)),
    "cifar10-resnet50": (R50, 2, 128, 0.0057, 0.01, 5e-4, CONSTANT, HFLIP),
    "cifar10-wrn28_10": (WRN, 2, 128, 0.0091, 0.01, 5e-4, CONSTANT, HFLIP),
    "cifar100-resnet50": (R50, 10, 128, 0.00139, 0.01, 5e-4, HALVED, HFLIP),
    "cifar100-wrn28_10": (WRN, 10, 128, 0.034, 0.01, 5e-4, HALVED, HFLIP),
    "imagenet-resnet50": ("torchvision:resnet50", 1, 128, 0.00439, 0.01, 5e-4, CONSTANT, HFLIP),
    "imagenet-vit": ("zoo:vit_b_16", 0.25, 128, 7.33e-6, 0.00035, 7e-6, CONSTANT, HFLIP),
    "streethazards-deeplabv3plus": (DEEPLAB, 10, 4, 0.01, 0.01, 1e-4, POLYNOMIAL, STREETS),
    "bdd_anomaly-deeplabv3plus": (DEEPLAB, 10, 4, 0.01, 0.01, 1e-4, POLYNOMIAL, STREETS),
    "muad-deeplabv3plus": (DEEPLAB, 6, 4, 0.044, 0.01, 1e-4, POLYNOMIAL, STREETS),
}


def test_every_row_of_the_papers_tables_is_there() -> None:
    assert names() == sorted(ROWS)
    for name, row in ROWS.items():
        r = abnn.Recipe.load(name)
        schedule = (r.schedule, r.milestones, r.lr_factor)
        values = (r.model, r.epochs, r.batch_size, r.lr, r.alpha, r.weight_decay, schedule)
        assert (*values, r.augmentation) == row
        assert (r.momentum, r.power, r.optimizer, r.nesterov) == (0.9, 0.9, "sgd", False)
        assert r.data == name.partition("-")[0]
        assert r.scratch == name.endswith("-scratch")
        assert r.prior == (None if r.scratch else abnn.RandomPrior())
    assert abnn.Recipe.load("cifar100-resnet50").lr_at(0, 1, epoch=5) == 0.00139 / 2


def test_values_are_set_as_a_toml_file_would() -> None:
    recipe = abnn.Recipe.load("cifar100-resnet50")
    changes = ["lr=1e-1", "schedule = polynomial", "milestones=[60,120]", "amp='bf16'"]
    expected = recipe.with_(lr=0.1, schedule="polynomial", milestones=(60, 120), amp="bf16")
    assert overridden(recipe, changes) == expected
    assert overridden(recipe, []) == recipe
    assert overridden(recipe, ["prior=false"]).prior is None
    assert overridden(recipe, ["prior=false", "prior=true"]) == recipe
    heavy = overridden(recipe, ["prior.classes=2", "prior.weight=6"]).prior
    assert heavy == abnn.RandomPrior(2, 6.0)
    assert overridden(recipe.with_(prior=None), ["prior.classes=2"]).prior == abnn.RandomPrior(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("momentun=0.5", "did you mean 'momentum'"),
        ("prior.wieght=6", "did you mean 'weight'"),
        ("schedule=polynomal", "did you mean 'polynomial'"),
        ("lr=fast", "lr='fast' must be a number of at least 0"),
        ("lr=-1", "lr=-1 must be a number of at least 0"),
        ("milestones=60", r"milestones=60 must be a list of numbers, as \[60, 120\]"),
        ("milestones=[60,", "no value of TOML"),
        ("augmentation=hflip", r"must be a list of names, as \[\"hflip\"\]"),
        ("prior.weight=heavy", "weight='heavy'"),
        ("prior=much", "prior='much' must be a RandomPrior"),
        ("nesterov=maybe", "nesterov='maybe' must be true or false"),
        ("model=3", "model=3 must be a name"),
        ("lr=", "write KEY=VALUE"),
        ("lr", "write KEY=VALUE"),
    ],
)
def test_a_value_that_can_not_be_set_is_refused(change: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        overridden(abnn.Recipe(), [change])


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
