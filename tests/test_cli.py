"""The command line: what it prints, its exit codes, and one sentence for every mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torchvision
from typer.main import get_command

import abnn
from abnn.cli import run
from abnn.cli.app import app
from abnn.cli.options import DATA, NETWORK
from abnn.progress import Progress
from commands import lines_of, parse

MODULE = """
from torch import nn
from abnn.progress import Progress

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))

def fails():
    raise OSError("no disk")

def tells():
    print("tells of long work:", Progress(9, "build").enabled)
    return build()

def waits():
    raise KeyboardInterrupt

def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())

number = 7
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of the user in it."""
    (tmp_path / "mynets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    return tmp_path


def test_the_version_is_the_librarys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"abnn {abnn.__version__}\n"


COMMANDS = list(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("args", [[], ["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_fits_a_terminal_and_has_an_example_that_runs(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(args) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    examples = lines_of(told.partition("Example:")[2])
    assert examples
    for line in examples:
        parse(line)
    assert args[:1] in ([], ["--help"]) or examples[0].split()[1] == args[0]


def test_help_names_every_source_of_networks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert NETWORK in told
    assert DATA in told


def test_every_command_is_summed_up_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    rows = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert [row.split()[0] for row in rows] == COMMANDS
    assert all(row.endswith(".") and not row.endswith("...") for row in rows)


def test_an_option_of_one_name_is_written_alike_everywhere() -> None:
    found: dict[str, set[tuple[str, ...]]] = {}
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        for option in command.params:
            if option.opts[0].startswith("--"):
                found.setdefault(option.opts[0], set()).add(tuple(option.opts))
    assert {name: ways for name, ways in found.items() if len(ways) > 1} == {}
    assert found["--out"] == {("--out", "-o")}


@pytest.mark.parametrize("args", [["recipes"], ["recipes", "--json"]])
def test_a_reader_that_has_seen_enough_is_no_mistake(args: list[str]) -> None:
    code = """
import os, sys
read, write = os.pipe()
os.close(read)
os.dup2(write, 1)
from abnn.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.stderr == ""


def test_inspect_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "torchvision:resnet18"]) == 0
    expected = str(abnn.inspect(torchvision.models.resnet18(weights=None)))
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    "network",
    [
        "timm:test_resnet",
        "timm:test_resnet.r160_in1k",
        "torchvision:lraspp_mobilenet_v3_large",
        "torchvision:resnet18@DEFAULT",
        "zoo:resnet50",
    ],
)
def test_networks_are_built_without_a_download(
    network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", network]) == 0
    assert "norms become Bayesian" in capsys.readouterr().out


def test_inspect_finds_a_builder_in_the_current_directory(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list(sys.path)
    assert run(["inspect", "module:mynets:build", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters_per_mode"] == 16
    assert [layer["family"] for layer in found["layers"]] == ["layer"]
    assert sys.path == path


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["inspcet"], "No such command 'inspcet'"),
        (["fit", "--lrr", "1"], "; see abnn fit --help."),
        (["inspect"], "Missing argument 'NETWORK'"),
        (["inspect", "resnet18"], "write zoo:NAME"),
        (["inspect", "torchvision:resnet81"], "the nearest is 'resnet18'"),
        (["inspect", "timm:resnet500"], "the nearest is 'resnet50'"),
        (["inspect", "module:mynets"], "write module:mynets:BUILDER"),
        (["inspect", "module:mynet:build"], "No module named 'mynet'"),
        (["inspect", "module:mynets:biuld"], "the nearest is 'build'"),
        (["inspect", "module:mynets:fails"], "OSError: no disk"),
        (["inspect", "module:mynets:number"], "is a int"),
        (["inspect", "module:mynets:lazy"], "run the network once on an input"),
        (["--show-completion", "tcsh"], "'tcsh' is not one of"),
        (["--install-completion"], "requires an argument"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--out", "mynets.py"], "is a file"),
        (["demo", "--out", "."], "give another directory with --out"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    here: Path, args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_long_work_tells_of_itself_in_a_log(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "module:mynets:tells"]) == 0
    assert capsys.readouterr().out.startswith("tells of long work: True\n")
    assert not Progress(9, "build").enabled


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_told_how_to_complete(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--show-completion", shell]) == 0
    assert f"_ABNN_COMPLETE=complete_{shell}" in capsys.readouterr().out


def test_a_shell_gets_its_completion_installed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert run(["--install-completion", "bash"]) == 0
    file = capsys.readouterr().out.split()[2].rstrip(";")
    assert "complete_bash" in Path(file).read_text()
    assert file in (here / ".bashrc").read_text()


@pytest.mark.parametrize(
    ("typed", "offered"), [("abnn ins", "inspect"), ("abnn inspect --js", "--json")]
)
def test_a_shell_completes_commands_and_options(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    for name, value in {"_ABNN_COMPLETE": "complete_bash", **words}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="0"):
        run([])
    assert capsys.readouterr().out.split() == [offered]


def test_an_interruption_has_a_code_of_its_own(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", "module:mynets:waits"]) == 130
    assert capsys.readouterr().err.strip() == "Stopped."


def test_an_interruption_before_the_command_begins_is_told_too() -> None:
    code = """
import sys

class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
from abnn.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "Stopped.")


@pytest.mark.parametrize(
    ("missing", "args", "extra"),
    [
        ("typer", ["--help"], "abnn[cli]"),
        ("rich", ["--help"], "abnn[cli]"),
        ("sklearn", ["demo", "--quick"], "abnn[demo]"),
        ("PIL", ["demo", "--quick"], "abnn[demo]"),
        ("timm", ["inspect", "timm:resnet18"], "pip install timm"),
    ],
)
def test_a_missing_package_is_named(here: Path, missing: str, args: list[str], extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from abnn.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.returncode == 2
    assert extra in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in here.iterdir()] == ["mynets.py"]


def test_the_demo_prints_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--quick", "--out", str(tmp_path / "new")]) == 0
    report = (tmp_path / "new" / "table.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith(report)


def test_a_demo_that_is_stopped_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "abnn", "demo", "--out", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1/5")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.strip() == "Stopped; the same command goes on from here."
