"""A step of a fit of four modes, over four steps of ordinary fine-tuning of the same network.

    python benchmarks/fit_step.py [--rounds 7] [--batch 128]

Ordinary fine-tuning trains all weights with SGD, in train mode. Where no weight of a convolution
gets a gradient, two thirds of its arithmetic are left.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import abnn
from harness import interleaved, milliseconds, ratio, say, table, versions
from plain_forms import NETWORKS, network

MODES, STEPS = 4, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="32 px", help="part of a name; default: %(default)s")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rows = [measure(n, args.batch, args.rounds) for n in NETWORKS if args.networks in n]
    print(f"Fitting, batch {args.batch}: {versions('timm', 'torchvision')}\n")
    header = (
        "network",
        "fine-tuning ms",
        "fit ms",
        "fit / fine-tuning",
        "frozen",
        "channels last",
        "A/A",
    )
    print(table(header, rows))


def measure(name: str, batch: int, rounds: int) -> list[str]:
    """One row: fine-tuning, a fit with statistics of its own and with frozen ones, and controls."""
    net, pixels = network(name)
    data = [(torch.randn(batch, 3, pixels, pixels), torch.randint(10, (batch,)))]
    say(f"{name}: {rounds} rounds")
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    seconds = interleaved(
        {
            "plain": fine_tuning(copy.deepcopy(net), *data[0]),
            "fit": fit(net, data, "per_mode"),
            "frozen": fit(net, data, "frozen"),
            "last": fine_tuning(last, *data[0]),
            "A/A": fine_tuning(copy.deepcopy(net), *data[0]),
        },
        rounds,
        warm_up=1,
    )
    ratios = [f"{ratio(seconds, n, 'plain'):.2f}" for n in ("fit", "frozen", "last", "A/A")]
    return [name, milliseconds(seconds, "plain"), milliseconds(seconds, "fit"), *ratios]


def fine_tuning(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """`MODES * STEPS` steps of SGD on all weights."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    channels_last = next(net.parameters()).is_contiguous(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last) if channels_last else x

    def run() -> None:
        for _ in range(MODES * STEPS):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return run


def fit(
    net: nn.Module, data: list[tuple[Tensor, Tensor]], stats: Literal["per_mode", "frozen"]
) -> Callable[[], object]:
    """`STEPS` steps of all modes."""
    bnn = abnn.convert(net, modes=MODES, stats=stats)
    return lambda: abnn.fit(bnn, data, steps=STEPS, lr=1e-3, momentum=0.9, weight_decay=5e-4)


if __name__ == "__main__":
    main()
