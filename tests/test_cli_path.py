"""From a folder of data to an evaluated Bayesian network, on the command line alone."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import abnn
from abnn.baselines import Single
from abnn.cli import run
from abnn.cli.predictions import FORMATS
from abnn.data import View, open_data
from abnn.record import Recorded
from abnn.zoo import small_resnet
from shared import shared

Image = pytest.importorskip("PIL.Image")
SCALE = ("--mean", "0.3", "--std", "0.3")
TRAIN = ["train", "--model", "zoo:small_resnet", "--data", "npz:data.npz", *SCALE]
TRAIN += ["--epochs", "1", "--batch-size", "8", "--out", "base"]
FIT = ["fit", "--weights", "base", "--set", "steps=3", "--modes", "2", "--batch-size", "8"]
FIT += ["--out", "bayes"]


def squares(count: int, seed: int) -> tuple[Any, Any]:
    """Grey images of 12 x 12 whose brightness is their class, one of three."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    x = rng.integers(0, 60, (count, 12, 12)) + 90 * y[:, None, None]
    return x.astype(np.uint8), y


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data, a trained network and an ABNN of it."""
    folder = tmp_path_factory.mktemp("path")
    (x, y), (tx, ty) = squares(32, 0), squares(18, 1)
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=tx, y_test=ty)
    np.savez(folder / "noise.npz", x=np.random.default_rng(2).integers(0, 255, (9, 12, 12), "u1"))
    np.savez(folder / "val.npz", x_val=tx, y_val=ty)
    np.savez(folder / "red.npz", x=np.zeros((3, 12, 12, 3), np.uint8), y=[0, 1, 2])
    (folder / "photos/more").mkdir(parents=True)
    for i, image in enumerate(tx[:5]):
        Image.fromarray(image).save(folder / "photos" / ("more" if i % 2 else ".") / f"{i}.png")
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert run(TRAIN) == 0
        assert run(FIT) == 0
        unscaled = [word for word in TRAIN if word not in ("--mean", "--std", "0.3")]
        assert run([*unscaled[:-1], "unscaled"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def the_abnn(folder: Path) -> abnn.ABNN:
    net = small_resnet(3)
    abnn.zoo.load_weights(net, folder / "base")
    return abnn.load(folder / "bayes", net.eval())


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_a_training_makes_a_network_for_the_classes_of_the_data(here: Path) -> None:
    net = small_resnet(3)
    abnn.zoo.load_weights(net, here / "base")
    config = json.loads((here / "base" / "run.json").read_text())["config"]
    assert config["model"] == "zoo:small_resnet"
    assert config["input"]["mean"] == [0.3]
    assert config["data"] == f"npz:{here / 'data.npz'}"
    assert (here / "base" / "recipe.toml").is_file()


def test_the_same_training_goes_on_and_another_one_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (here / "base" / "network.safetensors").read_bytes()
    assert run(TRAIN) == 0
    assert (here / "base" / "network.safetensors").read_bytes() == before
    assert run([*TRAIN, "--lr", "0.3"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_training_looks_at_what_is_held_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TRAIN[:-1], "looked", "--hold-out", "0.25", "--json"]
    assert run(command) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert 0 <= result["validation"]["accuracy"] <= 100
    assert "8 of the 32 training examples" in printed.err
    assert result["steps"] == 3


def test_a_fit_knows_network_data_and_scale_from_the_training(here: Path) -> None:
    config = json.loads((here / "bayes" / "run.json").read_text())["config"]
    assert config["weights"] == str(here / "base")
    assert config["input"]["std"] == [0.3]
    assert the_abnn(here).modes == 2


def test_an_evaluation_is_that_of_the_function(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", "bayes", "--ood", "noise=npz:noise.npz", "--samples", "3", "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["Network", "ABNN"]
    test: Any = open_data("npz:data.npz", "test", View(mean=(0.3,), std=(0.3,)))
    x, y = (torch.stack(part) for part in zip(*[test[i] for i in range(18)], strict=True))
    bnn = the_abnn(here)
    expected = abnn.evaluate(bnn, [(x, y)], samples=3)
    alone = abnn.evaluate(Single(bnn.restore()), [(x, y)])
    assert found["ABNN"]["nll"] == pytest.approx(expected.nll, rel=1e-5)
    assert found["Network"]["nll"] == pytest.approx(alone.nll, rel=1e-5)
    assert "auroc" in found["ABNN"]["ood"]["noise"]["msp"]
    assert Recorded(here / "bayes/evaluation/abnn").evaluation.nll == found["ABNN"]["nll"]


def test_a_temperature_is_fitted_to_held_out_data(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", "base", "--temperature", "npz:val.npz"]) == 0
    printed = capsys.readouterr().out
    assert "Network, temperature" in printed
    assert "abnn report base" in printed
    assert run(["report", "base", "--out", "page.html", "--replicates", "50"]) == 0


def test_a_prediction_names_the_files_in_order(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", "bayes", "photos", "--samples", "2", "--probs"]) == 0
    table = rows(capsys.readouterr().out)
    assert [row["input"] for row in table] == [
        *(f"photos/{i}.png" for i in (0, 2, 4)),
        *(f"photos/more/{i}.png" for i in (1, 3)),
    ]
    images, _ = squares(18, 1)
    x = (torch.from_numpy(images[[0, 2, 4, 1, 3]]).unsqueeze(1) / 255 - 0.3) / 0.3
    expected = the_abnn(here).predict(x, samples=2, seed=0)
    for i, row in enumerate(table):
        assert int(row["label"]) == int(expected.label[i])
        assert float(row["confidence"]) == pytest.approx(float(expected.confidence[i]), rel=1e-4)
        assert float(row["epistemic"]) == pytest.approx(float(expected.epistemic[i]), abs=1e-5)
        assert float(row["p(1)"]) == pytest.approx(float(expected.probs[i, 1]), rel=1e-3)
        assert row["abstain"] == str(float(row["confidence"]) < 0.5).lower()


@pytest.mark.parametrize("ending", FORMATS)
def test_all_formats_say_the_same(
    here: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = here / f"all{ending}"
    command = ["predict", "bayes", "npz:data.npz", "--out", str(out), "--abstain", "total>0.9"]
    assert run(command) == 0
    abstained = int(capsys.readouterr().out.split(" inputs, ")[1].split()[0])
    readers: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
        ".csv": lambda p: [dict(row) for row in rows(p.read_text())],
        ".json": lambda p: list(json.loads(p.read_text())),
        ".jsonl": lambda p: [json.loads(line) for line in p.read_text().splitlines()],
        ".parquet": lambda p: pytest.importorskip("pyarrow.parquet").read_table(p).to_pylist(),
    }
    table = readers[ending](out)
    assert len(table) == 18
    assert sum(str(row["abstain"]).lower() == "true" for row in table) == abstained
    assert all(
        (float(row["total"]) > 0.9) == (str(row["abstain"]).lower() == "true") for row in table
    )
    assert run(command) == 2
    assert "--overwrite to replace it" in capsys.readouterr().err
    assert run([*command, "--overwrite"]) == 0


def test_machines_read_predictions_from_standard_output(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "bayes", "photos", "--samples", "1", "--json"]
    assert run(command) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["input"] for row in table][:2] == ["photos/0.png", "photos/2.png"]
    assert run([*command, "--out", "machine.csv"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["out"], told["inputs"]) == ("machine.csv", 5)
    assert told["abstained"] == sum(row["abstain"] for row in table)


def test_a_broken_image_is_named_or_left_out(
    here: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Image.fromarray(squares(1, 1)[0][0]).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"nothing")
    command = ["predict", "bayes", str(tmp_path), "--out", str(tmp_path / "p.csv")]
    assert run(command) == 2
    assert "bad.png" in capsys.readouterr().err
    assert not (tmp_path / "p.csv").exists()
    assert run([*command, "--skip-broken"]) == 0
    assert "1 of 2 images can't be read" in capsys.readouterr().err
    assert len(rows((tmp_path / "p.csv").read_text())) == 1


def test_a_curve_of_samples_is_printed_drawn_and_kept(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["samples-curve", "bayes", "--data", "npz:val.npz", "--max-samples", "4"]
    assert run([*command, "--plot", "curve.svg", "--out", "curve.json"]) == 0
    assert "draws a mode" in capsys.readouterr().out
    assert json.loads((here / "curve.json").read_text())["samples"] == [1, 2, 4]
    assert (here / "curve.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "args, told",
    [
        (["fit", "--out", "x", "--data", "npz:data.npz"], "name it by --model"),
        (["fit", "--out", "x", "--model", "zoo:small_resnet"], "has random weights"),
        (["fit", "--out", "x", "--model", "zoo:resnet20", "--weights", "random"], "by --data"),
        (["train", "--out", "x", "--model", "zoo:resnet20"], "name it by --data"),
        (["evaluate", "nowhere"], "holds no result of abnn fit or abnn train"),
        (["evaluate", "bayes", "--data", "npz:val.npz"], "has no test data"),
        (["evaluate", "bayes", "--ood", "noise"], "write it as letters=npz:PATH"),
        (["evaluate", "bayes", "--samples", "0"], "--samples 0"),
        (["evaluate", "bayes", "--mean", "0.5"], "Give both --mean and --std"),
        (["evaluate", "bayes", "--size", "8,8,8"], "--size 8,8,8"),
        (
            ["evaluate", "bayes", "--data", "npz:red.npz"],
            "The images have 3 channels, and the network takes 1",
        ),
        (["predict", "unscaled", "npz:red.npz"], "takes images of 1 channel, and these have 3"),
        (["predict", "bayes", "nowhere.png"], "no file or folder nowhere.png"),
        (["predict", "bayes", "nowhere.png", "--out", "data.npz/p.csv"], "can't be written to"),
        (["predict", "bayes", "photos", "--out", "p.txt"], "must end with .csv"),
        (["predict", "bayes", "photos", "--abstain", "confidence=1"], "is no rule"),
        (["predict", "bayes", "npz:data.npz", "photos"], "predict it by itself"),
        (["samples-curve", "base", "--data", "npz:val.npz"], "holds no ABNN, but a Single"),
        (["samples-curve", "bayes", "--data", "npz:data.npz"], "has no validation data"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    here: Path, args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith("abnn: ")
    assert told in printed[-1]
    assert not (here / "x").exists()
    assert not (here / "p.txt").exists()


def test_two_processes_predict_what_one_predicts(here: Path) -> None:
    command = ["predict", "bayes", "npz:data.npz", "--batch-size", "4"]
    assert run([*command, "--out", "one.csv", "--overwrite"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "-m", "abnn"]
    subprocess.run(
        [*torchrun, *command, "--out", "two.csv", "--overwrite"],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert (here / "two.csv").read_text() == (here / "one.csv").read_text()


def test_a_real_checkpoint_goes_all_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, data = shared("weights/resnet56_cifar10.th"), shared("data/cifar10_small.npz")
    monkeypatch.chdir(tmp_path)
    scale = ["--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"]
    source = ["--model", "zoo:resnet56", "--weights", str(weights), "--data", f"npz:{data}"]
    fit = ["fit", *source, *scale, "--recipe", "cifar10-resnet50", "--set", "steps=1"]
    assert run([*fit, "--set", "modes=2", "--batch-size", "16", "--out", "run"]) == 0
    assert run(["evaluate", "run", "--limit", "100", "--samples", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert found["Network"]["accuracy"] > 85
    assert found["ABNN"]["accuracy"] > 85
