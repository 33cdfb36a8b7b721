"""Trainings that tests/test_train_together.py runs alone and under torchrun, and compares.

`train_together.py FOLDER CASE...` leaves in FOLDER what every process ended with. A case is
"equal", "errors", "straight" or "killed".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import abnn
from abnn import baselines
from abnn.distributed import world
from fit_together import Breaking, Dying, Fails, conv, error_of, images, rows
from fitting import data
from nets import mlp

Kept = dict[str, Tensor]


def kept(model: nn.Module, loader: Any, **arguments: Any) -> Kept:
    """What a training ends with."""
    result = abnn.train(model, loader, **{"epochs": 2, "lr": 0.05, "progress": False} | arguments)
    figures = {"validation": torch.tensor(result.validation)} if result.validation else {}
    return model.state_dict() | {"losses": result.losses} | figures


def over_rows(norm: type[nn.Module] = nn.BatchNorm1d, **arguments: Any) -> Kept:
    return kept(mlp(norm), DataLoader(rows(), 8, shuffle=True), **arguments)


def over_images(norm: nn.Module) -> Kept:
    return kept(conv(norm), DataLoader(images(), 8))


def fused() -> Kept:
    from timm.layers.norm_act import BatchNormAct2d

    return over_images(BatchNormAct2d(8, act_layer=nn.GELU))


def of_a_method(build: Callable[[nn.Module], baselines.Method]) -> Kept:
    torch.manual_seed(5)
    return kept(build(mlp()), data())


def segmentation() -> Kept:
    """Void pixels, most of them in the first rows, and none counts in the last batch's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1))
    x, y = torch.randn(5, 2, 6, 6), torch.randint(3, (5, 6, 6))
    some, few = y.clone(), y.clone()
    some[:2, 1:], few[:2] = 255, 255
    return kept(net, [(x, some), (x + 1, few)], ignore_index=255)


def soft() -> Kept:
    return kept(mlp(), [(x, F.one_hot(y, 3) * 0.9 + 0.1 / 3) for x, y in data(size=7)])


def own_weights() -> Kept:
    net = mlp()
    dict(net.named_parameters())["0.bias"].data += world().rank
    return kept(net, data())


def unused() -> Kept:
    """A part of the network that no loss depends on has no gradient, so no decay either."""
    net = mlp()
    net.register_module("spare", nn.Linear(2, 2))
    net.forward = lambda x: nn.Sequential(*list(net)[:4])(x)  # type: ignore[method-assign]
    return kept(net, data(), weight_decay=0.1)


EQUAL: dict[str, Callable[[], Kept]] = {
    "batch norm": over_rows,
    "layer norm with adamw": partial(over_rows, nn.LayerNorm, optimizer="adamw", lr=0.01),
    "layer norm": partial(over_rows, nn.LayerNorm),
    "cumulative statistics": lambda: over_images(nn.BatchNorm2d(8, momentum=None)),
    "no statistics": lambda: over_images(nn.BatchNorm2d(8, track_running_stats=False)),
    "timm's batch norm": fused,
    "void labels": segmentation,
    "probabilities as labels": soft,
    "weights of their own": own_weights,
    "unused weights": unused,
    "validation": partial(over_rows, validation=data(3)),
    "swag": lambda: of_a_method(
        lambda net: baselines.SWAG(net, rank=3, snapshots=4, start=0.2, members=3)
    ),
    "tradi": lambda: of_a_method(lambda net: baselines.TRADI(net, features=4, steps=False)),
}

# What draws random numbers in a step ends alike on all processes, but not as in one.
ALIKE: dict[str, Callable[[], Kept]] = {
    "dropout": lambda: kept(nn.Sequential(nn.Dropout(), mlp()), data()),
    "mimo": lambda: of_a_method(lambda net: baselines.MIMO(net, 2, rho=0.5)),
    "packed": lambda: of_a_method(lambda net: baselines.PackedEnsembles(net, 2, alpha=1.5)),
    "vi": lambda: of_a_method(lambda net: baselines.VIBNN(net, examples=48)),
}


def bad(change: Callable[[Tensor, Tensor], Any]) -> Callable[[], Any]:
    """Data of which one row of the last process is changed, in the third batch."""

    def train() -> Any:
        batches = data()
        change(*batches[2])
        return kept(mlp(), batches)

    return train


ERRORS: dict[str, Callable[[], Any]] = {
    "labels": bad(lambda _, y: y[-1:].fill_(7)),
    "nan": bad(lambda x, _: x[-1:].fill_(float("nan"))),
    "damaged": lambda: kept(mlp(), DataLoader(Breaking(), 8)),
    "in the network": lambda: kept(Fails(), data()),
    "too small": lambda: kept(mlp(nn.LayerNorm), DataLoader(rows(9), 8)),
    "recipe": lambda: kept(mlp(), data(), lr=0.05 + world().rank),
    "network": lambda: kept(mlp(width=8 + world().rank), data()),
    "order": lambda: kept(mlp(), data()[:: -1 if world().rank else 1]),
    "length": lambda: kept(mlp(), iter(data()[: 6 - world().rank]), steps=9),
}


def dying(folder: Path, how: str) -> Kept:
    """Run directories of their own, as on hosts that share no disk."""
    run = folder / how / str(world().rank)
    run.mkdir(parents=True, exist_ok=True)
    return kept(mlp(), Dying(run.parent / "marked", how), run=run, checkpoint_seconds=0)


def main(folder: Path, *cases: str) -> None:
    torch.set_num_threads(1)
    rank = world().rank
    if "equal" in cases:
        done = {name: case() for name, case in (EQUAL | ALIKE).items()}
        torch.save(done, folder / f"equal{rank}.pt")
    if "errors" in cases:
        errors = {name: error_of(case) for name, case in ERRORS.items()}
        (folder / f"errors{rank}.json").write_text(json.dumps(errors))
    for case in {"straight", "killed"} & set(cases):
        torch.save(dying(folder, case), folder / f"{case}{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
