"""ResNet-20 on CIFAR-10 with SVHN and textures as OOD: single model, temperature scaling, ABNN.

    python benchmarks/cifar10_svhn.py            # three seeds, as many steps as 2 epochs of 50k
    python benchmarks/cifar10_svhn.py --steps 50 --seeds 1 --limit 500   # a quick look

Real data and a real checkpoint are read from ../shared (or --shared). The test images are split:
1,000 serve as validation data, for the temperature and for choosing the fit by NLL; the other 4,000
are tested on. OOD data is never used to choose anything. Fits resume from the run directory and the
logits of every member are kept there, so an interrupted benchmark goes on where it was.

It ends with a report.html over all seeds. Corruptions and the number of draws are looked at with
the first seed, on the first 500 test images alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

import abnn
from abnn.baselines import Single, TemperatureScaling
from abnn.evaluate import Predictor
from abnn.files import write
from abnn.progress import Progress
from abnn.report import write_report
from abnn.zoo import cifar_resnet, load_weights

ROOT = Path(__file__).resolve().parents[1]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PAPER = abnn.Recipe.load("cifar10-resnet50")
# What the paper leaves to be found for another network, each with a learning rate that falls to 0.
CANDIDATES = [
    PAPER.with_(schedule="polynomial", lr=lr, alpha=alpha, prior=abnn.RandomPrior(weight=eta))
    for alpha in (0.01, 0.05)
    for eta in (1.0, 6.0)
    for lr in (0.02, 0.05)
]
MODES, DRAWS = 4, 8
CORRUPTIONS = ("gaussian_noise", "defocus_blur", "contrast", "jpeg")
CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
)  # fmt: skip


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
    scaled = TemperatureScaling(net).fit(loaders["val"])
    runs: dict[Path, int] = {}

    for name in args.recipes:
        recipe = PAPER if name == "paper" else choose(net, loaders, args)
        recipe, label = recipe.with_(steps=args.steps), f"ABNN, {name}"
        for seed in range(args.seeds):
            run = args.runs / f"{describe(recipe)}-{args.steps}-seed{seed}"
            runs[run] = seed
            bnn = abnn.convert(net, modes=MODES, alpha=recipe.alpha or 0.0)
            result = abnn.fit(
                bnn, loaders["train"], recipe, seed=seed, run=run, snapshots=10, progress=True
            )
            stored = member_logits(run / f"logits-{args.limit}.safetensors", bnn, loaders, seed)
            known = {dataset: stored[dataset] for dataset in ood}
            milliseconds = time_of(bnn, loaders["val"])
            members = Members(bnn, milliseconds)
            members_scaled = TemperatureScaling(members).fit(stored["val"])
            members_scaled.milliseconds = milliseconds  # type: ignore[assignment]
            plain: dict[str, Predictor] = {"single": Single(net), "temperature": scaled}
            for method, predictor in plain.items():
                evaluation = evaluated(predictor, loaders["test"], ood, run, method)
                if method not in rows:  # it is the same beside every fit
                    add(rows, method, evaluation)
            for suffix, predictor in (
                ("", members),
                (", temperature", members_scaled),
                (", one mode", Members(bnn, milliseconds, DRAWS)),
            ):
                name = f"{label}{suffix}"
                add(rows, name, evaluated(predictor, stored["test"], known, run, name))
            if seed == 0:
                look_closer(net, bnn, run, label, loaders)
            print(f"{label}, seed {seed}: fit {result.seconds:.0f} s\n\n{table(rows)}", flush=True)
    page = write_report(list(runs), args.runs / "report.html", title="CIFAR-10, ResNet-20")
    print(f"Report: {page}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")


def time_of(bnn: abnn.ABNN, loader: Batches) -> float:
    """Milliseconds of a prediction of one image."""
    (x, _) = next(iter(loader))
    bnn.predict(x, DRAWS)
    started = time.perf_counter()
    bnn.predict(x, DRAWS)
    return 1000 * (time.perf_counter() - started) / len(x)


def evaluated(
    predictor: Predictor, loader: Iterable[Any], ood: Mapping[str, Any], run: Path, name: str
) -> abnn.Evaluation:
    """The figures of a method, whose record goes into the run."""
    place = run / "evaluation" / name
    record = abnn.Record(place, classes=CLASSES, mean=MEAN, std=STD)
    return abnn.evaluate(predictor, loader, ood, record=record)


def look_closer(
    net: nn.Module, bnn: abnn.ABNN, run: Path, label: str, loaders: dict[str, Batches]
) -> None:
    """Corruptions, the number of draws and the way of the modes, for the report."""
    some = [(x[:128], y[:128]) for x, y in islice(loaders["test"], 4)]
    of_abnn = abnn.Recorded(run / "evaluation" / label)
    corrupted = partial(
        abnn.robustness, loader=some, corruptions=CORRUPTIONS, mean=MEAN, std=STD, progress=True
    )
    abnn.Recorded(run / "evaluation/single").add(corrupted(Single(net)))
    of_abnn.add(corrupted(bnn, samples=2))
    of_abnn.add(bnn.samples_curve(loaders["val"], max_samples=8, progress=True))
    of_abnn.add(abnn.trajectory(bnn, run, some[:3], progress=True))


class Members(nn.Module):
    """The predictor of an ABNN whose members' logits, `[B, S, K]`, stand beside the images."""

    def __init__(self, bnn: abnn.ABNN, milliseconds: float, first: int | None = None) -> None:
        super().__init__()
        self.first = first
        self.modes = MODES if first is None else 1
        # What the ABNN would cost, of which this only repeats the answers.
        share = self.modes / MODES
        self.num_added_parameters = round(share * bnn.num_added_parameters)
        self.num_added_bytes = round(share * bnn.num_added_bytes)
        self.fit_seconds, self.milliseconds = bnn.fit_seconds, share * milliseconds

    def predict(self, x: tuple[Tensor, Tensor], keep_members: bool = False) -> abnn.Prediction:
        logits, _ = x
        return abnn.Prediction.from_logits(logits[:, : self.first].movedim(1, 0), keep_members)


