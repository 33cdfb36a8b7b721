"""Networks of transformers, from folders that the test makes: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torchvision.transforms.v2 import functional as F

import abnn
from abnn.zoo import Input, open_model
from offline import forbidden, same

LABELS = ("ant", "bee", "cat")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(here: Path) -> Path:
    """A tiny ViT as save_pretrained leaves it."""
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=16,
        patch_size=8,
        id2label=dict(enumerate(LABELS)),
    )
    transformers.ViTForImageClassification(config).save_pretrained(here / "vit")
    size = {"height": 16, "width": 16}
    transformers.ViTImageProcessor(size=size).save_pretrained(here / "vit")
    return here / "vit"


def test_weights_are_loaded_with_their_input_and_labels(folder: Path) -> None:
    model = open_model(f"hf:{folder}", classes=3, channels=3)
    trained = transformers.AutoModelForImageClassification.from_pretrained(folder)
    assert model.trained
    assert same(model.net, trained)
    assert model.classes == LABELS
    half = (0.5, 0.5, 0.5)
    assert model.input == Input((16, 16), 3, half, half, "bilinear", squash=True)
    bnn = abnn.convert(model.net, modes=2)
    assert bnn.predict(torch.randn(2, 3, 16, 16)).probs.shape == (2, 3)


def test_random_weights_take_the_classes_and_channels_of_the_data(folder: Path) -> None:
    model = open_model("hf:vit", weights="random", classes=5, channels=1)
    assert model.net(torch.zeros(2, 1, 16, 16)).logits.shape == (2, 5)
    assert model.classes is None
    assert model.input is not None
    assert (model.input.channels, model.input.mean) == (1, ())
    with pytest.raises(ValueError, match="hf:vit has 3 classes, and the data has 5"):
        open_model("hf:vit", classes=5)
    with pytest.raises(ValueError, match="images of 3 channels, and the data has 1"):
        open_model("hf:vit", channels=1)


def test_text_has_no_images_to_expect(here: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=2,
    )
    transformers.BertForSequenceClassification(config).save_pretrained("bert")
    model = open_model("hf:bert")
    assert (model.input, model.classes) == (None, None)
    assert model.net(input_ids=torch.ones(2, 4, dtype=torch.long)).logits.shape == (2, 2)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, ((224, 224), (256, 256), False)),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, ((384, 384), (384, 384), True)),
    ],
)
def test_a_small_convnext_crops_and_a_large_one_squashes(
    folder: Path, processor: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    transformers.ConvNextImageProcessor(**processor).save_pretrained(folder)
    found = open_model("hf:vit").input
    assert found is not None
    assert (found.size, found.resized, found.squash) == expected


@pytest.mark.parametrize(
    ("size", "squash"), [({"shortest_edge": 256}, False), ({"height": 256, "width": 256}, True)]
)
def test_a_central_crop_is_found(folder: Path, size: dict[str, int], squash: bool) -> None:
    crop = {"height": 224, "width": 224}
    transformers.CLIPImageProcessor(size=size, crop_size=crop).save_pretrained(folder)
    found = open_model("hf:vit").input
    assert found is not None
    assert (found.size, found.resized, found.squash) == ((224, 224), (256, 256), squash)


def test_the_input_is_what_the_processor_does(folder: Path) -> None:
    processor = transformers.ConvNextImageProcessor(
        size={"shortest_edge": 32}, crop_pct=0.8, resample=2
    )
    processor.save_pretrained(folder)
    found = open_model("hf:vit").input
    assert found is not None
    assert found.resized is not None
    image = torch.randint(256, (3, 50, 70), dtype=torch.uint8)
    ours = F.resize(image, [found.resized[0]], antialias=True)
    ours = F.center_crop(ours, list(found.size or ())) / 255
    ours = F.normalize(ours, list(found.mean), list(found.std))
    theirs = processor(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(ours, theirs)


def test_it_says_that_a_normalisation_is_not_known(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    with pytest.warns(UserWarning, match="does not say how its images are normalised"):
        model = open_model("hf:vit")
    assert model.input == Input((16, 16))
    assert open_model("hf:vit", weights="random").input == Input((16, 16))


def test_a_network_without_a_trained_head_is_refused(folder: Path) -> None:
    net = transformers.ViTForImageClassification.from_pretrained(folder)
    del net.classifier
    save_file(net.state_dict(), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no trained weights for classifier\.bias \(2 of its"):
        open_model("hf:vit")


def test_a_network_that_classifies_nothing_is_refused(folder: Path) -> None:
    net = transformers.ViTForImageClassification.from_pretrained(folder)
    net.vit.save_pretrained(folder)
    with pytest.raises(ValueError, match="is a ViTModel, which classifies neither images nor"):
        open_model("hf:vit")


def test_a_folder_without_weights_is_told(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConnectionError, match=r"can't be fetched .*; give a folder that save_"):
        open_model("hf:vit")


def test_without_a_connection_it_says_what_to_do(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", forbidden)
    with pytest.raises(ConnectionError, match=r"\(hf download org/name --local-dir FOLDER\)"):
        open_model("hf:org/name")
