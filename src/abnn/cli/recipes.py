"""`abnn recipes`: the hyper-parameters that come with the library."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from abnn.cli.options import Json, Set, mistakes_told
from abnn.recipe import Recipe, names, overridden
from abnn.table import aligned

_COLUMNS = ("network", "data", "epochs", "lr", "alpha", "schedule", "augmentation")


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A recipe by name, or a TOML file.")
    ] = None,
    changes: Set = None,
    as_json: Json = False,
) -> None:
    """List the paper's recipes, or print one as a TOML file.

    Each is a row of one of the paper's two tables of hyper-parameters: of
    training from scratch, or of ABNN.

    Example:
      abnn recipes
      abnn recipes cifar10-resnet50 --set lr=0.01 > mine.toml
    """
    with mistakes_told("Stopped."):
        if name is not None:
            recipe = overridden(Recipe.load(name), changes or ())
            typer.echo(_json(recipe.to_dict()) if as_json else recipe.to_toml().rstrip())
            return
        if changes:
            raise ValueError("--set changes one recipe; give its name too.")
        found = {each: Recipe.load(each) for each in names()}
        if as_json:
            typer.echo(_json({k: {"table": _table(r)} | r.to_dict() for k, r in found.items()}))
            return
        rows = [[each, _table(recipe), *_cells(recipe)] for each, recipe in found.items()]
        typer.echo(aligned(["name", "table", *_COLUMNS], *rows, named=True))


def _table(recipe: Recipe) -> str:
    return "scratch" if recipe.scratch else "ABNN"


def _cells(recipe: Recipe) -> list[str]:
    alpha = "" if recipe.alpha is None else f"{recipe.alpha:g}"
    return [
        recipe.model or "",
        recipe.data or "",
        f"{recipe.epochs:g}",
        f"{recipe.lr:g}",
        alpha,
        _schedule(recipe),
        ", ".join(recipe.augmentation),
    ]


def _schedule(recipe: Recipe) -> str:
    if recipe.schedule == "multistep":
        at = ", ".join(f"{milestone:g}" for milestone in recipe.milestones)
        return f"x {recipe.lr_factor:g} at {at}"
    return recipe.schedule


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2)
