"""Snapshots of a fit: which there are, that no kill changes them, and reading them."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import abnn
from abnn.artifact import fingerprint
from abnn.rundir import read_losses
from abnn.snapshots import snapshots_of, write_snapshot
from fitting import banks, data, equal
from nets import mlp


class Stopping:
    """A loader whose fit is stopped when it asks for a certain batch."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.given, self.stop_at = 0, stop_at

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = data()
        for i in torch.randperm(6).tolist():
            if self.given == self.stop_at:
                raise KeyboardInterrupt
            self.given += 1
            yield batches[i]


def fitted(run: Path, stop_at: int | None = None, **arguments: Any) -> abnn.ABNN:
    """A fit of 12 steps, which may be stopped."""
    modes = arguments.pop("modes", 3)
    bnn = abnn.convert(mlp(), modes=modes)
    arguments = {"epochs": 2, "lr": 0.05, "snapshots": 5, "checkpoint_seconds": 0} | arguments
    try:
        abnn.fit(bnn, Stopping(stop_at), run=run, **arguments)
    except KeyboardInterrupt:
        assert stop_at is not None
    return bnn


def files(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "snapshots").iterdir()}


def steps(run: Path) -> list[int]:
    return [snapshot.step for snapshot in snapshots_of(run)]


# Which there are


def test_the_first_is_the_start_and_the_last_is_the_end(tmp_path: Path) -> None:
    start = banks(abnn.convert(mlp(), modes=3))
    bnn = fitted(tmp_path)
    found = snapshots_of(tmp_path)
    assert [snapshot.step for snapshot in found] == [0, 2, 4, 7, 9, 12]
    assert equal(found[0].tensors, start)
    assert equal(found[-1].tensors, banks(bnn))
    assert {snapshot.network for snapshot in found} == {fingerprint(bnn)["values"]}


def test_a_snapshot_is_where_a_fit_of_so_many_steps_ends(tmp_path: Path) -> None:
    fitted(tmp_path)
    for snapshot in snapshots_of(tmp_path)[1:]:
        bnn = abnn.convert(mlp(), modes=3)
        abnn.fit(bnn, Stopping(), steps=snapshot.step, lr=0.05)
        assert equal(snapshot.tensors, banks(bnn))


def test_a_fit_of_fewer_steps_leaves_one_of_every_step(tmp_path: Path) -> None:
    fitted(tmp_path, snapshots=100, epochs=0.5)
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_snapshots_change_no_number_of_a_fit(tmp_path: Path) -> None:
    with_, without = fitted(tmp_path / "with"), fitted(tmp_path / "without", snapshots=0)
    assert equal(banks(with_), banks(without))
    losses = [read_losses(tmp_path / name)[1] for name in ("with", "without")]
    assert torch.equal(*losses)
    assert not (tmp_path / "without" / "snapshots").exists()


@pytest.mark.parametrize("at_once", [1, 2])
def test_every_group_of_modes_has_files_of_its_own(tmp_path: Path, at_once: int) -> None:
    bnn = fitted(tmp_path, modes_at_once=at_once, snapshots=1)
    groups = {1: ["0-0", "1-1", "2-2"], 2: ["0-1", "2-2"]}[at_once]
    names = {f"{s:08}-{group}.safetensors" for s in (0, 12) for group in groups}
    assert set(files(tmp_path)) == names
    assert equal(snapshots_of(tmp_path)[-1].tensors, banks(bnn))


# No kill changes them


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("at_once", "stops"), [(None, (0, 3, 4, 9)), (1, (2, 11, 26)), (2, (7, 14))]
)
def test_a_fit_that_was_killed_leaves_the_same_files(
    tmp_path: Path, at_once: int | None, stops: tuple[int, ...], optimizer: str
) -> None:
    arguments: dict[str, Any] = {"modes_at_once": at_once, "optimizer": optimizer, "lr": 0.02}
    fitted(tmp_path / "straight", **arguments)
    expected = files(tmp_path / "straight")
    for stop_at in stops:
        run = tmp_path / f"stopped at {stop_at}"
        fitted(run, stop_at, **arguments)
        fitted(run, **arguments)
        assert files(run) == expected


def test_snapshots_after_the_last_checkpoint_are_written_once_more(tmp_path: Path) -> None:
    fitted(tmp_path / "straight")
    run = tmp_path / "killed"
    fitted(run, stop_at=3)
    checkpoint = (run / "checkpoint.safetensors").read_bytes()
    fitted(run, stop_at=8, checkpoint_seconds=1e9)
    assert (run / "checkpoint.safetensors").read_bytes() == checkpoint
    before = {name: (run / "snapshots" / name).stat().st_mtime_ns for name in files(run)}
    fitted(run)
    assert files(run) == files(tmp_path / "straight")
    again = [n for n, at in before.items() if (run / "snapshots" / n).stat().st_mtime_ns != at]
    assert again == ["00000004-0-2.safetensors", "00000007-0-2.safetensors"]


