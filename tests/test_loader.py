"""Prediction over data sets: the batches, what is written, and that nothing is left behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import abnn
from abnn.baselines import Single
from abnn.prefetch import batches
from abnn.results import COLUMNS
from nets import mlp

X = torch.randn(23, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(23) % 3
DATA = DataLoader(TensorDataset(X, Y), batch_size=5)


@pytest.fixture(params=["preds", "preds.parquet"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param.endswith("parquet"):
        pytest.importorskip("pyarrow")
    return tmp_path / "new" / str(request.param)


def model() -> abnn.ABNN:
    return abnn.convert(mlp(), modes=2, alpha=0.05)


def loading() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "abnn-prefetch"]


class LoaderError(Exception):
    """Whatever a loader may raise."""


def breaking(after: int) -> Iterator[Tensor]:
    yield from X.split(5)[:after]
    raise LoaderError


# The batches


def test_batches_come_with_their_place_in_the_data_set() -> None:
    seen = list(batches(DATA))
    assert [(b.start, b.rows) for b in seen] == [(0, 5), (5, 5), (10, 5), (15, 5), (20, 3)]
    assert torch.equal(torch.cat([b.inputs for b in seen]), X)
    assert torch.equal(torch.cat([b.labels for b in seen if b.labels is not None]), Y)


@pytest.mark.parametrize("batch", [X, (X,), {"x": X}, (X, ["a"] * 23), (X, torch.rand(23))])
def test_labels_are_not_needed(batch: Any) -> None:
    assert next(batches([batch])).labels is None


def test_the_next_batch_is_loaded_while_one_is_in_use() -> None:
    second = threading.Event()

    def loader() -> Iterator[Tensor]:
        yield X
        second.set()
        yield X

    feed = batches(loader())
    next(feed)
    assert second.wait(timeout=60)
    feed.close()


def test_not_more_than_two_batches_are_loaded_ahead() -> None:
    loaded = []

    def loader() -> Iterator[Tensor]:
        for part in X.split(2):
            loaded.append(len(part))
            yield part

    feed = batches(loader())
    for used, _ in enumerate(feed, start=1):
        assert len(loaded) <= used + 2


def test_what_the_loader_raises_is_raised_to_the_caller_after_what_came_before() -> None:
    seen: list[int] = []
    with pytest.raises(LoaderError):
        seen.extend(batch.rows for batch in batches(breaking(after=2)))
    assert seen == [5, 5]
    assert not loading()


@pytest.mark.parametrize("taken", [0, 1, 2, 5])
def test_the_thread_ends_when_the_batches_are_left(taken: int) -> None:
    feed = batches(X.split(4))
    for _ in range(taken):
        next(feed)
    feed.close()
    assert not loading()


def test_the_thread_ends_on_an_error_of_the_network() -> None:
    with pytest.raises(RuntimeError) as error:
        model().predict_loader([X, X[:, :3], X, X])
    assert error.traceback  # which keeps all that was under way
    assert not loading()


def test_the_thread_ends_on_an_error_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("abnn.results.NpyWriter.append", full)
    with pytest.raises(OSError, match="No space") as error:
        model().predict_loader(X.split(2), out=tmp_path / "preds")
    assert error.traceback
    assert not loading()
    assert list(tmp_path.iterdir()) == []


# In memory


@pytest.mark.parametrize("samples", [3, "auto"])
@pytest.mark.parametrize("size", [1, 5, 23])
def test_a_data_set_is_predicted_as_one_batch(samples: Any, size: int) -> None:
    bnn = model()
    whole = bnn.predict(X, samples=samples, seed=2)
    parts = bnn.predict_loader(list(X.split(size)), samples=samples, seed=2)
    assert torch.equal(parts.used_by_input(), whole.used_by_input())
    assert isinstance(parts.samples_used, int) == (samples == 3)
    for name in ("probs", "epistemic", "energy", "variation_ratio"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_members_are_kept_when_asked_for() -> None:
    pred = model().predict_loader(DATA, samples=3, keep_members=True)
    assert pred.members is not None
    assert pred.members.shape == (6, 23, 3)


class Stream(IterableDataset[Any]):
    """Of a length that nobody knows."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


def test_a_stream_without_a_length_is_predicted() -> None:
    bnn = model()
    pred = bnn.predict_loader(DataLoader(Stream(), 5))
    assert torch.equal(pred.probs, bnn.predict_loader(X.split(5)).probs)


def test_any_predictor_will_do() -> None:
    pred = abnn.predict_loader(Single(mlp()), DATA)
    torch.testing.assert_close(pred.probs, mlp()(X).softmax(1))


# On disk


