"""Every source of a network, on weights that the test makes: nothing is downloaded."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torchvision.models import ResNet50_Weights, ShuffleNet_V2_X0_5_Weights
from torchvision.transforms.v2 import functional as F

import abnn
from abnn.zoo import NETWORKS, Input, Model, build, open_model
from abnn.zoo.from_torchvision import _input
from offline import forbidden, same
from shared import shared

PAGE = (Path(__file__).parents[1] / "docs/models.md").read_text()
LABELS = ("ant", "bee", "cat")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, the only place from which anything can be read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", forbidden)
    monkeypatch.setattr(timm.models._hub, "hf_hub_download", forbidden)
    return tmp_path


class TestAnySource:
    @pytest.mark.parametrize(
        "spec", ["zoo:resnet20", "torchvision:shufflenet_v2_x0_5", "timm:test_resnet"]
    )
    def test_random_weights_are_refused_unless_asked_for(self, here: Path, spec: str) -> None:
        with pytest.raises(ValueError, match="random weights; give its trained ones by --weights"):
            open_model(spec)
        asked = open_model(spec, weights="random")
        assert (asked.trained, asked.source, asked.net.training) == (False, spec, False)
        assert not open_model(spec, trained=False).trained

    def test_random_weights_follow_the_seed_and_leave_torchs_generator_alone(self) -> None:
        before = torch.random.get_rng_state()
        one, two, three = (
            open_model("zoo:resnet20", weights="random", seed=seed).net for seed in (1, 1, 2)
        )
        assert same(one, two)
        assert not same(one, three)
        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize("spec", ["zoo:resnet20", "timm:test_resnet"])
    def test_a_file_of_weights_brings_its_number_of_classes(self, here: Path, spec: str) -> None:
        trained = build(spec, 7)
        torch.save({"model_state_dict": trained.state_dict()}, "net.pt")
        model = open_model(spec, weights="net.pt")
        assert model.trained
        assert same(model.net, trained)
        assert same(open_model(spec, weights="net.pt", classes=7).net, trained)
        with pytest.raises(
            ValueError, match=r"in net\.pt has 7 classes, and the data has 10; fine"
        ):
            open_model(spec, weights="net.pt", classes=10)

    @pytest.mark.parametrize("spec", ["zoo:resnet20", "timm:test_resnet"])
    @pytest.mark.parametrize("classes", [None, 7])
    def test_a_file_of_weights_brings_its_channels(
        self, here: Path, spec: str, classes: int | None
    ) -> None:
        trained = build(spec, classes, channels=1)
        torch.save(trained.state_dict(), "net.pt")
        model = open_model(spec, weights="net.pt")
        assert same(model.net, trained)
        assert model.input is not None
        assert (model.input.channels, model.input.mean) == (1, ())
        with pytest.raises(ValueError, match=r"in net\.pt was trained on images of 1 channels"):
            open_model(spec, weights="net.pt", channels=3)

    def test_the_folder_of_a_training_is_a_file_of_weights(self, here: Path) -> None:
        net = build("zoo:small_resnet", 3)
        data = [(torch.randn(4, 1, 8, 8), torch.arange(4) % 3)]
        abnn.train(net, data, steps=1, lr=0.1, run="run")
        assert same(open_model("zoo:small_resnet", weights="run").net, net)

    def test_weights_of_another_network_are_refused(self, here: Path) -> None:
        torch.save(build("zoo:small_resnet").state_dict(), "net.pt")
        with pytest.raises(ValueError, match=r"net\.pt do not fit CifarResNet \(missing conv1"):
            open_model("zoo:resnet20", weights="net.pt")

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("resnet18", "write zoo:NAME, torchvision:NAME"),
            ("tim:resnet18", "the nearest is 'timm'"),
            ("zoo:", "does not say where the network is from"),
            ("zoo:resnet21", "The zoo has no network 'resnet21'; the nearest is 'resnet20'"),
            ("torchvision:resnet81", "torchvision has no model 'resnet81'; the nearest is"),
            ("torchvision:resnet50@V3", "no weights 'V3'; it has IMAGENET1K_V1 and IMAGENET1K_V2"),
            ("timm:resnet500", "the nearest is 'resnet50'"),
            ("timm:test_resnet.r224", "timm:test_resnet has no weights 'r224'; it has r160_in1k"),
            ("timm:tv_resnet50", "another name for tv_resnet50; write timm:resnet50.tv_in1k"),
            ("hf:../nowhere", "There is no folder ../nowhere"),
            ("module:torch.nn", "write module:torch.nn:BUILDER"),
            ("module:torch.nn:Identiti", "the nearest is 'Identity'"),
            ("module:math:pi", "is a float; name what builds a torch.nn.Module"),
        ],
    )
    def test_an_unknown_name_is_told_with_what_there_is(
        self, here: Path, spec: str, message: str
    ) -> None:
        for opened in (open_model, build):
            with pytest.raises((ValueError, OSError), match=message):
                opened(spec)

    @pytest.mark.parametrize(
        ("spec", "missing", "message"),
        [
            ("torchvision:resnet18", "torchvision", "pip install torchvision"),
            ("zoo:resnet50", "torchvision", "pip install torchvision"),
            ("timm:resnet18", "timm", "pip install timm"),
            ("hf:org/name", "transformers", "pip install transformers"),
            (
                "zoo:deeplabv3plus",
                "segmentation_models_pytorch",
                "pip install segmentation-models-pytorch",
            ),
        ],
    )
    def test_a_missing_package_is_named(
        self, monkeypatch: pytest.MonkeyPatch, spec: str, missing: str, message: str
    ) -> None:
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ImportError, match=message):
            build(spec)


class TestZoo:
    def test_the_page_says_how_many_classes_and_parameters_each_has(self) -> None:
        rows = re.findall(r"\| `(\w+)` \|.*\| (\d+) \|[^|]*\| ([\d,]+) \|\n", PAGE)
        assert [row[0] for row in rows] == list(NETWORKS)
        for name, classes, parameters in rows:
            with torch.device("meta"):
                net = build(f"zoo:{name}")
            assert f"{sum(parameter.numel() for parameter in net.parameters()):,}" == parameters
            *_, head = net.parameters()
            assert len(head) == int(classes)

    @pytest.mark.parametrize("name", sorted(NETWORKS))
    def test_every_network_runs_on_the_input_it_asks_for(self, name: str) -> None:
        with torch.device("meta"):
            model = open_model(f"zoo:{name}", weights="random", classes=7)
        assert model.input is not None
        size = model.input.size or (64, 64)
        logits = model.net(torch.zeros(2, model.input.channels, *size, device="meta"))
        assert logits.shape[:2] == (2, 7)

    def test_channels_follow_the_data(self) -> None:
        model = open_model("zoo:resnet20", weights="random", channels=1)
        assert model.input == Input((32, 32), channels=1)
        assert model.net(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
        assert build("zoo:vit_b_16", channels=3)
        with pytest.raises(ValueError, match="three channels, and the data has 1"):
            build("zoo:vit_b_16", channels=1)

    @pytest.mark.parametrize("depth", [20, 56])
    def test_checkpoints_of_cifar_give_finite_logits(self, depth: int) -> None:
        model = open_model(
            f"zoo:resnet{depth}", weights=shared(f"weights/resnet{depth}_cifar10.th")
        )
        assert model.trained
        assert model.net(torch.randn(4, 3, 32, 32)).isfinite().all()


class TestTorchvision:
    NAME = "torchvision:shufflenet_v2_x0_5"

    @pytest.fixture
    def trained(self, here: Path) -> nn.Module:
        """A network whose weights lie where a download would have put them."""
        net: nn.Module = torchvision.models.shufflenet_v2_x0_5(weights=None)
        file = here / "hub/checkpoints" / Path(ShuffleNet_V2_X0_5_Weights.DEFAULT.url).name
        file.parent.mkdir(parents=True)
        torch.save(net.state_dict(), file)
        return net

    @pytest.mark.parametrize("tag", ["DEFAULT", "IMAGENET1K_V1"])
    def test_weights_are_loaded_with_their_input_and_labels(
        self, trained: nn.Module, tag: str
    ) -> None:
        model = open_model(f"{self.NAME}@{tag}", classes=1000)
        assert model.trained
        assert same(model.net, trained)
        assert model.classes is not None
        assert (model.classes[0], len(model.classes)) == ("tench", 1000)
        assert model.input is not None
        assert (model.input.size, model.input.resized) == ((224, 224), (256, 256))
        assert model.input.mean == (0.485, 0.456, 0.406)

    def test_the_input_is_what_the_preset_does(self) -> None:
        preset = ResNet50_Weights.IMAGENET1K_V2.transforms()
        expected = _input(preset)
        assert expected.resized == (232, 232)
        image = torch.rand(3, 260, 300)
        ours = F.resize(image, [expected.resized[0]], antialias=True)
        ours = F.center_crop(ours, list(expected.size or ()))
        ours = F.normalize(ours, list(expected.mean), list(expected.std))
        torch.testing.assert_close(ours, preset(image))

    def test_other_classes_than_the_weights_have_are_refused(self, here: Path) -> None:
        with pytest.raises(ValueError, match="has 1000 classes, and the data has 10; fine-tune"):
            open_model(f"{self.NAME}@DEFAULT", classes=10)
        scratch = open_model(f"{self.NAME}@DEFAULT", classes=10, weights="random")
        assert scratch.classes is None
        assert scratch.net(torch.zeros(1, 3, 32, 32)).shape == (1, 10)

    def test_a_file_takes_the_place_of_the_download(self, here: Path) -> None:
        trained = build(self.NAME)
        torch.save(trained.state_dict(), "net.pt")
        model = open_model(f"{self.NAME}@DEFAULT", weights="net.pt")
        assert same(model.net, trained)
        assert model.classes is not None

    def test_without_a_connection_it_says_what_to_do(self, here: Path) -> None:
        with pytest.raises(ConnectionError, match=r"no route to host.*; download https.*--weights"):
            open_model(f"{self.NAME}@DEFAULT")

    def test_images_of_other_channels_are_refused(self) -> None:
        with pytest.raises(ValueError, match="three channels, and the data has 1"):
            build(self.NAME, channels=1)

    def test_networks_that_normalise_themselves_still_do(self, here: Path) -> None:
        named = open_model("torchvision:googlenet@DEFAULT", weights="random")
        assert named.net.transform_input
        assert not open_model("torchvision:googlenet", weights="random").net.transform_input


class TestTimm:
    @pytest.fixture
    def trained(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
        """A network whose weights the hub gives."""
        net: nn.Module = timm.create_model("test_resnet")
        save_file(net.state_dict(), here / "model.safetensors")
        file = str(here / "model.safetensors")
        monkeypatch.setattr(timm.models._hub, "hf_hub_download", lambda *_, **__: file)
        return net

    def test_weights_are_loaded_with_their_input_and_labels(self, trained: nn.Module) -> None:
        model = open_model("timm:test_resnet.r160_in1k")
        assert model.trained
        assert same(model.net, trained)
        assert model.classes is not None
        assert (model.classes[0], len(model.classes)) == ("tench, Tinca tinca", 1000)
        assert model.input is not None
        assert (model.input.size, model.input.interpolation) == ((160, 160), "bilinear")

    def test_other_classes_or_channels_are_refused(self, here: Path) -> None:
        with pytest.raises(ValueError, match="has 1000 classes, and the data has 10"):
            open_model("timm:test_resnet.r160_in1k", classes=10)
        with pytest.raises(ValueError, match="images of 3 channels, and the data has 1; convert"):
            open_model("timm:test_resnet.r160_in1k", channels=1)
        scratch = open_model("timm:test_resnet", weights="random", classes=10, channels=1)
        assert scratch.net(torch.zeros(1, 1, 32, 32)).shape == (1, 10)
        assert scratch.input == Input((160, 160), 1, crop=0.95)

    def test_features_without_classes_are_refused(self, here: Path) -> None:
        with pytest.raises(ValueError, match="gives features and no classes"):
            open_model("timm:vit_small_patch14_dinov2.lvd142m")

    def test_without_a_connection_it_says_what_to_do(self, here: Path) -> None:
        with pytest.raises(ConnectionError, match=r"; download https.*and give it by --weights"):
            open_model("timm:test_resnet.r160_in1k")

    def test_names_of_efficientnet_pytorch_are_known(self) -> None:
        file = shared("weights/efficientnet_lite0_imagenet.pth")
        model = open_model("timm:tf_efficientnet_lite0.in1k", weights=file)
        theirs = torch.load(file, map_location="cpu", weights_only=True)
        # Both have their tensors in the same order, in which names have no part.
        ours = model.net.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs.values(), strict=True))
        with pytest.raises(ValueError, match="take the one whose name begins with tf_"):
            open_model("timm:efficientnet_lite0", weights=file)


class TestModule:
    @pytest.fixture(autouse=True)
    def mine(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (here / "my_nets.py").write_text(
            "from torch import nn\n"
            "from abnn.zoo import Input, Model\n"
            "def plain(): return nn.Linear(4, 3).train()\n"
            "def model():\n"
            "    return Model(plain(), input=Input((8, 8)), classes=('ant', 'bee', 'cat'))\n"
            "def attributes():\n"
            "    net = plain()\n"
            "    net.input, net.classes = Input((8, 8)), ['ant', 'bee', 'cat']\n"
            "    return net\n"
            "def unrelated():\n"
            "    net = plain()\n"
            "    net.input, net.classes = 4, 3\n"
            "    return net\n"
        )
        monkeypatch.delitem(sys.modules, "my_nets", raising=False)

    @pytest.mark.parametrize("builder", ["model", "attributes"])
    def test_what_a_builder_gives_with_its_network_is_taken(self, builder: str) -> None:
        model = open_model(f"module:my_nets:{builder}")
        assert (model.trained, model.source) == (True, f"module:my_nets:{builder}")
        assert (model.input, model.classes) == (Input((8, 8)), LABELS)
        assert not model.net.training
        with pytest.raises(ValueError, match="has 3 classes, and the data has 4"):
            open_model(f"module:my_nets:{builder}", classes=4)

    @pytest.mark.parametrize("builder", ["plain", "unrelated"])
    def test_a_network_alone_comes_with_nothing(self, builder: str) -> None:
        model = open_model(f"module:my_nets:{builder}", classes=3, channels=1)
        assert (model.input, model.classes) == (None, None)

    def test_the_builder_on_the_page_is_one(self, here: Path) -> None:
        block = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
        (here / "of_page.py").write_text(block)
        model = open_model("module:of_page:build")
        assert model.classes == ("cat", "dog")
        assert model.input is not None
        assert model.net(torch.rand(2, 3, *(model.input.size or ()))).shape == (2, 2)

    def test_weights_come_from_a_file(self, here: Path) -> None:
        trained = nn.Linear(4, 3)
        torch.save(trained.state_dict(), "net.pt")
        assert same(open_model("module:my_nets:plain", weights="net.pt").net, trained)
        assert not open_model("module:my_nets:plain", weights="random").trained
        torch.save(nn.Linear(4, 5).state_dict(), "net.pt")
        with pytest.raises(ValueError, match=r"weight \[5, 4\] instead of \[3, 4\]"):
            open_model("module:my_nets:plain", weights="net.pt")


class TestInput:
    def test_values_can_be_replaced(self) -> None:
        found = Input((224, 224), crop=0.875).with_(size=160, mean=[0.5] * 3, std=[0.25] * 3)
        assert (found.size, found.resized, found.mean) == ((160, 160), (182, 182), (0.5, 0.5, 0.5))

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"sise": 1}, "no 'sise'; the nearest is 'size'"),
            ({"size": 0}, r"size=\(0, 0\) must be"),
            ({"size": (1, 2, 3)}, "a height and a width"),
            ({"channels": 0}, "channels=0"),
            ({"mean": [0.5]}, "3 channels but 1 values as mean and 0 as std"),
            ({"mean": [0.5] * 3, "std": [0.0] * 3}, "must be more than 0"),
            ({"crop": 0}, "crop=0 must be more than 0"),
            ({"interpolation": "cubic"}, "'cubic' is unknown; the nearest is 'bicubic'"),
        ],
    )
    def test_impossible_values_are_refused(self, overrides: dict[str, Any], message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            Input().with_(**overrides)

    def test_a_model_is_a_network_with_what_comes_with_it(self) -> None:
        net = nn.Linear(2, 3)
        assert Model(net, classes=LABELS) == Model(net, classes=LABELS)
