"""Several processes: the same numbers as one, an end for all, and hosts that come back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import abnn
from fit_together import ERRORS, FILES, SHARED_BATCHES, SHARED_MODES
from fitting import banks, data, equal
from nets import mlp
from predict_together import BATCHES, PREDICT_ERRORS, PREDICTIONS, model

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1"]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)]),
}


def torchrun(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two processes on this machine."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=300
    )


def ends(folder: Path, name: str) -> list[Any]:
    """What each of the two processes ended with."""
    return [torch.load(folder / f"{name}{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch: starting takes longer than they do."""
    folder = tmp_path_factory.mktemp("together")
    cases = ("equal", "errors", "predict", "straight data", "straight modes")
    done = torchrun(HERE / "fit_together.py", folder, *cases)
    assert done.returncode == 0, done.stderr
    return folder


# The same numbers


@pytest.mark.parametrize("case", SHARED_BATCHES)
def test_processes_that_share_batches_end_like_one(together: Path, case: str) -> None:
    alone = SHARED_BATCHES[case](None)
    first, second = (end[case] for end in ends(together, "equal"))
    assert equal(first, second)
    for name, tensor in alone.items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", SHARED_MODES)
def test_processes_that_share_modes_end_like_one_bit_for_bit(together: Path, case: str) -> None:
    """Where the same modes are folded into one pass; else, as far as folding does not round."""
    alone = SHARED_MODES[case](None)
    first, second = (end[case] for end in ends(together, "equal"))
    assert equal(first, second)
    for name, tensor in alone.items():
        tolerance = 1e-5 if case == "modes, two for each" else 0
        torch.testing.assert_close(first[name], tensor, rtol=tolerance, atol=tolerance)


# Errors


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("labels", "PeerError: Process 1 of 2 stopped.*Labels go from 0 to 7", "ValueError: Lab"),
        ("nan", "FloatingPointError: .* nan at step 2", "FloatingPointError: .* nan at step 2"),
        ("damaged", "PeerError: .*OSError: row 7 is damaged", "OSError: row 7 is damaged"),
        ("in the network", "PeerError: Another process.*its own output", "MemoryError: out of"),
        ("one mode", "PeerError: .*Labels go from 0 to 3", "ValueError: Labels go from 0 to 3"),
        ("too small", "ValueError: A batch has 1 row, fewer than the 2 processes", None),
        ("weights", "ValueError: Process 1 runs another fit than process 0: its network", None),
        ("order", "ValueError: .*not have the same batch .epoch 0, batch 1.", None),
        ("length", "ValueError: .*not have the same number of batches .epoch 0, batch 6.", None),
        ("few modes", "ValueError: modes=1 is too few for 2 processes.*split='data'", None),
    ],
)
def test_what_goes_wrong_on_one_process_ends_both(
    together: Path, case: str, first: str, second: str | None
) -> None:
    assert case in ERRORS
    for rank, pattern in enumerate((first, second or first)):
        error = json.loads((together / f"errors{rank}.json").read_text())[case]
        assert re.match(pattern, error), error


def test_one_process_alone_ignores_a_split_but_not_a_wrong_one() -> None:
    alone, split = (abnn.convert(mlp(), modes=2) for _ in range(2))
    abnn.fit(alone, data(), epochs=1)
    abnn.fit(split, data(), epochs=1, split="data")
    assert equal(banks(alone), banks(split))
    with pytest.raises(ValueError, match="split='rows' must be 'data' or 'modes'"):
        abnn.fit(split, data(), split="rows")  # type: ignore[arg-type]


def test_a_fit_does_not_go_on_with_other_processes(together: Path) -> None:
    run, bnn = together / "straight data" / "0", abnn.convert(mlp(), modes=4)
    with pytest.raises(ValueError, match="processes was 2 that share every batch and now is one"):
        abnn.fit(bnn, data(), epochs=2, lr=0.05, run=run)


# Prediction


@pytest.mark.parametrize("case", PREDICTIONS)
def test_processes_predict_like_one_bit_for_bit(together: Path, case: str) -> None:
    alone = PREDICTIONS[case]()
    for end in ends(together, "pred"):
        assert equal(end[case], alone)


