"""One line that tells how far a long piece of work is: live on a terminal, sparse in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """Shows how much is done, a note and the time left, on standard error.

    Args:
        total: number of steps, or None if it is not known.
        label: what is being done.
        enabled: True, False, or None to show it only on a terminal.

    >>> with Progress(10, "fit", enabled=False) as progress:
    ...     progress.update(5, "loss 0.31")
    """

    def __init__(self, total: int | None, label: str, enabled: bool | None = None) -> None:
        self.total, self.label = total, label
        self.terminal = sys.stderr.isatty()
        self.enabled = self.terminal if enabled is None else enabled
        self.started: float | None = None
        self.first = 0
        self.shown = 0.0
        self.width = 0

    def update(self, done: int, note: str = "") -> None:
        """Say that `done` of the steps are done; `note` is shown beside it."""
        if not self.enabled:
            return
        now = time.monotonic()
        if self.started is None:  # a resumed run does not count what was done before
            self.started, self.first = now, done - 1
        # A terminal line is redrawn ten times a second, a log gets a line a quarter minute.
        if done != self.total and now - self.shown < (0.1 if self.terminal else 15):
            return
        self.shown = now
        rate = (now - self.started) / max(1, done - self.first)
        of, left = "", ""
        if self.total is not None:
            of = f"/{self.total}"
            left = f"{clock(rate * (self.total - done))} left" if done > self.first + 1 else ""
        parts = (f"{self.label} {done}{of}", note, left)
        line = "  ".join(part for part in parts if part)
        if self.terminal:
            print("\r" + line.ljust(self.width), end="", file=sys.stderr, flush=True)
            self.width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled and self.terminal and self.width:
            print(file=sys.stderr)


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> clock(75.4), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
