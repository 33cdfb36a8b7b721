"""The digits 0 to 7 of scikit-learn, and what a network that learns them should be unsure of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Labelled = tuple[Tensor, Tensor]

LOW, HIGH = -1.5, 2.5  # between which all pixels lie, with their noise
MEAN, STD = -LOW / (HIGH - LOW), 1 / (HIGH - LOW)
NOISE = 0.25  # without it the digits are too easy for a method to be better than another
MOVES = tuple(product(range(3), repeat=2))  # an image padded by a pixel has nine places


class Data(NamedTuple):
    """Images `[N, 1, 8, 8]`, from 0 to 1 and noise on top; where known, the digits they show."""

    train: Labelled
    validation: Labelled
    test: Labelled
    unseen: Tensor
    photos: Tensor

    def first(self, train: int, images: int) -> Data:
        """So many images to train and to test on."""
        (x, y), (test_x, test_y) = self.train, self.test
        return Data(
            train=(x[:train], y[:train]),
            validation=self.validation,
            test=(test_x[:images], test_y[:images]),
            unseen=self.unseen[:images],
            photos=self.photos[:images],
        )


def load_data(seed: int = 0) -> Data:
    """The digits, split by a seeded permutation, and what the network should be unsure of.

    >>> data = load_data()
    >>> [len(labels) for _, labels in (data.train, data.validation, data.test)]
    [700, 243, 500]
    >>> len(data.unseen), data.photos.shape
    (354, torch.Size([500, 1, 8, 8]))
    """
    try:
        import PIL  # noqa: F401  (what scikit-learn reads photographs with)
        from sklearn.datasets import load_digits, load_sample_images
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'The demo needs scikit-learn and pillow for its images: pip install "abnn[demo]".'
        ) from error
    rng = np.random.default_rng(seed)

    def noisy(clean: Tensor) -> Tensor:
        return (clean + NOISE * torch.from_numpy(rng.standard_normal(clean.shape))).float()

    pixels, labels = load_digits(return_X_y=True)
    x = noisy(torch.from_numpy(pixels / 16).reshape(-1, 1, 8, 8))
    y = torch.from_numpy(labels).long()
    order = torch.from_numpy(rng.permutation(np.flatnonzero(labels < 8)))
    train, validation, test = ((x[rows], y[rows]) for rows in order.split([700, 243, 500]))
    grey = np.stack([photo.mean(2) / 255 for photo in load_sample_images().images])
    patches = torch.from_numpy(grey).unfold(1, 8, 8).unfold(2, 8, 8).reshape(-1, 1, 8, 8)
    photos = noisy(patches[torch.from_numpy(rng.permutation(len(patches))[:500])])
    return Data(train, validation, test, unseen=x[y >= 8], photos=photos)


class Batches:
    """Batches of 50 images in random order, every image moved by up to a pixel.

    >>> batches = Batches(torch.zeros(100, 1, 8, 8), torch.zeros(100).long())
    >>> [x.shape for x, _ in batches]
    [torch.Size([50, 1, 8, 8]), torch.Size([50, 1, 8, 8])]
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        """Take images and labels whose number is a multiple of 50."""
        self.x, self.y = x, y

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.x) // 50

    def __iter__(self) -> Iterator[Labelled]:
        """Go through the images once; the order is that of torch's global generator."""
        for rows in torch.randperm(len(self.x)).split(50):
            wide = F.pad(self.x[rows], (1, 1, 1, 1))
            moved = torch.stack([wide[..., i : i + 8, j : j + 8] for i, j in MOVES], dim=1)
            yield moved[torch.arange(50), torch.randint(len(MOVES), (50,))], self.y[rows]
