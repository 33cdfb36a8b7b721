"""What commands share: lists in options, and what becomes of mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from abnn.cli import CommandError, is_first

NETWORK = (
    "zoo:NAME, torchvision:NAME[@WEIGHTS], timm:NAME[.TAG], hf:ORG/NAME or "
    "module:PACKAGE.MODULE:BUILDER."
)
WEIGHTS = "A file of trained weights, or the folder of a training; random for random ones."


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
    if isinstance(error, RuntimeError) and not lines[0].endswith("."):
        return (
            f"The network could not run ({lines[0].strip()}); check that it takes inputs of the "
            "data's shape, and that they fit the memory."
        )
    return str(error)
