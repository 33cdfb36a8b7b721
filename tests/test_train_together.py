"""Training over two processes: it ends like one, resumes like one, and stops as a whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fitting import equal
from test_distributed import HERE, ends, torchrun
from train_together import ALIKE, EQUAL, ERRORS


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch: starting takes longer than they do."""
    folder = tmp_path_factory.mktemp("together")
    done = torchrun(HERE / "train_together.py", folder, "equal", "errors", "straight")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", EQUAL)
def test_two_processes_end_like_one(together: Path, case: str) -> None:
    alone = EQUAL[case]()
    first, second = (end[case] for end in ends(together, "equal"))
    assert equal(first, second)
    assert first.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ALIKE)
def test_what_is_random_ends_alike_on_both(together: Path, case: str) -> None:
    first, second = (end[case] for end in ends(together, "equal"))
    assert equal(first, second)
    assert first["losses"].isfinite().all()
    assert first["losses"][-4:].mean() < first["losses"][:4].mean()


def test_one_that_is_killed_is_restarted_and_both_end_bit_identical(
    together: Path, tmp_path: Path
) -> None:
    done = torchrun("--max-restarts", 2, HERE / "train_together.py", tmp_path, "killed")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed" / "marked").exists()
    straight = ends(together, "straight")[0]
    for end in ends(tmp_path, "killed"):
        assert equal(end, straight)
    written = load_file(tmp_path / "killed" / "0" / "network.safetensors")
    assert equal(written, {name: straight[name] for name in written})


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("labels", "PeerError: Process 1 of 2 stopped.*Labels go from 0 to 7", "ValueError: Label"),
        ("nan", "FloatingPointError: The loss is nan at step 2", None),
        ("damaged", "PeerError: .*row 7 is damaged", "OSError: row 7 is damaged"),
        ("in the network", "PeerError: Another process .* its own output", "MemoryError: out of"),
        ("too small", "ValueError: A batch has 1 row, fewer than the 2 processes", None),
        ("recipe", "ValueError: Process 1 runs another training .* its recipe differs", None),
        ("network", "ValueError: Process 1 runs another training .* its network differs", None),
        ("order", "ValueError: The processes do not have the same batch .epoch 0, batch 1", None),
        ("length", "ValueError: .* the same number of batches .epoch 0, batch 6", None),
    ],
)
def test_what_goes_wrong_on_one_ends_both(
    together: Path, case: str, first: str, second: str | None
) -> None:
    assert case in ERRORS
    for rank, pattern in enumerate((first, second or first)):
        error = json.loads((together / f"errors{rank}.json").read_text())[case]
        assert re.match(pattern, error), error
