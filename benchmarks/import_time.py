"""How long `import abnn` takes over `import torch`, each in processes of their own.

python benchmarks/import_time.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from harness import interleaved, milliseconds, ratio, table, versions


def importing(name: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    variants = {
        "torch": lambda: importing("torch"),
        "abnn": lambda: importing("abnn"),
        "A/A": lambda: importing("torch"),
    }
    seconds = interleaved(variants, rounds)
    ratios = [f"{ratio(seconds, name, 'torch'):.3f}" for name in ("abnn", "A/A")]
    print(f"Importing: {versions()}\n")
    header = ("import torch ms", "import abnn ms", "ratio", "A/A")
    print(table(header, [(milliseconds(seconds, "torch"), milliseconds(seconds, "abnn"), *ratios)]))


if __name__ == "__main__":
    main()
