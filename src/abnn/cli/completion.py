"""Completion by TAB, for a shell that is named.

Typer's own options guess the shell from the processes around, and fail where there is none. What it
completes with is not public, so it is imported where completion is asked for and nowhere else.
"""

from __future__ import annotations

import os
from enum import StrEnum

import typer

from abnn.cli.options import mistakes_told

_NAMES = {"prog_name": "abnn", "complete_var": "_ABNN_COMPLETE"}


class Shell(StrEnum):
    """The shells that can complete."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"
    pwsh = "pwsh"


def prepare() -> None:
    """Understand what shells ask, if it is one that asks."""
    if _NAMES["complete_var"] in os.environ:
        from typer._completion_classes import completion_init

        completion_init()


def show(shell: Shell | None) -> None:
    """Print what a shell needs to complete, and stop."""
    if shell is not None:
        from typer._completion_shared import get_completion_script

        typer.echo(get_completion_script(**_NAMES, shell=shell.value))
        raise typer.Exit


def install(shell: Shell | None) -> None:
    """Write it where the shell finds it, and stop."""
    if shell is not None:
        from typer._completion_shared import install as write

        with mistakes_told("Stopped; nothing was installed."):
            _, path = write(**_NAMES, shell=shell.value)
        typer.echo(f"Written to {path}; start a new terminal.")
        raise typer.Exit
