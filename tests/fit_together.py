"""Fits that tests/test_distributed.py runs alone and under torchrun, and compares.

`fit_together.py FOLDER CASE...` leaves in FOLDER what every process ended with. A case is "equal",
"errors", "predict", or how a process dies and what is split, as "killed data".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import abnn
from abnn.distributed import shard, world
from fitting import banks, data
from nets import TimeFirst, cnn, mlp
from predict_together import PREDICT_ERRORS, PREDICTIONS, written

Kept = dict[str, Tensor]
FILES = ["preds", "preds.parquet"] if find_spec("pyarrow") else ["preds"]


def kept(bnn: abnn.ABNN, loader: Any, **arguments: Any) -> Kept:
    """What a fit ends with."""
    result = abnn.fit(bnn, loader, **{"epochs": 2, "lr": 0.05} | arguments)
    return banks(bnn) | {"losses": result.losses}


def rows(n: int = 45) -> TensorDataset:
    """With batches of 8, the last one has 5 rows."""
    x, y = (torch.cat(part)[:n] for part in zip(*data(), strict=True))
    return TensorDataset(x, y)


def images(n: int = 21) -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(2 * torch.randn(n, 3, 8, 8) + 1, torch.randint(3, (n,)))


def conv(norm: nn.Module) -> nn.Sequential:
    net = cnn()
    net[4] = norm
    return net.eval()


def segmentation(split: Any) -> Kept:
    """Void pixels, most of them in the first rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1))
    x, y = torch.randn(5, 2, 6, 6), torch.randint(3, (5, 6, 6))
    y[:2, 1:] = 255
    return kept(abnn.convert(net, modes=2), [(x, y)], steps=4, ignore_index=255, split=split)


def timm_norm(split: Any) -> Kept:
    from timm.layers.norm_act import BatchNormAct2d

    net = conv(BatchNormAct2d(8, act_layer=nn.GELU))
    return kept(abnn.convert(net, modes=2), DataLoader(images(), 8), split=split)


def over_rows(norm: type[nn.Module] = nn.BatchNorm1d, **arguments: Any) -> Callable[[Any], Kept]:
    convert = {k: arguments.pop(k) for k in ("stats", "noise", "alpha") if k in arguments}
    return lambda split: kept(
        abnn.convert(mlp(norm), modes=3, **convert),
        DataLoader(rows(), 8, shuffle=True),
        split=split,
        **arguments,
    )


def over_images(norm: Callable[[], nn.Module], **arguments: Any) -> Callable[[Any], Kept]:
    return lambda split: kept(
        abnn.convert(conv(norm()), modes=2),
        DataLoader(images(), 8),
        split=split,
        **arguments,
    )


def workers(split: Any) -> Kept:
    loader = DataLoader(images(), 8, shuffle=True, num_workers=1, persistent_workers=True)
    return kept(abnn.convert(cnn(), modes=2), loader, split=split)


def mappings(split: Any) -> Kept:
    batches = [{"input": x, "labels": y} for x, y in data()]
    return kept(abnn.convert(mlp(), modes=2), batches, split=split)


def time_first(split: Any) -> Kept:
    torch.manual_seed(0)
    net, batches = TimeFirst(), [(torch.randn(6, 5, 4), torch.randint(3, (6,))) for _ in range(3)]
    return kept(abnn.convert(net, modes=2), batches, split=split, modes_at_once=1)


def validated(split: Any) -> Kept:
    result = abnn.fit(abnn.convert(mlp(), modes=2), data(), validation=data(2), split=split)
    figures = [result.original, result.whole, *result.modes]
    return {"nll": torch.tensor([figure.nll for figure in figures if figure is not None])}


