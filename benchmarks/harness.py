"""Timings side by side: every variant runs once a round, so that what slows one slows all.

A ratio is the median over the rounds of the ratio within a round. A variant that is there twice,
the A/A control, shows how far from 1 a ratio gets by noise alone.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

Timings = dict[str, list[float]]


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2
) -> Timings:
    """Seconds of every variant, a list with one entry a round."""
    seconds: Timings = {name: [] for name in variants}
    for _ in range(warm_up):
        for run in variants.values():
            run()
    names = list(variants)
    for round_ in range(rounds):
        first = round_ % len(names)  # nobody is always the one after the same other
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Timings, name: str, to: str) -> float:
    """The median of the ratios within the rounds."""
    pairs = zip(seconds[name], seconds[to], strict=True)
    return statistics.median(a / b for a, b in pairs)


def milliseconds(seconds: Timings, name: str) -> str:
    return f"{1e3 * statistics.median(seconds[name]):.1f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it can be read as it is."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def versions(*packages: str) -> str:
    """What was measured, on what."""
    found = [f"{name} {version(name)}" for name in ("torch", "numpy", *packages)]
    python = f"Python {platform.python_version()}"
    return f"{', '.join([python, *found])}; {torch.get_num_threads()} threads, {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def say(line: str) -> None:
    """How far it is, beside the result."""
    print(line, file=sys.stderr, flush=True)