def test_a_process_killed_at_any_moment_leaves_the_same_files(tmp_path: Path) -> None:
    """A real process, killed for real, whenever there is a new snapshot."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_snapshots import fitted\n"
        "torch.set_num_threads(1)\n"
        "fitted(Path(sys.argv[1]), epochs=10, snapshots=20, modes=2, modes_at_once=1)\n"
        "print('done')\n"
    )
    fitted(tmp_path / "straight", epochs=10, snapshots=20, modes=2, modes_at_once=1)
    run, kills, seen = tmp_path / "run", 0, 0
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, script, run], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while kills < 2 and process.poll() is None:
            now = len(list((run / "snapshots").glob("*.safetensors")))
            if now > seen:
                seen = now
                process.kill()
                kills += 1
        out, err = process.communicate()
        if b"done" in out:
            break
        assert process.returncode == -9, err.decode()
    assert kills > 0
    left = {name: data for name, data in files(run).items() if not name.startswith(".")}
    assert left == files(tmp_path / "straight")


# What a fit refuses


def test_their_number_can_not_change_on_the_way(tmp_path: Path) -> None:
    fitted(tmp_path, stop_at=3)
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"snapshots was 5 and now is {count}.; use another"):
            fitted(tmp_path, snapshots=count)
    fitted(tmp_path)
    assert len(steps(tmp_path)) == 6


def test_a_fit_without_snapshots_goes_on_as_ever_but_gets_none_later(tmp_path: Path) -> None:
    fitted(tmp_path, stop_at=3, snapshots=0)
    assert "snapshots" not in (tmp_path / "fit.json").read_text()
    with pytest.raises(ValueError, match="snapshots was 0 and now is 5"):
        fitted(tmp_path)
    fitted(tmp_path, snapshots=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"snapshots": 3}, r"snapshots=3 need a directory; pass run= too"),
        ({"snapshots": -1}, "snapshots=-1 is not a whole number of at least 0"),
        ({"snapshots": 1.5}, "snapshots=1.5 is not a whole number"),
        ({"snapshots": True}, "snapshots=True is not a whole number"),
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abnn.fit(abnn.convert(mlp()), data(), **arguments)


def test_snapshots_of_a_lost_fit_are_not_mixed_with_those_of_a_new_one(tmp_path: Path) -> None:
    fitted(tmp_path)
    (tmp_path / "fit.json").unlink()
    with pytest.raises(ValueError, match=r"holds snapshots of a fit whose fit.json is gone; del"):
        fitted(tmp_path, lr=0.1)


@pytest.mark.parametrize("at", ["the folder", "the third", "a full disk"])
def test_a_failed_write_leaves_the_modes_as_they_were(tmp_path: Path, at: str) -> None:
    fitted(tmp_path, stop_at=0)
    shutil.rmtree(tmp_path / "snapshots")
    bnn = abnn.convert(mlp(), modes=3)
    before, limits = banks(bnn), resource.getrlimit(resource.RLIMIT_FSIZE)
    if at == "the folder":
        (tmp_path / "snapshots").touch()
    elif at == "the third":
        (tmp_path / "snapshots" / "00000004-0-2.safetensors").mkdir(parents=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="snapshots|File too large"):
            abnn.fit(bnn, Stopping(), epochs=2, lr=0.05, run=tmp_path, snapshots=5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert equal(banks(bnn), before)
    assert not list(tmp_path.glob("**/.*.tmp"))


# Reading them


def test_of_a_fit_under_way_only_steps_with_all_modes_are_read(tmp_path: Path) -> None:
    fitted(tmp_path, stop_at=8, modes=2, modes_at_once=1)
    with pytest.raises(ValueError, match="no snapshot of all modes yet"):
        snapshots_of(tmp_path)
    fitted(tmp_path, stop_at=11, modes=2, modes_at_once=1)  # of these 5 for the second mode
    assert steps(tmp_path) == [0, 2, 4]


def test_where_there_are_none_it_says_so(tmp_path: Path) -> None:
    fitted(tmp_path, snapshots=0)
    for run in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"holds no snapshots; fit with run= and snapshots=\."):
            snapshots_of(run)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3] + b"\x00\x11\x22")


def rename(file: Path) -> None:
    file.rename(file.with_name("modes.safetensors"))


def call_it_fewer(file: Path) -> None:
    file.rename(file.with_name("00000012-0-1.safetensors"))


def call_it_more(file: Path) -> None:
    file.rename(file.with_name("00000012-0-7.safetensors"))


def another_file(file: Path) -> None:
    safetensors.torch.save_file({"1.gamma": torch.ones(3, 8)}, file)


def another_network(file: Path) -> None:
    bnn = abnn.convert(mlp(torch.nn.LayerNorm), modes=3)
    write_snapshot(file.parent, bnn, range(3), 12, fingerprint(bnn)["values"])


def twice(file: Path) -> None:
    bnn = abnn.convert(mlp(), modes=3)
    write_snapshot(file.parent, bnn, range(1, 2), 12, fingerprint(bnn)["values"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "12-0-2.safetensors is damaged or no snapshot .*copy it again, or delete it"),
        (flip, "the values were changed"),
        (rename, "modes.safetensors is damaged or no snapshot .not the name of one"),
        (call_it_fewer, "not those of 2 modes"),
        (call_it_more, "modes 0 to 7 of 3"),
        (another_file, "is damaged or no snapshot .abnn did not write it"),
        (another_network, "are not of one fit; delete the one"),
        (twice, "holds a mode twice at step 12; delete"),
    ],
)
def test_files_that_are_damaged_or_foreign_are_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    fitted(tmp_path)
    change(tmp_path / "snapshots" / "00000012-0-2.safetensors")
    with pytest.raises(ValueError, match=message):
        snapshots_of(tmp_path)


def test_what_a_kill_left_under_a_temporary_name_is_no_snapshot(tmp_path: Path) -> None:
    fitted(tmp_path)
    (tmp_path / "snapshots" / ".00000012-0-2.safetensors.7.ab.tmp").write_bytes(b"half")
    assert len(steps(tmp_path)) == 6


# Several processes, each with a disk of its own

TOGETHER = """
import sys
from pathlib import Path
from typing import Any

