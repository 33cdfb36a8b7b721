"""What the README and the pages of docs/ tell a user to type does what they say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.main import get_command

import abnn
from abnn.cli.app import app
from abnn.zoo import small_resnet
from commands import lines_of, parse
from fitting import equal
from nets import cnn

ROOT = Path(__file__).parents[1]
Names = dict[str, Any]


def blocks(page: str) -> list[str]:
    """The Python on a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def loaders(net: nn.Module, channels: int = 3) -> Names:
    """Images by the names that the pages have for them; the network is right about most."""

    def loader(shuffle: bool = False) -> DataLoader[Any]:
        images = 4 * torch.rand(12, channels, 32, 32) - 2  # of mean 0.5 and std 0.25
        labels = net.eval()(images).argmax(1)
        labels[0] = 1 - labels[0].clamp(max=1)
        return DataLoader(TensorDataset(images, labels), 4, shuffle=shuffle)

    held_out = {f"{name}_loader": loader() for name in ("val", "test", "svhn")}
    return {"net": net, "train_loader": loader(shuffle=True), **held_out}


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Names:
    """What a user has before the first line: a network, loaders, and a folder to work in."""
    timm = pytest.importorskip("timm")
    net = timm.create_model("resnet10t", num_classes=5)
    # The pre-trained weights are not to be had here, and a smaller network will do.
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: net)
    monkeypatch.chdir(tmp_path)
    return loaders(net) | {"x": torch.randn(4, 3, 32, 32), "images": torch.randn(4, 3, 32, 32)}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Names:
    """What a user has who has read the README."""
    monkeypatch.chdir(tmp_path)
    names = {"abnn": abnn, "x": torch.randn(4, 3, 32, 32), "make_network": lambda: cnn().train()}
    return loaders(cnn()) | names


def test_every_example_of_the_readme_runs_in_order(readme: Names) -> None:
    assert len(blocks("README.md")) >= 5
    for block in blocks("README.md"):
        exec(block, readme)
    assert (Path("runs/convnext") / "modes.safetensors").is_file()


def test_every_example_of_the_page_about_evaluation_runs(names: Names) -> None:
    bnn = abnn.convert(names["net"], modes=2)
    abnn.fit(bnn, names["train_loader"], epochs=1, run="runs/mine", snapshots=1)
    for block in blocks("docs/evaluation.md"):
        exec(block, names | {"bnn": bnn, "MEAN": (0.5,) * 3, "STD": (0.25,) * 3})


def test_every_example_of_the_page_about_methods_runs(names: Names) -> None:
    for block in blocks("docs/methods.md"):
        exec(block, names)
    assert Path("runs/compare/table.txt").is_file()


def test_the_examples_of_the_page_about_training_run(names: Names) -> None:
    scratch, _, tuning = blocks("docs/training.md")  # the second takes 200 epochs
    names |= loaders(small_resnet(10), channels=1)
    exec(scratch + tuning, names)
    assert Path("runs/tuned/recipe.toml").is_file()


def test_every_example_of_the_page_about_integrations_runs(names: Names) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=20, num_hidden_layers=1, num_labels=3, **small)
    texts = [{"input_ids": torch.randint(20, (6,)), "labels": i % 3} for i in range(8)]
    names |= {"model": transformers.BertForSequenceClassification(config)}
    names |= {"train_texts": texts, "val_texts": texts[:4], "tokens": torch.zeros(2, 6).long()}
    for block in blocks("docs/integrations.md"):
        exec(block, names)
    for folder in ("lightning", "texts"):
        assert list(Path("runs", folder).glob("abnn-*/modes.safetensors"))


def test_a_look_on_the_way_does_not_change_a_training(names: Names) -> None:
    first, then = blocks("docs/integrations.md")[-2:]
    ends = []
    for training in (then, re.sub(r"\n    with .*", "", then, flags=re.DOTALL)):
        torch.manual_seed(0)
        exec(first.partition("\nbnn = ")[0] + training, names)
        ends.append(names["net"].state_dict())
    assert "seen" in names
    assert equal(*ends)


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:\s]*)(#[^)]*)?\)", page.read_text()):
        target = page.parent / link[0] if link[0] else page
        assert target.exists(), link
        if link[1]:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert link[1][1:] in anchors, link


def test_the_inspection_in_the_readme_is_real() -> None:
    timm = pytest.importorskip("timm")
    inspection = str(abnn.inspect(timm.create_model("convnext_tiny.fb_in1k")))
    shown = re.search(r"```\n(layer .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    for line in shown[1].strip().splitlines():
        assert line == "..." or re.sub(" +", " ", line) in re.sub(" +", " ", inspection)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_every_command_of_a_page_has_the_options_that_it_is_given(page: str) -> None:
    shells = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for line in lines_of("\n".join(shells)):
        parse(line)


def test_the_page_about_commands_tells_of_all_of_them() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    commands = re.findall(r"^\| `abnn ([a-z-]+)", page, re.MULTILINE)
    assert commands == list(get_command(app).commands)  # type: ignore[attr-defined]
    assert len(lines_of(page)) >= 6
