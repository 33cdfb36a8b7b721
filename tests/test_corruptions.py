"""Corruptions against closed forms and Pillow; batches, loaders, and what is refused."""

from __future__ import annotations

import colorsys
import sys
from collections import UserDict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from abnn.corruptions import CORRUPTIONS, SEVERITIES, Corrupted, corrupt
from abnn.corruptions.functions import _clouds
from abnn.images import images_of

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def images(n: int = 8, channels: int = 3, H: int = 32, W: int = 32) -> Tensor:
    """Colourful shapes with some detail, within 0.1..0.9."""
    g = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, channels, 4, 4, generator=g)
    smooth = F.interpolate(coarse, (H, W), mode="bicubic").clamp(0, 1)
    return 0.1 + 0.7 * smooth + 0.1 * torch.rand(n, channels, H, W, generator=g)


def flat(value: float, channels: int = 1, side: int = 64) -> Tensor:
    return torch.full((4, channels, side, side), value)


def spot(side: int) -> Tensor:
    image = torch.zeros(1, 1, side, side)
    image[..., side // 2, side // 2] = 1
    return image


# Closed forms


@pytest.mark.parametrize(
    ("side", "severity", "std"), [(64, 1, 0.04), (64, 5, 0.1), (96, 1, 0.08), (96, 2, 0.12)]
)
def test_gaussian_noise_has_the_published_deviation(side: int, severity: int, std: float) -> None:
    noise = corrupt(flat(0.5, side=side), "gaussian_noise", severity) - 0.5
    assert noise.std().item() == pytest.approx(std, rel=0.03)
    assert noise.mean().item() == pytest.approx(0, abs=std / 30)


@pytest.mark.parametrize(("side", "photons"), [(64, 50), (96, 3)])
def test_shot_noise_counts_photons(side: int, photons: int) -> None:
    counts = photons * corrupt(flat(0.2, side=side), "shot_noise", 5)
    assert torch.allclose(counts, counts.round(), atol=1e-4)
    if photons == 50:  # so many that none is cut off at 1
        assert counts.mean().item() == pytest.approx(10, rel=0.02)
        assert counts.var().item() == pytest.approx(10, rel=0.05)
    else:  # Poisson's share of none
        assert (counts == 0).double().mean().item() == pytest.approx(np.exp(-0.6), rel=0.03)


@pytest.mark.parametrize(("side", "share"), [(64, 0.07), (96, 0.27)])
def test_impulses_are_as_often_salt_as_pepper(side: int, share: float) -> None:
    noisy = corrupt(flat(0.5, 3, side), "impulse_noise", 5)
    for value in (0, 1):
        assert (noisy == value).double().mean().item() == pytest.approx(share / 2, rel=0.05)
    assert (noisy == 0.5).double().mean().item() == pytest.approx(1 - share, rel=0.02)


@pytest.mark.parametrize("name", ["defocus_blur", "motion_blur"])
@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("side", [32, 224])
def test_blur_neither_adds_nor_takes_light(name: str, severity: int, side: int) -> None:
    assert corrupt(spot(side), name, severity).sum().item() == pytest.approx(1, abs=1e-3)
    assert torch.allclose(corrupt(flat(0.3, 3, side), name, severity), torch.tensor(0.3))


def test_defocus_spreads_light_over_a_disk() -> None:
    blurred = corrupt(spot(224), "defocus_blur", 5)[0, 0]
    y, x = torch.meshgrid(torch.arange(224) - 112, torch.arange(224) - 112, indexing="ij")
    away = (x**2 + y**2).sqrt()
    assert torch.allclose(blurred[away < 8], torch.tensor(1 / (100 * np.pi)), rtol=0.02)
    assert blurred[away > 12.1].abs().max() == 0
    assert torch.allclose(blurred, blurred.T)
    assert torch.allclose(blurred, blurred.flip(0).roll(1, 0))


def test_motion_goes_along_a_line_near_the_horizontal() -> None:
    for place in range(20):
        y, x = corrupt(spot(224), "motion_blur", 3, first=place)[0, 0].nonzero(as_tuple=True)
        across, down = (112 - x).double(), (112 - y).double()
        assert across.max() == across.abs().max() > 20  # to one side
        slope = down[across.argmax()] / across.max()
        assert slope.abs() <= 1.05
        assert (down - slope * across).abs().max() < 1.5


def test_fog_is_the_image_and_a_cloud_below_the_brightest_value() -> None:
    clean = images()
    top = clean.amax((1, 2, 3), keepdim=True)
    thickness = 0.5  # of severity 2
    cloud = (corrupt(clean, "fog", 2) * (top + thickness) / top - clean) / thickness
    assert torch.allclose(cloud[:, 0], cloud[:, 1], atol=1e-5)
    assert cloud.amin((1, 2, 3)).abs().max() < 1e-5
    assert torch.allclose(cloud.amax((1, 2, 3)), torch.tensor(1.0), atol=1e-5)


def test_points_of_clouds_are_means_of_their_neighbours_plus_numbers_that_decay() -> None:
    numbers = torch.zeros(8, 8)
    numbers[4, 4] = 1  # the only number that is not zero: a bump in the middle
    cloud = _clouds(numbers, decay=3)
    assert cloud[4, 4] == 1
    assert cloud[0, 0] == 0
    assert cloud[4, 0] == cloud[0, 4] == 0.5  # of two corners and twice the middle, at the border
    assert cloud[2, 2] == cloud[6, 2] == 0.5  # of (0, 0), (0, 4), (4, 0), (4, 4)
    numbers[2, 2] = 1  # a smaller bump, of half the step
    assert _clouds(numbers, decay=3)[2, 2].item() == pytest.approx(0.5 + 1 / 9)


def test_brightness_is_added_to_the_brightest_channel_and_keeps_the_colour() -> None:
    clean = images()
    bright = corrupt(clean, "brightness", 1)
    assert torch.allclose(bright.amax(1), clean.amax(1) + 0.05, atol=1e-6)
    assert torch.allclose(bright / bright.amax(1, True), clean / clean.amax(1, True), atol=1e-5)
    assert torch.allclose(corrupt(flat(0.0, 3), "brightness", 5), torch.tensor(0.3))


@pytest.mark.parametrize(("side", "kept"), [(32, 0.15), (96, 0.05)])
def test_contrast_keeps_the_mean_and_a_share_of_the_deviation(side: int, kept: float) -> None:
    clean = images(H=side, W=side)
    pale = corrupt(clean, "contrast", 5)
    assert torch.allclose(pale.mean((2, 3)), clean.mean((2, 3)), atol=1e-5)
    assert torch.allclose(pale.std((2, 3)), kept * clean.std((2, 3)), atol=1e-5)


@pytest.mark.parametrize(("severity", "gain", "shift"), [(1, 0.3, 0), (3, 1.5, 0), (5, 2.5, 0.2)])
def test_saturate_is_that_of_the_hsv_colour_model(severity: int, gain: float, shift: float) -> None:
    clean = images(1, H=8, W=8)
    corrupted = corrupt(clean, "saturate", severity)
    for before, after in zip(clean[0].flatten(1).T, corrupted[0].flatten(1).T, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*before.tolist())
        expected = colorsys.hsv_to_rgb(h, min(1, gain * s + shift), v)
        assert after.tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(corrupt(flat(0.3, 3), "saturate", severity), flat(0.3, 3))


@pytest.mark.parametrize("severity", SEVERITIES)
# In other sizes, centres may lie on the edge of two blocks, where Pillow's own rounding decides.
@pytest.mark.parametrize("size", [(32, 32), (224, 224), (28, 40), (96, 128)])
def test_pixelate_is_the_box_filter_of_pillow(severity: int, size: tuple[int, int]) -> None:
    H, W = size
    kept = ((0.95, 0.9, 0.85, 0.75, 0.65) if H < 85 else (0.6, 0.5, 0.4, 0.3, 0.25))[severity - 1]
    clean = images(1, 1, H, W)
    few = Image.fromarray(clean[0, 0].numpy()).resize((int(W * kept), int(H * kept)), 4)
    expected = torch.from_numpy(np.array(few.resize((W, H), 4)))
    corrupted = corrupt(clean, "pixelate", severity)
    assert torch.allclose(corrupted[0, 0], expected, atol=1e-6)
    assert corrupted.unique().numel() <= int(W * kept) * int(H * kept)


def test_jpeg_keeps_more_of_brightness_than_of_colour() -> None:
    clean = images()
    lost = corrupt(clean, "jpeg", 5) - clean
    grey = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    assert (lost * grey).sum(1).abs().mean() < 0.5 * lost.abs().mean()


def test_jpeg_takes_other_numbers_of_channels_as_grey_images() -> None:
    four = images(channels=4)
    alone = [corrupt(four[:, i : i + 1], "jpeg", 4) for i in range(4)]
    assert torch.equal(corrupt(four, "jpeg", 4), torch.cat(alone, 1))


# What holds for all


@pytest.mark.parametrize("side", [32, 96])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_higher_severity_is_a_larger_distance(name: str, side: int) -> None:
    clean = images(64, H=side, W=side)
    away = [(corrupt(clean, name, s) - clean).abs().mean().item() for s in (0, *SEVERITIES)]
    # Colours become paler, and from severity 3 on stronger.
    rising = [away[:3], [0, *away[3:]]] if name == "saturate" else [away]
    if name == "motion_blur" and side == 32:  # one line of two lengths: beyond is next to nothing
        assert away[4] == pytest.approx(away[3], rel=1e-3)
        del away[3]
    for distances in rising:
        assert distances[0] == 0
        assert all(a < b for a, b in pairwise(distances))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_values_stay_in_range_and_type_and_shape_are_kept(name: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        clean = torch.rand(2, 3, 9, 14).round(decimals=1).to(dtype)
        corrupted = corrupt(clean, name, 5)
        assert (corrupted.shape, corrupted.dtype) == (clean.shape, dtype)
        assert corrupted.device == clean.device
        assert 0 <= corrupted.min() <= corrupted.max() <= 1


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_batch_can_be_cut_anywhere(name: str, channels: int) -> None:
    if name == "saturate" and channels != 3:
        pytest.skip("saturate is for three channels")
    clean = images(7, channels)
    whole = corrupt(clean, name, 3, seed=2, first=10)
    parts = [corrupt(clean[a:b], name, 3, 2, 10 + a) for a, b in ((0, 1), (1, 5), (5, 7))]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["gaussian_noise", "shot_noise", "impulse_noise", "motion_blur", "fog"]
)
def test_every_image_and_every_seed_has_its_own_noise(name: str) -> None:
    same = images(1).expand(2, -1, -1, -1)
    here = corrupt(same, name, 3)
    assert not torch.equal(here[0], here[1])
    assert not torch.equal(here[:1], corrupt(same[:1], name, 3, seed=1))
    assert torch.equal(here, corrupt(same, name, 3))


def test_severity_0_is_the_image_itself() -> None:
    clean = images()
    assert all(corrupt(clean, name, 0) is clean for name in CORRUPTIONS)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_no_images_are_no_images(name: str) -> None:
    assert corrupt(torch.zeros(0, 3, 8, 8), name, 3).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("given", "name", "severity", "message"),
    [
        (torch.rand(1, 3, 8, 8), "gausian_noise", 1, "'gausian_noise'; the nearest is 'gaussian_"),
        (torch.rand(1, 3, 8, 8), "fog", 6, "severity=6"),
        (torch.rand(1, 3, 8, 8), "fog", -1, "severity=-1"),
        (torch.rand(1, 3, 8, 8), "fog", 1.5, "severity=1.5 is not a whole number"),
        (torch.rand(1, 3, 8, 7), "fog", 1, "8×7 pixels"),
        (torch.rand(3, 8, 8), "fog", 1, r"torch.float32 \[3, 8, 8\]; give .* \[B, C, H, W\]"),
        (torch.zeros(1, 3, 8, 8).byte(), "fog", 1, "torch.uint8"),
        (np.zeros((1, 3, 8, 8)), "fog", 1, "a ndarray; give"),
        (torch.randn(1, 3, 8, 8), "fog", 1, "were normalised, give the mean= and std="),
        (torch.full((1, 3, 8, 8), 255.0), "fog", 0, "values from 255 to 255"),
        (torch.full((1, 3, 8, 8), torch.nan), "fog", 1, "values from nan"),
        (torch.rand(1, 1, 8, 8), "saturate", 1, "three channels, .* the images have 1; leave it"),
    ],
)
def test_bad_requests_are_refused(given: Any, name: str, severity: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(given, name, severity)


def test_without_pillow_jpeg_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        Corrupted([], "jpeg", 1)
    corrupt(images(), "fog", 1)


# Loaders


def normalised(x: Tensor) -> Tensor:
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def labelled(x: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, torch.arange(len(x))), 3)


