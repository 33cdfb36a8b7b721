"""Records: figures from what was stored, the inputs that stand out, and nothing half done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_calibration_error

import abnn
from abnn import Prediction
from abnn.baselines import Conformal, DeepEnsemble, Single, TemperatureScaling
from abnn.gallery import Striking
from abnn.images import to_bytes
from abnn.record import Record, Recorded
from abnn.statistics import figures_of


class Members(nn.Module):
    """A predictor whose members' logits, `[B, S, K, ...]`, are its inputs."""

    modes = 2

    def predict(self, x: Tensor, keep_members: bool = False) -> Prediction:
        return Prediction.from_logits(x.movedim(1, 0), keep_members)


def data(seed: int, *rest: int, n: int = 60, S: int = 4, K: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(n, S, K, *rest, generator=g)
    return x, (x.mean(1) + torch.randn(n, K, *rest, generator=g)).argmax(1)


def batches(x: Tensor, y: Tensor, size: int = 13) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def recorded(folder: Path, seed: int = 0, **more: Any) -> tuple[Recorded, abnn.Evaluation]:
    ood = {"far": batches(*data(seed + 50, n=40)), "a/b": batches(*data(seed + 60, n=30))}
    record = Record(folder / "evaluation/ABNN", **more)
    result = abnn.evaluate(Members(), batches(*data(seed)), ood, record=record)
    return Recorded(folder / "evaluation/ABNN"), result


@pytest.mark.parametrize("seed", range(3))
def test_figures_recomputed_from_it_are_those_of_other_libraries(tmp_path: Path, seed: int) -> None:
    stored, result = recorded(tmp_path, seed)
    p, y = stored.known["probs"].astype(float), stored.known["labels"]
    p /= p.sum(1, keepdims=True)
    assert result.accuracy == pytest.approx(100 * (p.argmax(1) == y).mean())
    assert result.nll == pytest.approx(log_loss(y, p, labels=range(5)), abs=1e-6)
    ece = multiclass_calibration_error(torch.tensor(p), torch.tensor(y), 5, n_bins=15)
    assert result.ece / 100 == pytest.approx(ece.item(), abs=1e-6)
    for name, saved in stored.ood.items():
        scores = [1 - part["confidence"].astype(float) for part in (stored.known, saved)]
        truth = [0] * len(scores[0]) + [1] * len(scores[1])
        msp = result.ood[name]["msp"]
        both = [*scores[0], *scores[1]]
        assert msp.auroc / 100 == pytest.approx(roc_auc_score(truth, both), abs=1e-6)
        assert msp.aupr / 100 == pytest.approx(average_precision_score(truth, both), abs=1e-6)


def test_what_is_compared_has_the_figures_of_the_evaluation(tmp_path: Path) -> None:
    stored, result = recorded(tmp_path)
    found, expected = figures_of(stored.examples(["msp", "entropy"])), result.figures()
    assert {"nll", "ood/a/b/entropy/auroc"} <= found.keys()
    for name, value in found.items():
        assert value == pytest.approx(expected[name], abs=1e-5), name


def test_the_evaluation_is_stored_beside_it(tmp_path: Path) -> None:
    stored, result = recorded(tmp_path, classes=["cat", "dog", "eel", "fox", "gnu"])
    assert stored.evaluation == result
    assert stored.evaluation.cost == result.cost
    assert (stored.name, stored.modes, stored.class_name(1)) == ("ABNN", 2, "dog")


def test_recording_changes_no_figure(tmp_path: Path) -> None:
    x, y = data(0)
    plain = abnn.evaluate(Members(), batches(x, y))
    assert abnn.evaluate(Members(), batches(x, y), record=tmp_path / "r") == plain


def test_the_most_striking_inputs_are_kept(tmp_path: Path) -> None:
    stored, _ = recorded(tmp_path, examples=3)
    p, y = stored.known.prediction(), torch.from_numpy(stored.known["labels"].copy())
    wrong = p.confidence.where(p.label != y, -math.inf)
    expected = {"mistakes": wrong, "uncertain": p.total}
    found = stored.striking()
    for kind, keys in expected.items():
        rows = [one.index for one in found if one.kind == kind]
        assert rows == keys.argsort(descending=True)[:3].tolist()
    far = stored.ood["far"].prediction().confidence
    assert [one.index for one in stored.striking(1)] == far.argsort(descending=True)[:3].tolist()
    members = found[0].members
    assert members is not None
    torch.testing.assert_close(members, data(0)[0][found[0].index].softmax(1))


def test_no_mistake_is_shown_where_there_is_none(tmp_path: Path) -> None:
    x, _ = data(0)
    right = Members().predict(x).label
    abnn.evaluate(Members(), batches(x, right), record=tmp_path / "r")
    assert {one.kind for one in Recorded(tmp_path / "r").striking()} == {"uncertain"}


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_kept_as_they_were_before_normalisation(tmp_path: Path, channels: int) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 3))
    pixels = torch.randint(256, (4, channels, 8, 8), dtype=torch.uint8)
    mean, std = [0.4] * channels, 0.3
    x = (pixels / 255 - 0.4) / 0.3
    record = Record(tmp_path / "r", mean=mean, std=std)
    abnn.evaluate(Single(net), [(x, torch.arange(4) % 3)], record=record)
    for one in Recorded(tmp_path / "r").striking():
        assert one.image is not None
        assert torch.equal(one.image, pixels[one.index])


