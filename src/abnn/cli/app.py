"""All commands, put together; importing this needs typer."""

from __future__ import annotations

from typing import Annotated

import typer

import abnn
from abnn.cli import compare, completion, demo, fit, inspect, recipes, report, tune

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command("compare")(compare.command)
app.command("demo")(demo.command)
app.command("fit")(fit.command)
app.command("inspect")(inspect.command)
app.command("recipes")(recipes.command)
app.command("report")(report.command)
app.command("tune")(tune.command)


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
