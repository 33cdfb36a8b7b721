"""How long 32 draws of a network take, over as many passes of its fastest plain form.

    python benchmarks/sampling.py [--networks ResNet-20] [--batches 1 16 128] [--rounds 15]

The fastest plain form has its batch norms folded into the convolutions and runs channels last, in
batches of the size that is fastest for it, found beforehand. The loop is what one would write
without a library: the plain networks of all draws, kept, and called one after the other.
"""

from __future__ import annotations

import argparse

import torch

import abnn
from harness import interleaved, milliseconds, ratio, say, table, versions
from plain_forms import NETWORKS, fastest_form, in_batches, loop, network

MODES, SAMPLES = 4, 8
ROWS = (8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="", help="part of a name; default: all")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = []
    for name in NETWORKS:
        if args.networks in name:
            rows += [measure(name, batch, args.rounds) for batch in args.batches]
    header = (
        "network",
        "batch",
        "draws",
        "plan",
        "plain ms",
        "abnn ms",
        "abnn / plain",
        "A/A",
        "loop / abnn",
    )
    print(f"Sampling: {versions('timm', 'torchvision')}\n")
    print(table(header, rows))


def measure(name: str, batch: int, rounds: int) -> list[str]:
    """One row: the fastest plain form, twice, ABNN, and the loop for a batch of one."""
    net, pixels = network(name)
    x = torch.randn(batch, 3, pixels, pixels)
    # Hundreds of images of 224 px take minutes; fewer draws have the same ratio.
    samples = SAMPLES if batch * pixels**2 < 2**18 else 1
    draws = MODES * samples
    if batch * draws * pixels**2 > 2**22:
        rounds = min(rounds, 5)
    bnn = abnn.convert(net, modes=MODES)
    bnn.predict(x, samples)  # from here on freed memory is kept, for the plain form as well
    plain, images = fastest_form(net), torch.cat([x] * draws)
    say(f"{name}, batch {batch}: which batch size is fastest for the plain form?")
    most = min(len(images), 2**22 // pixels**2)
    sizes = {rows: in_batches(plain, images, rows) for rows in ROWS if rows <= most}
    found = interleaved({str(rows): run for rows, run in sizes.items()}, 3, warm_up=1)
    best = min(sizes, key=lambda rows: min(found[str(rows)]))
    variants = {
        "plain": sizes[best],
        "abnn": lambda: bnn.predict(x, samples),
        "A/A": sizes[best],
    }
    if batch == 1:
        variants["loop"] = loop(bnn, x, samples)
    say(f"{name}, batch {batch}: {rounds} rounds")
    seconds = interleaved(variants, rounds)
    plan = bnn.plan(x, samples)
    say(f"{name}, batch {batch}: {ratio(seconds, 'abnn', 'plain'):.2f} of the plain form")
    return [
        name,
        str(batch),
        str(draws),
        f"{plan.draws} x {plan.examples} (plain {best})",
        milliseconds(seconds, "plain"),
        milliseconds(seconds, "abnn"),
        f"{ratio(seconds, 'abnn', 'plain'):.2f}",
        f"{ratio(seconds, 'A/A', 'plain'):.2f}",
        f"{ratio(seconds, 'loop', 'abnn'):.1f}" if batch == 1 else "",
    ]


if __name__ == "__main__":
    main()
