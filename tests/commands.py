"""Lines that a user may type, checked against the commands and their options."""

from __future__ import annotations

import re
import shlex

from typer.main import get_command

from abnn.cli.app import app


def lines_of(text: str) -> list[str]:
    """The lines of a text that run abnn, those that a backslash continues as one."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.match(r"\s*(torchrun .*-m )?abnn [a-z]", line)]


def parse(line: str) -> None:
    """Parse a line as abnn would, and run nothing; an option that is none is an error."""
    for part in re.split(r"&&|[|>]\s", line[line.index("abnn ") :])[:1]:
        _, name, *words = shlex.split(part, comments=True)
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        command.make_context(name, words)
