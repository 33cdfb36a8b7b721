"""What sources hold: images as they are stored, and how those in files are decoded."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from abnn.data.packages import package
from abnn.progress import Progress

_GREY = ("1", "L", "LA", "La")


class BrokenImageError(ValueError):
    """An image that can't be read; the message says which.

    >>> str(BrokenImageError("Caught in worker 1.\\nTraceback\\nBrokenImageError: a.jpg is."))
    'a.jpg is.'
    """

    def __str__(self) -> str:
        # A DataLoader hands on the error of a worker as a traceback, whose last line is ours.
        return super().__str__().strip().rpartition("\n")[2].rpartition("BrokenImageError: ")[2]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Images in files or in memory, decoded one by one.

    Args:
        rows: which of them there are.
        read: the path or the bytes of the file in a row.
        place: what to call it, when it is broken.

    >>> import io
    >>> from PIL import Image
    >>> Image.new("RGB", (8, 6)).save(png := io.BytesIO(), "png")
    >>> images = Encoded(range(2), lambda row: png.getvalue(), lambda row: f"image {row}")
    >>> len(images), images[1].size
    (2, (8, 6))
    """

    rows: Sequence[int]
    read: Callable[[int], str | bytes]
    place: Callable[[int], str]

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        """An image, as Pillow has it, turned as its camera says."""
        return self._open(i, _upright)

    def where(self, i: int) -> str:
        """What to call an image."""
        return self.place(self.rows[i])

    def mode(self, i: int) -> str:
        """What kind of pixels an image has, which the beginning of its file tells."""
        return str(self._open(i, lambda file: file.mode))

    def size(self, i: int) -> tuple[int, int]:
        """Height and width of an image."""
        width, height = self[i].size
        return height, width

    def only(self, kept: Sequence[int]) -> Encoded:
        """Some of the images."""
        return replace(self, rows=[self.rows[i] for i in kept])

    def broken(self) -> list[int]:
        """Which images can't be read: all are decoded once, by as many threads as there are cores.

        JPEGs are decoded to an eighth of their size, which reads all of the file in less time.
        """
        package("PIL.Image").init()  # not by several threads at once
        threads = os.cpu_count() or 1
        found = []
        with ThreadPoolExecutor(threads) as pool, Progress(len(self), "check images", None) as bar:
            for i, whole in enumerate(pool.map(self._is_whole, range(len(self)))):
                if not whole:
                    found.append(i)
                bar.update(i + 1, f"{len(found)} broken")
        return found

    def _is_whole(self, i: int) -> bool:
        try:
            self._open(i, _decoded_small)
        except BrokenImageError:
            return False
        return True

    def _open(self, i: int, use: Callable[[Any], Any]) -> Any:
        pillow = package("PIL.Image")
        try:
            file = self.read(self.rows[i])
            with pillow.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
                return use(image)
        except MemoryError:  # which says nothing about the image
            raise
        except Exception as error:  # a damaged file can fail anywhere in its decoder
            reason = str(error).rstrip(".").partition("\n")[0]
            if "cannot identify image file" in reason:
                reason = "its format is unknown"
            raise BrokenImageError(
                f"{self.where(i)} can't be read as an image ({reason}); put a whole one in its "
                "place, or leave broken ones out by skip_broken (--skip-broken)."
            ) from error


@dataclass(frozen=True, eq=False)
class Stored:
    """A part of a source.

    Args:
        name: what to call it.
        images: of bytes, `[N, H, W, C]`, `[N, H, W]` or `[N, C, H, W]`; in files; or rows that are
            no images at all.
        labels: `[N]`, or maps `[N, H, W]`; None where there are none.
        classes: their names, if they have any.
        notes: what a user should know of it.
        void: the label of pixels that do not count.

    >>> Stored("x of d.npz", torch.zeros(2, 4), torch.tensor([0, 1])).classes is None
    True
    """

    name: str
    images: Tensor | Encoded
    labels: Tensor | None = None
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    void: int | None = None


def files(paths: Sequence[str | os.PathLike[str]]) -> Encoded:
    """Images in files, called by their paths.

    >>> files(["a.png", "b.png"]).where(1)
    'b.png'
    """
    texts = [os.fspath(path) for path in paths]
    return Encoded(range(len(texts)), texts.__getitem__, texts.__getitem__)


def images_in(folder: str | os.PathLike[str]) -> list[str]:
    """The files of images in a folder, at any depth, but for hidden ones, which tools leave there.

    Links are followed, but neither in circles nor twice to the same folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     open(f"{place}/a.png", "w").close()
    ...     os.symlink(place, f"{place}/again")
    ...     len(images_in(place))
    1
    """
    endings = package("torchvision.datasets.folder").IMG_EXTENSIONS
    root = Path(folder).resolve()
    seen = {root, *root.parents}

    def is_new(path: str) -> bool:
        real = Path(path).resolve()
        return real not in seen and not seen.add(real)  # type: ignore[func-returns-value]

    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        visible = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [name for name in visible if is_new(os.path.join(place, name))]
        found += [(place, name) for name in names if name.lower().endswith(endings)]
    return [os.path.join(*parts) for parts in sorted(found) if not parts[1].startswith(".")]


def some(names: Sequence[str]) -> str:
    """A few of many names.

    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def coloured(image: Any, channels: int, place: str, grey_by_luminance: bool = False) -> Any:
    """An image of bytes with one or three channels.

    Args:
        image: as Pillow has it.
        channels: 1 or 3.
        place: what to call it, when that can't be.
        grey_by_luminance: whether one in colour may become grey.

    >>> from PIL import Image
    >>> coloured(Image.new("L", (8, 6)), 3, "a.png").mode
    'RGB'
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        # Below 256 they are those of 8 bits, stored wide, whose upper byte would be all black.
        narrow = image.mode == "I" and 0 < values.max() < 2**8
        if image.mode == "F" or narrow or values.min() < 0 or values.max() >= 2**16:
            raise ValueError(
                f"{place} has pixels of 32 bits, whose range is not known; save it with 8 or 16."
            )
        image = package("PIL.Image").fromarray((values >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns otherwise
    if channels == 1 and image.mode not in _GREY and not grey_by_luminance:
        raise ValueError(
            f"{place} is in colour, and the network takes one channel; make the image grey, or "
            "choose a network for three."
        )
    return image.convert("L" if channels == 1 else "RGB")


def is_grey(images: Encoded) -> bool:
    """Whether the first of the images is grey."""
    mode = images.mode(0)
    return mode in _GREY or mode[0] in "IF"


def _upright(file: Any) -> Any:
    return package("PIL.ImageOps").exif_transpose(file)


def _decoded_small(file: Any) -> None:
    file.draft(None, (1, 1))
    _upright(file)
