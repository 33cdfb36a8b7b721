"""Saving and loading: small, safe, and only onto the network it belongs to."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import abnn
from abnn import ArtifactError
from nets import cnn, mlp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))


def fitted(**kwargs: Any) -> abnn.ABNN:
    bnn = abnn.convert(mlp(), **{"modes": 3, "alpha": 0.1, **kwargs})
    torch.manual_seed(3)
    abnn.fit(bnn, [(torch.randn(8, 4), torch.randint(3, (8,)))], steps=3, lr=0.1)
    return bnn


@pytest.mark.parametrize("noise", ["channel", "example", "element"])
@pytest.mark.parametrize("stats", ["per_mode", "frozen"])
def test_what_is_loaded_predicts_the_same(tmp_path: Path, noise: str, stats: str) -> None:
    bnn = fitted(noise=noise, stats=stats)
    bnn.save(tmp_path / "new" / "run")
    loaded = abnn.load(tmp_path / "new" / "run", mlp())
    assert torch.equal(loaded.predict(X).probs, bnn.predict(X).probs)
    assert (loaded.alpha, loaded.noise, loaded.stats) == (0.1, noise, stats)
    assert loaded.fitted == bnn.fitted


def test_only_the_layers_that_were_converted_come_back(tmp_path: Path) -> None:
    abnn.convert(cnn(), layers="4").save(tmp_path)
    assert list(abnn.load(tmp_path, cnn()).bayes_layers) == ["4"]


def test_four_modes_of_a_resnet50_stay_under_two_megabytes(tmp_path: Path) -> None:
    from torchvision.models import resnet50

    abnn.convert(resnet50(), modes=4).save(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2_000_000


def test_there_are_two_files_and_no_pickle(tmp_path: Path) -> None:
    fitted().save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"modes.safetensors", "abnn.json"}
    assert safetensors.torch.load_file(tmp_path / "modes.safetensors")
    assert json.loads((tmp_path / "abnn.json").read_text())["format"] == "abnn"


def test_saving_again_replaces_the_old(tmp_path: Path) -> None:
    fitted(modes=2).save(tmp_path)
    fitted(modes=3).save(tmp_path)
    assert abnn.load(tmp_path, mlp()).modes == 3


def test_a_save_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted(modes=2).save(tmp_path)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        fitted(modes=3).save(tmp_path)
    assert abnn.load(tmp_path, mlp()).modes == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_an_output_function_is_asked_for_again(tmp_path: Path) -> None:
    bnn = abnn.convert(mlp(), output=lambda y: 2 * y)
    bnn.save(tmp_path)
    with pytest.raises(ArtifactError, match="output="):
        abnn.load(tmp_path, mlp())
    loaded = abnn.load(tmp_path, mlp(), output=lambda y: 2 * y)
    assert torch.equal(loaded.predict(X).probs, bnn.predict(X).probs)


def deeper() -> nn.Module:
    return nn.Sequential(*mlp(), nn.ReLU())


def retrained() -> nn.Module:
    net = mlp()
    net.state_dict()["3.weight"] += 1e-6
    return net


def restatistics() -> nn.Module:
    net = mlp()
    net.state_dict()["1.running_mean"] += 1e-3
    return net


def gelu() -> nn.Module:
    net = mlp()
    net[2] = nn.GELU()
    return net


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3)), "has no layer '1'"),
        (cnn(), r"'1' was a BatchNorm1d of shape \[8\], and here it is a BatchNorm2d"),
        (mlp(width=16), r"shape \[8\].*shape \[16\]"),
        (mlp(nn.LayerNorm), "here it is a LayerNorm"),
        (mlp(classes=5), "other layers, shapes or dtypes"),
        (deeper(), "other layers, shapes or dtypes"),
        (gelu(), "other layers, shapes or dtypes"),
        (mlp().double(), "other layers, shapes or dtypes"),
        (retrained(), "other weights"),
        (restatistics(), "other weights"),
    ],
)
def test_another_network_is_refused_and_untouched(
    tmp_path: Path, net: nn.Module, message: str
) -> None:
    fitted().save(tmp_path)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ArtifactError, match=message):
        abnn.load(tmp_path, net)
    assert all(torch.equal(t, before[k]) for k, t in net.state_dict().items())
    assert not any("Bayes" in type(m).__name__ for m in net.modules())


def edit(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "abnn.json").read_text())
        config[key] = value
        (folder / "abnn.json").write_text(json.dumps(config))

    return change


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def flip(folder: Path) -> None:
    data = bytearray((folder / "modes.safetensors").read_bytes())
    data[-5] ^= 1
    (folder / "modes.safetensors").write_bytes(data)


def foreign_tensors(folder: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(2)}, folder / "modes.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "abnn.json").unlink(), "abnn.json is missing"),
        (lambda folder: (folder / "modes.safetensors").unlink(), "modes.safetensors is missing"),
        (shutil.rmtree, "holds no saved ABNN"),
        (truncate("abnn.json"), "not valid JSON"),
        (truncate("modes.safetensors"), "damaged"),
        (flip, "damaged"),
        (foreign_tensors, "damaged"),
        (edit("alpha", 0.5), "changed after it was saved"),
        (edit("modes", 2), "changed after it was saved"),
        (edit("format", "peft"), "not written by abnn"),
        (edit("version", 99), "version 99"),
        (lambda folder: (folder / "abnn.json").write_text("[1, 2]"), "not written by abnn"),
        (lambda folder: (folder / "abnn.json").write_bytes(b"\xff\xfe"), "not valid JSON"),
    ],
)
def test_damaged_and_foreign_files_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "run"
    fitted().save(folder)
    damage(folder)
    with pytest.raises(ArtifactError, match=message):
        abnn.load(folder, mlp())


def test_a_directory_is_needed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="is a file"):
        fitted().save(tmp_path / "file")


def test_it_does_not_matter_how_the_network_lies_in_memory(tmp_path: Path) -> None:
    abnn.convert(cnn()).save(tmp_path)
    abnn.load(tmp_path, cnn().to(memory_format=torch.channels_last))
