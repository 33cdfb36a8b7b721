"""Anytime sampling on a real ResNet-20: how few forward passes do as well as 64 of every input?

    python benchmarks/auto_sampling.py             # three fits of 100 steps, all test images
    python benchmarks/auto_sampling.py --seeds 1 --limit 500   # a quick look

Real data and a real checkpoint are read from ../shared (or --shared). Four modes are fitted on
9,000 training images. The other 1,000, as they are and under Gaussian noise, show how large a
tolerance does no harm, without a test or OOD image. The fit and the logits of all 64 members are
kept in the run directory, so what was computed once is not computed again. Rows marked "replayed"
run the rule on those stored logits, which are the ones that `predict` would get; the others run
`predict` itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import abnn
from abnn.anytime import sample_until
from abnn.draws import all_draws
from abnn.files import write
from abnn.progress import Progress
from abnn.table import aligned
from abnn.zoo import cifar_resnet, load_weights
from cifar10_svhn import PAPER, ROOT, Batches

MODES, DRAWS = 4, 16
NOISE = 0.44  # of normalised pixels; a tenth of the range from black to white
TOLERANCES = (0.005, 0.01, 0.02, 0.05, 0.1)


def main() -> None:
    args = arguments()
    data = load_data(args)
    everything: list[dict[str, dict[str, float]]] = []
    for seed in range(args.seeds):
        bnn = fitted(args, data["train"], seed)
        if seed == 0:
            held_out(args, bnn, data)
        if args.held_out_only:
            return
        everything.append(compared(args, bnn, data, seed))
        print(f"\nFit with seed {seed}\n{table(everything[-1])}", flush=True)
    print(f"\n{over_fits(everything)}")
    print(f"\n{speed(bnn, {name: data[name] for name in ('test', 'svhn')})}")
    if args.out:
        args.out.write_text(json.dumps(everything, indent=2) + "\n")


def compared(
    args: argparse.Namespace, bnn: abnn.ABNN, data: dict[str, Batches], seed: int
) -> dict[str, dict[str, float]]:
    """A row for every rule; but for the first fit, only of what the target speaks of."""
    fit = "" if seed == 0 else f"-fit{seed}"
    members = {name: stored(args, bnn, name, data[name], fit=fit) for name in ("test", "svhn")}
    replayed = {name: [(logits, data[name].y)] for name, logits in members.items()}
    loaders = {name: data[name] for name in ("test", "svhn")}
    rows = {"S=64": figures(Replay(samples=16), replayed)}
    live: dict[str, dict[str, Any]] = {"auto": {"samples": "auto"}}
    if seed == 0:
        for L in (2, 4, 8):
            rows[f"S={L * MODES}"] = figures(Replay(samples=L), replayed)
        for tolerance in TOLERANCES:
            rows[f"auto {tolerance:g}, no pairs, replayed"] = figures(
                Replay(tolerance=tolerance), replayed
            )
        live["S=8, pairs"] = {"samples": 2, "draws": "antithetic"}
    for label, options in live.items():
        name = f"{label.replace(' ', '-')}-{args.steps}-{args.limit}{fit}.json"
        if not (args.runs / name).exists():
            write(args.runs / name, json.dumps(figures(Live(bnn, options), loaders)).encode())
        rows[label] = json.loads((args.runs / name).read_text())
    return rows


def over_fits(everything: list[dict[str, dict[str, float]]]) -> str:
    """What auto differs by from 64 members of every input: mean and spread over the fits."""
    names = ("accuracy", "nll", "ece", "auroc", "auroc epistemic")
    columns = {f"d {n}": [rows["auto"][n] - rows["S=64"][n] for rows in everything] for n in names}
    columns = {
        "share %": [100 * rows["auto"]["passes"] / rows["S=64"]["passes"] for rows in everything],
        **columns,
    }
    cells = []
    for values in columns.values():
        spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
        cells.append(f"{fmean(values):+.4f}{spread}")
    return aligned([f"{len(everything)} fits", *columns], ["auto", *cells])


class Replay:
    """Predicts from members' logits that are known already, `[N, M * L, K]`; counts passes."""

    def __init__(
        self, samples: int | None = None, tolerance: float = 0.01, stream: str = "predict"
    ) -> None:
        self.samples, self.tolerance, self.stream = samples, tolerance, stream
        self.used: list[Tensor] = []

    def predict(self, logits: Tensor) -> abnn.Prediction:
        members = logits.movedim(1, 0).unflatten(0, (MODES, DRAWS))
        if self.samples is not None:
            prediction = abnn.Prediction.from_logits(members[:, : self.samples].flatten(0, 1))
        else:
            prediction = sample_until(
                lambda rows, draws, size: replay(members, rows, draws),
                range(MODES),
                tolerance=self.tolerance,
                max_samples=DRAWS,
                stream=self.stream,
            )
        self.used.append(prediction.used_by_input())
        return prediction


