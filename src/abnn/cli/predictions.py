"""Predictions as a table: CSV, JSON or Parquet, a row an input."""

from __future__ import annotations

import csv
import json
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from abnn.cli import CommandError
from abnn.files import replaced

FORMATS = (".csv", ".json", ".jsonl", ".parquet")
MEASURES = ("confidence", "total", "aleatoric", "epistemic")
_AT_ONCE = 4096  # rows
_SIGNS: dict[str, Callable[[Any, Any], Any]] = {"<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Rule:
    """When to abstain: a measure below or above a threshold.

    >>> rule = Rule.of("epistemic>0.1")
    >>> rule.applies({"epistemic": np.array([0.05, 0.2])})
    array([False,  True])
    """

    measure: str
    sign: str
    threshold: float

    @classmethod
    def of(cls, text: str) -> Rule:
        """The rule that a command line writes as `confidence<0.8`."""
        found = re.fullmatch(r"\s*([a-z]+)\s*([<>])\s*([-+.\de]+)\s*", text)
        try:
            if found is None or found[1] not in MEASURES:
                raise ValueError
            return cls(found[1], found[2], float(found[3]))
        except ValueError as error:
            raise CommandError(
                f"--abstain {text} is no rule; write one of {', '.join(MEASURES)}, < or >, and a "
                'number, in quotes: --abstain "confidence<0.8".'
            ) from error

    def applies(self, columns: Mapping[str, Any]) -> Any:
        """Which rows to abstain from."""
        return _SIGNS[self.sign](np.asarray(columns[self.measure]), self.threshold)

    def __str__(self) -> str:
        return f"{self.measure} {self.sign} {self.threshold:g}"


def format_of(out: Path | None, as_json: bool) -> str:
    """How a table is written.

    >>> format_of(Path("table.parquet"), as_json=False)
    '.parquet'
    """
    if out is None:
        return ".json" if as_json else ".csv"
    if out.suffix not in FORMATS:
        raise CommandError(f"--out {out} must end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    return out.suffix


class Table:
    """A row for every input: what it is, its label and uncertainties, and whether to abstain.

    Args:
        saved: predictions by column, as `abnn.predict_loader(out=)` gives them.
        names: of the inputs; default: their numbers.
        classes: names of the classes; default: their numbers.
        rule: when to abstain.
        probabilities: whether there is a column for every class.
    """

    def __init__(
        self,
        saved: Mapping[str, Any],
        names: Sequence[str] | None,
        classes: Sequence[str] | None,
        rule: Rule,
        probabilities: bool = False,
    ) -> None:
        self.saved, self.names, self.classes, self.rule = saved, names, classes, rule
        self.rows, shape = len(saved["probs"]), saved["probs"].shape[1:]
        if len(shape) > 1:
            raise CommandError(
                "The network predicts every pixel (or token), which is no row of a table; use "
                'abnn.predict_loader(bnn, loader, out="predictions/") in Python.'
            )
        if classes is not None and len(classes) != shape[0]:
            self.classes = None  # they are those of other data
        self.shown = range(shape[0]) if probabilities else range(0)
        self.abstained = int(np.count_nonzero(rule.applies(saved)))

    def write(self, out: Path | None, kind: str) -> None:
        """Write the table to a file, whole or not at all, or print it."""
        if out is None:
            self._text(sys.stdout, kind)
            return
        with replaced(out, True, "", "predictions") as temporary:
            if kind == ".parquet":
                self._parquet(temporary)
            else:
                with open(temporary, "w", encoding="utf-8", newline="") as file:
                    self._text(file, kind)

    def _text(self, file: IO[str], kind: str) -> None:
        if kind == ".csv":
            writer = csv.writer(file, lineterminator="\n")
            for number, row in enumerate(self._rows()):
                if number == 0:
                    writer.writerow(row)
                writer.writerow(_told(value) for value in row.values())
            return
        begin, between, end = ("", "\n", "\n") if kind == ".jsonl" else ("[\n", ",\n", "\n]\n")
        for number, row in enumerate(self._rows()):
            file.write((between if number else begin) + json.dumps(row, ensure_ascii=False))
        file.write(end)

    def _parquet(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(
                "Parquet files need pyarrow: pip install 'abnn[parquet]'; or give an --out that "
                "ends with .csv."
            ) from error
        writer: Any = None
        try:
            for columns in self._parts():
                table = pyarrow.table(columns)
                writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()

    def _rows(self) -> Iterator[dict[str, Any]]:
        for columns in self._parts():
            for values in zip(*columns.values(), strict=True):
                yield {name: _short(v) for name, v in zip(columns, values, strict=True)}

    def _parts(self) -> Iterator[dict[str, list[Any]]]:
        """Some rows at a time, column by column, as plain values."""
        for start in range(0, self.rows, _AT_ONCE):
            rows = slice(start, min(start + _AT_ONCE, self.rows))
            some = {name: self.saved[name][rows] for name in ("label", *MEASURES)}
            labels = some.pop("label").tolist()
            numbers = list(range(rows.start, rows.stop))
            columns: dict[str, list[Any]] = {
                "input": [self.names[i] for i in numbers] if self.names else numbers,
                "label": [self._class(label) for label in labels],
                **{name: column.tolist() for name, column in some.items()},
                "abstain": self.rule.applies(some).tolist(),
            }
            probs = self.saved["probs"][rows]
            yield columns | {f"p({self._class(k)})": probs[:, k].tolist() for k in self.shown}

    def _class(self, k: int) -> Any:
        return k if self.classes is None else self.classes[k]


def _short(value: Any) -> Any:
    """A number in the digits that a float32 has."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _told(value: Any) -> Any:
    """A value of a CSV file: truth as JSON writes it."""
    return str(value).lower() if isinstance(value, bool) else value
