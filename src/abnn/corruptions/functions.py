"""The corruptions themselves: functions of images, a severity and random numbers."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from abnn.builders import nearest
from abnn.draws import generator, whole_number
from abnn.outputs import describe

T = TypeVar("T")
# A generator of random numbers for every image.
Randoms: TypeAlias = "Iterator[np.random.Generator]"  # not imported before it is needed
# Takes images `[B, C, H, W]` within 0..1 and may leave that range.
Corruption = Callable[[Tensor, int, Randoms], Tensor]

SEVERITIES = (1, 2, 3, 4, 5)
# The sides of the images of CIFAR-10-C and of ImageNet-C, and the side halfway between them.
_SMALL, _LARGE, _BETWEEN = 32, 224, 85
# Images that were normalised and are not any more may leave 0..1 by this much.
_ROUNDING = 0.01


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0, first: int = 0) -> Tensor:
    """Corrupt images by the name of the corruption.

    The random numbers of an image are a function of (name, seed, place), so they do not depend on
    the batch it is in, and are the same for all severities.

    Args:
        images: `[B, C, H, W]`, at least 8×8 pixels with values from 0 to 1.
        name: one of `CORRUPTIONS`.
        severity: 1 to 5; 0 leaves the images as they are.
        seed: of the random numbers.
        first: the place of the first image in its data set.

    >>> images = torch.rand(4, 3, 16, 16)
    >>> whole, last = corrupt(images, "fog", 3), corrupt(images[2:], "fog", 3, first=2)
    >>> torch.equal(whole[2:], last)
    True
    """
    level = whole_number("severity", severity)
    if not 0 <= level <= 5:
        raise ValueError(f"severity={severity} is none; give 1 to 5, or 0 for clean images.")
    seed, first = whole_number("seed", seed), whole_number("first", first, least=0)
    _check(images)
    require(name, images.shape[1])
    if level == 0 or len(images) == 0:
        return images
    places = range(first, first + len(images))
    randoms = (generator("data", seed, zlib.crc32(name.encode()), place) for place in places)
    exact = images.detach().to(torch.promote_types(images.dtype, torch.float32)).clamp(0, 1)
    return CORRUPTIONS[name](exact, level, randoms).clamp(0, 1).to(images.dtype)


def require(name: str, channels: int) -> None:
    """Refuse a corruption that does not exist, or not for so many channels or on this machine.

    >>> require("fog", channels=1)
    """
    if name not in CORRUPTIONS:
        raise ValueError(f"There is no corruption {name!r}; {nearest(str(name), CORRUPTIONS)}")
    if name == "saturate" and channels != 3:
        raise ValueError(
            "saturate needs three channels, red, green and blue, and the images have "
            f"{channels}; leave it out."
        )
    if name == "jpeg":
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise ImportError("jpeg needs Pillow: pip install pillow.") from error


def _check(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        shape = f" {list(images.shape)}" if isinstance(images, Tensor) else ""
        raise ValueError(
            f"The images are {describe(images)}{shape}; give a floating-point tensor "
            "[B, C, H, W] with values from 0 to 1."
        )
    if min(images.shape[2:]) < 8:
        raise ValueError(
            f"The images have {images.shape[2]}×{images.shape[3]} pixels; corruptions need at "
            "least 8×8."
        )
    if images.numel():
        low, high = images.min().item(), images.max().item()
        if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):  # so that NaN is refused too
            raise ValueError(
                f"The images have values from {low:.3g} to {high:.3g}, and corruptions are for 0 "
                "to 1; if they were normalised, give the mean= and std= of that to Corrupted or "
                "robustness."
            )


def _pick(images: Tensor, severity: int, small: Sequence[T], large: Sequence[T]) -> T:
    """The parameter of CIFAR-10-C or of ImageNet-C, by the size of the images."""
    return (small if min(images.shape[2:]) < _BETWEEN else large)[severity - 1]


def _scale(images: Tensor) -> float:
    """Pixels for one published pixel. Less than a pixel of a small image would do nothing."""
    side = min(images.shape[2:])
    return max(1.0, side / _SMALL) if side < _BETWEEN else side / _LARGE


def _stack(images: Tensor, arrays: Iterable[npt.NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.stack(list(arrays))).to(images)


def gaussian_noise(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Normal noise for every value, as in low light.

    >>> corrupt(torch.full((1, 1, 8, 8), 0.5), "gaussian_noise", 3).std() < 0.1
    tensor(True)
    """
    std = _pick(images, severity, (0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38))
    shape = tuple(images.shape[1:])
    noise = _stack(images, (rng.standard_normal(shape, np.float32) for rng in randoms))
    return images + std * noise


