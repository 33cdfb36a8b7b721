"""The run directory of a training: written as it goes, so that one that is killed resumes there."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from abnn.artifact import bank_tensors, fingerprint
from abnn.digests import digest
from abnn.distributed import World
from abnn.files import write
from abnn.journal import LOSSES as LOSSES
from abnn.journal import LR, RECIPE, RUN, Journal
from abnn.model import ABNN
from abnn.recipe import Recipe
from abnn.snapshots import FOLDER, bring_snapshots, write_snapshot

SETTINGS, CHECKPOINT, SEARCH = "fit.json", "checkpoint.safetensors", "tune.json"

Place = tuple[int, int, int]  # steps done, epoch, batches of this epoch done


@dataclass(frozen=True)
class TrainingState:
    """All that changes during a training, but for the place in the data.

    Args:
        values: what is trained, and the statistics beside it; written to in place.
        optimizer, scaler: of these.
        losses: of every step so far, `[steps, columns]`.
        group: of a fit, the modes that are trained together.
    """

    values: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    losses: Tensor
    group: range = range(1)

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimiser trains, in its order."""
        return [row for group in self.optimizer.param_groups for row in group["params"]]


def settings_of(
    bnn: ABNN, recipe: Recipe, steps: int, processes: str | None = None
) -> dict[str, Any]:
    """All that decides how a fit ends, as plain values.

    Args:
        bnn: the network at the start of the fit.
        recipe: the hyper-parameters.
        steps: number of steps of the fit.
        processes: how the work is split over processes, as far as the numbers depend on it.
    """
    settings = {
        "recipe": recipe.to_dict(),
        "steps": steps,
        "network": fingerprint(bnn)["values"],
        "start": digest(bank_tensors(bnn)),
        "alpha": bnn.alpha,
        "noise": bnn.noise,
        "stats": bnn.stats,
    }
    # What was written before is compared as JSON, which has no tuples.
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain if processes is None else plain | {"processes": processes}


