"""Comparisons: every method over every seed, done once, whatever interrupts them."""

from __future__ import annotations

import csv
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from abnn import Recipe
from abnn.baselines import DeepEnsemble
from abnn.compare import ENTRIES, Setting, Trial, compare
from abnn.record import Recorded

RECIPE = Recipe(epochs=2, lr=0.05, prior=None)
FEW = ["single", "temperature", "batch_ensemble", "deep_ensemble", "abnn"]


def network(width: int = 8) -> nn.Sequential:
    """With new random weights, as a user's builder makes one; not those of a fixed seed."""
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def batches(seed: int, count: int = 4, size: int = 12) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(3, 4, generator=torch.Generator().manual_seed(9))
    found = []
    for _ in range(count):
        y = torch.randint(3, (size,), generator=g)
        found.append((centres[y] + 2 * torch.randn(size, 4, generator=g), y))
    return found


def setting(**changes: Any) -> Setting:
    values = {
        "build": network,
        "train": batches(0),
        "validation": batches(1),
        "test": batches(2),
        "ood": {"far": [(5 + x,) for x, _ in batches(3)]},
        "recipe": RECIPE,
        "fit": Recipe(epochs=1),
        "members": 2,
        "samples": 4,
    }
    return Setting(**{**values, **changes})


def figures(run: Path) -> dict[str, Any]:
    return {
        str(file.parent.relative_to(run)): Recorded(file.parent).evaluation.figures()
        for file in sorted(run.glob("seed-*/evaluation/*/record.json"))
    }


class Stops:
    """A loader that is interrupted at one of its batches, once."""

    def __init__(self, batches: list[Any], after: int) -> None:
        self.batches, self.after = batches, after

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.after -= 1
            if self.after == 0:
                raise KeyboardInterrupt
            yield batch


def test_every_method_over_every_seed_is_in_the_table(tmp_path: Path) -> None:
    result = compare(setting(), tmp_path, seeds=[0, 1])
    assert list(result.evaluations) == [entry.title for entry in ENTRIES.values()]
    assert not result.failed
    assert all(len(rows) == 2 for rows in result.evaluations.values())
    every = [e for rows in result.evaluations.values() for e in rows]
    assert all(e and e.cost and e.cost.fit_seconds for e in every)
    text = (tmp_path / "table.txt").read_text()
    assert all(entry.title in text for entry in ENTRIES.values())
    assert text.rstrip() == str(result).rstrip()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert {row["method"] for row in rows} == set(result.evaluations)
    assert "\\begin{tabular}" in (tmp_path / "table.tex").read_text()
    json.loads((tmp_path / "table.json").read_text())