def member_logits(
    file: Path, bnn: abnn.ABNN, loaders: dict[str, Batches], seed: int
) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
    """For every dataset but the training one, all members' logits, the images and the labels."""
    names = [name for name in loaders if name != "train"]
    if not file.exists():
        draws = [abnn.Draw(seed, mode, index) for mode in range(MODES) for index in range(DRAWS)]
        tensors = {}
        with torch.no_grad(), Progress(len(names), "evaluate", True) as bar:
            for done, name in enumerate(names, start=1):
                parts = [
                    torch.cat([bnn.logits(x, draws[i : i + 4]) for i in range(0, len(draws), 4)])
                    for x, _ in loaders[name]
                ]
                tensors[name] = torch.cat(parts, dim=1).movedim(0, 1).contiguous()
                bar.update(done, name)
        write(file, safetensors.torch.save(tensors))
    tensors = safetensors.torch.load_file(file)
    return {
        name: list(
            zip(
                *(t.split(500) for t in (tensors[name], loaders[name].x, loaders[name].y)),
                strict=True,
            )
        )
        for name in names
    }


def choose(
    net: torch.nn.Module, loaders: dict[str, Batches], args: argparse.Namespace
) -> abnn.Recipe:
    """The candidate whose short fit has the least NLL on the validation images."""
    scores: dict[abnn.Recipe, float] = {}
    for candidate in CANDIDATES:
        recipe = candidate.with_(steps=min(args.search_steps, args.steps))
        run = args.runs / f"choose-{describe(recipe)}-{recipe.steps}"
        bnn = abnn.convert(net, modes=MODES, alpha=recipe.alpha or 0.0)
        result = abnn.fit(
            bnn, loaders["train"], recipe, run=run, validation=loaders["val"], progress=True
        )
        assert result.whole is not None
        scores[candidate] = result.whole.nll
        print(f"choose: {describe(recipe)}: validation NLL {result.whole.nll:.4f}", flush=True)
    best = min(scores, key=lambda candidate: scores[candidate])
    print(f"chosen: {describe(best)}\n", flush=True)
    return best


def describe(recipe: abnn.Recipe) -> str:
    eta = recipe.prior.weight if recipe.prior else 0
    return f"{recipe.schedule}-lr{recipe.lr:g}-alpha{recipe.alpha:g}-eta{eta:g}"


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
