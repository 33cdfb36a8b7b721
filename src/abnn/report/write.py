"""From run directories to a page and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from abnn.files import write
from abnn.report.gather import gather


def write_report(
    runs: str | PathLike[str] | Sequence[str | PathLike[str]],
    out: str | PathLike[str] = "report.html",
    *,
    figures: str | PathLike[str] | None = None,
    title: str | None = None,
    reference: str | None = None,
    replicates: int = 1000,
    detailed: int | None = None,
    progress: bool | None = None,
) -> Path:
    """Write a page about the evaluations of some runs: one file that needs nothing else.

    Needs matplotlib and jinja2: `pip install "abnn[report]"`.

    Args:
        runs: directories with `evaluation/NAME/`, as `abnn.evaluate(..., record=)` writes them.
        out: the page.
        figures: a directory for the figures as SVG and PNG; default: none are written.
        title: of the page.
        reference: name of the method that the others are compared with; default: the network alone.
        replicates: resampled sets behind every interval.
        detailed: how many of the runs are shown one by one, the first ones; the others count where
            mean and spread over runs are told. Default: all.
        progress: show a line of progress; default: on a terminal.

    >>> import tempfile
    >>> data = [(torch.randn(64, 3), torch.randint(3, (64,)))]
    >>> with tempfile.TemporaryDirectory() as run:
    ...     single = abnn.baselines.Single(nn.Identity())
    ...     result = abnn.evaluate(single, data, record=f"{run}/evaluation/single")
    ...     page = write_report(run, f"{run}/report.html", replicates=50)
    ...     page.name, page.read_text()[:15].lower()
    ('report.html', '<!doctype html>')
    """
    try:
        from abnn.report.figures import write_figures
        from abnn.report.page import render
    except ImportError as error:
        raise ImportError(
            "A report needs matplotlib and jinja2: pip install 'abnn[report]'."
        ) from error
    out = Path(out)
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a directory; give a file for the page.")
    some = [runs] if isinstance(runs, str | PathLike) else list(runs)
    data = gather(
        some,
        title=title,
        reference=reference,
        replicates=replicates,
        detailed=detailed,
        progress=progress,
    )
    page = render(data)
    if figures is not None:
        write_figures(data, Path(figures))
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, page.encode())  # last, so that where the page is, all is
    return out
