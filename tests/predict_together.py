"""Predictions that tests/test_distributed.py runs alone and in processes of fit_together.py."""

from __future__ import annotations

import io
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import abnn
from abnn.baselines import Single
from abnn.distributed import shard, world
from abnn.prediction import PER_INPUT
from abnn.robustness import robustness
from nets import mlp

Kept = dict[str, Tensor]
X = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(23) % 3
ROWS = TensorDataset(X, Y)
BATCHES = list(zip(X.split(5), Y.split(5), strict=True))  # five of them, for two processes


def model(norm: type[nn.Module] = nn.BatchNorm1d, **convert: Any) -> abnn.ABNN:
    return abnn.convert(mlp(norm), modes=2, **{"alpha": 0.05} | convert)


def kept(prediction: abnn.Prediction) -> Kept:
    members = {} if prediction.members is None else {"members": prediction.members}
    used = {"used": prediction.used_by_input()}
    return {name: getattr(prediction, name) for name in PER_INPUT} | used | members


def over(
    loader: Callable[[], Any], make: Callable[[], Any] = model, **predict: Any
) -> Callable[[], Kept]:
    """A case; every process starts with other random numbers, and process 0 as one alone."""

    def case() -> Kept:
        torch.manual_seed(5 + world().rank)
        return kept(abnn.predict_loader(make(), loader(), **predict))

    return case


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(zip(X, Y, strict=True)))


class Unsteady(nn.BatchNorm1d):
    """Normalises by the batch it is given, so every row depends on the others."""

    def __init__(self, width: int) -> None:
        super().__init__(width, track_running_stats=False)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def in_parts() -> abnn.ABNN:
    return shard(model())


def evaluated() -> Kept:
    result = abnn.evaluate(
        model(), DataLoader(ROWS, 5), ood={"noise": iter((3 * X).split(4))}, samples=2
    )
    figures = [result.n, *result.figures().values()]
    diversity = [*astuple(result.diversity), *astuple(result.ood_diversity["noise"])[:2]]  # type: ignore[arg-type]
    diversity = [value for value in diversity if value is not None]
    return {
        "figures": torch.tensor(figures, dtype=torch.float64),
        "diversity": torch.tensor(diversity, dtype=torch.float64),
    }


def recorded() -> Kept:
    """What process 0 has written, on its own disk."""
    with tempfile.TemporaryDirectory() as folder, world().joined() as team:
        ood = {"noise": iter((3 * X).split(4))}
        place = f"{folder}/record"
        abnn.evaluate(model(), DataLoader(ROWS, 5), ood, record=place, samples=2)
        found: Kept | None = None
        if team.rank == 0:
            record = abnn.Recorded(place)
            known, noise = (p["probs"] for p in (record.known, record.ood["noise"]))
            striking = [one for number in (0, 1) for one in record.striking(number)]
            members = [one.members for one in striking if one.members is not None]
            found = {
                "known": torch.from_numpy(known.copy()),
                "noise": torch.from_numpy(noise.copy()),
                "labels": torch.from_numpy(record.known["labels"].copy()),
                "striking": torch.tensor([one.index for one in striking]),
                "members": torch.stack(members),
                "digests": torch.tensor(record.digests),
                "disagreement": torch.tensor(record.disagreement),
            }
        else:
            assert os.listdir(folder) == []
        first = team.gather(found)[0]
        assert first is not None
        return first


def corrupted() -> Kept:
    images = torch.rand(23, 1, 8, 8, generator=generator_of(2))
    loader = DataLoader(TensorDataset((images - 0.5) / 0.3, Y), 5)
    net = Single(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), mlp()))
    names = ["gaussian_noise", "fog"]
    result = robustness(net, loader, names, [1, 4], mean=0.5, std=0.3)
    rows = [
        result.clean,
        *(figures for name in names for figures in result.corrupted[name].values()),
    ]
    return {"figures": torch.tensor([astuple(row) for row in rows], dtype=torch.float64)}


def alone() -> Kept:
    """What each process predicts by itself, though only some of them do."""
    if world().rank == 0:
        return kept(model().predict_loader(BATCHES, alone=True))
    return kept(model().predict_loader(DataLoader(ROWS, 5), alone=True))


