"""Things of the user's own that a command line names, as PACKAGE.MODULE:BUILDER."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def from_module(name: str) -> Any:
    """What a function of a module returns, or the object itself if it can't be called.

    >>> from_module("torch.nn:Identity")
    Identity()
    """
    path, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"module:{name} names no builder; write module:{name}:BUILDER.")
    # A module of the current directory is found, as with `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(path)
        if not hasattr(module, attribute):
            raise LookupError(attribute)
        found = getattr(module, attribute)
        return found if isinstance(found, nn.Module) or not callable(found) else found()
    except LookupError as error:
        if error.args != (attribute,):
            raise _unbuilt(name, error) from error
        known = vars(sys.modules[path])
        raise ValueError(f"{path} has no {attribute!r}; {nearest(attribute, known)}") from error
    except Exception as error:  # whatever the user's code does
        raise _unbuilt(name, error) from error
    finally:
        sys.path.remove(os.getcwd())


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message that names the nearest of what there is.

    >>> nearest("resnet81", ["resnet18", "vgg11"])
    "the nearest is 'resnet18'."
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0)
    return f"the nearest is {close[0]!r}." if close else "it has nothing at all."


def _unbuilt(name: str, error: Exception) -> ValueError:
    return ValueError(
        f"module:{name} can't be built ({type(error).__name__}: {error}); name an importable "
        "module and a function of it that needs no arguments."
    )
