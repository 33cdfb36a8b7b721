"""`abnn report`: a page about the evaluations of one or more runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from abnn.cli.options import Json, mistakes_told


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Directories with evaluation/NAME/, or records."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help="The page; default: report.html in RUN, or here if there are several.",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="A directory for the figures as SVG and PNG."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="The method all others are compared with; default: the network alone."),
    ] = None,
    replicates: Annotated[
        int, typer.Option(min=1, help="Resampled sets behind every interval.")
    ] = 1000,
    as_json: Json = False,
) -> None:
    """Show what was evaluated on one page.

    Is it better, when can it be trusted, what does it cost? The page is a single file
    that opens from disk, without a network. Several runs are shown side by side.

    Example:
      abnn report runs/mine --figures figures
    """
    from abnn.report import write_report

    with mistakes_told("Stopped; the page was not written.", ImportError):
        page = write_report(
            runs,
            out or (runs[0] if len(runs) == 1 else Path()) / "report.html",
            figures=figures,
            title=title,
            reference=reference,
            replicates=replicates,
        )
    if as_json:
        typer.echo(json.dumps({"page": str(page), "figures": figures and str(figures)}))
        return
    typer.echo(f"Written to {page}.")
    if figures is not None:
        typer.echo(f"Figures are in {figures}.")
