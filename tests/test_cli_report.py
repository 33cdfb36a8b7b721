"""`abnn report` from the shell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import abnn
from abnn.baselines import Single
from abnn.cli import run

DATA = [(torch.rand(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run in it."""
    monkeypatch.chdir(tmp_path)
    for name, net in (("plain", nn.Identity()), ("other", nn.Linear(3, 3))):
        abnn.evaluate(Single(net), DATA, record=f"run/evaluation/{name}")
    return tmp_path


def test_a_page_and_figures_are_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "run", "--figures", "pictures", "--replicates", "50"]) == 0
    page = (here / "run/report.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "plain" in page
    assert "other" in page
    kinds = {file.suffix for file in (here / "pictures").iterdir()}
    assert kinds == {".svg", ".png"}
    assert capsys.readouterr().out == "Written to run/report.html.\nFigures are in pictures.\n"


def test_title_and_reference_can_be_chosen(here: Path) -> None:
    args = ["--title", "A <b>title", "--reference", "other", "-o", "sub/page.html"]
    assert run(["report", "run", *args, "--replicates", "50"]) == 0
    page = (here / "sub/page.html").read_text()
    assert "A &lt;b&gt;title" in page
    assert "A <b>title" not in page


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere holds no record of an evaluation"),
        (["run", "--reference", "plan"], "There is no method 'plan'; "),
        (["run", "--replicates", "3"], "3 replicates can't give an interval"),
        (["run", "-o", "run"], "is a directory"),
        ([], "Missing argument 'RUN'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert run(["report", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(here.rglob("report.html"))


def test_a_page_about_several_runs_is_in_none_of_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(here / "run", here / "again")
    assert run(["report", "run", "again", "--replicates", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": "report.html", "figures": None}
    assert list(here.rglob("report.html")) == [here / "report.html"]
