"""One line that tells how far a long piece of work is: live on a terminal, sparse in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

_LIVE = 0.1  # seconds between two pictures of a terminal's line
_FIRST, _LONGEST = 30.0, 600.0  # between two lines of a log: ever longer, so that it stays short

_logged: ContextVar[bool] = ContextVar("logged", default=False)


@contextmanager
def logged() -> Iterator[None]:
    """Let long work tell of itself in a log too: what a program does, and a library does not.

    >>> with logged():
    ...     Progress(10, "fit").enabled
    True
    """
    token = _logged.set(True)
    try:
        yield
    finally:
        _logged.reset(token)


class Progress:
    """Shows how much is done, a note and the time left, on standard error.

    On a terminal this is one line that moves. Elsewhere it is a plain line after half a minute,
    after another minute, and so on, up to every ten minutes.

    Args:
        total: number of steps, or None if it is not known.
        label: what is being done.
        enabled: True, the first and the last step in any case; False; or None to show it on a
            terminal, and in a log within `logged()`, where work of seconds says nothing.

    >>> with Progress(10, "fit", enabled=False) as progress:
    ...     progress.update(5, "loss 0.31")
    """

    def __init__(self, total: int | None, label: str, enabled: bool | None = None) -> None:
        self.total, self.label = total, label
        self.terminal = sys.stderr.isatty()
        self.enabled = (self.terminal or _logged.get()) if enabled is None else enabled
        self.pause = _LIVE if self.terminal else _FIRST
        self.waits = enabled is None and not self.terminal
        self.started: float | None = None
        self.first = 0
        self.shown: float | None = None
        self.width = 0

    def update(self, done: int, note: str = "") -> None:
        """Say that `done` of the steps are done; `note` is shown beside it."""
        if not self.enabled:
            return
        now = time.monotonic()
        if self.started is None:  # a resumed run does not count what was done before
            self.started, self.first = now, done
        if not self._is_due(now, done == self.total):
            return
        self.shown = now
        rate = (now - self.started) / max(1, done - self.first)
        of, left = "", ""
        if self.total is not None:
            of = f"/{self.total}"
            left = f"{clock(rate * (self.total - done))} left" if done > self.first else ""
        parts = (f"{self.label} {done}{of}", note, left)
        line = "  ".join(part for part in parts if part)
        if self.terminal:
            line = line[: shutil.get_terminal_size().columns - 1]  # one that wraps can't move
            print("\r" + line.ljust(self.width), end="", file=sys.stderr, flush=True)
            self.width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)
            self.pause = min(2 * self.pause, _LONGEST)

    def _is_due(self, now: float, last: bool) -> bool:
        if self.shown is None:
            assert self.started is not None
            return not self.waits or now - self.started >= self.pause
        return last or now - self.shown >= self.pause

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
