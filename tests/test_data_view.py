"""How images become inputs: their size, their channels, and label maps that go along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from abnn.data import Images, View, notes_of, open_data, pictures
from shared import shared

RNG = np.random.default_rng(0)
SCALE: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


def photo(height: int, width: int) -> Any:
    coarse = RNG.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def saved(folder: Path, *images: Any) -> list[Path]:
    paths = [folder / f"{i}.png" for i in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        image.save(path)
    return paths


def as_torchvision(image: Any, resize: int, size: int, how: str) -> Tensor:
    transform = v2.Compose(
        [
            v2.Resize(resize, v2.InterpolationMode(how), antialias=True),
            v2.CenterCrop(size),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(SCALE["mean"], SCALE["std"]),
        ]
    )
    found: Tensor = transform(image)
    return found


@pytest.mark.parametrize("how", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("shape", [(60, 91), (91, 60), (40, 40), (20, 30)])
def test_an_image_is_resized_and_cut_as_torchvision_does(
    tmp_path: Path, shape: tuple[int, int], how: str
) -> None:
    image = photo(*shape)
    view = View((32, 32), **SCALE, crop=32 / 37, interpolation=how)
    x = pictures(saved(tmp_path, image), view)[0]
    torch.testing.assert_close(x, as_torchvision(image, 37, 32, how))


@pytest.mark.parametrize("shape", [(60, 91), (20, 30)])
def test_images_in_memory_are_resized_as_those_in_files(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    image = photo(*shape)
    view = View((32, 32), **SCALE, crop=0.875)
    array = torch.from_numpy(np.asarray(image).copy())[None]
    in_memory, in_file = Images(array, None, view)[0], pictures(saved(tmp_path, image), view)[0]
    assert (in_memory - in_file).abs().max() < 1.01 / 255 / min(SCALE["std"])


@pytest.mark.parametrize("size, shrunk", [((24, 40), 3), ((40, 24), 2)])
def test_an_input_that_is_no_square_is_cut_out_in_proportion(
    tmp_path: Path, size: tuple[int, int], shrunk: int
) -> None:
    ramp = np.tile(np.linspace(0, 255, 120, dtype=np.uint8)[None, :, None], (80, 1, 3))
    x = pictures(saved(tmp_path, Image.fromarray(ramp)), View(size))[0]
    assert x.shape == (3, *size)
    assert x[0, 5, 1:-1].diff().mean() * 255 == pytest.approx(255 / 119 * shrunk, rel=0.02)


def test_an_image_may_be_squashed_instead(tmp_path: Path) -> None:
    image = photo(60, 91)
    x = pictures(saved(tmp_path, image), View((32, 24), squash=True))[0]
    squashed = v2.functional.pil_to_tensor(image.resize((24, 32), Image.Resampling.BILINEAR))
    assert torch.equal(x, squashed.float() / 255)


def test_a_crop_beyond_the_image_has_a_black_border(tmp_path: Path) -> None:
    x = pictures(saved(tmp_path, photo(60, 60)), View((32, 32), crop=2.0))[0]
    assert not x[:, :8].any()
    assert not x[:, :, -8:].any()
    assert x[:, 8:-8, 8:-8].any()


def test_an_image_of_the_right_size_stays_as_it_is(tmp_path: Path) -> None:
    image = photo(32, 32)
    x = pictures(saved(tmp_path, image), View((32, 32), crop=0.5))[0]
    assert torch.equal(x, v2.functional.pil_to_tensor(image).float() / 255)


def test_a_crop_that_is_a_quotient_of_sizes_gives_these_sizes() -> None:
    for size in range(16, 400, 7):
        for resized in range(size, size + 60):
            assert View((size, size), crop=size / resized).resized == (resized, resized)


def test_images_of_several_sizes_need_one_to_be_brought_to(tmp_path: Path) -> None:
    paths = saved(tmp_path, photo(8, 9), photo(8, 9), photo(9, 8))
    data = pictures(paths)
    assert data[1].shape == (3, 8, 9)
    with pytest.raises(ValueError, match=r"2\.png is 9 x 8 large, and .*0\.png 8 x 9; say to"):
        data[2]


# Channels


def test_grey_images_get_the_three_channels_of_a_network(tmp_path: Path) -> None:
    grey = RNG.integers(0, 256, (8, 8), dtype=np.uint8)
    in_file = pictures(saved(tmp_path, Image.fromarray(grey)), View(**SCALE))
    in_memory = Images(torch.from_numpy(grey)[None], None, View(**SCALE))
    assert notes_of(in_file) == notes_of(in_memory) == ("grey in three channels",)
    torch.testing.assert_close(in_file[0], in_memory[0])
    back = in_file[0] * torch.tensor(SCALE["std"]).reshape(3, 1, 1)
    back = back + torch.tensor(SCALE["mean"]).reshape(3, 1, 1)
    torch.testing.assert_close(back * 255, torch.from_numpy(grey).float().expand(3, -1, -1))


def test_grey_images_stay_grey_for_a_network_of_one_channel(tmp_path: Path) -> None:
    data = pictures(saved(tmp_path, photo(8, 8).convert("L")), View(mean=(0.5,), std=(0.2,)))
    assert data[0].shape == (1, 8, 8)
    assert notes_of(data) == ()


@pytest.mark.parametrize("mode", ["RGBA", "P", "CMYK", "LA", "1"])
def test_files_of_all_kinds_of_pixels_have_three_channels(tmp_path: Path, mode: str) -> None:
    image = photo(8, 8).convert(mode)
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    image.save(path)
    expected = v2.functional.pil_to_tensor(image.convert("RGB")).float() / 255
    assert torch.equal(pictures(path)[0], expected)


def test_pixels_of_16_bits_keep_their_range(tmp_path: Path) -> None:
    deep = np.linspace(0, 2**16 - 1, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(deep).save(tmp_path / "a.png")
    x = pictures(tmp_path / "a.png")[0]
    assert (x[0] - torch.from_numpy(deep / 65535).float()).abs().max() < 1 / 255
    wide = deep.astype(np.int32)
    Image.fromarray(wide).save(tmp_path / "a.tiff")
    assert torch.equal(pictures(tmp_path / "a.tiff")[0], x)
    for unclear in (deep.astype(np.float32), 2 * wide, wide - 1, wide // 256):
        Image.fromarray(unclear).save(tmp_path / "a.tiff")
        with pytest.raises(ValueError, match=r"a\.tiff has pixels of 32 bits"):
            pictures(tmp_path / "a.tiff")[0]


def test_a_photo_stands_as_its_camera_says(tmp_path: Path) -> None:
    image = photo(8, 12)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by a quarter
    image.save(tmp_path / "a.png", exif=turned)
    x = pictures(tmp_path / "a.png")[0]
    assert torch.equal(x, v2.functional.pil_to_tensor(image).float().rot90(-1, (1, 2)) / 255)


@pytest.mark.parametrize(
    ("images", "view", "message"),
    [
        (
            torch.zeros(2, 4, 8, 9),
            View(**SCALE),
            "have 4 channels, and the network takes 3, .*; only grey",
        ),
        (
            torch.zeros(2, 8, 9, 3),
            View(mean=(0,), std=(1,)),
            "have 3 channels, and the network takes 1",
        ),
        (torch.zeros(2, 2, 8, 9), View(**SCALE), "have 2 channels, and the network takes 3"),
    ],
)
def test_other_channels_than_the_network_takes_are_refused(
    images: Tensor, view: View, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Images(images.to(torch.uint8), None, view)


def test_a_file_in_colour_is_not_for_a_network_of_one_channel(tmp_path: Path) -> None:
    paths = saved(tmp_path, photo(8, 8).convert("L"), photo(8, 8))
    data = pictures(paths, View(mean=(0.5,), std=(0.2,)))
    with pytest.raises(ValueError, match=r"1\.png is in colour, and the network takes one"):
        data[1]
    with pytest.raises(ValueError, match="one or three channels, and the network takes 4"):
        pictures(paths, View(mean=(0,) * 4, std=(1,) * 4))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": (224,)}, "no height and width"),
        ({"size": (0, 4)}, "no height and width"),
        ({"mean": (0.5,)}, "Give both --mean and --std"),
        ({"mean": (0.5,), "std": (0.0,)}, "not above 0 everywhere"),
        ({"crop": 0}, "no share of a side"),
        ({"crop": -1.5}, "no share of a side"),
        ({"interpolation": "biliner"}, "did you mean 'bilinear'"),
        ({"augmentation": ("random_flip",)}, "'random_flip' is unknown"),
        ({"augmentation": ("a3", "hflip")}, "a whole procedure"),
    ],
)
def test_a_view_that_can_not_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        View(**values)


# Label maps


def maps(folder: Path, **more: Any) -> str:
    """Images whose red channel is ten times the class of the pixel."""
    y = RNG.integers(0, 5, (6, 20, 30))
    y[:, :4] = 5
    x = np.stack([10 * y] * 3, -1).astype(np.uint8)
    np.savez(folder / "maps.npz", x_train=x, y_train=y, **more)
    return f"npz:{folder / 'maps.npz'}"


NAMES = np.array([*"abcde"])


def test_pixels_of_the_label_after_the_named_ones_do_not_count(tmp_path: Path) -> None:
    data: Any = open_data(maps(tmp_path, classes=NAMES), "train")
    x, y = data[3]
    assert notes_of(data) == ("pixels of label 5 do not count",)
    assert (x.shape, y.shape, y.dtype) == ((3, 20, 30), (20, 30), torch.int64)
    assert (y[:4] == -100).all()
    assert torch.equal((x[0, 4:] * 25.5).round().long(), y[4:])
    named: Any = open_data(maps(tmp_path, classes=np.array([*"abcde", "void"])), "train")
    assert (named.classes, named.void) == (tuple("abcde"), 5)
    own: Any = open_data(maps(tmp_path), "train", void=4)
    assert notes_of(own) == ("pixels of label 4 do not count",)
    assert sorted(own[0][1].unique().tolist()) == [-100, 0, 1, 2, 3, 5]


@pytest.mark.parametrize("names", [("hflip",), ("random_crop",), ("random_scale",)])
def test_label_maps_move_with_their_images(tmp_path: Path, names: tuple[str, ...]) -> None:
    size = None if names == ("hflip",) else (16, 24)
    view = View(size, augmentation=names, interpolation="nearest")
    data: Any = open_data(maps(tmp_path, classes=NAMES), "train", view)
    before = View(size).plain()
    seen = set()
    for _ in range(12):
        x, y = data[0]
        assert x.shape[1:] == y.shape == (size or (20, 30))
        counted = y != -100
        assert torch.equal((x[0] * 25.5).round().long()[counted], y[counted])
        seen.add(tuple(y.flatten().tolist()))
    assert len(seen) > 1
    assert before.augmentation == ()


def test_what_is_added_around_a_label_map_does_not_count(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "d.npz",
        x=np.full((1, 20, 30, 3), 200, np.uint8),
        y=np.zeros((1, 20, 30), np.uint8),
    )
    data: Any = open_data(f"npz:{tmp_path}/d.npz", "train", View(augmentation=("random_scale",)))
    added = 0
    for _ in range(20):
        x, y = data[0]
        assert torch.equal(x[0] == 0, y == -100)
        added += int((y == -100).sum())
    assert added > 0


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
def test_random_scales_are_from_a_half_to_two(shape: tuple[int, int]) -> None:
    from abnn.data.augmentation import steps_of

    jitter = steps_of(View(augmentation=("random_scale",)), shape, 3, maps=False)[0]
    image = v2.functional.to_image(torch.zeros(3, *shape, dtype=torch.uint8))
    sides = torch.tensor([jitter(image, 0)[0].shape[1] / shape[0] for _ in range(200)])
    assert 0.45 < sides.min() < 0.6
    assert 1.85 < sides.max() <= 2


def test_colours_are_jittered_and_labels_are_not(tmp_path: Path) -> None:
    data: Any = open_data(maps(tmp_path), "train", View(augmentation=("color_jitter",)))
    plain = data.plain()
    (x, y), (old, same) = data[1], plain[1]
    assert torch.equal(y, same)
    assert not torch.equal(x, old)


@pytest.mark.parametrize("name", ["medium", "a3"])
def test_what_mixes_whole_images_is_not_for_label_maps(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is for images of one label each"):
        open_data(maps(tmp_path), "train", View(augmentation=(name,)))


def test_maps_must_be_as_large_as_their_images(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 8, 8), np.uint8), y=np.zeros((2, 4, 4), int))
    with pytest.raises(ValueError, match=r"have the shape \[4, 4\], and images \[8, 8\]"):
        open_data(f"npz:{tmp_path}/d.npz", "train")


def test_real_street_scenes_have_eleven_classes_and_void() -> None:
    source = f"npz:{shared('data/camvid.npz')}"
    names = ("hflip", "random_scale", "random_crop", "color_jitter")
    data: Any = open_data(source, "validation", View((120, 160), **SCALE, augmentation=names))
    assert "pixels of label 11 do not count" in notes_of(data)
    assert len(data.classes) == 11
    x, y = data[0]
    assert (x.shape, y.shape) == ((3, 120, 160), (120, 160))
    assert set(y.unique().tolist()) <= {-100, *range(11)}
