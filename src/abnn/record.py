"""An evaluation on disk: what was predicted of every example, for reports and comparisons."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from abnn import gallery
from abnn.batches import inputs_of
from abnn.digests import tensor_bytes
from abnn.draws import generator, whole_number
from abnn.evaluation import Evaluation
from abnn.files import replaced, write
from abnn.gallery import Striking
from abnn.images import Statistic, images_in, plain, statistic, to_bytes
from abnn.metrics import disagreement_matrix
from abnn.prediction import Prediction
from abnn.results import Array, NpyWriter, Predictions, Writer, columns_of
from abnn.scores import SCORES
from abnn.statistics import Examples
from abnn.tally import terms_of

if TYPE_CHECKING:
    from abnn.curve import SamplesCurve
    from abnn.robustness import Robustness
    from abnn.trajectory import Trajectory

RECORD, FIGURES, GALLERY = "record.json", "evaluation.json", "gallery-{}.safetensors"
# What may be added to a record, by its class.
ADDED = {
    "SamplesCurve": "samples_curve.json",
    "Robustness": "robustness.json",
    "Trajectory": "trajectory.json",
}
_FORMAT = "abnn record 1"


@dataclass(frozen=True)
class Record:
    """Where an evaluation is written, and what makes it readable.

    Args:
        path: the directory; an earlier record there is replaced when the new one is complete.
        name: of the method; default: the last part of the path.
        classes: their names.
        mean, std: of the normalisation of images, a number or one a channel, to show them.
        examples: how many of the most striking inputs of each kind are kept.
        pixels: of an image with a label for every pixel, or a text with one for every token, how
            many of these are kept; they are drawn at random.

    >>> Record("runs/digits/evaluation/ABNN").name
    'ABNN'
    """

    path: str | PathLike[str]
    name: str = ""
    classes: Sequence[str] | None = None
    mean: Statistic | None = None
    std: Statistic | None = None
    examples: int = 12
    pixels: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        object.__setattr__(self, "name", self.name or Path(self.path).name)
        for name in ("examples", "pixels"):
            whole_number(name, getattr(self, name), least=1)
        if isinstance(self.classes, str):
            raise ValueError("classes= is one text; give the names as a list.")
        if self.classes is not None:
            object.__setattr__(self, "classes", [str(name) for name in self.classes])
        for name in ("mean", "std"):
            value = getattr(self, name)
            numbers = None if value is None else statistic(name, value).float()
            object.__setattr__(self, name, numbers)


@dataclass(frozen=True, eq=False)
class Rows:
    """What is written of one batch; made where it was predicted."""

    columns: Mapping[str, Array]
    found: list[Striking]
    digests: bytes  # of every input and its label
    differing: Tensor | None  # of every two members, the inputs on which they differ
    of_pixels: bool


class Recorder:
    """Writes a `Record` as the data goes by; process 0 does, the others make their rows.

    Args:
        record: where to, and how.
        predictor: what predicts.
        ignore_index: the label of what is left out.
        writes: whether this process writes.
    """

    def __init__(self, record: Record, predictor: Any, ignore_index: int, writes: bool) -> None:
        self.record, self.predictor, self.writes = record, predictor, writes
        self.ignore_index = ignore_index
        self.datasets: list[dict[str, Any]] = []
        self.differing: Tensor | None = None
        self.of_pixels: bool | None = None
        self.offers_members = all(
            "keep_members" in inspect.signature(each.predict).parameters
            for each in _companions(predictor)
        )

    def __enter__(self) -> Recorder:
        self._stack = ExitStack()
        if self.writes:
            place = replaced(self.record.path, True, RECORD, "a record of an evaluation")
            self.folder = self._stack.enter_context(place)
            self.folder.mkdir()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def wants_members(self, labels: Tensor | None, predict: Mapping[str, Any]) -> bool:
        """Whether the probabilities of every member are to be kept for this batch."""
        if self.of_pixels is None and labels is not None:
            self.of_pixels = labels.ndim > 1
        given = "keep_members" in predict or predict.get("samples") == "auto"
        return self.offers_members and not given and not self.of_pixels

    @contextmanager
    def dataset(self, name: str) -> Iterator[None]:
        """Write the rows of one dataset while the block lasts."""
        self.number, self.offset, self.checksum = len(self.datasets), 0, 0
        self.found: list[Striking] = []
        if not self.writes:
            yield
            return
        self.writer: Writer = NpyWriter(self.folder / str(self.number))
        try:
            yield
        finally:
            self.writer.close()
        gallery.save(self.folder / GALLERY.format(self.number), self.found)
        self.datasets.append({"name": name, "rows": self.offset, "digest": self.checksum})

    def rows(self, number: int, batch: Any, prediction: Prediction, labels: Tensor | None) -> Rows:
        """What to write of batch `number` of the dataset."""
        inputs = len(prediction.log_probs)
        digests = _checksums(batch, labels, inputs)
        of_pixels = prediction.label.ndim > 1
        flat = prediction.cpu().flat()
        keep = torch.arange(len(flat.log_probs))
        if labels is not None:
            labels = labels.cpu().flatten()
            keep = keep[labels != self.ignore_index]
        if of_pixels:
            some = min(len(keep), self.record.pixels * inputs)
            chosen = generator("data", 0, number).choice(len(keep), some, False, shuffle=False)
            keep = keep[torch.from_numpy(chosen).sort().values]
        kept, labels = flat[keep], None if labels is None else labels[keep]
        found, differing = list[Striking](), None
        if not of_pixels:
            image = partial(self._image, images_in(batch), keep)
            found = gallery.striking(kept, labels, self.record.examples, image)
            if labels is not None and kept.members is not None and len(keep):
                differing = (disagreement_matrix(kept.members) * len(keep)).round()
        return Rows(columns_of(kept, labels), found, digests, differing, of_pixels)

    def _image(self, images: Tensor | None, keep: Tensor, row: int) -> Tensor | None:
        if images is None:
            return None
        return to_bytes(images[keep[row]], self.record.mean, self.record.std)  # type: ignore[arg-type]

    def take(self, rows: Rows) -> None:
        """Write the rows of the next batch; only on the process that writes."""
        self.checksum = zlib.crc32(rows.digests, self.checksum)
        found = gallery.moved(rows.found, self.offset)
        self.found = gallery.merged(self.found, found, self.record.examples)
        if rows.differing is not None:
            before = self.differing
            self.differing = rows.differing if before is None else before + rows.differing
        self.writer.append(rows.columns)
        self.offset += len(rows.columns["probs"])
        self.of_pixels = rows.of_pixels

    def finish(self, evaluation: Evaluation) -> None:
        """Write the figures, and what the record is of; only on the process that writes."""
        if not self.writes:
            return
        from abnn import __version__

        known, differing = self.datasets[0], self.differing
        said = {
            "format": _FORMAT,
            "name": self.record.name,
            "predictor": type(self.predictor).__name__,
            "made": datetime.now(UTC).isoformat(),
            "versions": {"abnn": __version__, "torch": torch.__version__},
            "classes": self.record.classes,
            "modes": modes_of(self.predictor),
            "parameters": _parameters(self.predictor),
            "datasets": self.datasets,
            "of_pixels": self.of_pixels,
            "disagreement": None if differing is None else (differing / known["rows"]).tolist(),
        }
        write(self.folder / FIGURES, f"{evaluation.to_json()}\n".encode())
        write(self.folder / RECORD, f"{json.dumps(said, indent=2)}\n".encode())


class Recorded:
    """A record that was written, opened without reading its predictions.

    Args:
        path: what `evaluate(..., record=path)` wrote.

    >>> import tempfile
    >>> single, data = abnn.baselines.Single(nn.Identity()), [(torch.eye(3), torch.arange(3))]
    >>> with tempfile.TemporaryDirectory() as run:
    ...     result = abnn.evaluate(single, data, record=f"{run}/single")
    ...     recorded = Recorded(f"{run}/single")
    ...     recorded.name, recorded.known["probs"].shape, recorded.evaluation == result
    ('single', (3, 3), True)
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        try:
            said = json.loads((self.path / RECORD).read_bytes())
            if said["format"] != _FORMAT:
                raise ValueError
            self.name, self.predictor = str(said["name"]), str(said["predictor"])
            self.made = datetime.fromisoformat(said["made"])
            self.classes: list[str] | None = said["classes"]
            self.modes: int | None = said["modes"]
            self.parameters: int | None = said["parameters"]
            self.of_pixels = bool(said["of_pixels"])
            self.disagreement: list[list[float]] | None = said["disagreement"]
            self.datasets: list[str] = [dataset["name"] for dataset in said["datasets"]]
            self.digests: list[int] = [dataset["digest"] for dataset in said["datasets"]]
            self.evaluation = Evaluation.from_json((self.path / FIGURES).read_text())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} holds no record of an evaluation, or a damaged one; give what "
                "abnn.evaluate(..., record=) wrote."
            ) from error

    @property
    def known(self) -> Predictions:
        """The predictions of the labelled examples, with their "labels"."""
        return Predictions(self.path / "0")

    @property
    def ood(self) -> dict[str, Predictions]:
        """The predictions of every OOD dataset."""
        return {
            name: Predictions(self.path / str(number))
            for number, name in enumerate(self.datasets)
            if number
        }

    def striking(self, dataset: int = 0) -> list[Striking]:
        """The inputs of a dataset that are most worth looking at; 0 is the labelled one."""
        return gallery.load(self.path / GALLERY.format(dataset))

    def add(self, measured: SamplesCurve | Robustness | Trajectory) -> None:
        """Keep what else was measured of this predictor, for the report.

        Args:
            measured: what `samples_curve`, `robustness` or `trajectory` returned.
        """
        name = ADDED.get(type(measured).__name__)
        if name is None:
            raise TypeError(
                f"A {type(measured).__name__} has no place in a record; give what samples_curve, "
                "robustness or trajectory returned."
            )
        write(self.path / name, f"{measured.to_json()}\n".encode())

    def class_name(self, index: int) -> str:
        """What a class is called."""
        named = self.classes is not None and index < len(self.classes)
        return self.classes[index] if named and self.classes else str(index)

    def shared_with(self, other: Recorded) -> list[str]:
        """The datasets of which both have seen the same examples, in the same order."""
        own, theirs = (dict(zip(r.datasets, r.digests, strict=True)) for r in (self, other))
        return [name for name, digest in own.items() if theirs.get(name) == digest]

    def examples(
        self, scores: Sequence[str] = ("msp",), ood: Sequence[str] | None = None
    ) -> Examples:
        """What `abnn.statistics` compares: the terms of every figure, example by example.

        Args:
            scores: the scores that detection figures are to be of.
            ood: the OOD datasets; default: all.
        """
        prediction = self.known.prediction()
        labels = torch.from_numpy(np.array(self.known["labels"]))
        terms = terms_of(prediction, labels, torch.ones_like(labels, dtype=torch.bool))
        saved = {name: p for name, p in self.ood.items() if ood is None or name in ood}
        foreign = {name: p.prediction() for name, p in saved.items()}
        digests = dict(zip(self.datasets, self.digests, strict=True))
        return Examples(
            **terms,
            scores={name: SCORES[name](prediction) for name in scores},
            ood={
                dataset: {name: SCORES[name](p) for name in scores}
                for dataset, p in foreign.items()
            },
            digest=" ".join(str(digests[name]) for name in (self.datasets[0], *saved)),
        )


