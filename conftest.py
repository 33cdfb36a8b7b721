"""What every test and every docstring example starts from."""

import os
from typing import Any

import pytest
import torch
from torch import nn

import abnn

# Workers share the cores; a thread pool in each of them makes all of them many times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _start(doctest_namespace: dict[str, Any]) -> None:
    """Docstring examples may use these names without importing them."""
    doctest_namespace.update(abnn=abnn, torch=torch, nn=nn)
    torch.manual_seed(0)
