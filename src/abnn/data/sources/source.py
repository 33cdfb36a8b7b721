"""The shape of a source, and what those that download share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from abnn.data.packages import package
from abnn.data.stored import Stored

Part = Literal["train", "validation", "test"]
Parts = dict[str, Callable[[], Stored | Dataset[Any] | DataLoader[Any]]]

WHOLE = "whole"


@dataclass(frozen=True)
class Source:
    """A kind of data that a command line can name.

    Args:
        usage: how to name it.
        parts: what there is to read under a name, and what reads it.
    """

    usage: str
    parts: Callable[[str], Parts]

    @property
    def needs_name(self) -> bool:
        """Whether something must follow the colon.

        >>> Source("cifar10[:ROOT]", lambda name: {}).needs_name
        False
        """
        return "[" not in self.usage


def data_root() -> Path:
    """Where data is downloaded to: the environment variable ABNN_DATA, or ~/.cache/abnn/data.

    >>> data_root().is_absolute()
    True
    """
    return Path(os.environ.get("ABNN_DATA") or "~/.cache/abnn/data").expanduser().absolute()


@contextmanager
def downloading(what: str, name: str) -> Iterator[Path]:
    """The folder that a set is in or comes to, while no other process downloads there.

    Args:
        what: is downloaded.
        name: of the folder; none: `data_root()`.
    """
    root = Path(name).expanduser() if name else data_root()
    root.mkdir(parents=True, exist_ok=True)
    locks = package("filelock")  # which torch brings along
    try:
        # Processes under torchrun would write into each other's downloads.
        with locks.FileLock(root / f".{what}.lock") if os.access(root, os.W_OK) else _nothing():
            yield root
    except (OSError, RuntimeError) as error:
        reason = str(error).rstrip(".").partition("\n")[0]
        raise ValueError(
            f"{what} is neither complete in {root} nor could it be downloaded there ({reason}); "
            "put its files there, or name the folder that has them."
        ) from error


@contextmanager
def _nothing() -> Iterator[None]:
    yield
