"""The augmentations of the recipes: timm's and torchvision's, seeded, and mixed in batches."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset
from torchvision.transforms import v2

import abnn
from abnn.data import AUGMENTATIONS, MIXING, Images, View, training_loader
from abnn.order import seed_epoch

RNG = np.random.default_rng(0)
SCALE: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
COARSE = RNG.integers(0, 256, (12, 5, 5, 3), dtype=np.uint8)
K = 4


def images(side: int = 32, grey: bool = False, **view: Any) -> Images:
    x = np.stack([np.asarray(Image.fromarray(c).resize((side, side))) for c in COARSE])
    x = x.mean(-1).astype(np.uint8) if grey else x
    scale = {"mean": (0.5,), "std": (0.2,)} if grey else SCALE
    return Images(torch.from_numpy(x), torch.arange(12) % K, View(**scale, **view))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def normalised(image: Any) -> Tensor:
    steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*SCALE.values())]
    found: Tensor = v2.Compose(steps)(image)
    return found


def pil(data: Images, i: int) -> Any:
    return v2.functional.to_pil_image(data.x[i])


def timm_a3(data: Images) -> Callable[[Any], Any]:
    from timm.data import create_transform

    transform: Callable[[Any], Any] = create_transform(
        (160, 160), is_training=True, auto_augment="rand-m6-mstd0.5-inc1", interpolation="random",
        mean=SCALE["mean"], std=SCALE["std"],
    )  # fmt: skip
    return transform


def timm_medium(data: Images) -> Callable[[Any], Any]:
    from timm.data.auto_augment import rand_augment_transform

    policy = rand_augment_transform("rand-m9-n2-mstd1", {"img_mean": (128, 102, 76)})
    return lambda image: normalised(policy(image))


def small_crop(data: Images) -> Callable[[Any], Any]:
    crop = v2.RandomCrop(32, padding=4)
    return lambda image: normalised(crop(v2.functional.to_image(image)))


def large_crop(data: Images) -> Callable[[Any], Any]:
    crop = v2.RandomResizedCrop(96, antialias=True)
    return lambda image: normalised(crop(v2.functional.to_image(image)))


@pytest.mark.parametrize(
    ("name", "side", "view", "oracle"),
    [
        ("a3", 200, {"size": (224, 224)}, timm_a3),
        ("a3", 200, {}, timm_a3),
        ("medium", 32, {}, timm_medium),
        ("random_crop", 32, {}, small_crop),
        ("random_crop", 120, {"size": (96, 96)}, large_crop),
    ],
)
def test_what_is_named_is_what_timm_and_torchvision_do(
    name: str, side: int, view: dict[str, Any], oracle: Callable[[Images], Any]
) -> None:
    data = images(side, augmentation=(name,), **view)
    transform = oracle(data)
    for i in range(12):
        seed_everything(i)
        x = data[i][0]
        seed_everything(i)
        torch.testing.assert_close(x, transform(pil(data, i)))


def test_a3_trains_at_160_pixels_and_evaluates_at_the_size_of_the_network() -> None:
    data = images(200, size=(224, 224), augmentation=("a3",))
    assert (data[0][0].shape, data.plain()[0][0].shape) == ((3, 160, 160), (3, 224, 224))


def test_half_of_the_images_are_mirrored() -> None:
    data = images(augmentation=("hflip",))
    plain = data.plain()
    kept = 0
    for i in range(600):
        x, as_it_was = data[i % 12][0], plain[i % 12][0]
        kept += torch.equal(x, as_it_was)
        assert torch.equal(x, as_it_was) or torch.equal(x, as_it_was.flip(-1))
    assert 240 < kept < 360


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_everything_is_a_function_of_the_epoch(name: str, grey: bool) -> None:
    data = images(grey=grey, augmentation=(name,))
    loader = training_loader(data, 4, (name,), K)
    epochs = []
    for epoch in (0, 1, 0):
        seed_epoch(loader, 7, epoch)
        epochs.append([torch.cat(part) for part in zip(*loader, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(epochs[0], epochs[2], strict=True))
    assert not torch.equal(epochs[0][0], epochs[1][0])
    assert epochs[0][0].shape[1] == (1 if grey else 3)
    assert bool(epochs[0][0].isfinite().all())


def test_workers_draw_from_the_same_seed_and_not_the_same_numbers() -> None:
    x = torch.from_numpy(COARSE[:1].repeat(8, 0).repeat(4, 1).repeat(4, 2))
    data = Images(x, torch.arange(8) % K, View(**SCALE, augmentation=("medium",)))
    loader = training_loader(data, 2, ("medium",), K, workers=2)
    epochs = []
    for _ in range(2):
        seed_epoch(loader, 0, 0)
        epochs.append([torch.cat(part) for part in zip(*loader, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(*epochs, strict=True))
    assert len(epochs[0][0].unique(dim=0)) > 4


def test_augmented_images_can_be_given_to_workers() -> None:
    for name in AUGMENTATIONS:
        loader = training_loader(images(augmentation=(name,)), 4, (name,), K)
        data, mixing = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
        seed_everything(0)
        first = [data[i] for i in range(4)]
        seed_everything(0)
        assert torch.equal(loader.dataset[0][0], first[0][0])
        assert mixing(first)[0].shape[0] == 4


# Batches that are mixed


def test_mixed_labels_are_probabilities_and_those_of_medium_are_smooth() -> None:
    data = images(augmentation=("medium",))
    for name, smoothing in (("medium", 0.1), ("a3", 0.0)):
        for _, y in training_loader(data, 4, (name,), K):
            assert (y.shape, y.dtype) == ((4, K), torch.float32)
            torch.testing.assert_close(y.sum(1), torch.ones(4))
            assert y.min() >= smoothing / K - 1e-6
            assert y.max() <= 1 - smoothing + smoothing / K + 1e-6


def test_medium_mixes_as_the_paper_says() -> None:
    from timm.data.mixup import Mixup

    collate: Any = training_loader(images(), 4, ("medium",), K).collate_fn
    expected = Mixup(0.5, 0.2, switch_prob=0.5, label_smoothing=0.1, num_classes=K)
    assert vars(collate.mixup) == vars(expected)


def test_a_mixed_batch_is_its_images_in_the_parts_that_its_labels_say() -> None:
    # Constant images of 1 or 0, of two classes: their mean is the share of class 1.
    x = torch.stack([torch.zeros(3, 32, 32), torch.ones(3, 32, 32)]).repeat(4, 1, 1, 1)
    data = TensorDataset(x, torch.tensor([0, 1] * 4))
    for name in MIXING:
        seen = []
        for seed in range(8):
            torch.manual_seed(seed)
            for mixed, y in training_loader(data, 8, (name,), 2):
                smoothing = MIXING[name]["label_smoothing"]
                share = (y[:, 1] - smoothing / 2) / (1 - smoothing)
                torch.testing.assert_close(mixed.mean((1, 2, 3)), share, atol=1e-4, rtol=0)
                seen += share.tolist()
        assert any(0.01 < share < 0.99 for share in seen)


@pytest.mark.parametrize(
    ("n", "size", "names", "lengths"),
    [
        (9, 4, (), [4, 4]),  # a lone example
        (9, 8, (), [8]),
        (10, 4, (), [4, 4, 2]),
        (11, 4, (), [4, 4, 3]),
        (11, 4, ("medium",), [4, 4]),  # odd
        (10, 4, ("medium",), [4, 4, 2]),
        (1, 4, (), [1]),
        (4, 4, ("hflip",), [4]),
    ],
)
def test_a_last_batch_that_is_odd_or_alone_is_left_out(
    n: int, size: int, names: tuple[str, ...], lengths: list[int]
) -> None:
    data = TensorDataset(torch.zeros(n, 3, 8, 8), torch.arange(n) % K)
    assert [len(x) for x, _ in training_loader(data, size, names, K)] == lengths


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(3, 8, 8), 0)] * 5)


@pytest.mark.parametrize(
    ("data", "size", "classes", "message"),
    [
        (images(), 5, K, "Batches of 5 can't be mixed in pairs; give an even"),
        (images(), 4, None, "only if it is known how many classes"),
        (Stream(), 4, K, "Batches of a Stream can't be mixed"),
        (TensorDataset(torch.zeros(3, 3, 8, 8), torch.zeros(3)), 4, K, "3 examples make no batch"),
    ],
)
def test_what_can_not_be_mixed_is_refused(
    data: Any, size: int, classes: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        training_loader(data, size, ("medium",), classes)


def test_a_stream_is_loaded_in_its_order() -> None:
    assert [len(x) for x, _ in training_loader(Stream(), 2)] == [2, 2, 1]


def test_a_training_with_random_crops_that_was_stopped_ends_the_same(tmp_path: Any) -> None:
    data = images(augmentation=("hflip", "random_crop", "color_jitter"))
    loader = training_loader(data, 4)

    class Stops:
        def __len__(self) -> int:
            return len(loader)

        def __iter__(self) -> Any:
            for i, batch in enumerate(loader):
                if i == 2:
                    raise KeyboardInterrupt
                yield batch

    def network() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, K))

    recipe = abnn.Recipe(epochs=2, lr=0.01, prior=None)
    whole, parts = network(), network()
    abnn.train(whole, loader, recipe)
    with pytest.raises(KeyboardInterrupt):
        abnn.train(parts, Stops(), recipe, run=tmp_path, checkpoint_seconds=0)
    abnn.train(parts, loader, recipe, run=tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True)
    )


def test_images_that_are_only_normalised_and_mirrored_need_no_other_package() -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "for name in 'torchvision PIL timm datasets scipy'.split(): sys.modules[name] = None\n"
        "import torch\n"
        "from abnn.data import Images, View, training_loader\n"
        "x, y = torch.zeros(8, 6, 6, 3, dtype=torch.uint8), torch.arange(8)\n"
        "data = Images(x, y, View((6, 6), (0.5,) * 3, (0.2,) * 3, augmentation=('hflip',)))\n"
        "print(next(iter(training_loader(data, 4)))[0].shape)\n"
        "try: Images(x, y, View((4, 4)))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "torch.Size([4, 3, 6, 6])",
        "This data needs torchvision, which is not installed: pip install torchvision.",
    ], done.stderr
