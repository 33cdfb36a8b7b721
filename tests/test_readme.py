"""What the README tells a new user to type does what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import abnn

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What a user has before the first line: a network, loaders, and a folder to work in."""
    timm = pytest.importorskip("timm")
    create = timm.create_model
    # The pre-trained weights are not to be had here, and a smaller network will do.
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: create("resnet10t", num_classes=5))
    monkeypatch.chdir(tmp_path)

    def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.randn(4, 3, 32, 32), torch.randint(5, (4,))) for _ in range(2)]

    return {
        "net": timm.create_model().eval(),
        "x": loader()[0][0],
        "images": loader()[0][0],
        **{f"{name}_loader": loader() for name in ("train", "val", "test", "svhn")},
    }


def test_every_example_of_the_readme_runs_in_order(names: dict[str, Any]) -> None:
    assert len(BLOCKS) >= 5
    for block in BLOCKS:
        exec(block, names)
    assert (Path("runs/convnext") / "modes.safetensors").is_file()


def test_the_inspection_in_the_readme_is_real() -> None:
    timm = pytest.importorskip("timm")
    inspection = str(abnn.inspect(timm.create_model("convnext_tiny.fb_in1k")))
    shown = re.search(r"```\n(layer .*?)```", README, re.DOTALL)
    assert shown is not None
    for line in shown[1].strip().splitlines():
        assert line == "..." or re.sub(" +", " ", line) in re.sub(" +", " ", inspection)