def replay(members: Tensor, rows: Tensor | None, draws: Sequence[abnn.Draw]) -> Iterator[Tensor]:
    some = members if rows is None else members[:, :, rows]
    yield torch.stack([some[draw.mode, draw.index] for draw in draws])


class Live:
    """The ABNN itself; counts passes."""

    def __init__(self, bnn: abnn.ABNN, options: dict[str, Any]) -> None:
        self.bnn, self.options = bnn, options
        self.used: list[Tensor] = []

    def predict(self, x: Tensor) -> abnn.Prediction:
        prediction = self.bnn.predict(x, **self.options)
        self.used.append(prediction.used_by_input())
        return prediction


def figures(predictor: Replay | Live, loaders: dict[str, Any]) -> dict[str, float]:
    e = abnn.evaluate(predictor, loaders["test"], {"svhn": loaders["svhn"]}, progress=True)
    used, msp = torch.cat(predictor.used).double(), e.ood["svhn"]["msp"]
    return {
        "passes": used.mean().item(),
        "passes test": used[: e.n].mean().item(),
        "passes svhn": used[e.n :].mean().item(),
        "accuracy": e.accuracy,
        "nll": e.nll,
        "ece": e.ece,
        "auroc": msp.auroc,
        "fpr95": msp.fpr95,
        "auroc epistemic": e.ood["svhn"]["epistemic"].auroc,
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    whole = rows["S=64"]
    head = ["dataset", "passes", "CIFAR", "SVHN", "share %", "accuracy", "NLL", "ECE", "AUROC"]
    head += ["FPR95", "dNLL", "dECE", "dAUROC", "dAUROC epistemic"]
    lines = []
    for label, row in rows.items():
        d = {name: row[name] - whole[name] for name in row}
        lines.append(
            [
                label,
                f"{row['passes']:.1f}",
                f"{row['passes test']:.1f}",
                f"{row['passes svhn']:.1f}",
                f"{100 * row['passes'] / whole['passes']:.1f}",
                f"{row['accuracy']:.2f}",
                f"{row['nll']:.4f}",
                f"{row['ece']:.2f}",
                f"{row['auroc']:.2f}",
                f"{row['fpr95']:.2f}",
                f"{d['nll']:+.4f}",
                f"{d['ece']:+.3f}",
                f"{d['auroc']:+.3f}",
                f"{d['auroc epistemic']:+.3f}",
            ]
        )
    return aligned(head, *lines).replace("dataset", "method ", 1)


def held_out(args: argparse.Namespace, bnn: abnn.ABNN, data: dict[str, Batches]) -> None:
    """What tolerances do on training images that were not fitted on, clean and noisy.

    The noisy ones have labels and are hard, and telling them from the clean ones is a detection
    task: all that is asked of test and OOD data later can be asked of them.
    """
    sets = ("held", "noisy")
    truth = {
        name: Replay(samples=DRAWS).predict(stored(args, bnn, name, data[name], seed=1))
        for name in sets
    }
    lines = []
    for kind in ("predict", "antithetic"):
        loaders = {
            name: [(stored(args, bnn, name, data[name], stream=kind), data[name].y)]
            for name in sets
        }
        wholes: list[abnn.Evaluation] = []
        for tolerance in (None, *TOLERANCES):
            # No tolerance is all draws, the first row, which the others are compared with.
            rule = Replay(DRAWS if tolerance is None else None, tolerance or 0.0, kind)
            parts = {name: rule.predict(loaders[name][0][0]) for name in sets}
            found = [
                abnn.evaluate(rule, loaders["held"], {"noisy": loaders["noisy"]}),
                abnn.evaluate(rule, loaders["noisy"]),
            ]
            wholes = wholes or found
            lines.append(
                [
                    f"{kind.replace('predict', 'independent')} {tolerance or 'S=64'}",
                    *(f"{parts[name].used_by_input().double().mean():.1f}" for name in sets),
                    *(f"{off(parts[name], truth[name], tolerance):.1f}" for name in sets),
                    *(f"{e.nll - w.nll:+.4f}" for e, w in zip(found, wholes, strict=True)),
                    *(f"{e.ece - w.ece:+.2f}" for e, w in zip(found, wholes, strict=True)),
                    f"{_auroc(found[0]) - _auroc(wholes[0]):+.2f}",
                ]
            )
    head = ["dataset", "passes", "noisy", "off %", "noisy", "dNLL", "noisy", "dECE", "noisy"]
    print(f"{len(data['held'].y)} held-out training images, clean and noisy")
    print(aligned([*head, "dAUROC"], *lines).replace("dataset", "method ", 1), flush=True)


def off(auto: abnn.Prediction, truth: abnn.Prediction, tolerance: float | None) -> float:
    """Of the inputs that stopped early, how many are off by more than the tolerance, in percent."""
    stopped = auto.used_by_input() < MODES * DRAWS
    far = (auto.probs - truth.probs).abs().amax(1) > (tolerance or 0)
    return 100 * (far & stopped).sum().item() / max(1, int(stopped.sum()))


def _auroc(evaluation: abnn.Evaluation) -> float:
    return evaluation.ood["noisy"]["msp"].auroc


def speed(bnn: abnn.ABNN, loaders: dict[str, Batches]) -> str:
    """Seconds of the first batches of each data set, auto against 64 members."""
    seconds = {}
    for samples in (DRAWS, "auto"):
        started = time.perf_counter()
        for loader in loaders.values():
            for (x, _), _ in zip(loader, range(2), strict=False):
                bnn.predict(x, samples=samples)
        seconds[samples] = time.perf_counter() - started
    share = seconds["auto"] / seconds[DRAWS]
    return f"time of samples='auto' over that of S=64, 4 batches of 128: {share:.2f}"


def fitted(args: argparse.Namespace, train: Batches, seed: int = 0) -> abnn.ABNN:
    net = cifar_resnet(20)
    load_weights(net, args.shared / "weights/resnet20_cifar10.th")
    net = net.to(memory_format=torch.channels_last).eval()
    run = args.runs / (f"fit-{args.steps}" if seed == 0 else f"fit-{args.steps}-seed{seed}")
    if not (run / "modes.safetensors").exists():
        torch.manual_seed(seed)
        bnn = abnn.convert(net, modes=MODES, alpha=PAPER.alpha or 0.0)
        abnn.fit(bnn, train, PAPER.with_(steps=args.steps), seed=seed, run=run, progress=True)
    return abnn.load(run, net)


def stored(
    args: argparse.Namespace,
    bnn: abnn.ABNN,
    name: str,
    data: Batches,
    seed: int = 0,
    stream: str = "predict",
    fit: str = "",
) -> Tensor:
    """The logits of all members, `[N, S, K]`, from the run directory if they are there."""
    kind = "" if stream == "predict" else f"-{stream}"
    file = args.runs / f"{name}-{args.steps}-{args.limit}-seed{seed}{kind}{fit}.safetensors"
    if not file.exists():
        draws, parts = all_draws(range(MODES), DRAWS, seed, stream), []
        with torch.no_grad(), Progress(len(data), f"members on {name}", True) as bar:
            for done, (x, _) in enumerate(data, start=1):
                some = [bnn.logits(x, draws[i : i + 4]) for i in range(0, len(draws), 4)]
                parts.append(torch.cat(some).movedim(0, 1))
                bar.update(done)
        write(file, safetensors.torch.save({"logits": torch.cat(parts).contiguous()}))
    return safetensors.torch.load_file(file)["logits"]


def load_data(args: argparse.Namespace) -> dict[str, Batches]:
    cifar, svhn = (np.load(args.shared / f"data/{n}.npz") for n in ("cifar10_small", "svhn_small"))
    order = np.random.default_rng(0).permutation(len(cifar["x_train"]))
    held, train = order[:1000], order[1000:]
    n = args.limit
    noisy = Batches(cifar["x_train"][held], cifar["y_train"][held])
    g = torch.Generator().manual_seed(0)
    noisy.x = noisy.x + NOISE * torch.randn(noisy.x.shape, generator=g)
    return {
        "noisy": noisy,
        "train": Batches(cifar["x_train"][train], cifar["y_train"][train], train=True),
        "held": Batches(cifar["x_train"][held], cifar["y_train"][held]),
        "test": Batches(cifar["x_test"][:n], cifar["y_test"][:n]),
        "svhn": Batches(svhn["x_test"][:n], svhn["y_test"][:n]),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/auto_sampling")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3, help="fits to compare on test images")
    parser.add_argument("--limit", type=int, default=None, help="images of either test set")
    parser.add_argument("--held-out-only", action="store_true", help="no test or OOD image")
    parser.add_argument("--out", type=Path, default=None, help="write all figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
