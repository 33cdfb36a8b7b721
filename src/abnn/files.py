"""Files and directories that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Write a file so that at every moment there is either the old one or the whole new one."""
    # Processes of several hosts may write the same file, and may have the same number.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replaced(path: str | PathLike[str], overwrite: bool, marker: str, what: str) -> Iterator[Path]:
    """A temporary path beside `path`, whose place it takes when the block ends without an error.

    Args:
        path: a file or a directory.
        overwrite: replace what is there.
        marker: the file by which a directory is known to be one of ours.
        what: what is written, in a word.
    """
    path = Path(path)
    _check_free(path, overwrite, marker, what)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = temporary.with_suffix(".old")
    path.parent.mkdir(parents=True, exist_ok=True)
    _discard(temporary)
    try:
        yield temporary
        _check_free(path, overwrite, marker, what)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    finally:
        _discard(temporary)
        _discard(old)


def _check_free(path: Path, overwrite: bool, marker: str, what: str) -> None:
    if not path.name:
        raise ValueError(f"{str(path)!r} has no name; give a file or a directory to make.")
    if not path.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists; give another out=, or overwrite=True to replace it.")
    if path.is_dir() and any(path.iterdir()) and not (path / marker).is_file():
        raise FileExistsError(
            f"{path} is a directory that holds something else than {what}; give another one."
        )


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