def test_methods_share_the_networks_they_start_from(tmp_path: Path) -> None:
    given = setting()
    compare(given, tmp_path, methods=["single", "deep_ensemble"], seeds=[0])
    x = given.test[0][0]  # type: ignore[index]
    nets = [Trial(given, 0, tmp_path / "seed-0").base(member) for member in range(2)]
    assert not torch.equal(nets[0][0].weight, nets[1][0].weight)  # type: ignore[index]
    stored = {
        name: Recorded(tmp_path / "seed-0/evaluation" / name).known.prediction().probs[:12]
        for name in ("single", "deep_ensemble")
    }
    single = nets[0](x).softmax(1)
    torch.testing.assert_close(stored["single"], single.detach(), atol=1e-6, rtol=1e-4)
    both = DeepEnsemble(nets).predict(x).probs
    torch.testing.assert_close(stored["deep_ensemble"], both, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("after", [3, 9, 20, 27])
def test_a_comparison_that_was_stopped_goes_on_and_ends_the_same(
    tmp_path: Path, after: int
) -> None:
    compare(setting(), tmp_path / "whole", methods=FEW, seeds=[0])
    stops = setting(train=Stops(batches(0), after))
    with pytest.raises(KeyboardInterrupt):
        compare(stops, tmp_path / "parts", methods=FEW, seeds=[0])
    compare(setting(), tmp_path / "parts", methods=FEW, seeds=[0])
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")


def test_what_is_done_is_not_done_again_and_more_can_be_added(tmp_path: Path) -> None:
    compare(setting(), tmp_path, methods=["single", "batch_ensemble"], seeds=[0])
    untouchable = setting(train=Stops(batches(0), 2))  # after a look at its first batch
    first = compare(untouchable, tmp_path, methods=["batch_ensemble", "single"], seeds=[0])
    more = compare(setting(), tmp_path, methods=FEW, seeds=[0, 1])
    assert more.evaluations["Single model"][0] == first.evaluations["Single model"][0]
    assert len(more.evaluations["ABNN"]) == 2
    seeds = ("seed-0", "seed-1")
    assert more.records == [tmp_path / s / "evaluation" / m for s in seeds for m in FEW]


def test_seeds_and_members_differ_in_their_weights_and_are_reproducible(tmp_path: Path) -> None:
    trials = [Trial(setting(), seed, tmp_path) for seed in (0, 1)]
    weights = [trial.fresh(m)[0].weight for trial in trials for m in (0, 1)]  # type: ignore[index]
    assert len({w.sum().item() for w in weights}) == 4
    assert torch.equal(weights[0], trials[0].fresh(0)[0].weight)  # type: ignore[index]
    assert len({trial.recipe(m).seed for trial in trials for m in (0, 1)}) == 4


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    given = setting(build=partial(network, 6))
    compare(given, tmp_path / "one", methods=FEW, seeds=[0, 1])
    compare(given, tmp_path / "two", methods=FEW, seeds=[0, 1], jobs=2)
    assert figures(tmp_path / "one") == figures(tmp_path / "two")


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AttributeError])
def test_a_training_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, kind: type[Exception]
) -> None:
    class Odd(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if any(hasattr(part, "ensemble_r") for part in self.modules()):
                raise kind("no factors here; leave them out.")
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]

    given = setting(build=lambda: Odd(*network()))
    result = compare(given, tmp_path, methods=["single", "batch_ensemble"], seeds=[0])
    assert list(result.failed) == ["batch_ensemble of seed 0"]
    assert "no factors here" in str(result)
    assert result.evaluations["BatchEnsemble"] == [None]


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ({"members": 3}, {}, r"other settings \(members\)"),
        ({"recipe": RECIPE.with_(lr=0.1)}, {}, r"other settings \(recipe\)"),
        ({"test": batches(7)}, {}, r"other settings \(test\)"),
        ({"train": batches(7)}, {}, r"other settings \(train\)"),
        ({"validation": batches(7)}, {}, r"other settings \(validation\)"),
        ({"ood": {"far": batches(7)}}, {}, r"other settings \(ood far\)"),
        ({"ood": {}}, {}, r"other settings \(ood\)"),
        ({"build": partial(network, 9)}, {}, r"other settings \(network\)"),
        ({}, {"methods": ["abn"]}, "no method 'abn'; the nearest is 'abnn'"),
        ({}, {"methods": []}, "no method to compare"),
        ({}, {"seeds": []}, "one or more different"),
        ({}, {"seeds": [1, 1]}, "one or more different"),
        ({}, {"seeds": 0}, "seeds=0 must be one or more different"),
        ({}, {"jobs": 0}, "jobs"),
        ({"test": []}, {}, "test data is empty"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_work(
    tmp_path: Path, given: Any, more: Any, message: str
) -> None:
    compare(setting(), tmp_path, methods="single", seeds=[0])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        compare(setting(**given), tmp_path, **{"methods": "single", "seeds": [0], **more})
    assert sorted(tmp_path.rglob("*")) == before


def test_members_and_samples_are_checked() -> None:
    for wrong in ({"members": 0}, {"samples": 0}, {"ood": [1]}):
        with pytest.raises(ValueError, match=r"members|samples|map names"):
            setting(**wrong)
    assert setting(members=3, samples=16).samples_each == 6


def test_data_that_is_shuffled_is_known_again(tmp_path: Path) -> None:
    def shuffled(seed: int) -> DataLoader[Any]:
        x, y = (torch.cat(parts) for parts in zip(*batches(seed), strict=True))
        return DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)

    compare(setting(train=shuffled(0)), tmp_path, methods="single", seeds=[0])
    compare(setting(train=shuffled(0)), tmp_path, methods="single", seeds=[0])
    with pytest.raises(ValueError, match=r"other settings \(train\)"):
        compare(setting(train=shuffled(7)), tmp_path, methods="single", seeds=[0])


WORKERS = """
import os
import torch
from torch import nn
from abnn import Recipe
from abnn.compare import Setting, compare

X, Y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])

class Endless:
    def __iter__(self):
        yield X, Y
        print(os.getpid(), flush=True)
        while True:
            yield X, Y

def build():
    return nn.Linear(3, 2)

if __name__ == "__main__":
    data = [(X, Y)]
    setting = Setting(build, Endless(), data, data, recipe=Recipe(steps=10**6, prior=None))
    compare(setting, "run", methods="single", seeds=[0, 1], jobs=2)
"""


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WORKERS)
    command = [sys.executable, "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        workers = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
        ended, _, _ = select.select([process.stdout], [], [], 60)
        for worker in workers if not ended else []:
            os.kill(worker, signal.SIGKILL)
        assert ended  # the other end of the pipe is closed, which the workers held
        assert process.stdout.read() == b""
