"""Real data and weights that may lie beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1].parent / "shared"


def shared(path: str) -> Path:
    """A file of ../shared, such as "weights/resnet20_cifar10.th"; skips the test without it."""
    file = FOLDER / path
    if not file.is_file():
        pytest.skip(f"../shared/{path} is not there")
    return file