def test_an_image_without_a_known_normalisation_is_stretched() -> None:
    assert to_bytes(torch.tensor([[[-3.0, 5.0]]]), None, None).tolist() == [[[0, 255]]]
    assert to_bytes(torch.full((1, 2, 2), 7.0), None, None).unique().tolist() == [0]
    assert to_bytes(torch.tensor([[[0.2, 1.0]]]), None, None).tolist() == [[[51, 255]]]


def test_large_images_are_kept_small() -> None:
    assert to_bytes(torch.rand(3, 448, 224), None, None).shape == (3, 224, 112)


def test_disagreement_of_any_two_members_is_a_share_of_all_inputs(tmp_path: Path) -> None:
    stored, _ = recorded(tmp_path)
    labels = data(0)[0].argmax(2)
    expected = (labels[:, :, None] != labels[:, None]).double().mean(0)
    torch.testing.assert_close(torch.tensor(stored.disagreement).double(), expected)


def test_ignored_labels_have_no_row(tmp_path: Path) -> None:
    x, y = data(0)
    y[::3] = -100
    result = abnn.evaluate(Members(), batches(x, y), record=tmp_path / "r")
    stored = Recorded(tmp_path / "r")
    assert stored.known.rows == result.n == (y != -100).sum()
    kept = Members().predict(x[y != -100])
    for one in stored.striking():
        assert one.key in (kept.confidence[one.index].item(), kept.total[one.index].item())


def test_of_pixels_some_are_kept(tmp_path: Path) -> None:
    x, y = data(0, 6, 7, n=8)
    y[:, 0] = 255
    record = Record(tmp_path / "r", pixels=20)
    far = {"far": batches(*data(1, 6, 7, n=4), size=3)}
    result = abnn.evaluate(Members(), batches(x, y, 3), far, record=record, ignore_index=255)
    stored = Recorded(tmp_path / "r")
    assert (result.n, stored.known.rows, stored.ood["far"].rows) == (8 * 35, 8 * 20, 4 * 20)
    assert stored.of_pixels
    assert not stored.striking()
    assert (stored.known["labels"] != 255).all()
    # A row has the prediction and the label of one and the same pixel.
    flat = Members().predict(x).flat()
    rows = {
        (round(c, 6), label)
        for c, label in zip(flat.confidence.tolist(), y.flatten().tolist(), strict=True)
    }
    kept = stored.known["confidence"].tolist(), stored.known["labels"].tolist()
    assert {(round(c, 6), label) for c, label in zip(*kept, strict=True)} <= rows


def test_other_data_has_another_digest(tmp_path: Path) -> None:
    x, y = data(0)
    other = y.clone()
    other[7] = (other[7] + 1) % 5
    digests = []
    for i, given in enumerate([(x, y), (x, y), (x, other), (x + 1e-6, y)]):
        abnn.evaluate(Members(), batches(*given), record=tmp_path / str(i))
        digests.append(Recorded(tmp_path / str(i)).digests[0])
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("size", [1, 7, 60])
def test_the_digest_does_not_depend_on_the_batches(tmp_path: Path, size: int) -> None:
    stored, _ = recorded(tmp_path)
    abnn.evaluate(Members(), batches(*data(0), size), record=tmp_path / "r")
    assert Recorded(tmp_path / "r").digests == stored.digests[:1]
    assert stored.shared_with(Recorded(tmp_path / "r")) == ["in-distribution"]


