"""The plan of a prediction: what runs together, chosen from the network, the batch and the memory.

A plan changes how long a prediction takes and the memory it needs, never what comes out, but for
the rounding of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from abnn.draws import whole_number
from abnn.survey import Survey

# Beyond a few hundred rows a pass is no faster, only larger.
_MOST_ROWS = 512
# What is alive at once in a network, in units of the largest input of a norm: a few tensors of a
# residual block, or the four times wider middle of a transformer's.
_ALIVE = 16

# Memory that is always there.
_LITTLE_MEMORY = 2**28


@dataclass(frozen=True)
class Plan:
    """How the draws of a prediction run; what is None is chosen, what can't be done is left out.

    Args:
        draws: draws in one pass; 1 runs them one by one, each as a plain network.
        examples: examples in one pass.
        channels_last: whether images are laid out channels last, with copies of the weights of
            the convolutions in that order.
        trunk: whether what stands before the first Bayesian layer runs once for all draws.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> bnn, x = abnn.convert(net), torch.zeros(16, 4)
    >>> bnn.plan(x, samples=8)
    Plan(draws=32, examples=16, channels_last=False, trunk=True)
    >>> bnn.predict(x, plan=Plan(draws=1)).samples_used
    32
    """

    draws: int | None = None
    examples: int | None = None
    channels_last: bool | None = None
    trunk: bool | None = None

    def __post_init__(self) -> None:
        for name in ("draws", "examples"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, least=1))
        for name in ("channels_last", "trunk"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True, False or None.")


def rows_of(seen: Survey, x: Tensor, cached: bool = True) -> int:
    """Rows, of draws and examples together, that one pass should have.

    On a CPU a pass is fastest when the tensors that go from layer to layer stay in its cache, and
    when it is large enough that reading the weights is small beside them. On an accelerator it is
    faster the larger it is, up to a point; so it is when `cached` is False.
    """
    wanted = _MOST_ROWS
    if cached and x.device.type == "cpu":
        fitting = 2 * _CACHE_BYTES * torch.get_num_threads() // seen.row_bytes
        wanted = min(wanted, max(fitting, seen.weights // seen.row_elements))
    row = _ALIVE * seen.row_bytes
    if wanted * row > _LITTLE_MEMORY:  # asking takes time, and most passes need little
        wanted = min(wanted, _free_bytes(x.device) // 4 // row)
    return max(1, wanted)


def _read_cache_bytes() -> int:
    """Cache that a core has to itself: 1 MiB where the system does not tell."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
    except OSError:
        return 2**20
    return int(size.removesuffix("K")) * 2**10 if size.removesuffix("K").isdigit() else 2**20


_CACHE_BYTES = _read_cache_bytes()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 2**10 if found else 2**32
