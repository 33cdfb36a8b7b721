"""Plain text tables."""

from __future__ import annotations


def aligned(header: list[str], *rows: list[str], named: bool = False) -> str:
    """Columns of equal width, numbers to the right; a first column of names goes to the left.

    >>> print(aligned(["dataset", "AUROC"], ["svhn", "90.1"], named=True))
    dataset  AUROC
    svhn      90.1
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if named and i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    )
