"""ResNet-20 on CIFAR-10 with SVHN and textures as OOD: single model, temperature scaling, ABNN.

    python benchmarks/cifar10_svhn.py            # three seeds, as many steps as 2 epochs of 50k
    python benchmarks/cifar10_svhn.py --steps 50 --seeds 1 --limit 500   # a quick look

Real data and a real checkpoint are read from ../shared (or --shared). The test images are split:
1,000 serve as validation data, for the temperature and for choosing the learning rate and the
random prior by NLL; the other 4,000 are tested on. OOD data is never used to choose anything.
Fits resume from the run directory, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import abnn
from abnn.artifact import write
from abnn.baselines import Single, TemperatureScaling
from abnn.evaluate import Predictor
from abnn.zoo import cifar_resnet, load_weights

ROOT = Path(__file__).resolve().parents[1]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PAPER = abnn.Recipe.load("cifar10-resnet50")
CANDIDATES = [
    (lr, weight) for weight in (1.0, 6.0) for lr in (0.0057, 0.02, 0.05, 0.1)
]  # learning rate, weight of the random prior


class Batches:
    """Batches of images in memory, shuffled and flipped for training."""

    def __init__(self, x: np.ndarray, y: np.ndarray, train: bool = False, size: int = 128) -> None:
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
        images = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255
        self.x = ((images - mean) / std).contiguous(memory_format=torch.channels_last)
        self.y, self.train, self.size = torch.from_numpy(y), train, size

    def __len__(self) -> int:
        return len(self.x) // self.size if self.train else -(-len(self.x) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.x)) if self.train else torch.arange(len(self.x))
        for i in range(len(self)):
            rows = order[i * self.size : (i + 1) * self.size]
            x = self.x[rows]
            if self.train:
                flip = torch.rand(len(x)) < 0.5
                x[flip] = x[flip].flip(3)
            yield x.contiguous(memory_format=torch.channels_last), self.y[rows]


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    loaders = load_data(args)
    net = cifar_resnet(20)
    load_weights(net, args.shared / "weights/resnet20_cifar10.th")
    net = net.to(memory_format=torch.channels_last).eval()
    ood = {name: loaders[name] for name in ("svhn", "textures")}

    rows: dict[str, list[dict[str, float]]] = {}
    add(rows, "single", abnn.evaluate(Single(net), loaders["test"], ood))
    scaled = TemperatureScaling(net).fit(loaders["val"])
    add(rows, "temperature", abnn.evaluate(scaled, loaders["test"], ood))

    for name in args.recipes:
        recipe = PAPER if name == "paper" else choose(net, loaders, args)
        recipe, label = recipe.with_(steps=args.steps), f"ABNN, {name}"
        for seed in range(args.seeds):
            bnn = abnn.convert(net, modes=4, alpha=0.01)
            run = args.runs / f"lr{recipe.lr:g}-eta{eta(recipe):g}-{args.steps}-seed{seed}"
            result = abnn.fit(bnn, loaders["train"], recipe, seed=seed, run=run, progress=True)
            one = {"modes": [0], "seed": seed}
            for suffix, predictor, options in (
                ("", bnn, {"seed": seed}),
                (", one mode", bnn, one),
                (", temperature", TemperatureScaling(bnn), {}),
            ):
                kind = suffix.replace(",", "").replace(" ", "-")
                file = run / f"evaluation-{args.limit}{kind}.json"
                if isinstance(predictor, TemperatureScaling) and not file.exists():
                    predictor.fit(loaders["val"])
                figures = evaluation(file, predictor, loaders["test"], ood, options)
                add(rows, f"{label}{suffix}", figures)
            print(f"{label}, seed {seed}: fit {result.seconds:.0f} s\n\n{table(rows)}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")


def evaluation(
    file: Path,
    predictor: Predictor,
    test: Batches,
    ood: dict[str, Batches],
    options: dict[str, Any],
) -> abnn.Evaluation:
    """Evaluate once; a benchmark that goes on reads what it has."""
    if not file.exists():
        result = abnn.evaluate(predictor, test, ood, progress=True, **options)
        write(file, result.to_json().encode())
    return abnn.Evaluation.from_json(file.read_text())


def choose(
    net: torch.nn.Module, loaders: dict[str, Batches], args: argparse.Namespace
) -> abnn.Recipe:
    """The candidate whose short fit of two modes has the least NLL on the validation images."""
    best: tuple[float, abnn.Recipe] | None = None
    for lr, weight in CANDIDATES:
        prior = abnn.RandomPrior(weight=weight)
        recipe = PAPER.with_(steps=min(args.search_steps, args.steps), lr=lr, prior=prior)
        bnn = abnn.convert(net, modes=2, alpha=0.01)
        run = args.runs / f"choose-lr{lr:g}-eta{weight:g}-{recipe.steps}"
        abnn.fit(bnn, loaders["train"], recipe, run=run, progress=True)
        nll = evaluation(run / "validation.json", bnn, loaders["val"], {}, {}).nll
        print(f"choose: lr {lr:g}, eta {weight:g}: validation NLL {nll:.4f}", flush=True)
        if best is None or nll < best[0]:
            best = (nll, recipe)
    assert best is not None
    print(f"chosen: lr {best[1].lr:g}, eta {eta(best[1]):g}\n", flush=True)
    return best[1]


def eta(recipe: abnn.Recipe) -> float:
    return recipe.prior.weight if recipe.prior else 0.0


def add(rows: dict[str, list[dict[str, float]]], label: str, e: abnn.Evaluation) -> None:
    figures = {"acc": e.accuracy, "nll": e.nll, "ece": e.ece, "brier": e.brier}
    for name, scores in e.ood.items():
        msp = scores["msp"]
        figures |= {f"{name} auroc": msp.auroc, f"{name} aupr": msp.aupr}
        figures |= {f"{name} fpr95": msp.fpr95}
        figures |= {f"{name} auroc {s}": scores[s].auroc for s in ("entropy", "max_logit")}
    rows.setdefault(label, []).append(figures)


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """Mean and, over several seeds, standard deviation of every figure."""
    names = list(next(iter(rows.values()))[0])
    width = max(map(len, rows)) + 2
    lines = []
    for part in (names[:4], *(names[i : i + 5] for i in range(4, len(names), 5))):
        lines.append(" " * width + "".join(f"{name:>24}" for name in part))
        for label, runs in rows.items():
            cells = []
            for name in part:
                values = [run[name] for run in runs]
                digits = 4 if name in ("nll", "brier") else 2
                spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.{digits}f}{spread}".rjust(24))
            lines.append(label.ljust(width) + "".join(cells))
        lines.append("")
    return "\n".join(lines)


def load_data(args: argparse.Namespace) -> dict[str, Batches]:
    files = {
        n: args.shared / f"data/{n}.npz" for n in ("cifar10_small", "svhn_small", "textures_32")
    }
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        sys.exit(f"Missing: {', '.join(missing)}. Point --shared at the folder that holds data/.")
    cifar, svhn, textures = (np.load(path) for path in files.values())
    order = np.random.default_rng(0).permutation(len(cifar["x_test"]))
    val, test = order[:1000], order[1000:][: args.limit]
    return {
        "train": Batches(cifar["x_train"], cifar["y_train"], train=True),
        "val": Batches(cifar["x_test"][val], cifar["y_test"][val]),
        "test": Batches(cifar["x_test"][test], cifar["y_test"][test]),
        "svhn": Batches(svhn["x_test"][: args.limit], svhn["y_test"][: args.limit]),
        "textures": Batches(textures["x_test"][: args.limit], textures["y_test"][: args.limit]),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/cifar10_svhn")
    parser.add_argument("--steps", type=int, default=782, help="2 epochs of 50,000 images")
    parser.add_argument("--search-steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=None, help="images of every test set")
    parser.add_argument("--recipes", nargs="+", default=["paper", "chosen"], metavar="NAME")
    parser.add_argument("--out", type=Path, default=None, help="write all figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s; torch {torch.__version__}, abnn {abnn.__version__}")
