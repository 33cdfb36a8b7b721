"""`abnn demo`: see what an ABNN does, on real data and in about two minutes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from abnn.cli import CommandError
from abnn.demo import SEED, run_demo
from abnn.demo.text import SHADES


def command(
    out: Annotated[
        Path, typer.Option("--out", "-o", file_okay=False, help="Where everything is written.")
    ] = Path("abnn-demo"),
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Other data and networks.")
    ] = SEED,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take seconds; the numbers mean little.")
    ] = False,
) -> None:
    """See what it does for a classifier of handwritten digits.

    It is made Bayesian, and compared with the network alone, temperature scaling and an ensemble:
    are they right, are they as sure as they should be, and do they notice digits
    they never saw and photographs? Offline; takes about two minutes.

    Example:
      abnn demo --out runs/demo --seed 1
    """
    console = Console(highlight=False, soft_wrap=True)
    try:
        result = run_demo(out, seed, quick, say=lambda line: console.print(line, style="dim"))
    except ModuleNotFoundError as error:
        if error.name is not None:  # not the demo's own sentence, but a broken installation
            raise
        raise CommandError(str(error)) from error
    except OSError as error:
        reason = f"{out} can't be written: {error.strerror}" if error.strerror else str(error)
        raise CommandError(f"{reason}; give another directory with --out.") from error
    except KeyboardInterrupt:
        typer.echo("\nStopped; the same command goes on from here.", err=True)
        raise typer.Exit(130) from None
    console.print()
    console.print(_styled(_printable(result.text)))


def _styled(text: str) -> Text:
    styled = Text(text)
    styled.highlight_regex(r"[\d.]+\*", "bold green")
    styled.highlight_regex(r"(?m)^(digits|photographs|cost|What|Use|Written)\b.*$", "bold")
    return styled


def _printable(text: str) -> str:
    """The text, with letters for shades where the terminal knows no others."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return text.translate(str.maketrans(SHADES, " .:+#"))
    return text
