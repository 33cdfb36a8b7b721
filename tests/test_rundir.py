"""The run directory: a fit that is killed goes on, and one with other settings or data does not."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.rundir import read_losses
from fitting import banks, data, equal
from nets import mlp


class Augmented:
    """A loader that shuffles and augments with every global generator there is."""

    def __init__(self, batches: int = 6, stop_at: int | None = None) -> None:
        self.data, self.given, self.stop_at = data(batches), 0, stop_at

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in torch.randperm(len(self.data)).tolist():
            if self.given == self.stop_at:
                raise KeyboardInterrupt
            self.given += 1
            x, y = self.data[i]
            noise = torch.randn_like(x) * random.random() + np.random.rand()  # noqa: NPY002
            yield x + noise, y


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("at_once", "stop_at"), [(None, 4), (None, 6), (None, 9), (1, 3), (2, 17)])
def test_a_killed_fit_resumes_and_ends_bit_identical(
    tmp_path: Path, optimizer: Any, at_once: int | None, stop_at: int
) -> None:
    recipe = abnn.Recipe(epochs=2, lr=0.05, modes_at_once=at_once, optimizer=optimizer)
    straight = abnn.convert(mlp(), modes=3)
    expected = abnn.fit(straight, Augmented(), recipe)

    bnn = abnn.convert(mlp(), modes=3)
    before = banks(bnn)
    with pytest.raises(KeyboardInterrupt):
        abnn.fit(bnn, Augmented(stop_at=stop_at), recipe, run=tmp_path, checkpoint_seconds=0)
    assert equal(banks(bnn), before)  # the network itself is as it was
    resumed = abnn.fit(bnn, Augmented(), recipe, run=tmp_path, checkpoint_seconds=0)
    assert equal(banks(bnn), banks(straight))
    assert torch.equal(resumed.losses, expected.losses)

    again = abnn.convert(mlp(), modes=3)
    abnn.fit(again, Augmented(stop_at=0), recipe, run=tmp_path)  # done: no batch is asked for
    assert equal(banks(again), banks(straight))


def test_a_process_killed_at_any_moment_resumes_bit_identical(tmp_path: Path) -> None:
    """A real process, killed for real, several times in a row."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, abnn\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from nets import mlp\n"
        "from fitting import data\n"
        "torch.set_num_threads(1)\n"
        "bnn = abnn.convert(mlp(), modes=2)\n"
        "abnn.fit(bnn, data(), epochs=40, lr=0.01, run=sys.argv[1], checkpoint_seconds=0)\n"
        "print('done')\n"
    )
    straight = abnn.convert(mlp(), modes=2)
    abnn.fit(straight, data(), epochs=40, lr=0.01)

    run, kills = tmp_path / "run", 0
    checkpoint, seen = run / "checkpoint.safetensors", None
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, script, run], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while kills < 3 and process.poll() is None:
            now = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
            if now != seen:  # it has come further than the last time
                seen = now
                process.kill()
                kills += 1
        out, err = process.communicate()
        if b"done" in out:
            break
        assert process.returncode == -9, err.decode()
    assert kills > 0
    loaded = abnn.load(run, mlp())
    assert equal(banks(loaded), banks(straight))


def test_the_run_directory_holds_the_artefact_and_the_losses(tmp_path: Path) -> None:
    bnn = abnn.convert(mlp(), modes=2)
    result = abnn.fit(bnn, data(), epochs=1, run=tmp_path, validation=data(2))
    assert equal(banks(abnn.load(tmp_path, mlp())), banks(bnn))
    lines = (tmp_path / "losses.csv").read_text().splitlines()
    assert lines[0] == "step,mode_0,mode_1,lr"
    assert float(lines[6].split(",")[2]) == result.losses[5, 1].item()
    assert (tmp_path / "fit.txt").read_text() == f"{result}\n"
    assert not list(tmp_path.glob("*.tmp"))
    fitted = abnn.load(tmp_path, mlp()).fitted
    assert fitted is not None
    assert fitted["validation"]["original"]["n"] == 16


def test_another_fit_does_not_go_into_the_same_directory(tmp_path: Path) -> None:
    abnn.fit(abnn.convert(mlp()), data(), epochs=1, run=tmp_path)
    cases: list[tuple[abnn.ABNN, dict[str, Any], str]] = [
        (abnn.convert(mlp()), {"lr": 0.1}, "lr was 0.0057 and now is 0.1"),
        (abnn.convert(mlp(), alpha=0.1), {}, "alpha was 0.01 and now is 0.1"),
        (abnn.convert(mlp(nn.LayerNorm)), {}, "another network"),
    ]
    for bnn, overrides, message in cases:
        with pytest.raises(ValueError, match=message):
            abnn.fit(bnn, data(), epochs=1, run=tmp_path, **overrides)


