"""abnn against the ABNN of torch-uncertainty: prediction, memory and fit of the same network.

    python benchmarks/others.py [--batches 1 16 128] [--steps 4] [--rounds 9] [--fit-rounds 5]

Needs the packages of benchmarks/requirements.txt; `make bench` installs them. Both have 32 members,
8 draws of 4 modes. The loop is what one would write without a library: the plain networks of all
draws, kept, and called one after the other. The fits take the same batches of the same images, and
each starts from the plain network.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import chdir
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import abnn
from harness import interleaved, milliseconds, ratio, say, table, versions
from plain_forms import loop, network

MODES, SAMPLES, ALPHA, BATCH, LR = 4, 8, 0.01, 128, 1e-3
KIB = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--steps", type=int, default=4, help=f"of a fit, on batches of {BATCH}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fit-rounds", type=int, default=5)
    args = parser.parse_args()
    be_silent()
    net, _ = network("ResNet-20, 32 px")
    bnn, theirs = abnn.convert(net, modes=MODES, alpha=ALPHA), other(net)
    # Their trainer writes a folder of logs where it is called.
    with TemporaryDirectory() as folder, chdir(folder):
        fits = fitting(net, theirs, args.steps, args.fit_rounds)
    theirs.eval()
    found = versions("torchvision", "torch_uncertainty", "lightning")
    print(f"ResNet-20, 32 px, {MODES} modes, {SAMPLES} draws each: {found}\n")
    rows = [predicting(bnn, theirs, batch, args.rounds) for batch in args.batches]
    header = ("predict, batch", "theirs ms", "abnn ms", "theirs / abnn", "loop / abnn", "A/A")
    print(table(header, rows))
    print()
    print(table(("memory", "theirs KiB", "abnn KiB", "theirs / abnn"), memory(net, bnn, theirs)))
    print()
    print(table(("fit, 1 epoch", "theirs ms", "abnn ms", "theirs / abnn", "A/A"), [fits]))


def be_silent() -> None:
    """Let lightning tell nothing of its trainers."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def other(net: nn.Module) -> Any:
    """The ABNN of torch-uncertainty; it copies the network when it is fitted."""
    from torch_uncertainty.post_processing.abnn import ABNN

    be_silent()  # importing it has set up lightning's own ways
    return ABNN(
        num_classes=10,
        random_prior=3,
        alpha=ALPHA,
        num_models=MODES,
        num_samples=SAMPLES,
        base_lr=LR,
        device="cpu",
        max_epochs=1,
        use_original_model=False,
        model=net,
    )


def fitting(net: nn.Module, theirs: Any, steps: int, rounds: int) -> list[str]:
    """One row: a fit of theirs, and of ours, twice."""
    images, labels = torch.randn(steps * BATCH, 3, 32, 32), torch.randint(10, (steps * BATCH,))
    loader = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True)

    def ours() -> None:
        bnn = abnn.convert(net, modes=MODES, alpha=ALPHA)
        abnn.fit(bnn, loader, epochs=1, lr=LR, weight_decay=1e-4, nesterov=True)

    say(f"fit: {rounds} rounds")
    variants = {"theirs": lambda: theirs.fit(loader), "abnn": ours, "A/A": ours}
    seconds = interleaved(variants, rounds, warm_up=1)
    return [
        f"{steps} steps of {BATCH}",
        milliseconds(seconds, "theirs"),
        milliseconds(seconds, "abnn"),
        f"{ratio(seconds, 'theirs', 'abnn'):.2f}",
        f"{ratio(seconds, 'A/A', 'abnn'):.2f}",
    ]


def predicting(bnn: abnn.ABNN, theirs: Any, batch: int, rounds: int) -> list[str]:
    """One row: their prediction, ours, twice, and the loop."""
    x = torch.randn(batch, 3, 32, 32)
    say(f"predict, batch {batch}: {rounds} rounds")
    seconds = interleaved(
        {
            "theirs": their_prediction(theirs, x),
            "abnn": lambda: bnn.predict(x, SAMPLES),
            "loop": loop(bnn, x, SAMPLES),
            "A/A": lambda: bnn.predict(x, SAMPLES),
        },
        rounds,
    )
    return [
        str(batch),
        milliseconds(seconds, "theirs"),
        milliseconds(seconds, "abnn"),
        *(f"{ratio(seconds, name, 'abnn'):.2f}" for name in ("theirs", "loop", "A/A")),
    ]


def their_prediction(theirs: Any, x: Tensor) -> Callable[[], None]:
    """The mean probabilities, of the logits of all members, one after the other in a tensor."""

    @torch.no_grad()
    def run() -> None:
        members: Tensor = theirs(x).unflatten(0, (MODES * SAMPLES, len(x)))
        members.softmax(-1).mean(0)

    return run


def memory(net: nn.Module, bnn: abnn.ABNN, theirs: Any) -> list[list[str]]:
    """Two rows: all that is held, and what is held beyond the network itself."""
    plain = storages(net)
    both = storages(theirs.final_model), storages(bnn)
    rows = []
    for label, known in (("in total", {}), ("beyond the network", plain)):
        their_bytes, our_bytes = (
            sum(size for place, size in held.items() if place not in known) for held in both
        )
        cells = (f"{their_bytes / KIB:.0f}", f"{our_bytes / KIB:.0f}")
        rows.append([label, *cells, f"{their_bytes / our_bytes:.1f}"])
    return rows


def storages(net: nn.Module) -> dict[int, int]:
    """Bytes of the memory of all tensors, by its address."""
    tensors: Iterable[Tensor] = (*net.parameters(), *net.buffers())
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


if __name__ == "__main__":
    main()
