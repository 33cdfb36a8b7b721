"""What every test and every docstring example starts from."""

import signal
from typing import Any

import pytest
import torch
from torch import nn

import abnn

# Workers share the cores, and a thread pool in each makes all of them many times slower; and what
# is compared bit for bit, between processes too, must not depend on how sums were split.
torch.set_num_threads(1)

# A shell starts what is to run in the background with Ctrl-C ignored, and so would be the commands
# that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What training frameworks warn of by themselves, in tests and examples that run them.
_OF_FRAMEWORKS = (
    r".isinstance\(treespec, LeafSpec\). is deprecated",
    r"The '\w+_dataloader' does not have many workers",
    r"You defined a `validation_step` but have no `val_dataloader`",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    r"'pin_memory' argument is set as true but no accelerator is found",
    r"Starting from v1.9.0, `tensorboardX` has been removed",
    r"Checkpoint directory .* exists and is not empty",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let these pass, and nothing else."""
    for item in items:
        if "integrations" in item.nodeid:
            for message in _OF_FRAMEWORKS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture(autouse=True)
def _start(doctest_namespace: dict[str, Any]) -> None:
    """Docstring examples may use these names without importing them."""
    doctest_namespace.update(abnn=abnn, torch=torch, nn=nn)
    torch.manual_seed(0)
