"""Open the data that a command line names: `npz:PATH`, `folder:PATH`, `cifar10` and so on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from abnn.data.checks import checked, kind
from abnn.data.dataset import Images, Rows, is_images
from abnn.data.sources import SOURCES, Parts
from abnn.data.sources.source import WHOLE, Part
from abnn.data.stored import Encoded, Stored, files, images_in, some
from abnn.data.view import View


def open_data(
    source: str,
    part: Part,
    view: View = View(),  # noqa: B008  (frozen)
    *,
    skip_broken: bool = False,
    void: int | None = None,
    as_is: bool = False,
) -> Dataset[Any] | DataLoader[Any]:
    """A dataset, or a loader if the user's own module makes one.

    `classes_of` tells the names of its classes, and `notes_of` what a user should know of it.

    Args:
        source: where the data is from.
        part: which part of it; all of it, where it is not divided. Test data that is beside
            training data is never taken for validation.
        view: how images become inputs.
        skip_broken: leave out images that can't be read, and go on without classes that have no
            examples; the notes tell which. All images are decoded once to find them.
        void: the label of pixels that do not count; default: what the file says.
        as_is: take inputs that are no images of bytes as they are, whatever the view normalises by;
            for a view that is the network's own, and nothing that a user has asked for.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.zeros((9, 8, 8, 3), np.uint8), y=np.zeros(9, int))
    ...     len(open_data(f"npz:{folder}/d.npz", "train"))
    9
    """
    stored = stored_part(source, part)
    if not isinstance(stored, Stored):
        return _as_built(source, stored, view, as_is)
    if void is not None:
        stored = replace(stored, void=void, notes=(f"pixels of label {void} do not count",))
    if skip_broken:
        stored = without_broken(stored)
    notes = (*stored.notes, *checked(stored, absent_allowed=skip_broken))
    x, y = stored.images, stored.labels
    assert y is not None
    if isinstance(x, Encoded) or is_images(x):
        return Images(x, y, view, stored.classes, notes, stored.void)
    _check_rows(x, stored.name)
    unfit = "--mean and --std are" if view.mean and not as_is else ""
    if view.augmentation:
        names = ", ".join(view.augmentation)
        unfit = f"The {names} of the recipe {'is' if len(view.augmentation) == 1 else 'are'}"
    if unfit:
        raise ValueError(
            f"{unfit} for images of bytes, which {source.partition(':')[2]} does not hold; leave "
            f"it out{' by --no-augmentation' if view.augmentation else ''}."
        )
    return Rows(x, y, stored.classes, notes)


def pictures(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    view: View = View(),  # noqa: B008  (frozen)
    *,
    skip_broken: bool = False,
) -> Images:
    """Images without labels: files, or all that are in a folder; `.paths` tells which is which.

    Args:
        paths: of files or of folders, one or several; folders are searched to any depth.
        view, skip_broken: as of `open_data`.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (8, 6)).save(f"{folder}/a.png")
    ...     found = pictures(folder)
    ...     [Path(path).name for path in found.paths], found[0].shape
    (['a.png'], torch.Size([3, 6, 8]))
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = [file for path in given for file in _files_at(Path(path).expanduser())]
    if not found:
        raise ValueError("There is no file to predict; give one or more.")
    stored = Stored(some([str(path) for path in given]), files(found))
    if skip_broken:
        stored = without_broken(stored)
    return Images(stored.images, None, view, notes=stored.notes)


def parts_of(source: str) -> Parts:
    """The parts that a source has.

    >>> list(parts_of("cifar10"))
    ['train', 'test']
    """
    kind, colon, name = source.partition(":")
    known = SOURCES.get(kind)
    if known is not None and known.needs_name and not name:
        raise ValueError(f"{source!r} does not say which or where; write {known.usage}.")
    if known is None or (colon and not name):
        *most, last = (one.usage for one in SOURCES.values())
        raise ValueError(
            f"{source!r} does not say where the data is from; write {', '.join(most)} or {last}."
        )
    return known.parts(name)


def has_test(source: str) -> bool:
    """Whether a source has test data beside its other data.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.zeros((9, 4)), y=np.zeros(9, int))
    ...     has_test(f"npz:{folder}/d.npz")
    False
    """
    return "test" in parts_of(source)


def stored_part(source: str, part: Part) -> Stored | Dataset[Any] | DataLoader[Any]:
    """What a source holds of a part."""
    parts = parts_of(source)
    names: list[str] = [part, WHOLE]
    if part == "validation" and "train" not in parts:
        names.append("test")  # a file of held-out data alone
    reader = next((parts[name] for name in names if name in parts), None)
    if reader is None:
        has = " and ".join(name for name in parts if name != WHOLE)
        advice = (
            "hold some of its training data out, or name other data."
            if part == "validation"
            else "name other data."
        )
        raise ValueError(f"{source} has no {part} data, but {has} data; {advice}")
    stored = reader()
    if isinstance(stored, Stored) and not len(stored.images):
        raise ValueError(f"{stored.name} holds no examples; give some.")
    return stored


def without_broken(stored: Stored) -> Stored:
    """What is left of a part without images that can't be read; the notes say how many that are.

    >>> found = without_broken(Stored("folder", files(["none.png"])))
    Traceback (most recent call last):
    ValueError: No image of folder can be read; none.png is one.
    """
    images = stored.images
    if not isinstance(images, Encoded):
        return stored
    broken = images.broken()
    if not broken:
        return stored
    where = [images.where(i) for i in broken]
    if len(broken) == len(images):
        raise ValueError(f"No image of {stored.name} can be read; {where[0]} is one.")
    kept = sorted(set(range(len(images))) - set(broken))
    text = f"{len(broken)} of {len(images)} images can't be read and are left out: {some(where)}"
    return replace(
        stored,
        images=images.only(kept),
        labels=None if stored.labels is None else stored.labels[kept],
        notes=(*stored.notes, text),
    )


def _check_rows(x: Tensor, name: str) -> None:
    """Refuse images that would be taken for something else, and trained on as that."""
    if x.ndim > 2 and not x.is_floating_point():
        raise ValueError(
            f"{name} is {kind(x)}, which are no images of bytes; store them as uint8, from 0 to "
            "255, or as floating-point inputs of a network, [N, C, H, W]."
        )
    if x.ndim == 4 and x.shape[-1] <= 4 < x.shape[1]:
        raise ValueError(
            f"{name} is {kind(x)}, with the channels last; store floating-point inputs as a "
            "network takes them, [N, C, H, W], or images as uint8, from 0 to 255."
        )


def _as_built(
    source: str, data: Dataset[Any] | DataLoader[Any], view: View, as_is: bool
) -> Dataset[Any] | DataLoader[Any]:
    if view.mean and not as_is:
        raise ValueError(
            f"{source} gives inputs as its builder makes them; leave --mean and --std out, and let "
            "the builder normalise."
        )
    if view.augmentation:
        raise ValueError(
            f"The recipe asks for {', '.join(view.augmentation)}, which only the builder of "
            f"{source} can do; say by --no-augmentation that this is its business."
        )
    return data


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"There is no file or folder {path}; give the path of one.")
    found = sorted(map(Path, images_in(path)))
    if not found:
        raise ValueError(f"{path} holds no images; give a folder that does.")
    return found
