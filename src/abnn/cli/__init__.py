"""The command line: one command a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


class CommandError(Exception):
    """What a user can put right; its message is one sentence that says how."""


def main() -> None:
    """Run `abnn` with the arguments of this process, and end the process."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run `abnn` and return its exit code.

    2 is for a mistake, told in one sentence, and 130 for an interruption.

    >>> run(["--version"])
    abnn 0.1.0
    0
    """
    try:
        return _run(list(args) or ["--help"])
    except KeyboardInterrupt:
        if is_first():
            print("\nStopped.", file=sys.stderr)
        return 130


def _run(args: list[str]) -> int:
    try:
        from abnn.cli.app import app
        from abnn.cli.completion import prepare
        from abnn.progress import logged
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        return _mistaken('The command line needs typer and rich: pip install "abnn[cli]".')
    try:
        prepare()
        with logged():
            code = app(args, prog_name="abnn", standalone_mode=False)
    except Exception as error:
        if type(error).__name__ == "Abort":  # what typer makes of Ctrl-C
            raise KeyboardInterrupt from error
        # Typer's own complaints have this method, whichever version of it or of click they are of.
        message = str(error) if isinstance(error, CommandError) else _usage(error)
        if message is None:
            raise
        return _mistaken(message)
    return int(code or 0)


def is_first() -> bool:
    """Whether this is the only process, or number 0 of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _usage(error: Exception) -> str | None:
    form = getattr(error, "format_message", None)
    if form is None:
        return None
    message = str(form()).rstrip(".")
    asked = getattr(getattr(error, "ctx", None), "command_path", "abnn")
    return message if message.endswith("?") else f"{message}; see {asked} --help."


def _mistaken(message: str) -> int:
    # Under torchrun, process 0 speaks for all: it tells what went wrong on others, too.
    if is_first():
        print(f"abnn: {message}", file=sys.stderr)
    return 2
