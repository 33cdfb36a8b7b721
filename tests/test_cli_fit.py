"""`abnn fit`: what it reads and writes, alone and under torchrun, and what can be wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import abnn
from abnn.cli import run
from abnn.data import View, open_data
from abnn.snapshots import snapshots_of
from fitting import banks, data, equal

MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nets import cnn, mlp
from fitting import data

def dataset():
    x, y = (torch.cat(part) for part in zip(*data()))
    return TensorDataset(x, y)

def loader():
    return DataLoader(dataset(), 8)

def gray():
    x, y = dataset().tensors
    return TensorDataset(torch.rand(len(y), 1, 8, 8), y)

class Endless(TensorDataset):
    def __getitem__(self, i):
        print("row", flush=True)
        return super().__getitem__(i)

def endless():
    return Endless(*dataset().tensors)

class Unreadable(TensorDataset):
    def __getitem__(self, i):
        raise OSError("row 0 is broken")

def unreadable():
    return Unreadable(*dataset().tensors)

number = 7
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of the user and files of data in it."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    x, y = (torch.cat(part).numpy() for part in zip(*data(), strict=True))
    np.savez("rows.npz", x_train=x, y_train=y, x_val=x[:16], y_val=y[:16])
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    np.savez("images.npz", x=images, y=rng.integers(0, 3, 20))
    np.savez("short.npz", x=images, y=[0, 1])
    (tmp_path / "not.npz").write_text("nonsense")
    (tmp_path / "mixed.toml").write_text('augmentation = ["medium"]')
    return tmp_path


ROWS = ("--model", "module:mine:mlp", "--data", "npz:rows.npz", "--batch-size", "8", "--modes", "2")


def test_a_fit_writes_what_load_reads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--epochs", "1", "--lr", "0.05", "--alpha", "0.02", "--validation", "npz:rows.npz")
    assert run(["fit", *ROWS, *options, "--out", "run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("6 steps of 2 modes")
    assert "all modes" in printed
    assert printed.endswith("Written to run; abnn evaluate run scores it.\n")
    from nets import mlp

    bnn = abnn.load("run", mlp())
    assert (bnn.modes, bnn.alpha) == (2, 0.02)
    assert bnn.fitted is not None
    assert bnn.fitted["validation"]["original"]["n"] == 16


def test_a_machine_reads_the_result(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--steps", "4", "--validation", "npz:rows.npz", "--out", "run", "--json")
    assert run(["fit", *ROWS, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["run"], result["steps"], len(result["losses"])) == ("run", 4, 2)
    assert result["recipe"]["batch_size"] == 8
    assert list(result["validation"]) == ["original", "mode 0", "mode 1", "all modes"]
    assert {"nll", "accuracy", "ece"} < result["validation"]["all modes"].keys()


def test_the_command_is_the_function(here: Path) -> None:
    from nets import mlp

    assert run(["fit", *ROWS, "--data", "module:mine:loader", "--steps", "4", "--out", "run"]) == 2
    options = ROWS[:2] + ROWS[6:]
    assert (
        run(["fit", *options, "--data", "module:mine:loader", "--steps", "4", "--out", "run"]) == 0
    )
    bnn = abnn.convert(mlp(), modes=2)
    abnn.fit(bnn, data(), steps=4)
    assert equal(banks(abnn.load("run", mlp())), banks(bnn))


def test_snapshots_are_left_on_the_way(here: Path) -> None:
    assert run(["fit", *ROWS, "--steps", "6", "--snapshots", "3", "--out", "run"]) == 0
    assert [snapshot.step for snapshot in snapshots_of("run")] == [0, 2, 4, 6]


def test_weights_come_from_a_file(here: Path) -> None:
    from nets import mlp

    net = mlp()
    nn.init.constant_(dict(net.named_parameters())["3.bias"], 5.0)
    torch.save(net.state_dict(), "net.pt")
    options = ("--weights", "net.pt", "--steps", "2", "--out", "run")
    assert run(["fit", *ROWS, *options]) == 0
    assert abnn.load("run", net).modes == 2


def test_random_weights_are_the_same_when_a_fit_goes_on(here: Path) -> None:
    command = ["fit", "--model", "zoo:small_resnet", "--weights", "random", "--modes", "2"]
    command += ["--data", "module:mine:gray", "--batch-size", "8", "--out", "run"]
    assert run([*command, "--steps", "2"]) == 0
    before = (here / "run" / "modes.safetensors").read_bytes()
    assert run([*command, "--steps", "2"]) == 0
    assert (here / "run" / "modes.safetensors").read_bytes() == before


def test_images_of_bytes_become_normalised_floats_with_the_channels_first(here: Path) -> None:
    view = View(mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 1.0))
    dataset: Any = open_data("npz:images.npz", "train", view)
    with np.load("images.npz") as arrays:
        expected = (arrays["x"][3].transpose(2, 0, 1) / 255 - 0.5) / [[[0.25]], [[0.5]], [[1.0]]]
    torch.testing.assert_close(dataset[3][0], torch.from_numpy(expected).float())
    mirrored: Any = open_data("npz:images.npz", "train", View(augmentation=("hflip",)))
    plain: Any = open_data("npz:images.npz", "train")
    seen = {bool((mirrored[0][0] == plain[0][0]).all()) for _ in range(20)}
    assert seen == {True, False}
    assert any((mirrored[0][0] == plain[0][0].flip(-1)).all() for _ in range(20))


def test_a_folder_of_images_is_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    with np.load("images.npz") as arrays:
        for i, x in enumerate(arrays["x"]):
            folder = here / "photos" / f"class {i % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            image.fromarray(x[..., 0]).save(folder / f"{i}.png")
    command = ["fit", "--model", "module:mine:cnn", "--data", "folder:photos", "--steps", "2"]
    assert run([*command, "--batch-size", "8", "--modes", "2", "--out", "run"]) == 0
    assert capsys.readouterr().err.startswith("train: grey in three channels\n")
    (folder / "broken.png").write_bytes(b"")
    assert run([*command, "--batch-size", "21", "--modes", "2", "--out", "other"]) == 2
    assert "broken.png can't be read as an image" in capsys.readouterr().err


def test_two_processes_end_like_one(here: Path) -> None:
    from nets import cnn

    tests = Path(__file__).parent
    command = ["-m", "abnn", "fit", "--model", "module:mine:cnn", "--data", "npz:images.npz"]
    command += ["--batch-size", "8", "--modes", "3", "--epochs", "2", "--lr", "0.05"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *command, "--out", "two"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{tests.parent / 'src'}:{tests}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written to two;") == 1
    assert run([*command[2:], "--out", "one"]) == 0
    two, one = (banks(abnn.load(folder, cnn())) for folder in ("two", "one"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--model", "timm:resnet18"], "random weights; give its trained ones by --weights"),
        (["--model", "module:mine:number"], "is a int"),
        (["--model", "module:mine:cnn"], "The network could not run (Expected 3D"),
        (["--data", "module:mine:unreadable", "--workers", "1"], "OSError: row 0 is broken"),
        (["--weights", "none.pt"], "no file none.pt"),
        (["--data", "rows.npz"], "write npz:PATH, folder:PATH"),
        (["--data", "npz:none.npz"], "no file none.npz"),
        (["--data", "npz:not.npz"], "no npz file of plain arrays"),
        (["--data", "npz:short.npz"], "20 inputs but 2 labels"),
        (["--data", "module:mine:number"], "is a int; name what builds a Dataset"),
        (["--data", "module:mine:loader"], "has a batch size; set it there"),
        (["--validation", "npz:none.npz"], "no file none.npz"),
        (["--mean", "0.5"], "both --mean and --std"),
        (["--mean", "half", "--std", "1"], "not a list of numbers"),
        (["--mean", "0.5", "--std", "1"], "for images of bytes, which rows.npz does not hold"),
        (["--recipe", "cifar10-resnet5"], "did you mean 'cifar10-resnet50'"),
        (["--recipe", "cifar10-resnet50"], "hflip of the recipe"),
        (["--recipe", "muad-deeplabv3plus"], "random_scale of the recipe are for images"),
        (["--recipe", "mixed.toml"], "asks for medium, which mixes labels"),
        (["--lr", "-1"], "lr=-1.0"),
        (["--noise", "loud"], "noise='loud'"),
        (["--split", "rows"], "split='rows'"),
        (["--snapshots", "-1"], "--snapshots"),
        (["--lr", "1e30"], "lower the learning rate"),
        (["--out", "mine.py"], "mine.py"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    here: Path, changes: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", *ROWS, "--out", "run", *changes]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_a_fit_that_is_stopped_says_how_to_go_on(here: Path) -> None:
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "abnn", "fit", *ROWS, "--data", "module:mine:endless"]
    command += ["--epochs", "100000", "--out", "run"]
    pipe = subprocess.PIPE
    environment = {"PYTHONPATH": f"{tests.parent / 'src'}:{tests}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"row\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.decode().strip() == "Stopped; the same command goes on from here."
