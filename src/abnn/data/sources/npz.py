"""`npz:PATH`: arrays, or JPEGs, in a file of numpy's.

Arrays are `x` and `y`, JPEGs are `jpeg`, `offsets` and `y`: image i is the bytes
`jpeg[offsets[i]:offsets[i + 1]]`. Parts have _train, _val or _test behind these names. `classes`
names the classes; if labels are maps, a last one may be called void.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from abnn.data.checks import numbers_of_classes
from abnn.data.sources.source import WHOLE, Parts, Source
from abnn.data.stored import Encoded, Stored

_SUFFIXES = {"train": "_train", "validation": "_val", "test": "_test", WHOLE: ""}
_VOID = 255  # what most label maps call pixels of no class


def parts(path: str) -> Parts:
    """The parts of a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x_train=np.zeros((9, 4)), x_val=np.zeros((2, 4)))
    ...     list(parts(f"{folder}/d.npz"))
    ['train', 'validation']
    """
    path = os.path.expanduser(path)  # a shell does not, behind a colon
    names = list(_arrays(path))
    found = {
        part: suffix
        for part, suffix in _SUFFIXES.items()
        if f"x{suffix}" in names or {f"jpeg{suffix}", f"offsets{suffix}"} <= {*names}
    }
    if not found:
        raise ValueError(
            f"{path} has neither x, nor x_train, x_val or x_test, nor jpeg and offsets; it has "
            f"{', '.join(names) or 'nothing'}."
        )
    return {part: partial(_read, path, suffix) for part, suffix in found.items()}


SOURCE = Source("npz:PATH", parts)


def _read(path: str, suffix: str) -> Stored:
    wanted = [f"{name}{suffix}" for name in ("x", "jpeg", "offsets", "y")]
    arrays = _arrays(path, [*wanted, "classes"])
    x, jpeg, offsets, y = (arrays.get(name) for name in wanted)
    name = f"{wanted[0] if x is not None else wanted[1]} of {path}"
    names = arrays.get("classes")
    classes = None if names is None else _names(path, names)
    labels = None if y is None else _labels(path, y, wanted[3])
    images = _rows(path, x, wanted[0]) if x is not None else _jpegs(path, jpeg, offsets)
    if labels is None or labels.ndim == 1:
        return Stored(name, images, labels, classes)
    if classes and classes[-1].lower() == "void":
        classes = classes[:-1]
    void = _void(labels, classes)
    notes = () if void is None else (f"pixels of label {void} do not count",)
    return Stored(name, images, labels, classes, notes, void)


def _names(path: str, names: Any) -> tuple[str, ...]:
    if names.ndim != 1:
        raise ValueError(f"classes of {path} is no list of names; give one for every class.")
    return tuple(text.decode() if isinstance(text, bytes) else str(text) for text in names.tolist())


def _labels(path: str, y: Any, name: str) -> Tensor:
    if y.dtype.kind in "US":
        raise ValueError(
            f"The labels of {path} are texts; give the numbers of classes as {name}, and the names "
            "as classes."
        )
    return numbers_of_classes(_tensor(path, y, name), path)


def _rows(path: str, x: Any, name: str) -> Tensor:
    rows = _tensor(path, x, name)
    # numpy calculates with 64 bits, and some files are kept small with 16; networks have 32.
    return rows.float() if rows.is_floating_point() else rows


def _void(labels: Tensor, classes: Sequence[str] | None) -> int | None:
    """The label of pixels that do not count: 255, or the one after the classes, if it is there."""
    after = (len(classes),) if classes else ()
    return next((void for void in (_VOID, *after) if bool((labels == void).any())), None)


def _jpegs(path: str, jpeg: Any, offsets: Any) -> Encoded:
    ends = np.asarray(offsets)
    if (
        jpeg.dtype != np.uint8
        or jpeg.ndim != 1
        or ends.ndim != 1
        or ends.dtype.kind not in "iu"
        or not len(ends)
        or (np.diff(ends.astype(np.int64)) < 0).any()
        or ends[0] < 0
        or ends[-1] > len(jpeg)
    ):
        raise ValueError(
            f"The offsets of {path} do not divide its jpeg; image i must be the bytes "
            "jpeg[offsets[i]:offsets[i + 1]]."
        )
    return Encoded(range(len(ends) - 1), _Stream(jpeg, ends), partial(_place, path))


class _Stream:
    """Cuts images out of a stream of bytes; an object, for processes can't be given lambdas."""

    def __init__(self, stream: Any, ends: Any) -> None:
        self.stream, self.ends = stream, ends

    def __call__(self, row: int) -> bytes:
        return bytes(self.stream[self.ends[row] : self.ends[row + 1]])


def _place(path: str, row: int) -> str:
    return f"{path}, image {row}"


def _tensor(path: str, array: Any, name: str) -> Tensor:
    if array.ndim == 0:
        raise ValueError(f"{name} of {path} is a single value; give one for every example.")
    native = array.dtype.newbyteorder("=")
    wide = np.int64 if native in (np.uint16, np.uint32, np.uint64) else native
    try:
        return torch.from_numpy(array.astype(wide, copy=False))
    except TypeError as error:
        raise _unfit(path, f"{name} holds {array.dtype}, not numbers") from error


def _arrays(path: str, wanted: Sequence[str] | None = None) -> dict[str, Any]:
    """Those of the wanted arrays that there are; the names of all if none are wanted."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}; give npz: the path of one.")
    if not zipfile.is_zipfile(path):
        raise _unfit(path, "it is not what numpy.savez writes, or not all of it")
    try:
        with np.load(path) as arrays:
            if wanted is None:
                return dict.fromkeys(arrays)
            return {name: arrays[name] for name in wanted if name in arrays}
    except (ValueError, OSError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise _unfit(path, str(error)) from error


def _unfit(path: str, reason: str) -> ValueError:
    return ValueError(f"{path} is no npz file of plain arrays: {reason.rstrip('.')}.")