def test_a_loader_gives_what_corrupt_gives_and_the_labels() -> None:
    clean = images(8)
    batches = list(Corrupted(labelled(clean), "fog", 3, seed=4))
    assert torch.equal(torch.cat([x for x, _ in batches]), corrupt(clean, "fog", 3, seed=4))
    assert torch.equal(torch.cat([y for _, y in batches]), torch.arange(8))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_normalised_images_are_corrupted_as_they_were_before(name: str) -> None:
    clean = images(8)
    loader = Corrupted(labelled(normalised(clean)), name, 2, MEAN, STD)
    expected = normalised(corrupt(clean, name, 2))
    off = (torch.cat([x for x, _ in loader]) - expected).abs()
    # Rounding before a count of photons or a step of 8 bits can move some of these by one.
    assert off.mean() < 1e-3
    assert off.median() < 1e-5


def test_one_mean_can_be_for_all_channels() -> None:
    (bright,) = Corrupted([torch.zeros(2, 4, 8, 8)], "brightness", 2, torch.tensor(0.5), 0.5)
    assert torch.allclose(bright, torch.tensor(0.2))


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_mappings_keep_their_other_entries(kind: Any) -> None:
    x, mask, y = images(2), torch.ones(2, 5), torch.tensor([1, 2])
    (batch,) = Corrupted([kind(mask=mask, pixel_values=x, labels=y)], "contrast", 3)
    assert torch.equal(batch["pixel_values"], corrupt(x, "contrast", 3))
    assert batch["mask"] is mask
    assert batch["labels"] is y


