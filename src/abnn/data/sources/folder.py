"""`folder:PATH`: a folder of images for every class, as torchvision's `ImageFolder` has them.

If it holds the folders train, val (or validation, valid) and test, or some of them, the classes are
in these. The classes are those of train, sorted by name, in all parts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from abnn.data.sources.source import WHOLE, Parts, Source
from abnn.data.stored import Stored, files, images_in, some

_NAMES = {
    "train": ("train",),
    "validation": ("val", "validation", "valid"),
    "test": ("test",),
}


def parts(path: str) -> Parts:
    """The parts of a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "train", "cat").mkdir(parents=True)
    ...     Path(folder, "test", "cat").mkdir(parents=True)
    ...     list(parts(folder))
    ['train', 'test']
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {path}; give folder: the path of one.")
    found = {
        part: root / name
        for part, names in _NAMES.items()
        for name in names
        if (root / name).is_dir() and _classes(root / name)  # else it is a class of that name
    }
    if not found:
        return {WHOLE: partial(_read, root, root)}
    first = next(iter(found.values()))
    return {part: partial(_read, folder, first) for part, folder in found.items()}


SOURCE = Source("folder:PATH", parts)


def _read(folder: Path, first: Path) -> Stored:
    """A part, whose classes are those of the first part."""
    classes, own = _classes(first), _classes(folder)
    if not own:
        raise ValueError(
            f"{folder} has no folders of classes; put the images of every class into a folder of "
            "its name."
        )
    unknown = [name for name in own if name not in classes]
    if unknown:
        raise ValueError(
            f"{folder} has the class{'es' if len(unknown) > 1 else ''} {some(unknown)}, which "
            f"{first} has not; the parts of a set must have the same classes."
        )
    found = [(path, k) for k, name in enumerate(classes) for path in images_in(folder / name)]
    if not found:
        raise ValueError(f"{folder} holds no images; give some.")
    paths, labels = zip(*found, strict=True)
    return Stored(str(folder), files(paths), torch.tensor(labels), tuple(classes))


def _classes(folder: Path) -> list[str]:
    # Hidden ones are left by editors and by archives.
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith((".", "__MACOSX"))
    )
