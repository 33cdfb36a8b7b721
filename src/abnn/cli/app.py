"""All commands, put together; importing this needs typer."""

from __future__ import annotations

from typing import Annotated

import typer

import abnn
from abnn.cli import (
    compare,
    completion,
    demo,
    evaluate,
    fit,
    inspect,
    predict,
    recipes,
    report,
    samples_curve,
    train,
    tune,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# In the order in which they are used.
for command in (
    demo,
    inspect,
    recipes,
    train,
    tune,
    fit,
    predict,
    evaluate,
    samples_curve,
    report,
    compare,
):
    app.command(command.__name__.rpartition(".")[2].replace("_", "-"))(command.command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"abnn {abnn.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    install_completion: Annotated[
        completion.Shell | None,
        typer.Option(
            metavar="SHELL",
            callback=completion.install,
            is_eager=True,
            help="Complete by TAB in bash, zsh, fish or pwsh.",
        ),
    ] = None,
    show_completion: Annotated[
        completion.Shell | None,
        typer.Option(
            metavar="SHELL",
            callback=completion.show,
            is_eager=True,
            help="Print what that would install.",
        ),
    ] = None,
) -> None:
    """Turn a trained PyTorch network into a Bayesian one, and know when to trust it.

    Example: abnn demo
    """
