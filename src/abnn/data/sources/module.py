"""`module:PACKAGE.MODULE:BUILDER`: what a function of the user's own makes, for any part."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from abnn.builders import from_module
from abnn.data.sources.source import WHOLE, Parts, Source


def parts(name: str) -> Parts:
    """What a builder makes is not divided.

    >>> list(parts("mine:data"))
    ['whole']
    """
    return {WHOLE: partial(_build, name)}


SOURCE = Source("module:PACKAGE.MODULE:BUILDER", parts)


def _build(name: str) -> Dataset[Any] | DataLoader[Any]:
    data = from_module(name)
    if not isinstance(data, Dataset | DataLoader):
        raise ValueError(
            f"module:{name} is a {type(data).__name__}; name what builds a Dataset or a DataLoader."
        )
    return data
