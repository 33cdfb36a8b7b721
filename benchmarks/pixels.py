"""Memory and time of an evaluation over the number of pixels, and its distance from the exact one.

    python benchmarks/pixels.py                     # 10^6, 10^7 and 10^8 pixels; some minutes
    python benchmarks/pixels.py --pixels 1e6 1e7

Each runs in a process of its own. Frames of 11 classes are made as they are read, half of them
labelled and half out-of-distribution. "exact" compares with scikit-learn on all scores, where they
fit into memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import abnn
from harness import say, table, versions

CLASSES, HEIGHT, WIDTH = 11, 360, 480
EXACT_UP_TO = 10**7


class Softmax:
    """The predictor whose inputs are logits."""

    def predict(self, x: Tensor) -> abnn.Prediction:
        return abnn.Prediction.from_logits(x.unsqueeze(0))


def frames(pixels: int, spread: float, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(round(pixels / (HEIGHT * WIDTH))):
        x = spread * torch.randn(1, CLASSES, HEIGHT, WIDTH, generator=generator)
        yield x, (x + torch.randn(x.shape, generator=generator)).argmax(1)


def known(pixels: int) -> Iterator[tuple[Tensor, Tensor]]:
    return frames(pixels // 2, 3.0, 0)


def unknown(pixels: int) -> Iterator[tuple[Tensor, Tensor]]:
    return frames(pixels // 2, 2.0, 1)


def measure(pixels: int, queue: multiprocessing.Queue[str]) -> None:
    torch.set_num_threads(1)
    started = time.perf_counter()
    result = abnn.evaluate(Softmax(), known(pixels), {"far": unknown(pixels)}, progress=False)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    auroc = result.ood["far"]["msp"].auroc
    row = {"MB": f"{peak:.0f}", "s": f"{seconds:.0f}", "AUROC %": f"{auroc:.6f}"}
    row["bound"] = f"{result.auroc_bound:.1e}"
    if pixels <= EXACT_UP_TO:
        id_scores, ood_scores = (
            torch.cat([1 - x.softmax(1).amax(1).flatten() for x, _ in made])
            for made in (known(pixels), unknown(pixels))
        )
        truth = torch.cat([torch.zeros(len(id_scores)), torch.ones(len(ood_scores))])
        exact = 100 * roc_auc_score(truth, torch.cat([id_scores, ood_scores]))
        row["off"] = f"{abs(auroc - exact):.1e}"
    queue.put(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pixels", nargs="+", type=float, default=[1e6, 1e7, 1e8])
    context = multiprocessing.get_context("spawn")
    print(versions("scikit-learn"))
    rows = []
    for pixels in map(int, parser.parse_args().pixels):
        queue = context.Queue()
        process = context.Process(target=measure, args=(pixels, queue))
        process.start()
        row = json.loads(queue.get())
        process.join()
        rows.append(
            [f"{pixels:.0e}", *(row.get(k, "-") for k in ("MB", "s", "AUROC %", "bound", "off"))]
        )
        say(" ".join(rows[-1]))
    print(table(["pixels", "peak MB", "s", "AUROC %", "bound", "off"], rows))


if __name__ == "__main__":
    main()
