"""The demo end to end, and the honesty of what it tells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import parameters_to_vector

import abnn
from abnn.demo import SEED, Demo, load_data, run_demo
from abnn.demo.data import Batches, Data
from abnn.demo.run import Row
from abnn.demo.text import compare, table
from abnn.demo.training import QUICK, do_share, train_network
from abnn.evaluation import Evaluation
from abnn.metrics import Detection
from abnn.report.gather import gather

METHODS = ["single", "temperature", "ABNN", "ensemble"]


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(out: Path) -> Demo:
    return run_demo(out, quick=True, say=quiet)


@pytest.fixture
def finished(demo: Demo, out: Path, tmp_path: Path) -> Path:
    """A copy of the directory, to run in again."""
    return Path(shutil.copytree(out, tmp_path / "copy"))


def evaluations(demo: Demo) -> dict[str, Evaluation]:
    return {name: row.evaluation for name, row in demo.rows.items()}


def networks(out: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in out.glob("demo-runs/*/network-*.safetensors")}


def test_all_methods_are_in_the_results(demo: Demo, out: Path) -> None:
    results = json.loads((out / "results.json").read_text())
    assert list(results["methods"]) == METHODS
    for name, found in results["methods"].items():
        assert found["nll"] == demo.rows[name].evaluation.nll
        assert 0 <= found["accuracy"] <= 100
        assert 0 <= found["ece"] <= 100
        assert {"unseen", "photos"} == set(found["ood"])
        assert 0 <= found["ood"]["photos"]["msp"]["auroc"] <= 100


def test_costs_are_those_of_the_methods(demo: Demo) -> None:
    parameters = {name: row.parameters for name, row in demo.rows.items()}
    assert parameters["single"] == 0 < parameters["temperature"] == 1
    assert parameters["ABNN"] < parameters["ensemble"] / 50
    assert all(row.milliseconds > 0 for row in demo.rows.values())


def test_temperature_scaling_changes_no_label(demo: Demo) -> None:
    found = evaluations(demo)
    assert found["temperature"].accuracy == found["single"].accuracy


def test_the_report_is_written_and_fits_a_terminal(demo: Demo, out: Path) -> None:
    assert (out / "table.txt").read_text(encoding="utf-8") == demo.text + "\n"
    assert all(len(line) <= 80 for line in demo.text.splitlines() if str(out) not in line)


def test_the_printed_code_loads_the_result(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"^    (?=import abnn)(?:.*\n| *\n)+?(?=\S)", demo.text, re.MULTILINE)[0]
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in code.splitlines()), names)
    assert names["bnn"].modes == 4
    assert names["prediction"].label.shape == (5,)
    assert "tensor" in capsys.readouterr().out


def test_a_second_run_uses_what_is_there(demo: Demo, finished: Path) -> None:
    before, lines = networks(finished), list[str]()
    again = run_demo(finished, quick=True, say=lines.append)
    assert evaluations(again) == evaluations(demo)
    assert networks(finished) == before
    assert lines[0].startswith("Going on from")


def test_another_seed_may_share_the_directory(demo: Demo, finished: Path) -> None:
    assert evaluations(run_demo(finished, seed=1, quick=True, say=quiet)) != evaluations(demo)


def test_an_interrupted_run_goes_on_to_the_same_numbers(demo: Demo, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("3/5"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, quick=True, say=interrupt)
    before = networks(tmp_path)
    assert list(before) == ["network-0.safetensors"]
    resumed = run_demo(tmp_path, quick=True, say=quiet)
    assert evaluations(resumed) == evaluations(demo)
    assert before.items() <= networks(tmp_path).items()


def test_a_second_process_does_the_same_work(
    demo: Demo, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("abnn.demo.training.FULL", QUICK)
    monkeypatch.setattr("abnn.demo.training._FIRST_FITS", 0)
    do_share(str(tmp_path), str(SEED))
    (run,) = out.glob("demo-runs/*")
    found = {str(file.relative_to(run)): file for file in run.glob("**/*.safetensors")}
    assert {f"network-{k}.safetensors" for k in range(4)} < set(found)
    for name, file in found.items():
        one, same = load_file(file), load_file(tmp_path / name)
        assert all(torch.equal(tensor, same[key]) for key, tensor in one.items())


def test_the_second_process_ends_with_the_first(tmp_path: Path) -> None:
    code = "import sys; from abnn.demo.training import second; second(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(tmp_path), "0"]
    ended = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert ended.returncode == 1  # what has done its share ends with 0
    assert not list(tmp_path.iterdir())


def test_the_page_shows_all_methods_and_what_was_measured(demo: Demo, out: Path) -> None:
    page = (out / "report.html").read_text()
    for name in ("Network alone", "Temperature scaling", "ABNN", "Deep ensemble"):
        assert name in page
    data = gather([out / "abnn"], replicates=50)
    assert all(method.robustness for method in data.methods)
    bayesian = data.methods[2]
    assert bayesian.fit
    assert bayesian.samples_curve
    assert bayesian.trajectory
    assert bayesian.figures["nll"] == demo.rows["ABNN"].evaluation.nll


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files"):
        run_demo(tmp_path, quick=True, say=quiet)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]


def test_the_callers_threads_stay(finished: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        run_demo(finished, quick=True, say=quiet)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


def test_training_is_a_function_of_its_seed_and_leaves_the_callers_randomness() -> None:
    batches, state = Batches(torch.rand(50, 1, 8, 8), torch.arange(50) % 8), torch.get_rng_state()
    nets = [train_network(batches, 1, seed) for seed in (0, 0, 1)]
    one, same, other = (parameters_to_vector(net.parameters()) for net in nets)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_image_is_in_two_parts_of_the_data() -> None:
    data = load_data(seed=3)
    parts = [{image.numpy().tobytes() for image in x} for x in images(data)]
    assert [len(part) for part in parts] == [700, 243, 500, 354, 500]
    assert all(one.isdisjoint(other) for one, other in combinations(parts, 2))


def test_the_network_sees_the_digits_0_to_7_alone() -> None:
    data = load_data()
    for _, labels in (data.train, data.validation, data.test):
        assert labels.unique().tolist() == list(range(8))


def test_the_data_are_a_function_of_the_seed() -> None:
    one, same, other = (images(load_data(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def images(data: Data) -> list[torch.Tensor]:
    return [data.train[0], data.validation[0], data.test[0], data.unseen, data.photos]


def row(accuracy: float, nll: float, auroc: float) -> Row:
    detection = Detection(auroc=auroc, aupr=50.0, fpr95=30.0, aupr_in=50.0, fpr95_in=30.0)
    ood = {"unseen": {"msp": detection}, "photos": {"msp": detection}}
    evaluation = abnn.Evaluation(500, accuracy, nll, brier=0.1, ece=2.0, ood=ood)
    return Row(evaluation, parameters=0, seconds=0.0, milliseconds=1.0)


def test_what_got_worse_is_said() -> None:
    said = compare(row(95.0, nll=0.2, auroc=90.0), row(94.0, nll=0.1, auroc=90.04))
    assert said == (
        "Against the single network the ABNN is better in NLL (0.200 to 0.100); worse in accuracy "
        "(95.0 to 94.0); equal in calibration, AUROC on 8 and 9, FPR95 on 8 and 9, AUROC on "
        "photographs, FPR95 on photographs."
    )


def test_the_best_of_each_line_is_marked_and_all_that_print_alike() -> None:
    rows = {"single": row(95.0, nll=0.2, auroc=90.0), "ABNN": row(94.0, nll=0.1, auroc=90.04)}
    lines = {line[:27].strip(): line[27:].split() for line in table(rows, load_data()).splitlines()}
    assert lines["accuracy, %"] == ["95.0*", "94.0"]
    assert lines["negative log-likelihood"] == ["0.200", "0.100*"]
    assert lines["AUROC, %"] == ["90.0*", "90.0*"]