@pytest.mark.parametrize("samples", [3, "auto"])
@pytest.mark.parametrize("known_length", [True, False])
def test_what_is_written_is_what_is_predicted(out: Path, samples: Any, known_length: bool) -> None:
    bnn = model()
    expected = bnn.predict_loader(DATA, samples=samples)
    saved = bnn.predict_loader(DATA if known_length else iter(DATA), samples=samples, out=out)
    assert saved.path == out
    assert saved.rows == 23
    assert list(saved) == [*COLUMNS, "labels"]
    for name in COLUMNS:
        value = expected.used_by_input() if name == "samples_used" else getattr(expected, name)
        np.testing.assert_array_equal(saved[name], value.numpy())
    np.testing.assert_array_equal(saved["labels"], Y.numpy())
    again = abnn.load_predictions(out).prediction(slice(3, 9))
    torch.testing.assert_close(again.log_probs, expected[3:9].log_probs)
    torch.testing.assert_close(again.epistemic, expected[3:9].epistemic)


def test_pixels_are_written(out: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)).eval()
    data = [(torch.randn(2, 3, 6, 8), torch.zeros(2, 4, 6).long()) for _ in range(2)]
    bnn = abnn.convert(net, modes=2)
    saved = bnn.predict_loader(data, samples=2, out=out)
    assert saved["probs"].shape == (4, 5, 4, 6)
    assert saved["labels"].shape == saved["total"].shape == (4, 4, 6)
    np.testing.assert_array_equal(saved["probs"], bnn.predict_loader(data, samples=2).probs)


def test_columns_of_a_directory_are_plain_npy_files_mapped_into_memory(tmp_path: Path) -> None:
    saved = model().predict_loader(X.split(5), out=tmp_path / "preds")
    assert isinstance(saved["probs"], np.memmap)
    assert np.load(tmp_path / "preds/probs.npy").shape == (23, 3)
    assert "labels" not in saved


def test_a_parquet_file_has_a_row_group_a_batch(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    model().predict_loader(DATA, out=tmp_path / "preds.parquet")
    file = parquet.ParquetFile(tmp_path / "preds.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(5)] == [5, 5, 5, 5, 3]
    assert file.read(columns=["label"])["label"].to_pylist() == model().predict(X).label.tolist()


def test_the_predictions_of_a_data_set_are_never_held(out: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Watched:
        def predict(self, x: Tensor) -> abnn.Prediction:
            prediction = Single(mlp()).predict(x)
            assert sum(ref() is not None for ref in alive) <= 1
            alive.append(weakref.ref(prediction.log_probs))
            return prediction

    abnn.predict_loader(Watched(), (X.clone() for _ in range(20)), out=out)
    assert len(alive) == 20


@pytest.mark.parametrize(
    ("loader", "error"),
    [
        (lambda: breaking(after=2), LoaderError),
        (lambda: [X, X[:, :3]], RuntimeError),
        (list, ValueError),
    ],
)
def test_nothing_is_left_of_a_prediction_that_failed(out: Path, loader: Any, error: Any) -> None:
    with pytest.raises(error):
        model().predict_loader(loader(), out=out)
    assert list(out.parent.iterdir()) == []


def test_while_it_is_written_it_is_not_there(out: Path) -> None:
    def loader() -> Iterator[Tensor]:
        for part in X.split(5):
            assert not out.exists()
            yield part

    model().predict_loader(loader(), out=out)
    assert out.exists()
    assert list(out.parent.iterdir()) == [out]


def test_what_is_there_is_replaced_only_when_asked_to(out: Path) -> None:
    bnn = model()
    bnn.predict_loader(DATA, out=out)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        bnn.predict_loader([X[:2]], out=out)
    with pytest.raises(LoaderError):
        bnn.predict_loader(breaking(after=1), out=out, overwrite=True)
    assert abnn.load_predictions(out).rows == 23
    assert bnn.predict_loader([X[:2]], out=out, overwrite=True).rows == 2
    assert list(out.parent.iterdir()) == [out]


def test_a_directory_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(FileExistsError, match="something else"):
        model().predict_loader(DATA, out=tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "..."


def test_without_pyarrow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"abnn\[parquet\]"):
        model().predict_loader(DATA, out=tmp_path / "preds.parquet")


@pytest.mark.parametrize("text", ["", "{}", '{"rows": 3}'])
def test_a_foreign_directory_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "predictions.json").write_text(text)
    with pytest.raises(ValueError, match="holds no predictions"):
        abnn.load_predictions(tmp_path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    saved = model().predict_loader([X], out=tmp_path / "preds")
    with pytest.raises(KeyError, match="'labels'; there are probs"):
        saved["labels"]


def test_batches_that_do_not_fit_together_are_refused() -> None:
    tokens = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    bnn = abnn.convert(tokens, class_dim=-1)
    with pytest.raises(ValueError, match=r"Batch 2 has probabilities of shape \(6, 7\)"):
        bnn.predict_loader([torch.randn(2, 5, 4), torch.randn(2, 7, 4)])
    with pytest.raises(ValueError, match="Batch 2 has .* and no labels, and the first"):
        model().predict_loader([(X, Y), X])
    with pytest.raises(ValueError, match="a label for every input"):
        model().predict_loader([(X, Y[:5])])
    with pytest.raises(ValueError, match="empty"):
        model().predict_loader([])
