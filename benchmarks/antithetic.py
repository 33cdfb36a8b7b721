"""Antithetic draws on a real ResNet-20: how much less do the figures of a prediction vary by seed?

    python benchmarks/antithetic.py      # takes the fit of benchmarks/auto_sampling.py

For as many draws, the variance over seeds of every figure of the first test images (no label is
looked at) with independent draws, over that with antithetic pairs. Above 1, pairs are better.
"""

from __future__ import annotations

import torch
from torch import Tensor

import abnn
from abnn.progress import Progress
from abnn.table import aligned
from auto_sampling import arguments, fitted, load_data

FIGURES = ("probs", "total", "aleatoric", "epistemic", "max_logit", "energy")
IMAGES, SEEDS = 200, 16


def main() -> None:
    args = arguments()
    data = load_data(args)
    bnn, x = fitted(args, data["train"]), data["test"].x[:IMAGES]
    rows = []
    for L in (2, 4):
        independent, pairs = variances(bnn, x, L, "independent"), variances(bnn, x, L, "antithetic")
        ratios = (independent[name] / pairs[name] for name in FIGURES)
        rows.append([str(L), *(f"{ratio:.2f}" for ratio in ratios)])
    print(f"variance of independent over that of antithetic draws, {IMAGES} images, {SEEDS} seeds")
    print(aligned(["draws a mode", *FIGURES], *rows))


def variances(bnn: abnn.ABNN, x: Tensor, L: int, draws: str) -> dict[str, float]:
    with Progress(SEEDS, f"{L} {draws} draws", True) as bar:
        runs = []
        for seed in range(SEEDS):
            runs.append(bnn.predict(x, samples=L, seed=seed, draws=draws))  # type: ignore[arg-type]
            bar.update(seed + 1)
    return {
        name: torch.stack([getattr(run, name) for run in runs]).double().var(0).mean().item()
        for name in FIGURES
    }


if __name__ == "__main__":
    main()
