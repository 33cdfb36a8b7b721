"""The data that a command line names: `npz:PATH`, or `module:PACKAGE.MODULE:BUILDER`.

A source is a function of (what follows the colon, part, mean, std, augmentation) that returns a
dataset; a new one is a line in `SOURCES`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from abnn.batches import inputs_of
from abnn.builders import from_module
from abnn.draws import generator
from abnn.folding import first_tensor
from abnn.image_set import Images, channels_first, conformed

Part = Literal["train", "validation", "test"]

# The names of the arrays of an npz file, the first that are there.
_ARRAYS: dict[Part, list[tuple[str, str]]] = {
    "train": [("x_train", "y_train"), ("x", "y")],
    "validation": [("x_val", "y_val"), ("x_test", "y_test"), ("x", "y")],
    "test": [("x_test", "y_test"), ("x", "y")],
}
_OOD_ARRAYS = [("x_test",), ("x",)]  # the labels are of other classes, and of no use
_NO_LABEL = -100


def open_data(
    source: str,
    part: Part,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    augmentation: Sequence[str] = (),
) -> Dataset[Any] | DataLoader[Any]:
    """A dataset, or a loader if the user's own module makes one.

    Args:
        source: where the data is from.
        part: which part of it.
        mean, std: of every channel of images, to normalise by.
        augmentation: what a recipe asks for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.zeros((9, 8, 8, 3), np.uint8), y=np.zeros(9, int))
    ...     len(open_data(f"npz:{folder}/d.npz", "train"))
    9
    """
    kind, name = _parts_of(source)
    _check_channels(mean, std)
    data: Dataset[Any] | DataLoader[Any] = SOURCES[kind](name, part, mean, std, augmentation)
    return data


def held_out_split(
    data: Dataset[Any], size: float, seed: int = 0
) -> tuple[Subset[Any], Subset[Any]]:
    """What is left of a dataset, and what is held out of it, drawn by the seed alone.

    Args:
        data: a dataset that knows its length. The flips of `Images` are only in what is left.
        size: how many examples to hold out; below 1, which share of them.
        seed: the same seed holds out the same examples.

    >>> rest, held_out = held_out_split(TensorDataset(torch.arange(10)), 0.2)
    >>> len(rest), len(held_out), sorted({*rest.indices, *held_out.indices}) == list(range(10))
    (8, 2, True)
    """
    if not isinstance(data, Dataset) or isinstance(data, IterableDataset):
        raise ValueError(
            f"A part can't be held out of a {type(data).__name__}; give a Dataset that knows its "
            "length."
        )
    n = len(data)  # type: ignore[arg-type]
    count = round(size * n) if 0 < size < 1 else int(size)
    if (count != size and size >= 1) or not 0 < count < n:
        raise ValueError(
            f"size={size} of {n} examples can't be held out; give a share between 0 and 1 or a "
            "whole number, which leaves some on both sides."
        )
    shuffled = generator("data", seed).permutation(n)
    held, rest = sorted(shuffled[:count].tolist()), sorted(shuffled[count:].tolist())
    return Subset(data, rest), Subset(data.plain() if isinstance(data, Images) else data, held)


def train_and_validation(
    source: str,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    augmentation: Sequence[str] = (),
    size: float = 0.1,
    seed: int = 0,
) -> tuple[Dataset[Any], Dataset[Any], str]:
    """Training data, validation data that is neither that nor test data, and where this is from.

    An npz file that has x_val and y_val has both; of any other data, a part is held out.

    Args:
        source, mean, std, augmentation: as of `open_data`.
        size, seed: as of `held_out_split`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x_train=np.zeros((20, 4), np.float32), y_train=[0, 1] * 10)
    ...     train, validation, note = train_and_validation(f"npz:{folder}/d.npz")
    >>> len(train), len(validation), note
    (18, 2, 'validation: 2 of the 20 training examples, drawn by seed 0')
    """
    train = open_data(source, "train", mean, std, augmentation)
    kind, name = _parts_of(source)
    if kind == "npz" and {"x_val", "y_val"} <= set(_names(name)):
        validation = open_data(source, "validation", mean, std)
        assert isinstance(train, Dataset)
        assert isinstance(validation, Dataset)
        return train, validation, f"validation: x_val of {name}"
    if isinstance(train, DataLoader):
        raise ValueError(
            f"{source} is a DataLoader, of which no validation data can be held out; let the "
            "builder make a Dataset."
        )
    rest, held_out = held_out_split(train, size, seed)
    n = len(rest) + len(held_out)
    drawn = f"{len(held_out)} of the {n} training examples, drawn by seed {seed}"
    return rest, held_out, f"validation: {drawn}"


def open_ood(
    source: str,
    like: Dataset[Any] | DataLoader[Any],
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> tuple[Dataset[Any] | DataLoader[Any], str]:
    """Out-of-distribution data in the shape of the in-distribution data, and what was done to it.

    Images of bytes become grey or of three channels, and are resized, rounded to bytes again, and
    normalised as those that they are to be told from. All labels are -100, which stands for none.

    Args:
        source: as of `open_data`; of an npz file x_test or x is taken. What a builder of your own
            makes is left as it is.
        like: the in-distribution data.
        mean, std: what that is normalised by, where it is of your own making.

    >>> import tempfile
    >>> like = Images(torch.zeros(4, 28, 28, dtype=torch.uint8), torch.zeros(4).long())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.zeros((9, 32, 32, 3), np.uint8))
    ...     data, note = open_ood(f"npz:{folder}/d.npz", like)
    >>> data[0][0].shape, note
    (torch.Size([1, 28, 28]), 'grey by luminance; resized from 32 x 32 to 28 x 28')
    """
    kind, path = _parts_of(source)
    _check_channels(mean, std)
    if kind != "npz":
        found: Dataset[Any] | DataLoader[Any] = SOURCES[kind](path, "test", (), (), ())
        return found, "as its builder makes it"
    (x,) = _arrays(path, _OOD_ARRAYS)
    labels = torch.full((len(x),), _NO_LABEL)
    whole = _whole(like)
    shape = _shape(whole)
    images = x.dtype == torch.uint8 and x.ndim in (3, 4) and len(shape) == 3
    if images and not (mean or isinstance(whole, Images)):
        raise ValueError(
            f"{path} holds images of bytes, and it is not known how the in-distribution data is "
            "normalised; give its mean and std, or a builder of your own (module:)."
        )
    if images:
        x, note = conformed(channels_first(x), shape)
        data = Images(x, labels, mean, std)
        if isinstance(whole, Images):
            data.mean, data.std = whole.mean, whole.std
        return data, note
    if mean or isinstance(whole, Images) or not x.is_floating_point():
        wanted = "images of bytes" if mean or isinstance(whole, Images) else "floating-point inputs"
        raise ValueError(
            f"{path} holds {_kind(x)}, but the in-distribution data is of {wanted}; give OOD "
            "data of the same kind."
        )
    if x.shape[1:] != shape:
        raise ValueError(
            f"An example of {path} has the shape {list(x.shape[1:])}, but one of the "
            f"in-distribution data {list(shape)}; only images of bytes are brought to it."
        )
    return TensorDataset(x, labels), "as it is"


def has_test(source: str) -> bool:
    """Whether an npz file has test data beside its training data.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.zeros((9, 4)), y=np.zeros(9, int))
    ...     has_test(f"npz:{folder}/d.npz")
    False
    """
    return "x_test" in _names(_parts_of(source)[1])


def _whole(data: Dataset[Any] | DataLoader[Any]) -> Dataset[Any]:
    return _whole(data.dataset) if isinstance(data, Subset | DataLoader) else data


def _shape(data: Dataset[Any]) -> torch.Size:
    """The shape of an example's first input."""
    example = next(iter(data)) if isinstance(data, IterableDataset) else data[0]
    return first_tensor(inputs_of(example)).shape


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of the shape {list(x.shape)}"


