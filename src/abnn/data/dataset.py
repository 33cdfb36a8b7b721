"""Images as a network takes them, and examples that are no images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from abnn.data.augmentation import IGNORED, Step, steps_of
from abnn.data.packages import package
from abnn.data.stored import Encoded, coloured, is_grey
from abnn.data.view import View

_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, as in ITU-R BT.601


class Images(Dataset[Any]):
    """Images of bytes as floats with the channels first, of the size and scale that a `View` says.

    Args:
        x: `[N, H, W, C]`, `[N, H, W]` or `[N, C, H, W]`, of bytes; or images in files.
        y: labels, or maps of them `[N, H, W]`; None: examples are images alone.
        view: what becomes of the images.
        classes: the names of the classes, if they have any.
        notes: what a user should know of the data; what is done to the channels is added.
        void: the label of pixels that do not count; it becomes -100.
        grey_by_luminance: whether images in colour may become grey, where one channel is wanted.

    >>> images = Images(torch.full((4, 8, 8, 3), 255, dtype=torch.uint8), torch.zeros(4).long())
    >>> images[0][0].shape, images[0][0].max()
    (torch.Size([3, 8, 8]), tensor(1.))
    """

    def __init__(
        self,
        x: Tensor | Encoded,
        y: Tensor | None,
        view: View = View(),  # noqa: B008  (frozen)
        classes: Sequence[str] | None = None,
        notes: Sequence[str] = (),
        void: int | None = None,
        grey_by_luminance: bool = False,
    ) -> None:
        self.y, self.void = y, void
        self.classes = None if classes is None else tuple(classes)
        self.grey_by_luminance = grey_by_luminance
        self.x: Tensor | Encoded
        if isinstance(x, Tensor):
            x, done = _with_channels(channels_first(x), view, grey_by_luminance)
            self.channels = x.shape[1]
        else:
            done, self.channels = _of_files(x, view), view.channels or 3
        self.x = x
        self.maps = y is not None and y.ndim > 1
        self._own_size = _size(self.x)
        if self.maps and y is not None and tuple(y.shape[1:]) != self._own_size:
            raise ValueError(
                f"The labels of an image have the shape {list(y.shape[1:])}, and images "
                f"{list(self._own_size)}; give the number of one class an image, or maps of the "
                "size of the images."
            )
        self.notes = (*notes, *done)
        self.view = view
        self._prepare()

    def _prepare(self) -> None:
        view = self.view
        self.flip = "hflip" in view.augmentation
        self.mean = torch.tensor(view.mean or [0.0]).reshape(-1, 1, 1)
        self.std = torch.tensor(view.std or [1.0]).reshape(-1, 1, 1)
        self.size = view.training_size or self._own_size
        own = set(view.augmentation) - {"hflip"}
        self._steps: list[Step] = []
        # Images of bytes that only are normalised and mirrored need no other package, nor its time.
        if own or isinstance(self.x, Encoded) or self.size != self._own_size:
            self._steps = steps_of(view, self.size, self.channels, self.maps)

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        """An image and its label, or the image alone where there are no labels."""
        image = self.x[i]
        label: Any = IGNORED if self.y is None else self.y[i]
        if self.maps:
            label = label.long()
            if self.void is not None:
                label = label.masked_fill(label == self.void, IGNORED)
        if not isinstance(image, Tensor):
            image = self._with_channels(image, i)
        if self._steps or not isinstance(image, Tensor):
            image, label = self._shaped(image, label)
        x = (image.float() / 255 - self.mean) / self.std
        if self.flip and torch.rand(()) < 0.5:
            x, label = x.flip(-1), label.flip(-1) if self.maps else label
        return x if self.y is None else (x, label)

    def plain(self) -> Images:
        """The same images without augmentation."""
        other = copy.copy(self)
        other.view = self.view.plain()
        other._prepare()
        return other

    @property
    def is_resized(self) -> bool:
        """Whether the images, or the first of them, are stored in another size.

        >>> Images(torch.zeros(2, 8, 8, dtype=torch.uint8), None, View(size=(4, 4))).is_resized
        True
        """
        return self.size != self._own_size

    @property
    def paths(self) -> tuple[str, ...]:
        """What to call the images: their files, or their places.

        >>> Images(torch.zeros(2, 8, 8, dtype=torch.uint8), None).paths
        ('image 0', 'image 1')
        """
        if isinstance(self.x, Tensor):
            return tuple(f"image {i}" for i in range(len(self.x)))
        return tuple(self.x.where(i) for i in range(len(self.x)))

    def _with_channels(self, image: Any, i: int) -> Any:
        assert isinstance(self.x, Encoded)
        size = (image.height, image.width)
        if self.view.training_size is None and size != self._own_size:
            raise ValueError(
                f"{self.x.where(i)} is {size[0]} x {size[1]} large, and {self.x.where(0)} "
                f"{self._own_size[0]} x {self._own_size[1]}; say to which size images are to be "
                "brought (size of the view; --size)."
            )
        return coloured(image, self.channels, self.x.where(i), self.grey_by_luminance)

    def _shaped(self, image: Any, label: Any) -> tuple[Tensor, Any]:
        tensors = package("torchvision.tv_tensors")
        if isinstance(image, Tensor):
            image = tensors.Image(image)
        if self.maps:
            label = tensors.Mask(label)
        for step in self._steps:
            image, label = step(image, label)
        if not isinstance(image, Tensor):
            image = package("torchvision.transforms.v2.functional").pil_to_tensor(image)
        # From here on they are plain tensors: a batch of a subclass of them would stay one.
        return image.as_subclass(Tensor), label.as_subclass(Tensor) if self.maps else label


class Rows(TensorDataset):
    """Examples that are no images of bytes, as they are stored.

    >>> Rows(torch.zeros(2, 4), torch.tensor([0, 1]), ("cat", "dog")).classes
    ('cat', 'dog')
    """

    def __init__(
        self, x: Tensor, y: Tensor, classes: Sequence[str] | None = None, notes: Sequence[str] = ()
    ) -> None:
        super().__init__(x, y)
        self.classes = None if classes is None else tuple(classes)
        self.notes = tuple(notes)


def whole(data: Dataset[Any] | DataLoader[Any]) -> Dataset[Any]:
    """The dataset of which this is a part, or which this loads.

    >>> images = Images(torch.zeros(4, 8, 8, dtype=torch.uint8), None)
    >>> whole(DataLoader(Subset(images, [0, 1]))) is images
    True
    """
    return whole(data.dataset) if isinstance(data, Subset | DataLoader) else data


def classes_of(data: Dataset[Any] | DataLoader[Any]) -> tuple[str, ...] | None:
    """The names of the classes of any dataset, if it has them.

    >>> images = Images(torch.zeros(2, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), View(), "ab")
    >>> classes_of(Subset(images, [0]))
    ('a', 'b')
    """
    names = getattr(whole(data), "classes", None)
    return None if names is None else tuple(str(name) for name in names)


def notes_of(data: Dataset[Any] | DataLoader[Any]) -> tuple[str, ...]:
    """What a user should know of the data: what was left out, and what is done to channels.

    >>> view = View(mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    >>> notes_of(Images(torch.zeros(2, 8, 8, dtype=torch.uint8), None, view))
    ('grey in three channels',)
    """
    return tuple(getattr(whole(data), "notes", ()))


def is_images(x: Tensor) -> bool:
    """Whether an array holds images of bytes.

    >>> is_images(torch.zeros(2, 8, 8, dtype=torch.uint8)), is_images(torch.zeros(2, 8, 8))
    (True, False)
    """
    return x.dtype == torch.uint8 and x.ndim in (3, 4)


def channels_first(x: Tensor) -> Tensor:
    """Images `[N, C, H, W]`, of `[N, H, W]` or with the channels, at most four, at the end.

    >>> channels_first(torch.zeros(9, 8, 8, 3)).shape
    torch.Size([9, 3, 8, 8])
    """
    x = x.unsqueeze(1) if x.ndim == 3 else x
    return x.movedim(-1, 1) if x.shape[-1] <= 4 else x


def conformed(images: Tensor, shape: Sequence[int]) -> tuple[Tensor, str]:
    """Images of bytes `[N, C, H, W]` brought to another shape `[C, H, W]`, and what that took.

    >>> images, note = conformed(torch.zeros(9, 3, 32, 32, dtype=torch.uint8), (1, 28, 28))
    >>> images.shape, note
    (torch.Size([9, 1, 28, 28]), 'grey by luminance; resized from 32 x 32 to 28 x 28')
    """
    C, size = shape[0], list(shape[1:])
    before, old = images.shape[1], list(images.shape[2:])
    if before != C and {before, C} != {1, 3}:
        raise ValueError(
            f"The images have {before} channels, and the in-distribution ones {C}; only grey "
            "images and those of three colours can be brought to each other."
        )
    done = [] if before == C else ["grey by luminance" if C == 1 else "grey in three channels"]
    if old != size:
        text = f"resized from {old[0]} x {old[1]} to {size[0]} x {size[1]}"
        done.append(text + ("" if old[0] * size[1] == old[1] * size[0] else ", out of proportion"))
    if not done:
        return images, "as it is"
    grey = before == 3 and C == 1
    parts = []
    for some in images.split(256):  # as floats they take four times the memory, and more
        part = some.float()
        if grey:
            part = torch.einsum("nchw,c->nhw", part, torch.tensor(_LUMINANCE)).unsqueeze(1)
        if old != size:
            part = F.interpolate(part, size, mode="bilinear", antialias=True)
        # In-distribution images are of whole bytes, and by that OOD ones are not to be told.
        parts.append(part.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts).expand(-1, C, -1, -1), "; ".join(done)


def _with_channels(x: Tensor, view: View, grey_by_luminance: bool) -> tuple[Tensor, list[str]]:
    """Images with the channels that a network wants, and what that took."""
    before, wanted = x.shape[1], view.channels
    if wanted is None or before == wanted:
        return x, []
    if before == 1 and wanted == 3:
        return x.expand(-1, 3, -1, -1), ["grey in three channels"]
    if before == 3 and wanted == 1 and grey_by_luminance:
        images, note = conformed(x, (1, *x.shape[2:]))
        return images, [note]
    raise ValueError(
        f"The images have {before} channels, and the network takes {wanted}, as many as mean has "
        "numbers; only grey images are brought to the three channels of a network."
    )


def _of_files(x: Encoded, view: View) -> list[str]:
    if view.channels not in (None, 1, 3):
        raise ValueError(
            f"Images in files have one or three channels, and the network takes {view.channels}, "
            "as many as mean has numbers; choose a network that takes such images."
        )
    return ["grey in three channels"] if view.channels != 1 and len(x) and is_grey(x) else []


def _size(x: Tensor | Encoded) -> tuple[int, int]:
    return (x.shape[2], x.shape[3]) if isinstance(x, Tensor) else x.size(0)
