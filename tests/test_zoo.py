from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from abnn.zoo import (
    cifar_resnet,
    deeplabv3plus,
    load_weights,
    resnet50,
    resnet50_imagenet,
    vit_b_16,
    wide_resnet,
    wrn28_10,
)
from abnn.zoo.wide_resnet import WideBlock
from shared import shared


def parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def copy(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class TestCifarResNet:
    def test_sizes_are_the_papers(self) -> None:
        assert parameters(cifar_resnet(20)) == 269_722
        assert round(parameters(cifar_resnet(56)) / 1e6, 2) == 0.85
        assert round(parameters(cifar_resnet(110)) / 1e6, 1) == 1.7

    @pytest.mark.parametrize("depth", [8, 20, 56])
    def test_depth_counts_convolutions_and_the_linear_layer(self, depth: int) -> None:
        layers = [m for m in cifar_resnet(depth).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        assert len(layers) == depth

    @pytest.mark.parametrize("size", [31, 32, 33])
    def test_any_image_size_gives_one_logit_a_class(self, size: int) -> None:
        logits = cifar_resnet(8, num_classes=7)(torch.randn(2, 3, size, size))
        assert logits.shape == (2, 7)

    @pytest.mark.parametrize("depth", [2, 19, 0, -4])
    def test_an_impossible_depth_is_refused(self, depth: int) -> None:
        with pytest.raises(ValueError, match=rf"6n \+ 2 layers.*not {depth}\."):
            cifar_resnet(depth)

    @pytest.mark.parametrize("depth", [20, 56])
    def test_names_are_the_checkpoints(self, depth: int) -> None:
        path = shared(f"weights/resnet{depth}_cifar10.th")
        weights = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        names = {name for name in cifar_resnet(depth).state_dict() if "num_batches" not in name}
        assert names == {name.removeprefix("module.") for name in weights}

    def test_trained_weights_classify_cifar10(self) -> None:
        net = cifar_resnet(20)
        load_weights(net, shared("weights/resnet20_cifar10.th"))
        with np.load(shared("data/cifar10_small.npz")) as data:
            images, labels = data["x_test"][:1000], data["y_test"][:1000]
        mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        x = torch.from_numpy((images / 255 - mean) / std).float().permute(0, 3, 1, 2)
        with torch.no_grad():
            predicted = net.eval()(x).argmax(1)
        # 91.73 % on the whole test set
        assert (predicted.numpy() == labels).mean() == pytest.approx(0.917, abs=0.01)


@pytest.mark.parametrize(
    ("builder", "millions"),
    [
        (resnet50, 23.52),
        (lambda: resnet50(100), 23.71),
        (resnet50_imagenet, 25.56),
        (wrn28_10, 36.48),
        (lambda: wide_resnet(40, 4), 8.95),
        (lambda: wide_resnet(16, 8), 10.96),
        (vit_b_16, 86.57),
        (deeplabv3plus, 26.68),
    ],
)
def test_sizes_are_the_published_ones(builder: Any, millions: float) -> None:
    with torch.device("meta"):
        assert round(parameters(builder()) / 1e6, 2) == millions


class TestResNet50:
    def test_the_stem_for_cifar_keeps_all_pixels(self) -> None:
        with torch.device("meta"):
            net = resnet50(in_channels=1)
        stem = nn.Sequential(net.conv1, net.maxpool)  # type: ignore[arg-type]
        assert stem(torch.zeros(1, 1, 32, 32, device="meta")).shape == (1, 64, 32, 32)
        with torch.device("meta"):
            net = resnet50_imagenet(in_channels=4)
        assert net(torch.zeros(1, 4, 64, 64, device="meta")).shape == (1, 1000)

    def test_all_convolutions_start_with_kaimings_values(self) -> None:
        for name, weight in resnet50().named_parameters():
            if weight.ndim == 4:
                fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
                expected = (2 / fan_out) ** 0.5
                assert weight.std().item() == pytest.approx(expected, rel=0.1), name


class TestWideResNet:
    @pytest.mark.parametrize("depth", [10, 16, 28])
    def test_depth_counts_convolutions(self, depth: int) -> None:
        with torch.device("meta"):
            net = wide_resnet(depth, 2)
        assert sum(isinstance(module, nn.Conv2d) for module in net.modules()) == depth

    def test_a_block_without_its_last_convolution_is_its_shortcut(self) -> None:
        first, second = WideBlock(2, 4, 2, 0.0).eval(), WideBlock(4, 4, 1, 0.0).eval()
        for block in (first, second):
            nn.init.zeros_(block.conv2.weight)
        x = torch.randn(2, 2, 8, 8)
        assert first.convShortcut is not None
        torch.testing.assert_close(first(x), first.convShortcut(first.bn1(x).relu()))
        assert torch.equal(second(first(x)), first(x))

    def test_dropout_acts_in_training_alone(self) -> None:
        block, x = WideBlock(4, 4, 1, dropout=0.5).eval(), torch.randn(2, 4, 8, 8)
        still = block(x)
        assert torch.equal(block(x), still)
        block.dropout.train()
        assert not torch.equal(block(x), still)

    def test_an_impossible_depth_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"6n \+ 4 convolutions.*not 20\."):
            wide_resnet(20)


def test_deeplab_has_the_encoder_of_resnet50_and_a_logit_a_pixel() -> None:
    with torch.device("meta"):
        net, encoder = deeplabv3plus(13).eval(), resnet50_imagenet()
    del encoder.fc
    assert parameters(net.encoder) == parameters(encoder)  # type: ignore[arg-type]
    assert net(torch.zeros(1, 3, 32, 48, device="meta")).shape == (1, 13, 32, 48)


def test_patches_must_fill_the_image() -> None:
    with pytest.raises(ValueError, match="image_size=100 must be a multiple of 16"):
        vit_b_16(image_size=100)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class TestLoadWeights:
    @pytest.fixture
    def trained(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    @pytest.fixture
    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    @pytest.mark.parametrize(
        "wrapper", [None, "state_dict", "model", "model_state_dict", "ema", "state_dict_ema"]
    )
    @pytest.mark.parametrize(
        "prefix", ["", "module.", "_orig_mod.", "model.", "net.", "module._orig_mod.model."]
    )
    def test_wrappers_and_prefixes_are_taken_off(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module, wrapper: str | None, prefix: str
    ) -> None:
        content: Any = {prefix + name: tensor for name, tensor in trained.state_dict().items()}
        torch.save({wrapper: content, "epoch": 3} if wrapper else content, tmp_path / "w.pt")
        load_weights(net, tmp_path / "w.pt")
        assert equal(copy(net), copy(trained))

    def test_the_network_is_taken_before_its_average(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module
    ) -> None:
        average = {name: 0 * tensor for name, tensor in trained.state_dict().items()}
        torch.save({"model_ema": average, "model": trained.state_dict()}, tmp_path / "w.pt")
        load_weights(net, tmp_path / "w.pt")
        assert equal(copy(net), copy(trained))

    def test_wrappers_are_taken_off_one_after_the_other(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module
    ) -> None:
        averaged = torch.optim.swa_utils.AveragedModel(trained)
        torch.save({"model": {"state_dict": averaged.state_dict()}}, tmp_path / "w.pt")
        load_weights(net, tmp_path / "w.pt")
        assert equal(copy(net), copy(trained))

    def test_a_compiled_part_of_a_network_keeps_its_name(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module
    ) -> None:
        weights = trained.state_dict()
        inside = {name.replace(".", "._orig_mod."): tensor for name, tensor in weights.items()}
        torch.save(inside, tmp_path / "w.pt")
        load_weights(net, tmp_path / "w.pt")
        assert equal(copy(net), copy(trained))

    def test_what_a_module_holds_beside_the_network_is_left_out(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module
    ) -> None:
        module = nn.ModuleDict({"model": trained, "metric": nn.BatchNorm1d(2)})
        torch.save({"state_dict": module.state_dict(), "epoch": 1}, tmp_path / "w.ckpt")
        load_weights(net, tmp_path / "w.ckpt")
        assert equal(copy(net), copy(trained))

    def test_two_networks_in_a_file_are_refused(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module
    ) -> None:
        both = nn.ModuleDict({"model": trained, "net": net}).state_dict()
        torch.save(both, tmp_path / "w.pt")
        with pytest.raises(ValueError, match=r"two tensors for 0\.weight, one of them as net\.0"):
            load_weights(net, tmp_path / "w.pt")

    @pytest.mark.parametrize("name", ["network.safetensors", "model.safetensors"])
    def test_a_folder_is_read(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module, name: str
    ) -> None:
        with pytest.raises(FileNotFoundError, match=r"no network\.safetensors, .* in the folder"):
            load_weights(net, tmp_path)
        save_file(trained.state_dict(), tmp_path / name)
        load_weights(net, tmp_path)
        assert equal(copy(net), copy(trained))

    def test_safetensors_are_read(self, tmp_path: Path, trained: nn.Module, net: nn.Module) -> None:
        save_file(trained.state_dict(), tmp_path / "w.safetensors")
        load_weights(net, str(tmp_path / "w.safetensors"))
        assert equal(copy(net), copy(trained))

    def test_a_part_named_module_keeps_its_name(self, tmp_path: Path) -> None:
        trained, net = (nn.ModuleDict({"module": nn.Linear(2, 3)}) for _ in range(2))
        torch.save(trained.state_dict(), tmp_path / "w.pt")
        load_weights(net, tmp_path / "w.pt")
        assert equal(copy(net), copy(trained))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"0.bias": None}, r"do not fit Sequential \(missing 0\.bias\): build"),
            ({"head": torch.ones(1)}, r"\(unexpected head\)"),
            ({"0.bias": None, "head": torch.ones(1)}, r"\(missing 0\.bias; unexpected head\)"),
            ({"0.bias": torch.ones(4)}, r"\(of another shape 0\.bias \[4\] instead of \[3\]\)"),
            ({str(i): torch.ones(1) for i in range(5)}, r"unexpected 0, 1, 2 and 2 more"),
            ({"0.bias": "text"}, "holds no weights"),
            ({"0.bias": torch.ones(3).char()}, r"\(of another kind 0\.bias int8\)"),
            ({"0.bias": torch.ones(3) * 1j}, r"\(of another kind 0\.bias complex64\)"),
            ({"0.weight": torch.ones(3, 2, device="meta")}, r"kind 0\.weight without values\)"),
            ({"1.bias": torch.tensor([0, 1, torch.nan])}, r"are not finite \(1\.bias\): take"),
        ],
    )
    def test_weights_that_do_not_fit_change_nothing(
        self,
        tmp_path: Path,
        trained: nn.Module,
        net: nn.Module,
        change: dict[str, Any],
        message: str,
    ) -> None:
        content = {**trained.state_dict(), **change}
        torch.save({k: v for k, v in content.items() if v is not None}, tmp_path / "w.pt")
        before = copy(net)
        with pytest.raises(ValueError, match=message):
            load_weights(net, tmp_path / "w.pt")
        assert equal(copy(net), before)

    @pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
    @pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04", b"\x80\x02}q\x00."])
    def test_an_unreadable_file_is_refused(
        self, tmp_path: Path, net: nn.Module, suffix: str, content: bytes
    ) -> None:
        path = tmp_path / f"w{suffix}"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            load_weights(net, path)

    @pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
    def test_a_truncated_file_is_refused(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module, suffix: str
    ) -> None:
        path = tmp_path / f"w{suffix}"
        (save_file if suffix == ".safetensors" else torch.save)(trained.state_dict(), path)
        path.write_bytes(path.read_bytes()[:-20])
        before = copy(net)
        with pytest.raises(ValueError, match="cannot be read"):
            load_weights(net, path)
        assert equal(copy(net), before)

    def test_a_pickled_network_is_refused_unexecuted(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module
    ) -> None:
        torch.save(trained, tmp_path / "w.pt")
        with pytest.raises(ValueError, match=r"cannot be read without running code \(torch\.nn"):
            load_weights(net, tmp_path / "w.pt")

    def test_what_stops_a_checkpoint_from_being_read_is_named(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module
    ) -> None:
        content = {"state_dict": trained.state_dict(), "args": argparse.Namespace(lr=0.1)}
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(ValueError, match=r"without running code \(argparse\.Namespace\): it"):
            load_weights(net, tmp_path / "w.pt")

    def test_code_in_a_checkpoint_is_not_run(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module
    ) -> None:
        content = {"state_dict": trained.state_dict(), "more": Bomb(tmp_path / "ran")}
        torch.save(content, tmp_path / "w.pt")
        before = copy(net)
        with pytest.raises(ValueError, match=r"without running code \(.*mkdir\)"):
            load_weights(net, tmp_path / "w.pt")
        assert equal(copy(net), before)
        assert not (tmp_path / "ran").exists()
        pickle.loads(pickle.dumps(content["more"]))  # which does run it
        assert (tmp_path / "ran").exists()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_weights_of_another_precision_are_read(
        self, tmp_path: Path, trained: nn.Module, net: nn.Module, dtype: torch.dtype
    ) -> None:
        trained.to(dtype)
        save_file(trained.state_dict(), tmp_path / "w.safetensors")
        load_weights(net, tmp_path / "w.safetensors")
        assert equal(copy(net), copy(trained.float()))

    def test_a_missing_file_is_named(self, tmp_path: Path, net: nn.Module) -> None:
        with pytest.raises(FileNotFoundError, match=r"There is no file .*w\.pt"):
            load_weights(net, tmp_path / "w.pt")
