"""Memory: of a prediction with 8 and with 256 draws of every mode, and of 1 and 16 modes.

    python benchmarks/memory.py

Every prediction runs in a process of its own, which tells by how much its peak lies above what it
held before, and its peak as a whole. Needs Linux.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torchvision

import abnn
from harness import table, versions

MIB = 2**20


def main() -> None:
    if sys.argv[1:]:
        print(*peak_of_prediction(int(sys.argv[1])))
        return
    print(f"Memory: {versions('torchvision')}\n")
    few, many = predicted(2), predicted(64)
    rows = [
        ("predict, peak above the network, MiB", *(f"{b / MIB:.0f}" for b in (few[0], many[0]))),
        ("predict, peak of the process, MiB", *(f"{b / MIB:.0f}" for b in (few[1], many[1]))),
    ]
    ratios = (many[0] / few[0], many[1] / few[1])
    print(
        table(
            ("ResNet-18, 32 px, batch 16", "S = 8", "S = 256", "ratio"),
            [(*row, f"{r:.2f}") for row, r in zip(rows, ratios, strict=True)],
        )
    )
    one, sixteen = weights(1), weights(16)
    print()
    print(
        table(
            ("ResNet-50, weights", "1 mode", "16 modes", "ratio"),
            [("MiB", f"{one / MIB:.1f}", f"{sixteen / MIB:.1f}", f"{sixteen / one:.3f}")],
        )
    )


def predicted(samples: int) -> tuple[int, int]:
    """Bytes of a prediction with so many draws of four modes, measured in a new process."""
    command = [sys.executable, __file__, str(samples)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(out[0]), int(out[1])


def peak_of_prediction(samples: int) -> tuple[int, int]:
    torch.manual_seed(0)
    bnn = abnn.convert(torchvision.models.resnet18(num_classes=10), modes=4)
    x = torch.randn(16, 3, 32, 32)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    bnn.predict(x, samples)
    return status("VmHWM") - before, status("VmHWM")


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def weights(modes: int) -> int:
    """Bytes of all tensors of an ABNN, those on the same memory counted once."""
    bnn = abnn.convert(torchvision.models.resnet50(), modes=modes)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*bnn.parameters(), *bnn.buffers())
    }
    return sum(storages.values())


if __name__ == "__main__":
    main()
