"""What commands share: options of the same name, lists in them, and what becomes of mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from abnn.cli import CommandError, is_first

NETWORK = (
    "zoo:NAME, torchvision:NAME[@WEIGHTS], timm:NAME[.TAG], hf:ORG/NAME or "
    "module:PACKAGE.MODULE:BUILDER."
)
WEIGHTS = "A file of trained weights, or the folder of a training; random for random ones."
DATA = (
    "npz:PATH, folder:PATH, cifar10, cifar100, svhn, imagenet:PATH, dtd, hf:NAME or "
    "module:PACKAGE.MODULE:BUILDER."
)

NetworkName = Annotated[str | None, typer.Option("--model", help=NETWORK)]
WeightsFile = Annotated[str | None, typer.Option("--weights", help=WEIGHTS)]
Mean = Annotated[str | None, typer.Option(help="Of the channels, as 0.49,0.48,0.45.")]
Std = Annotated[str | None, typer.Option(help="Of the channels, as 0.25,0.24,0.26.")]
Size = Annotated[
    str | None, typer.Option(help="Of the images, as 224 or 180,240; default: the network's.")
]
SkipBroken = Annotated[
    bool, typer.Option("--skip-broken", help="Leave out images that can't be read, and say so.")
]
Ood = Annotated[
    list[str] | None,
    typer.Option(help="Out-of-distribution data, as letters=npz:PATH; once for each."),
]
Samples = Annotated[str, typer.Option(help="Draws of every mode, or auto: what an input needs.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the draws.")]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Inputs a batch.")]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Examples a step, over all processes."),
]
Workers = Annotated[int, typer.Option(min=0, help="Processes that load data.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Only the first so many inputs of each data set.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a value of the recipe, as lr=0.1; once for each."),
]
NoAugmentation = Annotated[
    bool, typer.Option("--no-augmentation", help="Leave out what the recipe asks for.")
]
Checkpoints = Annotated[
    float,
    typer.Option("--checkpoint-seconds", min=0, help="How often a checkpoint is written."),
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write event files to the run directory.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def numbers(option: str, text: str | None) -> tuple[float, ...]:
    """A list of numbers; none where the option is not given.

    >>> numbers("--mean", "0.5,0.25"), numbers("--mean", None)
    ((0.5, 0.25), ())
    """
    try:
        return tuple(float(number) for number in text.split(",")) if text else ()
    except ValueError as error:
        raise CommandError(f"{option} {text} is not a list of numbers, as 0.5,0.5,0.5.") from error


def whole_numbers(option: str, text: str) -> list[int]:
    """A list of whole numbers.

    >>> whole_numbers("--seeds", "0,1,2")
    [0, 1, 2]
    """
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise CommandError(f"{option} {text} is not a list of whole numbers, as 0,1,2.") from error


def samples_of(text: str) -> int | Literal["auto"]:
    """How many draws of every mode are asked for.

    >>> samples_of("8"), samples_of("auto")
    (8, 'auto')
    """
    if text == "auto":
        return "auto"
    if not text.isdigit() or int(text) < 1:
        raise CommandError(f"--samples {text} is neither a number of at least 1 nor auto.")
    return int(text)


@contextmanager
def mistakes_told(stopped: str, *more: type[Exception]) -> Iterator[None]:
    """Tell in one sentence what a user can put right, and what an interruption leaves.

    Args:
        stopped: what is said of an interruption.
        more: errors that are mistakes too, beside those of values, types and files.
    """
    mistakes: tuple[type[Exception], ...] = (ValueError, TypeError, *more)
    try:
        yield
    except BrokenPipeError:  # by head, which has seen enough; typer ends quietly
        raise
    except mistakes as error:
        raise CommandError(_sentence(error)) from error
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.strerror else _sentence(error)
        raise CommandError(reason.rstrip(".") + ".") from error
    except KeyboardInterrupt:
        if is_first():
            typer.echo(f"\n{stopped}", err=True)
        raise typer.Exit(130) from None


def _sentence(error: Exception) -> str:
    """What an error says in one line; of torch's own, also what it may come from."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("Caught "):  # by a process that loads data; its own words come last
        return lines[-1].strip()
    channels = re.search(r"to have (\d+) channels, but got (\d+) channels", lines[0])
    if channels is not None:
        taken, given = channels[1], channels[2]
        return (
            f"The network takes images of {taken} channel{'s' * (taken != '1')}, and these have "
            f"{given}; give others, or, for grey images, --mean and --std of {taken} numbers."
        )
    if isinstance(error, RuntimeError) and not lines[0].endswith("."):
        return (
            f"The network could not run ({lines[0].strip()}); check that it takes inputs of the "
            "data's shape, and that they fit the memory."
        )
    return str(error)