import torch

import abnn
from abnn.distributed import world
from fitting import data
from nets import mlp

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), world().rank


def fit(run: str, loader: Any, split: Any, snapshots: int = 3) -> None:
    bnn = abnn.convert(mlp(), modes=2)
    arguments = {"lr": 0.05, "modes_at_once": 1, "checkpoint_seconds": 0, "epochs": 1}
    abnn.fit(bnn, loader, run=folder / run, snapshots=snapshots, split=split, **arguments)


class Stops(list[Any]):
    given = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.given += 1
            if self.given == 6:
                raise OSError("stopped")
            yield batch


fit(f"modes {rank}", data(), "modes")
fit(f"data {rank}", data(), "data")
# A fit that stops, and goes on where process 0 is another one.
try:
    fit(f"moved {rank}", Stops(data()), "data")
except OSError as error:
    print(error)
fit(f"moved {1 - rank}", data(), "data")
fit("one disk", data(), "modes")
try:
    fit(f"odd {rank}", data(), "data", snapshots=rank)
except ValueError as error:
    (folder / f"odd {rank}.txt").write_text(str(error))
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch: starting takes longer than they do."""
    folder, tests = tmp_path_factory.mktemp("together"), Path(__file__).parent
    (folder / "fit.py").write_text(TOGETHER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", folder / "fit.py", folder],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(tests.parent / "src"), str(tests)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of one process."""
    folder, bnn = tmp_path_factory.mktemp("alone"), abnn.convert(mlp(), modes=2)
    abnn.fit(bnn, data(), epochs=1, lr=0.05, modes_at_once=1, run=folder, snapshots=3)
    return files(folder)


@pytest.mark.parametrize("run", ["modes 0", "one disk"])
def test_process_0_ends_with_the_modes_of_all(
    together: Path, alone: dict[str, bytes], run: str
) -> None:
    assert files(together / run) == alone


def test_a_process_keeps_its_own_modes(together: Path, alone: dict[str, bytes]) -> None:
    own = {name: data for name, data in alone.items() if "-1-1." in name}
    assert files(together / "modes 1") == own


def test_of_processes_that_share_batches_process_0_writes(together: Path) -> None:
    found = snapshots_of(together / "data 0")
    assert [snapshot.step for snapshot in found] == [0, 2, 4, 6]
    assert equal(found[-1].tensors, banks(abnn.load(together / "data 0", mlp())))
    assert not (together / "data 1" / "snapshots").exists()


def test_process_0_gets_what_another_one_wrote_before_a_restart(together: Path) -> None:
    assert files(together / "moved 1") == files(together / "data 0")
    # Mode by mode: what was done when process 0 of the first attempt stopped.
    assert sorted(files(together / "moved 0")) == [
        f"{step:08}-0-0.safetensors" for step in (0, 2, 4)
    ]


def test_all_processes_must_leave_as_many(together: Path) -> None:
    for rank in range(2):
        said = (together / f"odd {rank}.txt").read_text()
        assert "its number of snapshots differs" in said
