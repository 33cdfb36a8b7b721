"""Snapshots: where the modes were on their way through a fit.

A snapshot is a file for every group of modes that is fitted together, so that whoever fits a group
writes it and nobody waits. It holds nothing that differs from one run of a fit to the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from abnn.artifact import bank_tensors
from abnn.digests import digest
from abnn.distributed import World
from abnn.files import write
from abnn.model import ABNN

FOLDER = "snapshots"
_NAME = re.compile(r"(\d{8,})-(\d+)-(\d+)\.safetensors")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All modes of a fit after some of its steps.

    Args:
        step: how many steps were done; 0 at the start.
        tensors: gamma, beta and statistics, `[M, ...]`, named as in the artefact.
        network: the digest of the backbone's values.
    """

    step: int
    tensors: dict[str, Tensor]
    network: str


def snapshots_of(run: str | PathLike[str]) -> list[Snapshot]:
    """The snapshots in the run directory of a fit, in order, also of one that is not done.

    Steps at which not all modes have come yet are left out.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> bnn = abnn.convert(net, modes=2)
    >>> with tempfile.TemporaryDirectory() as run:
    ...     result = abnn.fit(bnn, loader, epochs=2, run=run, snapshots=2)
    ...     start, middle, end = snapshots_of(run)
    >>> start.step, middle.step, end.step, sorted(end.tensors)
    (0, 5, 10, ['1.beta', '1.gamma'])
    >>> bool((end.tensors["1.gamma"] == bnn.bayes_layers["1"].bank.gamma).all())
    True
    """
    parts = [_read(file) for file in sorted((Path(run) / FOLDER).glob("*.safetensors"))]
    if not parts:
        raise ValueError(f"{run} holds no snapshots; fit with run= and snapshots=.")
    found = []
    for step in sorted({part.step for part in parts}):
        here = sorted((part for part in parts if part.step == step), key=lambda p: p.group.start)
        for part in here:
            if part.kind != parts[0].kind:
                raise ValueError(
                    f"{part.file} and {parts[0].file.name} are not of one fit; delete the one that "
                    "does not belong here."
                )
        modes = [mode for part in here for mode in part.group]
        if len(set(modes)) < len(modes):
            raise ValueError(
                f"{here[0].file.parent} holds a mode twice at step {step}; delete the files that "
                "do not belong here."
            )
        if len(modes) == parts[0].modes:
            names = here[0].tensors
            tensors = {name: torch.cat([part.tensors[name] for part in here]) for name in names}
            found.append(Snapshot(step, tensors, here[0].network))
    if not found:
        raise ValueError(f"{run} holds no snapshot of all modes yet; let its fit go on.")
    return found


# What a fit does


def snapshot_steps(steps: int, count: int) -> list[int]:
    """After how many steps a fit leaves a snapshot: the start, and evenly spread to the end.

    >>> snapshot_steps(10, 3), snapshot_steps(2, 5), snapshot_steps(10, 0)
    ([0, 3, 6, 10], [0, 1, 2], [])
    """
    n = min(count, steps)
    return [i * steps // n for i in range(n + 1)] if n else []


def write_snapshot(folder: Path, bnn: ABNN, group: range, step: int, network: str) -> None:
    """Write where a group of modes is."""
    rows = slice(group.start, group.stop)
    tensors = {name: tensor[rows].cpu() for name, tensor in bank_tensors(bnn).items()}
    about = {"modes": bnn.modes, "network": network, "digest": digest(tensors)}
    # One entry: several would come in an order that is another one in every process.
    data = safetensors.torch.save(tensors, {"snapshot": json.dumps(about)})
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / _name(step, group), data)


def bring_snapshots(
    folder: Path, steps: Sequence[int], groups: Sequence[range], team: World
) -> None:
    """Bring the snapshots that process 0 does not have to it, from whoever does."""
    names = [_name(step, group) for step in steps for group in groups]
    missing = team.together(lambda: [name for name in names if not (folder / name).exists()])[0]
    for name in missing:  # one at a time, so that memory holds no more
        file = folder / name
        with team.meeting():
            own = file.read_bytes() if file.exists() else None
        given = [data for data in team.gather_first(own) if data is not None]
        with team.meeting():
            if given:
                folder.mkdir(parents=True, exist_ok=True)
                write(file, given[0])


def _name(step: int, group: range) -> str:
    return f"{step:08}-{group.start}-{group.stop - 1}.safetensors"


# What is read


@dataclass(frozen=True, eq=False)
class _Part:
    """One file."""

    file: Path
    step: int
    group: range
    modes: int
    network: str
    tensors: dict[str, Tensor]

    @property
    def kind(self) -> tuple[object, ...]:
        """What all files of one fit have in common."""
        layers = {name: (t.dtype, t.shape[1:]) for name, t in self.tensors.items()}
        return self.modes, self.network, layers


def _read(file: Path) -> _Part:
    name = _NAME.fullmatch(file.name)
    try:
        if name is None:
            raise ValueError("not the name of one")
        step, first, last = map(int, name.groups())
        with safetensors.safe_open(file, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            about = json.loads((opened.metadata() or {}).get("snapshot", "{}"))
        if not isinstance(about, dict) or not {"modes", "network", "digest"} <= about.keys():
            raise ValueError("abnn did not write it")
        if about["digest"] != digest(tensors):
            raise ValueError("the values were changed")
        part = _Part(file, step, range(first, last + 1), about["modes"], about["network"], tensors)
        if not 0 <= first <= last < part.modes:
            raise ValueError(f"modes {first} to {last} of {part.modes}")
        if any(tensor.shape[:1] != (len(part.group),) for tensor in tensors.values()):
            raise ValueError(f"the values are not those of {len(part.group)} modes")
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged or no snapshot ({error}); copy it again, or delete it."
        ) from error
    return part