class RunDirectory:
    """Settings, checkpoints and losses of one training: of a fit of modes, or of a network.

    A checkpoint is one file, replaced atomically, with everything the rest depends on: what is
    trained, the optimiser's state, and the place in the data. Noise, priors and the order of the
    data are functions of the seed and that place.

    Args:
        path: the directory; it is made if it does not exist.
        settings: all that decides how it ends, as plain values, with a digest "network".
        every: seconds between checkpoints.
        journal: writes what it tells its reader.
        columns: the names of the losses of a step.
        modes: the modes of this process, where processes share them.
        rank: the number of this process. Only process 0 writes, but for checkpoints where every
            process has modes of its own; the others read what they find.
        snapshots: the steps that leave a snapshot, if there are to be any.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        settings: dict[str, Any],
        every: float,
        journal: Journal,
        columns: Sequence[str] = ("loss",),
        modes: range | None = None,
        rank: int = 0,
        snapshots: Sequence[int] = (),
    ) -> None:
        self.path, self.every, self.rank = Path(path), every, rank
        self.journal, self.columns = journal, columns
        self.snapshots, self.network = snapshots, settings["network"]
        self.writes = rank == 0 or modes is not None
        self.claimed = self.made = False
        name = CHECKPOINT if modes is None else f"checkpoint-{modes.start}-{modes.stop - 1}"
        self.file = (self.path / name).with_suffix(".safetensors")
        self.started = self.written = time.monotonic()
        # What was passed without a snapshot can't be had later, so their number can't change.
        self._claim(settings | {"snapshots": len(snapshots) - 1} if snapshots else settings)
        self.tensors, self.meta = self._read()
        if rank == 0:
            journal.start(self.path)

    @property
    def seconds_before(self) -> float:
        """Time of the fit before it was interrupted."""
        return float(self.meta.get("seconds", 0.0))

    def share(self, world: World) -> None:
        """Let all processes go on from the furthest checkpoint that any of them can read.

        After a restart, process 0 may be on a host that never wrote one.
        """
        place = (int(self.meta[key]) for key in ("group", "step")) if self.meta else (-1, 0)
        self.tensors, self.meta = world.furthest(tuple(place), (self.tensors, self.meta))

    def _claim(self, settings: dict[str, Any]) -> None:
        file = self.path / SETTINGS
        if not check_settings(file, settings):
            if self.path.exists() and not self.path.is_dir():
                raise ValueError(f"run={str(self.path)!r} is a file; give a directory.")
            if any((self.path / FOLDER).glob("*.safetensors")):
                raise ValueError(
                    f"{self.path / FOLDER} holds snapshots of a fit whose {SETTINGS} is gone; "
                    "delete them, or use another run directory."
                )
            if (self.path / SEARCH).exists():
                raise ValueError(f"{self.path} holds a search of tune; use another run directory.")
            if self.writes:
                self.made = not self.path.exists()
                self.path.mkdir(parents=True, exist_ok=True)
                write(file, (json.dumps(settings, indent=2) + "\n").encode())
                # Processes that share the modes fail apart, and another may still go on here.
                self.claimed = self.file.name == CHECKPOINT

    def _read(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        file = self.file
        if not file.exists():
            return {}, {}
        try:
            with safetensors.safe_open(file, "pt") as checkpoint:
                names = checkpoint.keys()
                tensors = {name: checkpoint.get_tensor(name) for name in names}
                return tensors, checkpoint.metadata()
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}); delete it to start anew.") from error

    def resume(self, state: TrainingState) -> Place:
        """Bring what is trained back to its last checkpoint, and tell its place."""
        if not self.meta or int(self.meta["group"]) < state.group.start:
            return 0, 0, 0
        saved = _under("bank", self.tensors)
        for name, value in state.values.items():
            value.copy_(saved[name])
        state.losses.copy_(self.tensors["losses"])
        if int(self.meta["group"]) > state.group.start:
            return len(state.losses), 0, 0  # this group was done, and a later one was under way
        for name, tensor in _under("optimizer", self.tensors).items():
            index, key = name.split("/")
            row = state.parameters[int(index)]
            # The step count of Adam lives on the CPU; everything else beside its parameter.
            state.optimizer.state[row][key] = tensor if key == "step" else tensor.to(row.device)
        state.scaler.load_state_dict(json.loads(self.meta["scaler"]))
        return int(self.meta["step"]), int(self.meta["epoch"]), int(self.meta["batch"])

    def check_data(self, batch: Any) -> None:
        """Compare the batch at which the fit goes on with the one it had got there before."""
        digests = self.meta["data"].split()
        if digests[self.rank if len(digests) > 1 else 0] != data_digest(batch):
            raise ValueError(
                f"The loader does not give the batches that the fit in {self.path} saw, so it "
                "can't go on as if it had not been interrupted; give it the same data, with no "
                "randomness but torch's, numpy's and Python's own, or use another run directory."
            )

    def is_due(self, last: bool) -> bool:
        """Whether it is time for a checkpoint; after the last step of a group it always is."""
        return last or time.monotonic() - self.written >= self.every

    def checkpoint(self, state: TrainingState, place: Place, data: list[str]) -> None:
        """Write a checkpoint; `data` are the digests of the last batch, one for every process."""
        if not self.writes:
            return
        now = self.written = time.monotonic()
        tensors = {f"bank/{name}": value.contiguous() for name, value in state.values.items()}
        for index, row in enumerate(state.parameters):
            for key, value in state.optimizer.state.get(row, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{index}/{key}"] = value.contiguous()
        tensors["losses"] = state.losses
        meta = {
            "group": str(state.group.start),
            "step": str(place[0]),
            "epoch": str(place[1]),
            "batch": str(place[2]),
            "data": " ".join(data),
            "seconds": str(self.seconds_before + now - self.started),
            "scaler": json.dumps(state.scaler.state_dict()),
        }
        write(self.file, safetensors.torch.save(tensors, meta))
        if self.rank == 0:
            self.journal.figures(self.path, self.columns, state.losses)

    def snapshot(self, bnn: ABNN, group: range, step: int) -> None:
        """Write where a group of modes is, if this step is one to leave a snapshot.

        A checkpoint comes after it. So a fit that goes on from there has all snapshots before,
        and writes those that came after the checkpoint once more.
        """
        if self.writes and step in self.snapshots:
            write_snapshot(self.path / FOLDER, bnn, group, step, self.network)

    def collect(self, team: World, groups: Sequence[range]) -> None:
        """Let process 0 have the snapshots that others wrote to disks of their own."""
        bring_snapshots(self.path / FOLDER, self.snapshots, groups, team)

    def finish(self, save: Callable[[Path], object], losses: Tensor, text: str) -> None:
        """Write the artefact, by `save`, and what was achieved."""
        if self.rank != 0:
            return
        save(self.path)
        self.journal.figures(self.path, self.columns, losses)
        write(self.path / "fit.txt", f"{text}\n".encode())

    def close(self) -> None:
        """Let go of open files, however the training ended.

        One that failed before there was anything to go on from leaves the directory as it was, so
        that what was wrong can be changed.
        """
        self.journal.close()
        if self.claimed and not any(self.path.rglob("*.safetensors")):
            for name in (SETTINGS, RECIPE, RUN):
                (self.path / name).unlink(missing_ok=True)
            if self.made and not any(self.path.iterdir()):
                self.path.rmdir()


def check_settings(file: Path, settings: dict[str, Any], what: str = "a fit") -> bool:
    """Whether a run was begun with these settings; if it was with others, this is an error.

    Args:
        file: where a run keeps its settings.
        settings: plain values, as JSON has them.
        what: what kind of run it is.
    """
    if not file.exists():
        return False
    try:
        before = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON; use another run directory.") from error
    if isinstance(before, dict) and ("method" in before) != ("method" in settings):
        raise ValueError(
            f"{file.parent} holds {'a training' if 'method' in before else 'a fit of an ABNN'}; "
            "use another run directory."
        )
    changed = _differences(before, settings)
    if changed:
        raise ValueError(
            f"{file.parent} holds {what} with other settings ({'; '.join(changed)}); use another "
            "run directory, or delete this one."
        )
    return True


def data_digest(batch: Any) -> str:
    """One digest of all tensors of a batch."""
    leaves = enumerate(pytree.tree_leaves(batch))
    return digest({str(i): leaf for i, leaf in leaves if isinstance(leaf, Tensor)})


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


def _differences(before: Any, now: dict[str, Any]) -> list[str]:
    """What differs, in words; digests are not shown."""
    if not isinstance(before, dict):
        return ["not the settings of a fit"]
    words = {
        "network": "another network",
        "start": "modes that start from other values",
        "validation": "other validation data",
    }
    before, now = ({"processes": "one", "snapshots": 0} | settings for settings in (before, now))
    changed = []
    for key in now | before:
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if key == "recipe" and isinstance(old, dict) and isinstance(new, dict):
            changed += [
                f"{k} was {old.get(k)} and now is {new.get(k)}"
                for k in new | old
                if old.get(k) != new.get(k)
            ]
        else:
            changed.append(words.get(key, f"{key} was {old} and now is {new}"))
    return list(dict.fromkeys(changed))


def columns_of_modes(modes: int) -> list[str]:
    """What the losses of the modes are called.

    >>> columns_of_modes(2)
    ['mode_0', 'mode_1']
    """
    return [f"mode_{m}" for m in range(modes)]


def read_losses(run: str | PathLike[str]) -> tuple[list[int], Tensor]:
    """The training losses in a run directory: the steps, from 0, and `[steps, M]`.

    Of a fit that is not done, or whose modes are not fitted together, some are NaN.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(3)]
    >>> with tempfile.TemporaryDirectory() as run:
    ...     result = abnn.fit(abnn.convert(net, modes=2), loader, epochs=1, run=run)
    ...     steps, losses = read_losses(run)
    >>> steps, bool((losses == result.losses).all())
    ([0, 1, 2], True)
    """
    file = Path(run) / LOSSES
    if not file.is_file():
        raise ValueError(
            f"{run} holds no {LOSSES}; give the run= directory of a fit, which has one from its "
            "first checkpoint on."
        )
    try:
        text = file.read_text()
        if not text.endswith("\n"):
            raise ValueError("it ends in the middle of a line")
        header, *rows = csv.reader(text.splitlines(), strict=True)
        modes = header[1:-1] if header[-1:] == [LR] else header[1:]
        if header[:1] != ["step"] or not modes or modes != columns_of_modes(len(modes)):
            raise ValueError("the first line names no modes")
        if any(len(row) != len(header) for row in rows):
            raise ValueError("a line is too short or too long")
        steps = [int(row[0]) for row in rows]
        if any(a >= b for a, b in zip([-1, *steps], steps, strict=False)):
            raise ValueError("the steps are not in order")
        values = [
            [float(v) if v else float("nan") for v in row[1 : 1 + len(modes)]] for row in rows
        ]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file} is damaged ({error}); the fit writes it anew.") from error
    return steps, torch.tensor(values).view(len(steps), len(modes))
