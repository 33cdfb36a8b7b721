"""Libraries that networks come from, none of which the core needs, and their downloads."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def package(name: str, install: str | None = None) -> Any:
    """An installed package, imported when it is needed.

    Args:
        name: what it is imported by.
        install: what it is installed by, where that differs.

    >>> package("json").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"{name} is not installed: pip install {install or name}.") from error


@contextmanager
def fetching(what: str, otherwise: str) -> Iterator[None]:
    """Tell what a library could not fetch, and what else can be done.

    Args:
        what: is fetched.
        otherwise: what else can be done, as an order.

    >>> try:
    ...     with fetching("timm:resnet18.a1_in1k", "give a file"):
    ...         raise OSError("no route to host")
    ... except ConnectionError as error:
    ...     print(error)
    timm:resnet18.a1_in1k can't be fetched (OSError: no route to host); give a file.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # every hub raises errors of its own
        lines = str(error).strip().splitlines() or ["no reason given"]
        reason = f"{type(error).__name__}: {lines[0].rstrip('.')}"
        raise ConnectionError(f"{what} can't be fetched ({reason}); {otherwise}.") from error


def shows_progress() -> bool:
    """Whether somebody would see a progress bar."""
    return sys.stderr.isatty()
