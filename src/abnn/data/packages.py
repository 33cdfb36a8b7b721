"""What reading and augmenting images asks of other packages, all of them extras."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {"PIL": "pillow"}  # as pip calls them, where that is another name


def package(name: str) -> Any:
    """A module of a package that may not be installed.

    >>> package("torchvision.transforms.v2").__name__
    'torchvision.transforms.v2'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        # What is missing may be a part of an installed package, which is another matter.
        if (error.name or "").partition(".")[0] != top:
            raise
        pip = _NAMES.get(top, top)
        raise ValueError(
            f"This data needs {pip}, which is not installed: pip install {pip}."
        ) from error
