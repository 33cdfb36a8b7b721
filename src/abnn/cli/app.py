"""All commands, put together; importing this needs typer."""

from __future__ import annotations

from inspect import cleandoc
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

# Plain help: frames leave no room for a source's name at 80 columns, and [@WEIGHTS] is no markup.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
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
    name = command.__name__.rpartition(".")[2].replace("_", "-")
    # \b keeps the lines of the paragraph that it stands before, so that they can be copied.
    about = cleandoc(command.command.__doc__ or "").replace("\nExample:", "\n\b\nExample:")
    app.command(name, help=about)(command.command)


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
    r"""Make trained PyTorch networks Bayesian, and know when to trust them.

    abnn COMMAND --help tells more of each, with an example.

    \b
    Example:
      abnn demo
    """