def modes_of(predictor: Any) -> int | None:
    """Number of modes of a predictor, or of the one it is a companion of.

    >>> modes_of(abnn.convert(nn.Sequential(nn.LayerNorm(2)), modes=3))
    3
    """
    modes = (getattr(each, "modes", None) for each in _companions(predictor))
    return next((int(number) for number in modes if isinstance(number, int)), None)


def _parameters(predictor: Any) -> int | None:
    """Parameters of the one original network, as far as the predictor tells."""
    added = getattr(predictor, "num_added_parameters", None)
    if added is None or not isinstance(predictor, nn.Module):
        return None
    return sum(p.numel() for p in predictor.parameters()) - int(added)


def _companions(predictor: Any) -> Iterator[Any]:
    """A predictor, the one it is a companion of, and so on."""
    while hasattr(predictor, "predict"):
        yield predictor
        predictor = getattr(predictor, "predictor", getattr(predictor, "net", None))


def _checksums(batch: Any, labels: Tensor | None, inputs: int) -> bytes:
    """Of every input and its label, so that it does not matter how they were cut into batches.

    Where there are images, what stands beside them does not count: two methods may be given the
    same images with something of their own.
    """
    images = images_in(batch)
    leaves = pytree.tree_leaves(plain(inputs_of(batch))) if images is None else [images]
    tensors = [leaf.detach().cpu() for leaf in (*leaves, labels) if isinstance(leaf, Tensor)]
    found = b""
    for i in range(inputs):
        checksum = 0
        for tensor in tensors:
            own = tensor[i] if tensor.ndim and len(tensor) == inputs else tensor
            checksum = zlib.crc32(tensor_bytes(own), checksum)
        found += checksum.to_bytes(4, "little")
    return found
