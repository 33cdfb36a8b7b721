"""The line of progress: it moves on a terminal, and is seldom in a log."""

from __future__ import annotations

import io
import os
import sys
from itertools import pairwise

import pytest

from abnn.progress import Progress, logged


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def pass_(self, bar: Progress, done: int, seconds: float) -> None:
        self.now += seconds
        bar.update(done, "loss 0.5")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from here on."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_a_terminal_has_one_line_that_moves(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with Progress(20, "fit") as bar:
        for done in range(1, 21):
            clock.pass_(bar, done, 0.0625)
    *pictures, end = screen.getvalue().split("\r")[1:]
    assert len(pictures) == 10
    assert pictures[0].startswith("fit 1/20  loss 0.5")
    assert end == "fit 20/20  loss 0.5  0:00 left\n"


def test_a_line_never_wraps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((12, 40)))
    with Progress(20, "evaluate svhn") as bar:
        clock.pass_(bar, 1, 0)
    assert screen.getvalue() == "\revaluate sv\n"


def hours(clock: Clock, enabled: bool | None) -> None:
    with Progress(3600, "fit", enabled) as bar:
        for done in range(1, 3601):
            clock.pass_(bar, done, 4)


def test_a_log_has_plain_lines_ever_more_seldom(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with logged():
        hours(clock, None)
    log = capsys.readouterr().err
    assert "\r" not in log
    lines = log.splitlines()
    assert lines[0] == "fit 9/3600  loss 0.5  3:59:24 left"
    seconds = [4 * int(line.split("/")[0].removeprefix("fit ")) for line in lines]
    steps = [b - a for a, b in pairwise(seconds)]
    assert steps[:4] == [60, 120, 240, 480]
    assert set(steps[4:-1]) == {600}
    assert lines[-1].startswith("fit 3600/3600")


def test_work_of_seconds_leaves_no_line_in_a_log(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with logged(), Progress(5, "fit") as bar:
        for done in range(1, 6):
            clock.pass_(bar, done, 5)
    assert capsys.readouterr().err == ""


def test_a_library_says_nothing_in_a_log(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    hours(clock, None)
    assert capsys.readouterr().err == ""


def test_what_is_asked_for_has_a_first_and_a_last_line(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(5, "fit", True) as bar:
        for done in range(1, 6):
            clock.pass_(bar, done, 1)
    assert [line[:7] for line in capsys.readouterr().err.splitlines()] == ["fit 1/5", "fit 5/5"]


def test_work_of_unknown_length_counts(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with logged(), Progress(None, "predict") as bar:
        for done in range(1, 12):
            clock.pass_(bar, done, 10)
    assert capsys.readouterr().err.splitlines() == ["predict 4  loss 0.5", "predict 10  loss 0.5"]