def _parts_of(source: str) -> tuple[str, str]:
    kind, _, name = source.partition(":")
    if kind not in SOURCES or not name:
        raise ValueError(
            f"{source!r} does not say where the data is from; write npz:PATH or "
            "module:PACKAGE.MODULE:BUILDER."
        )
    return kind, name


def _check_channels(mean: Sequence[float], std: Sequence[float]) -> None:
    if len(mean) != len(std):
        raise ValueError("Give both --mean and --std, with as many numbers each, or neither.")


def _names(path: str) -> list[str]:
    """The names of the arrays of an npz file that has been read before."""
    with np.load(path) as arrays:
        return list(arrays)


def _arrays(path: str, wanted: Sequence[Sequence[str]]) -> list[Tensor]:
    """The arrays of an npz file, under the first of the wanted names that are all there."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}; give npz: the path of one.")
    try:
        with np.load(path) as arrays:
            found = next((names for names in wanted if all(n in arrays for n in names)), None)
            if found is None:
                names = " or ".join(" and ".join(names) for names in wanted)
                raise KeyError(f"{path} has no {names}; it has {', '.join(arrays) or 'nothing'}.")
            tensors = [torch.from_numpy(arrays[name]) for name in found]
            if any(len(tensor) == 0 for tensor in tensors):
                raise KeyError(f"{' and '.join(found)} of {path} hold no examples; give some.")
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    except (ValueError, OSError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no npz file of plain arrays: {error}.") from error
    return tensors


def _npz(
    path: str, part: Part, mean: Sequence[float], std: Sequence[float], augmentation: Sequence[str]
) -> Dataset[Any]:
    unknown = [name for name in augmentation if name != "hflip"]
    if unknown:
        raise ValueError(
            f"The recipe asks for {', '.join(unknown)}, which npz: data does not get; do it in a "
            "dataset of your own (module:), or leave all augmentation out by --no-augmentation."
        )
    x, y = _arrays(path, _ARRAYS[part])
    if len(x) != len(y):
        raise ValueError(f"{path} has {len(x)} inputs but {len(y)} labels.")
    if y.is_complex() or (y.is_floating_point() and not torch.equal(y, y.trunc())):
        raise ValueError(f"The labels of {path} are {_kind(y)}; give the numbers of classes.")
    if x.dtype == torch.uint8 and x.ndim in (3, 4):
        return Images(x, y.long(), mean, std, "hflip" in augmentation)
    if mean or augmentation:
        wanted = "--mean and --std are" if mean else "The hflip of the recipe is"
        raise ValueError(
            f"{wanted} for images of bytes, which {path} does not hold; leave it out"
            f"{'' if mean else ' by --no-augmentation'}."
        )
    return TensorDataset(x, y.long())


def _own(
    name: str, part: Part, mean: Sequence[float], std: Sequence[float], augmentation: Sequence[str]
) -> Dataset[Any] | DataLoader[Any]:
    if mean:
        raise ValueError("--mean and --std are for npz: data; let the builder normalise its own.")
    if augmentation:
        raise ValueError(
            f"The recipe asks for {', '.join(augmentation)}, which only the builder of "
            f"module:{name} can do; say by --no-augmentation that this is its business."
        )
    data = from_module(name)
    if not isinstance(data, Dataset | DataLoader):
        raise ValueError(
            f"module:{name} is a {type(data).__name__}; name what builds a Dataset or a DataLoader."
        )
    return data


SOURCES: dict[str, Any] = {"npz": _npz, "module": _own}