@pytest.mark.parametrize("name", ["preds", "preds.parquet"])
def test_processes_write_one_file_and_need_no_common_disk(together: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    alone = model().predict_loader(BATCHES, samples="auto")
    first, second = (end[name] for end in ends(together, "files"))
    assert torch.equal(first["probs"], alone.probs)
    assert first["handle"] == second["handle"] == f"Predictions({name}: 23 rows, 12 columns)"
    assert first["left"] == FILES[: FILES.index(name) + 1]
    assert second["left"] == []
    assert second["probs"] == (
        f"{name} is not here; if several processes predicted, process 0 wrote it to its own disk."
    )
    assert first["said"].endswith("predict 5/5  23 inputs  0:00 left\n")
    assert second["said"] == ""


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("a damaged row", "PeerError: Process 1 of 2 .*OSError: row 7 is dam", "OSError: row 7"),
        ("a dead line", "PeerError: Process 1 of 2 .*OSError: the line is", "OSError: the line"),
        ("in the network", "MemoryError: out of memory", "PeerError: .*MemoryError: out of mem"),
        (
            "a full disk",
            "OSError: .*File too large",
            "PeerError: Process 0 .*OSError: .*large",
        ),
        ("it is there", "FileExistsError: .*overwrite=True", "PeerError: .*FileExistsError"),
        ("batches of two kinds", "ValueError: Batch 2 has .* and no labels", "PeerError: .*Batch"),
        ("other weights", "ValueError: Process 1 was given .* see weights;", None),
        ("other arguments", "ValueError: Process 1 was given .* see seed;", None),
        ("another order", "ValueError: .*not have the same batches .after batch 0.", None),
        ("another length", "ValueError: .*not have the same batches .after batch 3.", None),
        ("another length, in full turns", "ValueError: .*same batches .after batch 4.", None),
        ("empty", "ValueError: The loader is empty", None),
        ("a sampler's share", "ValueError: The loader has a DistributedSampler", None),
        ("no labels", "PeerError: .*no labels were found", "ValueError: .*no labels were found"),
        ("other corruptions", "ValueError: Process 1 was given .* see seed;", None),
    ],
)
def test_what_goes_wrong_in_a_prediction_ends_both_and_leaves_nothing(
    together: Path, case: str, first: str, second: str | None
) -> None:
    assert case in PREDICT_ERRORS
    for rank, pattern in enumerate((first, second or first)):
        error = json.loads((together / f"predict errors{rank}.json").read_text())[case]
        assert re.match(pattern, error), error
    assert list((together / "broken").iterdir()) == []


# Restarts


def test_a_killed_process_is_restarted_and_all_end_bit_identical(
    together: Path, tmp_path: Path
) -> None:
    cases = ("killed data", "killed modes")
    done = torchrun("--max-restarts", 2, HERE / "fit_together.py", tmp_path, *cases)
    assert done.returncode == 0, done.stderr
    for case in cases:
        assert (tmp_path / case / "marked").exists()
        for end in ends(tmp_path, case):
            assert equal(end, ends(together, case.replace("killed", "straight"))[0])
        loaded = banks(abnn.load(tmp_path / case / "0", mlp()))
        assert equal(loaded, {name: end[name] for name in loaded})


# Two hosts


@dataclass
class Hosts:
    """Two network namespaces, joined by a cable: hosts as far as sockets can tell."""

    names: dict[str, str]
    folder: Path
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, host: str, case: str, **environment: str) -> subprocess.Popen[bytes]:
        """A torchrun on one of the hosts; "a" is where they meet."""
        address = {"a": "10.77.0.1", "b": "10.77.0.2"}
        # The last two: how soon a host that went away is given up.
        conf = f"is_host={int(host == 'a')},keep_alive_interval=1,keep_alive_max_attempt=2"
        command = [
            *("ip", "netns", "exec", self.names[host], *TORCHRUN),
            *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address['a']}:29400"),
            *("--rdzv-id", "fit", "--local-addr", address[host], "--rdzv-conf", conf),
            *(str(HERE / "fit_together.py"), str(self.folder), case),
        ]
        environment |= {"HOST": host, "GLOO_SOCKET_IFNAME": "cable"}
        with open(self.log(host), "ab") as log:
            agent = subprocess.Popen(command, env=ENVIRONMENT | environment, stdout=log, stderr=log)
        self.agents.append(agent)
        return agent

    def log(self, host: str) -> Path:
        return self.folder / f"{host}.log"

    def finish(self) -> None:
        for agent in self.agents:
            agent.wait(timeout=120)
        logs = "".join(self.log(host).read_text() for host in "ab")
        assert [agent.returncode for agent in self.agents[-2:]] == [0, 0], logs

    def kill(self, host: str) -> None:
        """Kill whatever runs on a host."""
        for pid in ip("netns", "pids", self.names[host]).stdout.split():
            subprocess.run(["kill", "-9", pid], capture_output=True)


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip")
    names = {host: f"abnn-{os.getpid()}-{host}" for host in "ab"}
    hosts = Hosts(names, tmp_path)
    try:
        for name in names.values():
            made = ip("netns", "add", name)
            if made.returncode:
                pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
        cable = ("link", "add", "cable", "netns", names["a"], "type", "veth")
        made = ip(*cable, "peer", "name", "cable", "netns", names["b"])
        if made.returncode:
            pytest.skip(f"network namespaces can't be joined: {made.stderr.strip()}")
        for i, name in enumerate(names.values()):
            ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for host, name in names.items():
            hosts.kill(host)
            ip("netns", "delete", name)
        for agent in hosts.agents:
            agent.wait()


def test_two_hosts_end_like_one_though_a_process_was_killed(
    hosts: Hosts, together: Path, tmp_path: Path
) -> None:
    for host in "ab":
        hosts.start(host, "killed data")
    hosts.finish()
    assert (tmp_path / "killed data" / "marked").exists()
    for end in ends(tmp_path, "killed data"):
        assert equal(end, ends(together, "straight data")[0])


def test_a_host_that_goes_down_and_comes_back_takes_part_again(
    hosts: Hosts, together: Path, tmp_path: Path
) -> None:
    # Else a torchrun that joins later never hears where the others meet: see docs/scale.md.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [hosts.start(host, "waiting data", **own_store) for host in "ba"]
    while not (tmp_path / "waiting data" / "marked").exists():
        assert all(agent.poll() is None for agent in agents), hosts.log("b").read_text()
    hosts.kill("b")
    hosts.start("b", "waiting data", **own_store)
    hosts.finish()
    for end in ends(tmp_path, "waiting data"):
        assert equal(end, ends(together, "straight data")[0])
