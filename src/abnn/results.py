"""Predictions on disk: written batch by batch, whole or not at all, and opened without loading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from abnn.files import replaced
from abnn.prediction import PER_INPUT, Prediction

# What is written of every input, beside the labels; all are attributes of a Prediction.
COLUMNS = (
    "probs",
    "label",
    "confidence",
    "total",
    "aleatoric",
    "epistemic",
    "variation_ratio",
    "disagreement",
    "max_logit",
    "energy",
    "samples_used",
)
INDEX = "predictions.json"
Array = np.ndarray[Any, Any]


def columns_of(prediction: Prediction, labels: Tensor | None) -> dict[str, Array]:
    """The rows of a batch, column by column."""
    values = {name: getattr(prediction, name) for name in COLUMNS}
    values["samples_used"] = prediction.used_by_input()
    if labels is not None:
        values["labels"] = labels
    return {name: value.cpu().contiguous().numpy() for name, value in values.items()}


class Writer(Protocol):
    """Appends rows to files of a temporary name."""

    def append(self, columns: Mapping[str, Array]) -> None:
        """Write the rows of one batch."""

    def close(self) -> None:
        """Finish the files."""


class NpyWriter:
    """A directory of .npy files, one a column, whose rows are appended as raw bytes."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path, self.rows = path, 0
        self.files: dict[str, IO[bytes]] = {}
        self.kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}

    def append(self, columns: Mapping[str, Array]) -> None:
        """Write the rows of one batch."""
        for name, array in columns.items():
            if self.rows == 0:
                self.files[name] = open(self.path / f"{name}.npy", "wb")  # noqa: SIM115
                self.kinds[name] = (array.dtype, array.shape[1:])
                self._write_header(name)
            self.files[name].write(array.tobytes())
        self.rows += len(columns["probs"])

    def close(self) -> None:
        """Write how many rows there are, for which the header of a .npy file leaves room."""
        for name, file in self.files.items():
            file.seek(0)
            self._write_header(name)
            file.close()
        index = {"format": "abnn predictions", "rows": self.rows, "columns": list(self.files)}
        (self.path / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write_header(self, name: str) -> None:
        dtype, shape = self.kinds[name]
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (self.rows, *shape),
        }
        np.lib.format.write_array_header_1_0(self.files[name], header)


class ParquetWriter:
    """One Parquet file, a row group a batch; what has several numbers a row is a list."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer: Any = None
        self.pa, self.pq = _pyarrow()

    def append(self, columns: Mapping[str, Array]) -> None:
        """Write the rows of one batch."""
        arrays = {name: self._array(array) for name, array in columns.items()}
        if self.writer is None:
            shapes = {name: array.shape[1:] for name, array in columns.items()}
            fields = [(name, array.type) for name, array in arrays.items()]
            schema = self.pa.schema(fields, metadata={"abnn": json.dumps({"shapes": shapes})})
            self.writer = self.pq.ParquetWriter(self.path, schema)
        table = self.pa.table(arrays, schema=self.writer.schema)
        self.writer.write_table(table)

    def _array(self, array: Array) -> Any:
        flat = self.pa.array(array.reshape(-1))
        size = int(np.prod(array.shape[1:]))
        return flat if array.ndim == 1 else self.pa.FixedSizeListArray.from_arrays(flat, size)

    def close(self) -> None:
        """Write the footer."""
        if self.writer is not None:
            self.writer.close()


@contextmanager
def target(path: str | PathLike[str], overwrite: bool = False) -> Iterator[Writer]:
    """Where predictions go; they are in place only when complete.

    Args:
        path: a file that ends with ".parquet", or a directory for .npy files.
        overwrite: replace what is there, if abnn wrote it.
    """
    parquet = Path(path).suffix == ".parquet"
    if parquet:
        _pyarrow()
    with replaced(path, overwrite, INDEX, "predictions") as temporary:
        writer = (ParquetWriter if parquet else NpyWriter)(temporary)
        try:
            yield writer
        finally:
            writer.close()


class Predictions(Mapping[str, Array]):
    """Predictions on disk, by column: read when asked for, and of .npy files only what is used.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> data = [(torch.randn(5, 4), torch.arange(5) % 3) for _ in range(2)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = abnn.convert(net).predict_loader(data, out=f"{folder}/preds")
    ...     saved, saved["probs"].shape, saved.prediction(slice(0, 2)).label.shape
    (Predictions(preds: 10 rows, 12 columns), (10, 3), torch.Size([2]))
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._parquet = self.path.is_file()
        try:
            if self._parquet:
                metadata = _pyarrow()[1].read_schema(self.path).metadata or {}
                self._shapes = json.loads(metadata[b"abnn"])["shapes"]
                self._names, self.rows = list(self._shapes), self._file().metadata.num_rows
            else:
                index = json.loads((self.path / INDEX).read_text())
                self._names, self.rows = list(index["columns"]), int(index["rows"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} holds no predictions of abnn; give what predict_loader(out=) wrote."
            ) from error

    def _file(self) -> Any:
        return _pyarrow()[1].ParquetFile(self.path, memory_map=True)

    def __getitem__(self, name: str) -> Array:
        """A column; of a directory memory-mapped, of a Parquet file read."""
        if name not in self._names:
            raise KeyError(f"There is no column {name!r}; there are {', '.join(self._names)}.")
        if not self.path.exists():
            raise FileNotFoundError(
                f"{self.path} is not here; if several processes predicted, process 0 wrote it to "
                "its own disk."
            )
        if not self._parquet:
            array: Array = np.load(self.path / f"{name}.npy", mmap_mode="r")
            return array
        column = self._file().read(columns=[name])[name].combine_chunks()
        shape = self._shapes[name]
        flat = column.flatten() if shape else column
        values: Array = flat.to_numpy(zero_copy_only=False).reshape(-1, *shape)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        """Number of columns; `rows` is the number of inputs."""
        return len(self._names)

    def prediction(self, rows: slice = slice(None)) -> Prediction:
        """The `Prediction` of some rows, in memory.

        What was stored are probabilities, so the logarithm of one below 1e-38 is that of 1e-38.
        """
        names = ("probs", *PER_INPUT[1:], "samples_used")
        probs, *rest = (torch.from_numpy(np.array(self[name][rows])) for name in names)
        return Prediction(probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), *rest)

    def __repr__(self) -> str:
        return f"Predictions({self.path.name}: {self.rows} rows, {len(self)} columns)"


def load_predictions(path: str | PathLike[str]) -> Predictions:
    """Open what `ABNN.predict_loader(..., out=path)` wrote.

    >>> load_predictions("no/such/place")
    Traceback (most recent call last):
    ValueError: no/such/place holds no predictions of abnn; give what predict_loader(out=) wrote.
    """
    return Predictions(path)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "Parquet files need pyarrow: pip install 'abnn[parquet]'; or give a directory as out=."
        ) from error
    return pyarrow, pyarrow.parquet
