"""Names that the examples in docstrings may use without importing them."""

from typing import Any

import pytest
import torch
from torch import nn

import abnn


@pytest.fixture(autouse=True)
def _examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(abnn=abnn, torch=torch, nn=nn)
    torch.manual_seed(0)
