"""`hf:NAME[@CONFIG]`: a set of the Hugging Face hub, or a folder that `datasets` wrote or reads.

The images are the first column of the type Image, the labels the first of the type ClassLabel, or
else whole numbers in a column named label or labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abnn.data.packages import package
from abnn.data.sources.source import WHOLE, Parts, Source
from abnn.data.stored import Encoded, Stored

_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def parts(name: str) -> Parts:
    """The parts of a set; one that has a single part is not divided, whatever that is called.

    >>> import datasets, tempfile
    >>> rows = {"label": [0, 1]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     datasets.Dataset.from_dict(rows).save_to_disk(folder)
    ...     list(parts(folder))
    ['whole']
    """
    found = _opened(name)
    if not isinstance(found, dict):
        return {WHOLE: partial(_read, name, found)}
    if len(found) == 1:
        return {WHOLE: partial(_read, name, *found.values())}
    known = {
        part: next((found[key] for key in keys if key in found), None)
        for part, keys in _NAMES.items()
    }
    return {part: partial(_read, name, data) for part, data in known.items() if data is not None}


SOURCE = Source("hf:NAME[@CONFIG]", parts)


def _opened(name: str) -> Any:
    """A dataset, or a dictionary of them."""
    datasets = package("datasets")
    path, _, config = name.partition("@")
    saved = [Path(name, file) for file in ("dataset_dict.json", "state.json")]
    try:
        if any(file.is_file() for file in saved):
            return datasets.load_from_disk(name)
        return datasets.load_dataset(path, config or None)
    except Exception as error:  # of the network, the hub or the reader of a file
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"hf:{name} can't be opened ({type(error).__name__}: {reason}); give the name of a set "
            "on the hub, with @CONFIG where it has several, or a folder of one."
        ) from error


def _read(name: str, data: Any) -> Stored:
    datasets = package("datasets")
    features = data.features
    images = [key for key, of in features.items() if isinstance(of, datasets.Image)]
    named = [key for key, of in features.items() if isinstance(of, datasets.ClassLabel)]
    numbered = [
        key
        for key, of in features.items()
        if key in ("label", "labels") and "int" in str(getattr(of, "dtype", ""))
    ]
    if not images:
        raise ValueError(
            f"hf:{name} has no column of images; it has "
            f"{', '.join(f'{key} ({type(of).__name__})' for key, of in features.items())}."
        )
    labels = [key for key in named if key in ("label", "labels")] + named + numbered
    notes = []
    for what, found in (("images", images), ("labels", list(dict.fromkeys(labels)))):
        if len(found) > 1:
            notes.append(f"{what} are the column {found[0]}, not {' or '.join(found[1:])}")
    column = data.select_columns(images[0]).cast_column(images[0], datasets.Image(decode=False))
    split = "" if data.split is None else f", {data.split}"
    place = f"hf:{name}{split}"
    return Stored(
        place,
        Encoded(range(len(data)), _Column(column, images[0]), partial(_place, place)),
        _numbers(data[labels[0]]) if labels else None,
        tuple(features[labels[0]].names) if named else None,
        tuple(notes),
    )


def _numbers(labels: Iterable[int | None]) -> Tensor:
    """Labels; those that are not there become -1, as the hub has it, which is no label."""
    return torch.tensor([-1 if label is None else label for label in labels])


class _Column:
    """The files of a column of images; an object, for processes can't be given lambdas."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name

    def __call__(self, row: int) -> str | bytes:
        file = self.data[row][self.name]
        if file is None:
            raise ValueError("there is no image")
        found: str | bytes = file["path"] if file["bytes"] is None else file["bytes"]
        return found


def _place(place: str, row: int) -> str:
    return f"{place}, image {row}"