PREDICTIONS: dict[str, Callable[[], Kept]] = {
    "rows in order": over(lambda: DataLoader(ROWS, 5)),
    "rows shuffled": over(lambda: DataLoader(ROWS, 5, shuffle=True)),
    "rows shuffled by a generator": over(
        lambda: DataLoader(ROWS, 5, shuffle=True, generator=generator_of(world().rank))
    ),
    "workers": over(lambda: DataLoader(ROWS, 5, shuffle=True, num_workers=1)),
    "a full last turn": over(lambda: DataLoader(ROWS, 6)),
    "fewer batches than processes": over(lambda: DataLoader(ROWS, 23)),
    "a list": over(lambda: BATCHES),
    "a stream": over(lambda: DataLoader(Stream(), 5)),
    "unknown length": over(lambda: iter(BATCHES)),
    "no labels": over(lambda: ({"input": x} for x in X.split(5))),
    "auto": over(lambda: BATCHES, samples="auto", tolerance=0.01),
    "members": over(lambda: DataLoader(ROWS, 5), samples=3, keep_members=True),
    "noise per example": over(lambda: DataLoader(ROWS, 5), lambda: model(noise="example")),
    "noise per element": over(lambda: DataLoader(ROWS, 5), lambda: model(noise="element")),
    "rows that mix": over(lambda: DataLoader(ROWS, 5), lambda: model(Unsteady), samples=2),
    "another predictor": over(lambda: DataLoader(ROWS, 5), lambda: Single(mlp())),
    "weights in parts": over(lambda: DataLoader(ROWS, 5, shuffle=True), in_parts),
    "evaluate": evaluated,
    "a record": recorded,
    "robustness": corrupted,
    "alone": alone,
}


def written(folder: Path, name: str) -> dict[str, Any]:
    """A file of a process that shares no disk with the others, and what it says of progress."""
    own = folder / f"disk{world().rank}"
    own.mkdir(parents=True, exist_ok=True)
    with chdir(own), redirect_stderr(io.StringIO()) as said:
        saved = model().predict_loader(DataLoader(ROWS, 5), samples="auto", out=name, progress=True)
        try:
            probs = torch.from_numpy(saved["probs"].copy())
        except FileNotFoundError as error:
            probs = str(error)  # type: ignore[assignment]
        return {
            "handle": repr(saved),
            "probs": probs,
            "said": said.getvalue(),
            "left": sorted(os.listdir()),
        }


# What goes wrong on one process only


class Breaking(Dataset[Any]):
    """Its seventh row, in the second batch of five, can't be read."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> Any:
        if i == 7:
            raise OSError("row 7 is damaged")
        return X[i], Y[i]


class FailsOn(nn.Module):
    """A network that fails on the third batch, which is of process 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if any(torch.equal(row, X[10]) for row in x):
            raise MemoryError("out of memory here")
        y: Tensor = self.norm(x)
        return y


def breaking_stream() -> Iterator[Any]:
    """It breaks on one process, which is ahead of the other."""
    yield from BATCHES[:3]
    if world().rank == 1:
        raise OSError("the line is dead")
    yield from BATCHES[3:]


def full_disk(out: Path) -> Any:
    """No file of this process can have more than some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        return model().predict_loader(BATCHES, out=out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def is_there(out: Path) -> Any:
    if world().rank == 0:
        out.mkdir()
    try:
        return model().predict_loader(BATCHES, out=out)
    finally:
        if world().rank == 0:
            out.rmdir()


def of_rank(net: Any) -> abnn.ABNN:
    net[0].bias.data += world().rank
    return abnn.convert(net)


def distributed_sampler() -> Any:
    sampler: Any = DistributedSampler(ROWS)
    return DataLoader(ROWS, 5, sampler=sampler)


PREDICT_ERRORS: dict[str, Callable[[Path], Any]] = {
    "a damaged row": lambda out: model().predict_loader(DataLoader(Breaking(), 5), out=out),
    "a dead line": lambda out: model().predict_loader(breaking_stream(), out=out),
    "in the network": lambda out: abnn.convert(FailsOn()).predict_loader(BATCHES, out=out),
    "a full disk": full_disk,
    "it is there": is_there,
    "batches of two kinds": lambda out: model().predict_loader([BATCHES[0], X[:5]], out=out),
    "other weights": lambda out: of_rank(mlp()).predict_loader(BATCHES, out=out),
    "other arguments": lambda out: model().predict_loader(BATCHES, seed=world().rank, out=out),
    "another order": lambda out: model().predict_loader(
        BATCHES[:: -1 if world().rank else 1], out=out
    ),
    "another length": lambda out: model().predict_loader(iter(BATCHES[: 4 - world().rank])),
    "another length, in full turns": lambda out: model().predict_loader(
        iter(BATCHES[: 4 + world().rank])
    ),
    "empty": lambda out: model().predict_loader([], out=out),
    "a sampler's share": lambda out: model().predict_loader(distributed_sampler(), out=out),
    "no labels": lambda _: abnn.evaluate(model(), [BATCHES[0], X[:5]]),
    "other corruptions": lambda _: robustness(model(), BATCHES, corruption_seed=world().rank),
}
