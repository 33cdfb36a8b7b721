"""`abnn recipes`: the list, one of it, and what can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from abnn import Recipe
from abnn.cli import run
from abnn.recipe import names


def test_the_list_has_a_line_for_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == names()
    row = next(line for line in lines if line.startswith("cifar10-resnet50-scratch"))
    values = row.split()
    assert values[1:6] == ["scratch", "zoo:resnet50", "cifar10", "200", "0.1"]
    assert "x 0.2 at 60, 120, 160" in row


def test_a_recipe_is_printed_as_the_file_that_it_can_be_loaded_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names():
        assert run(["recipes", name]) == 0
        (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
        assert Recipe.load(tmp_path / "mine.toml") == Recipe.load(name)
    assert run(["recipes", "cifar10-resnet50", "--set", "lr=0.01", "--set", "prior.weight=6"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    changed = Recipe.load(tmp_path / "mine.toml")
    assert changed.prior is not None
    assert (changed.lr, changed.prior.weight, changed.epochs) == (0.01, 6, 2)


def test_machines_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "--json"]) == 0
    every = json.loads(capsys.readouterr().out)
    assert list(every) == names()
    assert every["imagenet-vit"].pop("table") == "ABNN"
    assert every["cifar10-wrn28_10-scratch"]["table"] == "scratch"
    assert Recipe.from_dict(every["imagenet-vit"]) == Recipe.load("imagenet-vit")
    assert run(["recipes", "imagenet-vit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == every["imagenet-vit"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cifar10-resnet5"], "did you mean 'cifar10-resnet50'"),
        (["mine.toml"], "no recipe file mine.toml"),
        (["--set", "lr=1"], "give its name too"),
        (["imagenet-vit", "--set", "alhpa=1"], "did you mean 'alpha'"),
        (["imagenet-vit", "--set", "lr"], "write KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["recipes", *arguments]) == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert len(errors.splitlines()) == 1
