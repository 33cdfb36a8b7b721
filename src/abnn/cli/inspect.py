"""`abnn inspect`: what conversion would do to a network, without its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

import abnn
from abnn.cli.options import NETWORK, Json, mistakes_told
from abnn.zoo import build


def command(
    network: Annotated[str, typer.Argument(metavar="NETWORK", help=NETWORK)],
    as_json: Json = False,
) -> None:
    """List the norms of a network, and what becomes of each.

    The network is built with random weights; nothing is downloaded, but for the
    description of a network on the hub.

    Example:
      abnn inspect timm:convnext_tiny.fb_in1k
    """
    with mistakes_told("Stopped.", ImportError):
        inspection = abnn.inspect(build(network))
    if as_json:
        parameters = {"parameters_per_mode": inspection.parameters_per_mode}
        typer.echo(json.dumps({"network": network} | parameters | asdict(inspection), indent=2))
    else:
        typer.echo(str(inspection))
