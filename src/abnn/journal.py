"""What a run directory tells its reader: what ran where, and its figures over the steps."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from abnn.files import write
from abnn.recipe import Recipe

RECIPE, RUN, LOSSES, EVENTS = "recipe.toml", "run.json", "losses.csv", "tensorboard"
LR = "lr"


class Journal:
    """Writes what nobody needs to go on with a run, but everybody to understand it.

    Args:
        trained: what is trained, in words.
        recipe: its hyper-parameters.
        lr: the learning rate of a step, counted from 0.
        config: plain values of the caller's own, such as the name of the data.
        tensorboard: write event files for TensorBoard too.
        processes: how many there are.

    >>> import tempfile
    >>> journal = Journal("a network", Recipe(lr=0.5), lambda step: 0.5)
    >>> with tempfile.TemporaryDirectory() as run:
    ...     journal.figures(Path(run), ["loss"], torch.tensor([[2.0], [1.5], [torch.nan]]))
    ...     (Path(run) / "losses.csv").read_text().split()
    ['step,loss,lr', '0,2.0,0.5', '1,1.5,0.5']
    """

    def __init__(
        self,
        trained: str,
        recipe: Recipe,
        lr: Callable[[int], float],
        config: Mapping[str, Any] | None = None,
        tensorboard: bool = False,
        processes: int = 1,
    ) -> None:
        self.recipe, self.lr = recipe, lr
        self.writer = _summary_writer() if tensorboard else None
        self.events: Any = None
        self.told: Tensor | None = None  # what is in the event files already
        self.values = {
            "trained": trained,
            "seed": recipe.seed,
            "processes": processes,
            "config": _plain(config or {}),
        }

    def start(self, path: Path) -> None:
        """Write what is known at the start; a run that goes on elsewhere has several places."""
        write(path / RECIPE, self.recipe.to_toml().encode())
        places = _places(path / RUN)
        here = _environment()
        if not places or places[-1] != here:
            places.append(here)
        text = json.dumps(self.values | {"environments": places}, indent=2)
        write(path / RUN, f"{text}\n".encode())

    def figures(self, path: Path, columns: Sequence[str], table: Tensor) -> None:
        """Write the figures of all steps so far, `[steps, columns]`; those that are NaN are not."""
        done = ~table.isnan().all(1)
        rates = [self.lr(step) if there else float("nan") for step, there in enumerate(done)]
        whole = torch.cat(
            [table.double().cpu(), torch.tensor(rates, dtype=torch.float64)[:, None]], 1
        )
        names = [*columns, LR]
        write(path / LOSSES, _csv(whole, names).encode())
        if self.writer is not None:
            self._tell(path / EVENTS, names, whole)

    def close(self) -> None:
        """Close the event files, if there are any."""
        if self.events is not None:
            self.events.close()

    def _tell(self, folder: Path, names: Sequence[str], table: Tensor) -> None:
        """Add to the event files what they do not have.

        A run that goes on begins them anew, from the figures in its checkpoint: what was told of
        steps after that would else be there twice.
        """
        if self.told is None:
            for file in folder.glob("events.out.tfevents.*"):
                file.unlink()
            assert self.writer is not None
            self.events = self.writer(str(folder))
            self.told = torch.zeros_like(table, dtype=torch.bool)
        new = ~table.isnan() & ~self.told
        for step, column in new.nonzero().tolist():
            value = float(table[step, column])
            self.events.add_scalar(_tag(names[column]), value, step)
        self.events.flush()
        self.told |= new


def check_unwritten(config: Mapping[str, Any] | None, tensorboard: bool) -> None:
    """Refuse what would be written to a run directory, where there is none.

    >>> check_unwritten({}, tensorboard=False)
    """
    if config or tensorboard:
        name = "config=" if config else "tensorboard=True"
        raise ValueError(f"{name} needs a directory to be written to; pass run= too.")


def _tag(name: str) -> str:
    if name == LR:
        return name
    return f"{'validation' if name in ('nll', 'accuracy', 'ece') else 'train'}/{name}"


def _csv(table: Tensor, names: Sequence[str]) -> str:
    rows = [
        ",".join([str(step), *("" if v != v else repr(v) for v in row)])
        for step, row in enumerate(table.tolist())
        if any(v == v for v in row)
    ]
    return "\n".join([",".join(["step", *names]), *rows]) + "\n"


def _plain(config: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(config), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"config= can't be written as JSON ({error}); give texts, numbers, and lists and "
            "mappings of them."
        ) from error


def _environment() -> dict[str, str]:
    from abnn import __version__

    return {
        "abnn": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _places(file: Path) -> list[Any]:
    """The environments that a run has had so far."""
    try:
        found = json.loads(file.read_bytes())["environments"]
    except (OSError, ValueError, TypeError, KeyError):  # a reader's loss, not the run's
        return []
    return found if isinstance(found, list) else []


def _summary_writer() -> Callable[[str], Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            'tensorboard=True needs tensorboard: pip install "abnn[tensorboard]".'
        ) from error
    writer: Callable[[str], Any] = SummaryWriter
    return writer