def test_the_digest_of_images_is_not_of_what_stands_beside_them(tmp_path: Path) -> None:
    class Beside(nn.Module):
        def predict(self, x: tuple[Tensor, Tensor]) -> Prediction:
            return Prediction.from_logits(x[0].unsqueeze(0))

    images, y = torch.rand(9, 3, 8, 8), torch.arange(9) % 3
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    abnn.evaluate(Single(net), [(images, y)], record=tmp_path / "a")
    abnn.evaluate(Beside(), [(torch.randn(9, 3), images, y)], record=tmp_path / "b")
    a, b = (Recorded(tmp_path / name).digests for name in "ab")
    assert a == b


def test_companions_keep_the_members_of_their_predictor(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    bnn, batch = abnn.convert(net, modes=2), (torch.randn(9, 4), torch.arange(9) % 3)
    both = Conformal(TemperatureScaling(bnn), 0.5).fit([batch], samples=3)
    abnn.evaluate(both, [batch], record=tmp_path / "r", samples=3)
    stored = Recorded(tmp_path / "r")
    assert stored.modes == 2
    assert all(s.members is not None and s.members.shape == (6, 3) for s in stored.striking())


def test_as_many_draws_as_are_needed_are_recorded_without_members(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    batch = torch.randn(9, 4), torch.arange(9) % 3
    abnn.evaluate(abnn.convert(net), [batch], record=tmp_path / "r", samples="auto")
    stored = Recorded(tmp_path / "r")
    assert stored.disagreement is None
    assert all(one.members is None for one in stored.striking())


def test_an_ensemble_and_a_predictor_of_ones_own_are_recorded(tmp_path: Path) -> None:
    class Own:
        def predict(self, x: Tensor) -> Prediction:
            return Prediction.from_logits(x.unsqueeze(0))

    batch = torch.eye(3), torch.arange(3)
    for name, predictor in (("own", Own()), ("deep", DeepEnsemble([nn.Identity(), nn.ReLU()]))):
        abnn.evaluate(predictor, [batch], record=tmp_path / name)
        assert Recorded(tmp_path / name).known.rows == 3


def test_a_record_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    recorded(tmp_path, 0)

    def failing() -> Iterator[Any]:
        yield batches(*data(1))[0]
        raise OSError("the disk is gone")

    folder = tmp_path / "evaluation/ABNN"
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(OSError, match="the disk is gone"):
        abnn.evaluate(Members(), failing(), record=folder)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert [file.name for file in folder.parent.iterdir()] == ["ABNN"]
    stored, result = recorded(tmp_path, 1)
    assert stored.evaluation == result


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/thesis.tex").write_text("words")
    with pytest.raises(FileExistsError, match="holds something else than a record"):
        abnn.evaluate(Members(), batches(*data(0)), record=tmp_path / "r")
    assert (tmp_path / "r/thesis.tex").read_text() == "words"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "record.json").write_text("{"),
        lambda folder: (folder / "record.json").write_text('{"format": "something else"}'),
        lambda folder: (folder / "record.json").unlink(),
        lambda folder: (folder / "evaluation.json").write_text("{}"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, spoil: Any) -> None:
    stored, _ = recorded(tmp_path)
    spoil(stored.path)
    with pytest.raises(ValueError, match="holds no record of an evaluation, or a damaged one"):
        Recorded(stored.path)


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:99])]
)
def test_damaged_images_are_told_by_their_file(tmp_path: Path, spoil: Any) -> None:
    stored, _ = recorded(tmp_path)
    spoil(stored.path / "gallery-1.safetensors")
    with pytest.raises(ValueError, match="gallery-1.safetensors is damaged or missing"):
        stored.striking(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"examples": 0}, "examples=0 is not a whole number of at least 1"),
        ({"pixels": 1.5}, "pixels=1.5 is not a whole number"),
        ({"classes": "cat"}, "classes= is one text; give the names as a list"),
        ({"mean": "grey"}, "mean='grey' is no number"),
        ({"std": []}, "no number, nor one a channel"),
    ],
)
def test_a_record_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Record("r", **given)


def test_only_measurements_are_added(tmp_path: Path) -> None:
    stored, _ = recorded(tmp_path)
    curve = abnn.SamplesCurve(9, 2, 1, 0.1, [1, 2], {"difference": [0.1, 0.0]}, {})
    stored.add(curve)
    file = stored.path / "samples_curve.json"
    assert abnn.SamplesCurve.from_json(file.read_text()) == curve
    with pytest.raises(TypeError, match="A Striking has no place in a record"):
        stored.add(Striking("mistakes", 1.0, 0))  # type: ignore[arg-type, unused-ignore]
