"""Callbacks for training frameworks: the network is trained, and then it becomes Bayesian."""

from __future__ import annotations

import importlib
from typing import Any


def package(extra: str, *names: str) -> Any:
    """The first of some packages that is installed.

    Args:
        extra: what of abnn brings one of them.
        names: of the packages.

    >>> package("demo", "no_such_package", "json").__name__
    'json'
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ModuleNotFoundError(
        f'{names[0].partition(".")[0]} is not installed: pip install "abnn[{extra}]".'
    )
