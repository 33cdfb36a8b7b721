"""Data that a command line names: its parts, what is held out, and OOD sets of another shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from abnn.data import (
    Images,
    View,
    classes_of,
    held_out_split,
    open_data,
    open_ood,
    train_and_validation,
)

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (12, 8, 8), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (6, 16, 12, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def saved(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "d.npz", **arrays)
    return f"npz:{folder / 'd.npz'}"


def like(C: int, H: int, W: int, **view: Any) -> Images:
    images = torch.zeros(3, C, H, W, dtype=torch.uint8)
    return Images(images, torch.zeros(3).long(), View(**view))


def ood(*given: Any) -> tuple[Any, str]:
    return open_ood(*given)


def stacked(data: Dataset[Any]) -> Tensor:
    return torch.stack([data[i][0] for i in range(len(data))])  # type: ignore[arg-type]


def test_the_test_part_is_x_test_or_all_there_is(tmp_path: Path) -> None:
    source = saved(tmp_path, x_train=GREY, y_train=LABELS, x_test=GREY[:5], y_test=LABELS[:5])
    both: Any = open_data(source, "test")
    assert len(both) == 5
    alone: Any = open_data(saved(tmp_path, x=GREY, y=LABELS), "test")
    assert len(alone) == 12
    with pytest.raises(ValueError, match=r"d\.npz has no test data, but train data; name other"):
        open_data(saved(tmp_path, x_train=GREY, y_train=LABELS), "test")


def test_test_data_beside_training_data_is_no_validation_data(tmp_path: Path) -> None:
    arrays = {"x_test": GREY[:5], "y_test": LABELS[:5]}
    held_out: Any = open_data(saved(tmp_path, **arrays), "validation")
    assert len(held_out) == 5
    both = saved(tmp_path, x_train=GREY, y_train=LABELS, **arrays)
    with pytest.raises(ValueError, match="no validation data, but train and test data; hold some"):
        open_data(both, "validation")


@pytest.mark.parametrize("size, count", [(0.25, 25), (7, 7), (0.011, 1)])
def test_what_is_held_out_and_what_is_left_is_everything(size: float, count: int) -> None:
    rest, held = held_out_split(TensorDataset(torch.arange(100)), size)
    assert len(held) == count
    assert sorted([*rest.indices, *held.indices]) == list(range(100))


def test_what_is_held_out_is_a_matter_of_the_seed_alone() -> None:
    data = TensorDataset(torch.arange(100))
    held = held_out_split(data, 20, seed=1)[1].indices
    torch.manual_seed(5)
    assert held_out_split(data, 20, seed=1)[1].indices == held
    assert held_out_split(data, 20, seed=2)[1].indices != held


def test_held_out_images_are_not_mirrored() -> None:
    view = View(augmentation=("hflip",))
    images = Images(torch.from_numpy(GREY), torch.from_numpy(LABELS), view)
    rest, held = held_out_split(images, 4)
    plain = Images(torch.from_numpy(GREY), torch.from_numpy(LABELS))
    for _ in range(10):
        assert torch.equal(stacked(held), stacked(Subset(plain, held.indices)))
    assert any((rest[0][0] != plain[rest.indices[0]][0]).any() for _ in range(20))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(1, 8, 8), 0)])


@pytest.mark.parametrize("size", [0, 1.5, 12, -3, 0.01])
def test_what_can_not_be_held_out_is_refused(size: float) -> None:
    data = TensorDataset(torch.arange(12))
    with pytest.raises(ValueError, match="can't be held out; give a share"):
        held_out_split(data, size)
    for other in (DataLoader(data), Stream()):
        with pytest.raises(ValueError, match=f"held out of a {type(other).__name__}"):
            held_out_split(other, 3)  # type: ignore[arg-type]


def test_validation_data_is_never_test_data(tmp_path: Path) -> None:
    arrays = {"x_train": GREY, "y_train": LABELS, "x_test": 255 - GREY, "y_test": LABELS}
    train, validation, note = train_and_validation(saved(tmp_path, **arrays), size=3, seed=4)
    assert note == "validation: 3 of the 12 training examples, drawn by seed 4"
    both = torch.cat([stacked(train), stacked(validation)])
    whole = torch.from_numpy(GREY).float().unsqueeze(1) / 255
    assert len(both.unique(dim=0)) == 12
    assert torch.equal(both.unique(dim=0), whole.unique(dim=0))


def test_validation_data_of_a_file_is_used(tmp_path: Path) -> None:
    arrays = {"x_train": GREY, "y_train": LABELS, "x_val": GREY[:4], "y_val": LABELS[:4]}
    source = saved(tmp_path, **arrays)
    train, validation, note = train_and_validation(source, View(augmentation=("hflip",)))
    assert (len(train), len(validation)) == (12, 4)  # type: ignore[arg-type]
    assert note == f"validation: that of {source}"
    assert isinstance(train, Images)
    assert isinstance(validation, Images)
    assert (train.flip, validation.flip) == (True, False)


def test_a_loader_has_nothing_to_hold_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "held.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "def data(): return TensorDataset(torch.arange(10))\n"
        "def loader(): return DataLoader(data())\n"
    )
    monkeypatch.chdir(tmp_path)
    rest, held, _ = train_and_validation("module:held:data", size=4)
    assert (len(rest), len(held)) == (6, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is a DataLoader, of which no validation data"):
        train_and_validation("module:held:loader")
    data, note = ood("module:held:data", like(1, 8, 8))
    assert (len(data), note) == (10, "as its builder makes it")


def test_what_is_no_image_of_bytes_may_be_taken_as_it_is(tmp_path: Path) -> None:
    rows = np.zeros((6, 3, 8, 8), np.float32)
    source, view = saved(tmp_path, x=rows, y=LABELS[:6]), View((8, 8), (0.5,), (0.2,))
    with pytest.raises(ValueError, match="for images of bytes, which .* does not hold; leave it"):
        open_data(source, "train", view)
    data: Any = open_data(source, "train", view, as_is=True)
    assert torch.equal(stacked(data), torch.zeros(6, 3, 8, 8))
    assert ood(source, data, view)[1] == "as it is"
    with pytest.raises(ValueError, match="hflip of the recipe is for images of bytes"):
        open_data(source, "train", View(augmentation=("hflip",)), as_is=True)


def test_classes_that_lost_their_examples_to_validation_are_told(tmp_path: Path) -> None:
    arrays = {"x": GREY, "y": [0] * 5 + [1] * 6 + [2], "classes": ["cat", "dog", "cow"]}
    notes = {train_and_validation(saved(tmp_path, **arrays), size=6, seed=s)[2] for s in range(9)}
    assert any(note.endswith("; no training example is left of cow") for note in notes)
    assert any(note.endswith(f"seed {s}") for note in notes for s in range(9))


def test_numbers_of_every_width_and_order_are_read(tmp_path: Path) -> None:
    rows = np.arange(48).reshape(12, 4)
    for kind in (">f8", "<f8", "f4", "f2"):
        source = saved(tmp_path, x=rows.astype(kind), y=LABELS.astype(">u8")[:, None])
        data: Any = open_data(source, "train")
        x, y = zip(*data, strict=True)
        assert torch.stack(x).dtype == torch.float32
        assert torch.equal(torch.stack(x), torch.tensor(rows).float())
        assert torch.stack(y).tolist() == LABELS.tolist()


def test_names_of_classes_may_be_bytes(tmp_path: Path) -> None:
    names = ["Käse".encode(), b"dog", b"cow"]
    assert classes_of(open_data(saved(tmp_path, x=GREY, y=LABELS, classes=names), "train")) == (
        "Käse",
        "dog",
        "cow",
    )


def test_two_channels_may_be_last_too(tmp_path: Path) -> None:
    x = np.stack([GREY, GREY], -1)
    data: Any = open_data(saved(tmp_path, x=x, y=LABELS), "train")
    assert data[0][0].shape == (2, *GREY.shape[1:])


def test_what_is_no_archive_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / "d.npz").write_text("not found")
    with pytest.raises(ValueError, match=r"d.npz is no npz file .*: it is not what numpy.savez"):
        open_data(f"npz:{tmp_path}/d.npz", "train")


def test_a_file_is_found_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path, x=GREY, y=LABELS)
    assert len(open_data("npz:~/d.npz", "train")) == 12  # type: ignore[arg-type]


# Out-of-distribution data


def test_images_of_the_same_shape_stay_as_they_are(tmp_path: Path) -> None:
    data, note = ood(saved(tmp_path, x_test=GREY, y_test=LABELS), like(1, 8, 8))
    assert note == "as it is"
    assert torch.equal(stacked(data)[:, 0], torch.from_numpy(GREY).float() / 255)
    assert (data.y == -100).all()


def test_colour_becomes_the_grey_that_pillow_makes(tmp_path: Path) -> None:
    data, note = ood(saved(tmp_path, x=COLOUR), like(1, 16, 12))
    assert note == "grey by luminance"
    expected = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in COLOUR])
    assert np.abs(data.x[:, 0].numpy().astype(int) - expected).max() <= 1
    white, _ = ood(saved(tmp_path, x=np.full_like(COLOUR, 255)), like(1, 16, 12))
    assert (white.x == 255).all()


def test_grey_becomes_three_equal_channels(tmp_path: Path) -> None:
    data, note = ood(saved(tmp_path, x=GREY), like(3, 8, 8))
    assert note == "grey in three channels"
    assert torch.equal(
        stacked(data), torch.from_numpy(GREY).float().unsqueeze(1).repeat(1, 3, 1, 1) / 255
    )


@pytest.mark.parametrize("size", [(8, 6), (5, 9), (32, 24)])
def test_images_are_resized_as_pillow_does(tmp_path: Path, size: tuple[int, int]) -> None:
    data, note = ood(saved(tmp_path, x=COLOUR), like(3, *size))
    stretched = ", out of proportion" if size == (5, 9) else ""
    assert note == f"resized from 16 x 12 to {size[0]} x {size[1]}{stretched}"
    expected = np.stack(
        [
            np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
            for image in COLOUR
        ]
    )
    assert np.abs(data.x.movedim(1, -1).numpy().astype(int) - expected).max() <= 1


def test_both_are_done_to_any_number_of_images(tmp_path: Path) -> None:
    many = np.concatenate([COLOUR] * 50)
    data, note = ood(saved(tmp_path, x=many), like(1, 7, 7))
    assert note == "grey by luminance; resized from 16 x 12 to 7 x 7, out of proportion"
    assert data.x.shape == (300, 1, 7, 7)
    assert torch.equal(data.x[:6], data.x[-6:])


def test_they_are_normalised_as_those_that_they_are_told_from(tmp_path: Path) -> None:
    source = saved(tmp_path, x=GREY)
    plain = torch.from_numpy(GREY).float().unsqueeze(1) / 255
    known = Subset(like(1, 8, 8, mean=[0.5], std=[0.25], augmentation=["hflip"]), [0, 1])
    for given in (known, DataLoader(known)):
        data, _ = ood(source, given)
        assert not data.flip
        torch.testing.assert_close(stacked(data), (plain - 0.5) / 0.25)
    own = TensorDataset(torch.zeros(2, 1, 8, 8), torch.zeros(2))
    data, _ = ood(source, own, View(mean=(0.1,), std=(0.2,)))
    torch.testing.assert_close(stacked(data), (plain - 0.1) / 0.2)
    stream, _ = open_ood(source, Stream(), View(mean=(0.1,), std=(0.2,)))
    torch.testing.assert_close(stacked(stream), (plain - 0.1) / 0.2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not known how the in-distribution data is normalised"):
        open_ood(source, own)


def test_inputs_that_are_no_images_must_be_alike(tmp_path: Path) -> None:
    rows = np.zeros((5, 4), np.float32)
    known = TensorDataset(torch.zeros(2, 4), torch.zeros(2))
    data, note = ood(saved(tmp_path, x=rows), known)
    assert (len(data), note) == (5, "as it is")
    with pytest.raises(ValueError, match=r"has the shape \[3\], but .* \[4\]"):
        open_ood(saved(tmp_path, x=rows[:, :3]), known)


@pytest.mark.parametrize(
    "arrays, known, message",
    [
        ({"x_train": GREY}, like(1, 8, 8), "no test data, but train data"),
        ({"x": GREY[:0]}, like(1, 8, 8), "x of .* holds no examples"),
        ({"x": GREY.astype(np.float32)}, like(1, 8, 8), "holds float32 .* is of images of bytes"),
        ({"x": GREY.astype(np.int64)}, like(1, 8, 8), "holds int64 .* is of images of bytes"),
        ({"x": np.zeros((3, 8, 8, 4), np.uint8)}, like(3, 8, 8), "have 4 channels, .* 3; only"),
        ({"x": GREY}, TensorDataset(torch.zeros(2, 4)), "uint8 .* of floating-point inputs"),
        ({"x": np.array(["a"])}, like(1, 8, 8), "no npz file of plain arrays"),
        ({"x": np.array([{}])}, like(1, 8, 8), "no npz file of plain arrays"),
    ],
)
def test_unfit_ood_data_is_refused(
    tmp_path: Path, arrays: dict[str, Any], known: Dataset[Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_ood(saved(tmp_path, **arrays), known)


def test_a_source_must_say_what_it_is() -> None:
    for unclear in ("npz", "npz:"):
        with pytest.raises(ValueError, match="does not say which or where; write npz:PATH"):
            open_ood(unclear, like(1, 8, 8))
    for unclear in ("d.npz", "cifar10:", "files:d", ""):
        with pytest.raises(ValueError, match="write npz:PATH, folder:PATH, .* or module:PACKAGE"):
            open_ood(unclear, like(1, 8, 8))
    with pytest.raises(FileNotFoundError, match=r"no file none\.npz"):
        open_ood("npz:none.npz", like(1, 8, 8))
    with pytest.raises(ValueError, match="Give both --mean and --std"):
        View(mean=(0.5,))


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"x": GREY[:0], "y": LABELS[:0]}, "x of .* holds no examples"),
        ({"x": GREY, "y": LABELS + 0.5}, "labels of .* are float64 .* numbers of classes"),
        ({"x": GREY}, "x of .* has no labels"),
        ({"rows": GREY}, "neither x, nor x_train, x_val or x_test, .*; it has rows"),
        ({"x": GREY, "y": LABELS - 1}, "label of .* is -1; labels are numbers from 0"),
        ({"x": GREY, "y": LABELS, "classes": ["a", "b"]}, "is 2, but there are the names of 2"),
        ({"x": GREY, "y": LABELS, "classes": [*"abcd"]}, "no example of the class d; add"),
        ({"x": GREY, "y": LABELS[:3]}, "12 inputs but 3 labels"),
        ({"x": GREY, "y": np.array(["cat"] * 12)}, "labels of .* are texts; .* numbers .* as y, "),
        ({"x": GREY, "y": np.array([b"cat"] * 12)}, "labels of .* are texts"),
        ({"x": GREY, "y": np.eye(3)[LABELS]}, r"have the shape \[3\], .* number of one class an"),
        ({"x": GREY, "y": np.array(1)}, "y of .* is a single value; give one for every example"),
        ({"x": np.array(1), "y": LABELS}, "x of .* is a single value"),
        ({"x": GREY, "y": LABELS, "classes": np.array("cat")}, "classes of .* is no list of names"),
        ({"x": GREY.astype(np.uint16), "y": LABELS}, "is int64 .* no images of bytes; store them"),
        ({"x": GREY > 9, "y": LABELS}, "is bool .* no images of bytes; store them as uint8"),
        ({"x": np.zeros((12, 8, 8, 3)), "y": LABELS}, "with the channels last; store floating-poi"),
    ],
)
def test_unfit_labelled_data_is_refused(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_data(saved(tmp_path, **arrays), "train")
