"""Every recipe, as a command line runs it: two steps of its own network on data of its own shape.

Networks, images and numbers of classes are of full size, but for street scenes, which are cut to
64 x 96. What is smaller, to last seconds: steps, batches, and one mode instead of four.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from abnn.cli import run
from abnn.recipe import Recipe, names
from data_sources import cifar10, cifar100, png, wordnet, write_meta

for needed in ("torchvision", "timm", "segmentation_models_pytorch"):
    pytest.importorskip(needed)

RNG = np.random.default_rng(0)
# Classes that are seen; those of BDD-Anomaly are Cityscapes' without the two that are anomalies.
CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
CLASSES |= {"streethazards": 13, "bdd_anomaly": 17, "muad": 15}
SHAPES = {"cifar10": (32, 32), "cifar100": (32, 32), "imagenet": (224, 224)}
SCENE = (64, 96)


def imagenet(root: Path, _: pytest.MonkeyPatch) -> str:
    """An image of another size than the network's for each of 1000 classes."""
    image = png(RNG.integers(0, 256, (50, 70, 3), dtype=np.uint8))
    for k in range(1000):
        (root / "train" / wordnet(k)).mkdir(parents=True)
        (root / "train" / wordnet(k) / "0.png").write_bytes(image)
    write_meta(root, [f"class {k}" for k in range(1000)])
    return f"imagenet:{root}"


def scenes(root: Path, _: pytest.MonkeyPatch, classes: int) -> str:
    x = RNG.integers(0, 256, (4, *SCENE, 3), dtype=np.uint8)
    np.savez(root / "scenes.npz", x=x, y=np.arange(x[..., 0].size).reshape(4, *SCENE) % classes)
    return f"npz:{root}/scenes.npz"


@pytest.fixture
def seen() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the images that come to the first convolution of a network."""
    shapes: list[tuple[int, ...]] = []

    def look(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.Conv2d) and module.in_channels == 3:
            assert isinstance(inputs[0], Tensor)
            shapes.append(tuple(inputs[0].shape))

    hook = register_module_forward_pre_hook(look)
    yield shapes
    hook.remove()


@pytest.mark.parametrize("name", names())
def test_a_recipe_runs_its_network_on_its_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, ...]]
) -> None:
    recipe = Recipe.load(name)
    assert recipe.data is not None
    classes = CLASSES[recipe.data]
    batch = 1 if name == "imagenet-vit" else 2  # it has no batch norm, and is slow
    changes = ["--set", "steps=2", "--set", f"batch_size={batch}"]
    command = ["train"] if recipe.scratch else ["fit", "--weights", "random", "--modes", "1"]
    command += ["--recipe", name, *changes, "--out", str(tmp_path / "run")]
    if recipe.data == "cifar10":
        assert cifar10(tmp_path, monkeypatch) == recipe.data
    elif recipe.data == "cifar100":
        assert cifar100(tmp_path, monkeypatch, classes) == recipe.data
    elif recipe.data == "imagenet":
        command += ["--data", imagenet(tmp_path, monkeypatch)]
    else:
        command += ["--data", scenes(tmp_path, monkeypatch, classes)]
    assert run(command) == 0

    assert {shape[1:] for shape in seen} == {(3, *SHAPES.get(recipe.data, SCENE))}
    ran = Recipe.load(tmp_path / "run" / "recipe.toml")
    assert ran.model == recipe.model
    assert ran.with_(model=None, data=None, modes=None) == recipe.with_(
        model=None, data=None, steps=2, batch_size=batch
    )
    _, *rows = csv.reader((tmp_path / "run" / "losses.csv").read_text().splitlines())
    losses = [float(loss) for _, loss, _ in rows]  # of a step, which has a learning rate too
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    # Of a network that has learned nothing yet, and a prior that weighs a class at most twice.
    assert 0 < losses[0] < 4 * math.log(classes)
