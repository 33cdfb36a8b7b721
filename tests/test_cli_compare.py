"""`abnn compare` from the shell."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from abnn.cli import run

COMMAND = ["compare", "--model", "zoo:small_resnet", "--data", "npz:data.npz", "--out", "run"]
COMMAND += ["--mean", "0.4", "--std", "0.3", "--epochs", "1", "--batch-size", "8"]
COMMAND += ["--members", "2", "--samples", "2", "--ood", "noise=npz:noise.npz"]
FEW = ["--methods", "single, augmentation,abnn", "--seeds", "0"]
TITLES = ["Single model", "Test-time augmentation", "ABNN"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with data in it: grey images whose brightness is their class."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    y = np.arange(40) % 3
    x = (rng.integers(0, 60, (40, 12, 12)) + 90 * y[:, None, None]).astype(np.uint8)
    np.savez("data.npz", x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:])
    np.savez("noise.npz", x=rng.integers(0, 255, (9, 12, 12), dtype=np.uint8))
    np.savez("val.npz", x=x[30:], y=y[30:])
    return tmp_path


def test_the_table_is_printed_and_kept_and_goes_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMAND, *FEW]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith((here / "run/table.txt").read_text().rstrip())
    assert "validation: 3 of the 30 training examples" in printed.err
    assert (here / "run/report.html").is_file()
    with (here / "run/table.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["column"] == "accuracy"]
    assert [row["method"] for row in rows] == TITLES
    assert all(title in (here / "run/table.tex").read_text() for title in TITLES)

    network = here / "run/seed-0/network-0/network.safetensors"
    before = network.stat().st_mtime_ns
    assert run([*COMMAND, *FEW[:2], "--seeds", "0,1", "--no-report", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert network.stat().st_mtime_ns == before
    found = {title: cells["accuracy"]["values"] for title, cells in table["methods"].items()}
    assert {title: len(values) for title, values in found.items()} == dict.fromkeys(TITLES, 2)
    assert [values[0] for values in found.values()] == [float(row["value_0"]) for row in rows]


@pytest.mark.parametrize(
    "args, told",
    [
        (["--methods", "single,abn"], "no method 'abn'; the nearest is 'abnn'"),
        (["--seeds", "a"], "--seeds a is not a list of whole numbers"),
        (["--seeds", "1,1"], "must be one or more different numbers"),
        (["--members", "0"], "Invalid value for '--members'"),
        (["--data", "npz:val.npz"], "has no test data of its own; name it by --test"),
        (["--data", "npz:none.npz"], "no file none.npz"),
        (["--ood", "noise"], "write it as letters=npz:PATH"),
        (["--set", "lr=fast"], "lr"),
        (["--model", "zoo:small_resnt"], "small_resnet"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    here: Path, args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMAND, *FEW, *args]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith("abnn: ")
    assert told in printed[-1]
    assert not (here / "run").exists()


def test_what_is_mistyped_is_told_before_data_is_read(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMAND, "--data", "npz:none.npz", "--methods", "abn"]) == 2
    assert "no method 'abn'" in capsys.readouterr().err


def test_another_setting_needs_another_directory(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMAND, "--methods", "single", "--seeds", "0", "--no-report"]) == 0
    assert run([*COMMAND, "--methods", "single", "--seeds", "0", "--mean", "0.5"]) == 2
    assert "holds a comparison with other settings (train" in capsys.readouterr().err