class Block(nn.Module):
    """Gives what its norm gave, which for several modes is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x.relu()))
        return y


def sharded(split: Any) -> Kept:
    """A network whose weights are spread over the processes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 3, 3), Block(), Block(), nn.Flatten(), nn.Linear(108, 3))
    bnn = shard(abnn.convert(net, modes=2))
    weights: list[Any] = [p for p in bnn.backbone.parameters() if hasattr(p, "to_local")]
    assert len(weights) == (0 if split is None else 8)  # of three convolutions and a linear layer
    assert all(p.to_local().numel() < p.numel() for p in weights)
    torch.manual_seed(5)
    probs = bnn.predict(torch.randn(5, 3, 8, 8), samples=2).probs
    loaders = DataLoader(images(), 8, shuffle=True), DataLoader(images(), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        end = kept(bnn, loaders[0], split=split, validation=loaders[1], lr=0.01)
    with TemporaryDirectory() as folder:
        bnn.save(folder)
        loaded = abnn.load(folder, net)
    return end | {"probs": probs, "loaded": loaded.bayes_layers["1.norm"].bank.gamma.detach()}


SHARED_BATCHES: dict[str, Callable[[Any], Kept]] = {
    "batch norm": over_rows(),
    "batch norm, a mode at a time": over_rows(modes_at_once=1),
    "batch norm with adamw": over_rows(optimizer="adamw", lr=0.01),
    "frozen statistics": over_rows(stats="frozen"),
    "layer norm": over_rows(nn.LayerNorm),
    "noise per example": over_rows(noise="example", alpha=0.2),
    "noise per element": over_rows(noise="element", alpha=0.2),
    "batch norm of images": over_images(lambda: nn.BatchNorm2d(8)),
    "cumulative statistics": over_images(lambda: nn.BatchNorm2d(8, momentum=None)),
    "batch norm without statistics": over_images(
        lambda: nn.BatchNorm2d(8, track_running_stats=False)
    ),
    "instance norm with statistics": over_images(
        lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    ),
    "timm's batch norm": timm_norm,
    "void labels": segmentation,
    "workers": workers,
    "mappings": mappings,
    "time first": time_first,
    "validation": validated,
    "sharded weights": sharded,
}

SHARED_MODES: dict[str, Callable[[Any], Kept]] = {
    "modes, two at a time": lambda split: kept(
        abnn.convert(mlp(), modes=4), DataLoader(rows(), 8, shuffle=True), split=split,
        modes_at_once=2,
    ),
    "modes, two for each": lambda split: kept(
        abnn.convert(mlp(), modes=4), DataLoader(rows(), 8, shuffle=True), split=split
    ),
    "modes, unequal": lambda split: kept(
        abnn.convert(mlp(), modes=3), data(), split=split, modes_at_once=1
    ),
}  # fmt: skip


# What goes wrong on one process only


class Breaking(Dataset[Any]):
    """Its last row can't be read, which is in the share of the last process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        if i == 7:
            raise OSError("row 7 is damaged")
        return torch.randn(4), i % 3


class Fails(nn.Module):
    """A network that fails on the last process, between two batch norms that all must reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training_now() and world().rank == 1:
            raise MemoryError("out of memory here")
        y: Tensor = self.last(x)
        return y

    def training_now(self) -> bool:
        return self.last.training


def bad(change: Callable[[Tensor, Tensor], Any], modes: int = 3) -> Callable[[], Any]:
    """Data of which one row of the last process is changed, in the third batch."""

    def fit() -> Any:
        batches = data()
        change(*batches[2])
        return kept(abnn.convert(mlp(), modes=modes), batches, split="data")

    return fit


def of_this_rank(
    make: Callable[[int], tuple[abnn.ABNN, Any]], split: Any, **arguments: Any
) -> Callable[[], Any]:
    return lambda: kept(*make(world().rank), split=split, **arguments)


def net_of_rank(rank: int) -> nn.Sequential:
    net = mlp()
    dict(net.named_parameters())["0.bias"].data += rank
    return net


ERRORS: dict[str, Callable[[], Any]] = {
    "labels": bad(lambda _, y: y[-1:].fill_(7)),
    "nan": bad(lambda x, _: x[-1:].fill_(float("nan"))),
    "damaged": lambda: kept(abnn.convert(mlp(), modes=1), DataLoader(Breaking(), 8)),
    "in the network": lambda: kept(abnn.convert(Fails(), modes=2), data(), split="data"),
    "one mode": of_this_rank(
        lambda rank: (abnn.convert(mlp(), modes=2), data(classes=3 + rank)), "modes"
    ),
    "too small": lambda: kept(abnn.convert(mlp(nn.LayerNorm), modes=1), DataLoader(rows(9), 8)),
    "weights": of_this_rank(lambda rank: (abnn.convert(net_of_rank(rank)), data()), None),
    "order": of_this_rank(
        lambda rank: (abnn.convert(mlp()), data()[:: -1 if rank else 1]), "data"
    ),
    "length": of_this_rank(
        lambda rank: (abnn.convert(mlp()), iter(data()[: 6 - rank])), "data", steps=9
    ),
    "few modes": lambda: kept(abnn.convert(mlp(), modes=1), data(), split="modes"),
}  # fmt: skip


def error_of(case: Callable[[], Any]) -> str:
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# A process that dies


class Dying:
    """Batches in the midst of which a process is killed, or waits to be killed; but only once."""

    def __init__(self, mark: Path, how: str) -> None:
        self.mark, self.how, self.given = mark, how, 0
        self.victim = os.environ.get("HOST", str(world().rank)) in ("1", "b")

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = data()
        for i in torch.randperm(len(batches)).tolist():
            if self.given == 8 and self.victim and not self.mark.exists():
                self.mark.touch()
                if self.how == "waiting":
                    signal.pause()
                elif self.how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
            self.given += 1
            yield batches[i]


def dying(folder: Path, how: str, split: Any) -> Kept:
    """A fit whose processes have run directories of their own, as on hosts that share no disk."""
    run = folder / f"{how} {split}" / os.environ.get("HOST", str(world().rank))
    run.mkdir(parents=True, exist_ok=True)
    loader = Dying(run.parent / "marked", how)
    bnn = abnn.convert(mlp(), modes=4)
    return kept(bnn, loader, split=split, run=run, checkpoint_seconds=0)


def main(folder: Path, *cases: str) -> None:
    torch.set_num_threads(1)
    if "equal" in cases:  # a process group of the user's own, which is left alone
        dist.init_process_group("gloo")
    rank = world().rank
    if "equal" in cases:
        done = {name: case("data") for name, case in SHARED_BATCHES.items()}
        done |= {name: case("modes") for name, case in SHARED_MODES.items()}
        torch.save(done, folder / f"equal{rank}.pt")
    if "errors" in cases:
        errors = {name: error_of(case) for name, case in ERRORS.items()}
        (folder / f"errors{rank}.json").write_text(json.dumps(errors))
    if "predict" in cases:
        torch.save({name: case() for name, case in PREDICTIONS.items()}, folder / f"pred{rank}.pt")
        files = {name: written(folder, name) for name in FILES}
        torch.save(files, folder / f"files{rank}.pt")
        (folder / "broken").mkdir(exist_ok=True)
        errors = {
            name: error_of(partial(case, folder / "broken" / "preds"))
            for name, case in PREDICT_ERRORS.items()
        }
        (folder / f"predict errors{rank}.json").write_text(json.dumps(errors))
    for case in cases:
        how, _, split = case.partition(" ")
        if split:
            torch.save(dying(folder, how, split), folder / f"{case}{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