def test_a_fit_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        abnn.fit(
            abnn.convert(mlp()), Augmented(stop_at=3), epochs=1, run=tmp_path, checkpoint_seconds=0
        )
    other = Augmented()
    other.data = [(x + 1, y) for x, y in other.data]
    bnn = abnn.convert(mlp())
    before = banks(bnn)
    with pytest.raises(ValueError, match="does not give the batches.*same data"):
        abnn.fit(bnn, other, epochs=1, run=tmp_path)
    assert equal(banks(bnn), before)


def test_a_damaged_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    abnn.fit(abnn.convert(mlp()), data(), epochs=1, run=tmp_path)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="delete it to start anew"):
        abnn.fit(abnn.convert(mlp()), data(), epochs=1, run=tmp_path)
    (tmp_path / "fit.json").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not valid JSON"):
        abnn.fit(abnn.convert(mlp()), data(), epochs=1, run=tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        abnn.fit(abnn.convert(mlp()), data(), epochs=1, run=tmp_path / "fit.txt")


@pytest.mark.parametrize("at_once", [None, 1])
def test_the_losses_are_read_as_they_were(tmp_path: Path, at_once: int | None) -> None:
    bnn = abnn.convert(mlp(), modes=3)
    expected = abnn.fit(bnn, data(), epochs=2, run=tmp_path, modes_at_once=at_once).losses
    steps, losses = read_losses(tmp_path)
    assert steps == list(range(12))
    assert torch.equal(losses, expected)


def test_losses_that_are_not_there_yet_are_nan(tmp_path: Path) -> None:
    """Two modes, one after the other, killed in the middle of the second."""
    arguments: dict[str, Any] = {"epochs": 1, "modes_at_once": 1, "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        abnn.fit(abnn.convert(mlp(), modes=2), Augmented(stop_at=9), run=tmp_path, **arguments)
    steps, losses = read_losses(tmp_path)
    assert steps == list(range(6))
    assert losses.isnan().tolist() == [[False, False]] * 3 + [[False, True]] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it ends in the middle of a line"),
        ("\n", "the first line names no modes"),
        ("step\n0\n", "the first line names no modes"),
        ("step,mode_1\n0,1.5\n", "the first line names no modes"),
        ("step,mode_0\n0,1.5,2\n", "a line is too short or too long"),
        ("step,mode_0\n0,1.5\n1,0.", "it ends in the middle of a line"),
        ("step,mode_0\n1,1.5\n0,2.5\n", "the steps are not in order"),
        ("step,mode_0\n0,much\n", "could not convert string to float: 'much'"),
        ("step,mode_0\nfirst,1.5\n", "invalid literal for int"),
    ],
)
def test_damaged_losses_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"holds no losses.csv; give the run= directory"):
        read_losses(tmp_path)
    (tmp_path / "losses.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_losses(tmp_path)


@pytest.mark.parametrize("made_before", [False, True])
def test_a_fit_that_fails_at_once_does_not_claim_its_directory(
    tmp_path: Path, made_before: bool
) -> None:
    run = tmp_path / "run"
    if made_before:
        run.mkdir()
    wrong = [(torch.randn(8, 5), torch.zeros(8, dtype=torch.long))]  # of another shape
    with pytest.raises(RuntimeError):
        abnn.fit(abnn.convert(mlp(), modes=2), wrong, steps=1, run=run)
    assert run.exists() == made_before
    abnn.fit(abnn.convert(mlp(), modes=3), data(), steps=2, run=run)
    assert (run / "modes.safetensors").is_file()


def test_runs_of_other_kinds_are_named_and_kept(tmp_path: Path) -> None:
    net, loader = mlp(), data()
    abnn.train(mlp(), loader, steps=1, run=tmp_path / "base")
    abnn.fit(abnn.convert(net), loader, steps=1, run=tmp_path / "fit")
    abnn.tune(net, loader, loader, steps=1, trials=1, run=tmp_path / "search")
    kept = {file: file.read_bytes() for file in tmp_path.rglob("*.toml")}
    wrong = {"base": "base holds a training", "search": "holds a search of tune"}
    for name, told in wrong.items():
        with pytest.raises(ValueError, match=f"{told}; use another run directory"):
            abnn.fit(abnn.convert(net), loader, steps=1, run=tmp_path / name)
    with pytest.raises(ValueError, match="fit holds a fit of an ABNN; use another"):
        abnn.train(mlp(), loader, steps=1, run=tmp_path / "fit")
    for name in ("base", "fit"):
        with pytest.raises(ValueError, match="give the search a directory of its own"):
            abnn.tune(net, loader, loader, steps=1, trials=1, run=tmp_path / name)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.toml")} == kept