def test_labels_of_four_dimensions_are_left_alone() -> None:
    x, y = images(2), images(2)
    (batch,) = Corrupted([(x, torch.zeros(2, 1), y)], "fog", 3)
    assert torch.equal(batch[0], corrupt(x, "fog", 3))
    assert batch[2] is y
    assert images_of(([x], y)) is x


def test_severity_0_gives_the_batches_themselves_but_checks_them() -> None:
    batches = [(images(2), torch.tensor([0, 1]))]
    assert next(iter(Corrupted(batches, "fog", 0))) is batches[0]
    with pytest.raises(ValueError, match="three channels"):
        list(Corrupted([images(2, channels=1)], "saturate", 0))


def test_a_loader_can_be_iterated_again() -> None:
    loader = Corrupted(labelled(images()), "gaussian_noise", 3)
    first, second = list(loader), list(loader)
    assert len(loader) == len(first) == 3
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True))


def test_a_generator_that_is_empty_when_iterated_again_is_reported() -> None:
    loader = Corrupted((x for x in [images()]), "fog", 1)
    list(loader)
    with pytest.raises(ValueError, match="after its first pass; give one that can be iterated"):
        list(loader)


def test_it_shows_what_processes_that_share_batches_look_for() -> None:
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(images()), 3, shuffle=True, generator=generator)
    corrupted = Corrupted(loader, "fog", 1)
    assert corrupted.sampler is loader.sampler
    assert corrupted.batch_sampler is loader.batch_sampler
    assert corrupted.generator is generator


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {"name": "frog"}, "'frog'; the nearest is 'fog'"),
        ([], {"severity": 7}, "severity=7"),
        ([], {"std": 0}, "std=0 is not above 0"),
        ([], {"std": [1, 1, -1]}, "is not above 0"),
        ([], {"mean": "grey"}, "mean='grey' is no number"),
        ([], {"mean": []}, r"mean=\[\] is no number"),
        ([], {"std": float("nan")}, "std=nan is no number"),
        ([images()], {"mean": (0.5, 0.5)}, "mean= has 2 values and the images have 3 channels"),
        ([images()], {"std": (1, 1)}, "std= has 2 values"),
        ([images() - 0.5], {}, "were normalised"),
        ([(torch.zeros(2, 4), torch.zeros(2))], {}, "a tuple of 2, in which no images"),
        ([torch.zeros(2, 3, 8, 8).byte()], {}, "no images were found; give .* floating-point"),
    ],
)
def test_bad_loaders_are_refused(loader: Any, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"name": "fog", "severity": 1} | options
    with pytest.raises(ValueError, match=message):
        list(Corrupted(loader, **arguments))