def shot_noise(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Poisson noise: a value is the number of photons that arrived of those expected.

    >>> corrupt(torch.zeros(1, 3, 8, 8), "shot_noise", 5).sum()
    tensor(0.)
    """
    photons = _pick(images, severity, (500, 250, 100, 75, 50), (60, 25, 12, 5, 3))
    expected = images.double().cpu().numpy() * photons
    counts = (rng.poisson(rate) for rng, rate in zip(randoms, expected, strict=True))
    return _stack(images, counts) / photons


def impulse_noise(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Salt and pepper: a share of the values becomes 0 or 1.

    >>> corrupt(torch.full((1, 1, 32, 32), 0.5), "impulse_noise", 1).unique()
    tensor([0.0000, 0.5000, 1.0000])
    """
    share = _pick(images, severity, (0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27))
    shape = tuple(images.shape[1:])
    chance = _stack(images, (rng.random(shape) for rng in randoms))
    return images.where(chance >= share / 2, 1.0).where(chance <= 1 - share / 2, 0.0)


def defocus_blur(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Blur by a disk with a soft edge, as of a lens out of focus.

    >>> spot = torch.zeros(1, 1, 8, 8)
    >>> spot[..., 4, 4] = 1
    >>> corrupt(spot, "defocus_blur", 5)[0, 0, 4].round(decimals=4)
    tensor([0.0000, 0.0000, 0.0000, 0.1111, 0.1111, 0.1111, 0.0000, 0.0000])
    """
    radius, softness = _pick(
        images,
        severity,
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
        ((3.0, 0.1), (4.0, 0.5), (6.0, 0.5), (8.0, 0.5), (10.0, 0.5)),
    )
    radius, softness = radius * _scale(images), softness * _scale(images)
    soft, hard = max(1, int(2.5 * softness)), int(radius)
    reach = soft + hard
    across = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (across[:, None].square() + across.square() <= radius**2).double()
    edge = torch.exp(-across[hard : hard + 2 * soft + 1].square() / (2 * softness**2))
    kernel = F.conv2d(disk[None, None], (edge[:, None] * edge)[None, None], padding=soft)
    planes = F.pad(images.flatten(0, 1)[:, None], (reach,) * 4, mode="reflect")
    return F.conv2d(planes, (kernel / kernel.sum()).to(images)).view_as(images)


def motion_blur(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Blur along a line of a random direction, at most 45° from the horizontal.

    >>> spot = torch.zeros(1, 1, 32, 32)
    >>> spot[..., 16, 16] = 1
    >>> corrupt(spot, "motion_blur", 5).max() < 0.6
    tensor(True)
    """
    radius, std = _pick(
        images,
        severity,
        ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),
        ((10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0)),
    )
    H, W = images.shape[2:]
    # As in ImageMagick, what is published for a radius reaches twice as far, to one side.
    reach = 2 * math.ceil(radius * _scale(images))
    steps = np.arange(reach + 1)
    weights = np.exp(-((steps / (std * _scale(images))) ** 2) / 2)
    weights /= weights.sum()
    moved = torch.zeros_like(images)
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    for out, image, rng in zip(moved, padded, randoms, strict=True):
        angle = rng.uniform(-math.pi / 4, math.pi / 4)
        down = reach + np.rint(steps * math.sin(angle)).astype(int)
        right = reach + np.rint(steps * math.cos(angle)).astype(int)
        for y, x, weight in zip(down.tolist(), right.tolist(), weights.tolist(), strict=True):
            out.add_(image[:, y : y + H, x : x + W], alpha=weight)
    return moved


def fog(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """A bright cloud over the image, rough at all scales.

    >>> image = torch.eye(32).expand(1, 3, 32, 32)
    >>> corrupt(image, "fog", 5).mean() > image.mean() + 0.1
    tensor(True)
    """
    thickness, decay = _pick(
        images,
        severity,
        ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
        ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
    )
    H, W = images.shape[2:]
    side = 2 ** math.ceil(math.log2(max(H, W)))
    numbers = _stack(images, (rng.uniform(-1, 1, (1, side, side)) for rng in randoms))
    cloud = _clouds(numbers, decay)[..., :H, :W]
    top = images.amax((1, 2, 3), keepdim=True)
    return (images + thickness * cloud) * top / (top + thickness)


def _clouds(numbers: Tensor, decay: float) -> Tensor:
    """Fractals from 0 to 1 by the diamond-square algorithm, of uniform numbers `[..., 2^k, 2^k]`.

    Every point is the mean of four that are `step` away, plus its number, which counts the less
    the smaller the step; borders meet.
    """
    cloud, step, roughness = torch.zeros_like(numbers), numbers.shape[-1], 1.0
    while step > 1:
        half = step // 2
        corners = cloud[..., ::step, ::step].clone()
        across, down = corners + corners.roll(-1, -1), corners + corners.roll(-1, -2)
        centres = (across + across.roll(-1, -2)) / 4
        centres += roughness * numbers[..., half::step, half::step]
        cloud[..., half::step, half::step] = centres
        for rows, columns, ends, dim in ((0, half, across, -2), (half, 0, down, -1)):
            mean = (ends + centres + centres.roll(1, dim)) / 4
            new = roughness * numbers[..., rows::step, columns::step]
            cloud[..., rows::step, columns::step] = mean + new
        step, roughness = half, roughness / decay**2
    cloud -= cloud.amin((-2, -1), keepdim=True)
    return cloud / cloud.amax((-2, -1), keepdim=True)


def brightness(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Raise the brightest channel of every pixel, and the others so that the colour stays.

    >>> corrupt(torch.full((1, 1, 8, 8), 0.5), "brightness", 2).unique()
    tensor([0.6000])
    """
    more = _pick(images, severity, (0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5))
    top = images.amax(1, keepdim=True)
    raised = (top + more).clamp(max=1)
    return torch.where(top > 0, images * (raised / top), raised)


def contrast(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Move all values of a channel towards their mean.

    >>> image = torch.eye(8).expand(1, 3, 8, 8)
    >>> corrupt(image, "contrast", 2).unique()
    tensor([0.0625, 0.5625])
    """
    kept = _pick(images, severity, (0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05))
    mean = images.mean((2, 3), keepdim=True)
    return mean + kept * (images - mean)


def saturate(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Paler colours in severities 1 and 2, stronger ones in 3 to 5; for images of 3 channels.

    What is grey has no colour to change and stays as it is; the published images turn it reddish.

    >>> pixel = torch.tensor([0.8, 0.4, 0.4])[None, :, None, None]
    >>> corrupt(pixel.expand(1, 3, 8, 8), "saturate", 2)[0, :, 0, 0]
    tensor([0.8000, 0.7600, 0.7600])
    """
    gain, shift = _pick(
        images,
        severity,
        ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
        ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),
    )
    top = images.amax(1, keepdim=True)
    range_ = top - images.amin(1, keepdim=True)
    saturation = range_ / top
    factor = (gain * saturation + shift).clamp(max=1) / saturation
    # Less than half a step of 8 bits is rounding, whose colour is arbitrary.
    return torch.where(range_ > 0.5 / 255, top - (top - images) * factor, images)


def pixelate(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """Shrink the image to fewer pixels, and enlarge it without smoothing.

    >>> corrupt(torch.rand(1, 1, 16, 16), "pixelate", 5).unique().numel()
    100
    """
    kept = _pick(images, severity, (0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25))
    (rows, row), (columns, column) = (_blocks(side, kept) for side in images.shape[2:])
    few = rows.to(images) @ images @ columns.to(images).T
    return few[..., row, :][..., column]


def _blocks(side: int, kept: float) -> tuple[Tensor, Tensor]:
    """Weights `[few, side]` of the pixels whose centres a block covers; which block a pixel shows.

    Centres are counted in halves of a pixel, as whole numbers, so nothing is left to rounding.
    """
    few = int(side * kept)
    centres = torch.arange(1, 2 * side, 2) * few
    inside = torch.arange(few)[:, None] == (centres - 1) // (2 * side)
    return inside / inside.sum(1, keepdim=True), centres // (2 * side)


def jpeg(images: Tensor, severity: int, randoms: Randoms) -> Tensor:
    """What is left of the image in a small JPEG file; needs Pillow.

    Three channels are red, green and blue; any other number are so many grey images.

    >>> image = torch.full((1, 3, 8, 8), 0.2)
    >>> (corrupt(image, "jpeg", 5) - image).abs().max() < 0.02
    tensor(True)
    """
    from PIL import Image

    quality = _pick(images, severity, (80, 65, 58, 50, 40), (25, 18, 15, 10, 7))

    def stored(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    coloured = images.shape[1] == 3
    pictures = images.permute(0, 2, 3, 1) if coloured else images.flatten(0, 1)
    pixels = (255 * pictures).round().to("cpu", torch.uint8).numpy()
    read = _stack(images, map(stored, pixels)) / 255
    return read.permute(0, 3, 1, 2).contiguous() if coloured else read.view_as(images)


CORRUPTIONS: dict[str, Corruption] = {
    function.__name__: function
    for function in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        motion_blur,
        fog,
        brightness,
        contrast,
        saturate,
        pixelate,
        jpeg,
    )
}
