"""Every source gives the same set alike; what is their own of some."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from abnn.data import (
    SOURCES,
    Images,
    View,
    classes_of,
    has_test,
    held_out_split,
    notes_of,
    open_data,
    open_ood,
    pictures,
    train_and_validation,
)
from data_sources import IMAGES, MAKERS, NAMES, TEST, TRAIN, K, X, Y, png, stream, write_folder
from shared import shared

VIEW = View((32, 32), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.fixture(params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The name of a maker, and the source that it wrote."""
    return request.param, MAKERS[request.param](tmp_path, monkeypatch)


def everything(data: Any) -> tuple[Tensor, Tensor]:
    x, y = next(iter(DataLoader(data, len(data))))
    return x, y


def normalised(images: Any) -> Tensor:
    x = torch.from_numpy(images).movedim(-1, 1).float() / 255
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (VIEW.mean, VIEW.std))
    return (x - mean) / std


def nearest(x: Tensor, images: Any) -> Tensor:
    """Which of the images each is, and that it is one of them: JPEGs are only near to it."""
    distance = (x.unsqueeze(1) - normalised(images)).abs().mean((2, 3, 4))
    assert (distance.min(1).values < 0.15).all()
    return distance.argmin(1)


def test_every_source_is_tested() -> None:
    tested = {"npz" if name == "jpegs" else "hf" if "datasets" in name else name for name in MAKERS}
    assert tested == set(SOURCES)


def test_inputs_are_normalised_images_with_their_labels(made: Any) -> None:
    name, source = made
    own = name == "module"
    data = open_data(source, "train", View() if own else VIEW)
    x, y = everything(data)
    count = 20 if name == "dtd" else TRAIN
    assert (x.shape, x.dtype, y.dtype) == ((count, 3, 32, 32), torch.float32, torch.int64)
    assert classes_of(data) == (
        None if own else tuple("0123456789") if name == "svhn" else tuple(NAMES)
    )
    which = nearest(x, X["train"])
    assert sorted(which.tolist()) == list(range(count))
    assert (y == torch.from_numpy(Y["train"])[which]).all()
    if name != "jpegs":
        torch.testing.assert_close(x, normalised(X["train"])[which])


def test_training_validation_and_test_data_share_no_image(made: Any) -> None:
    name, source = made
    view = View() if name == "module" else VIEW
    train, validation, note = train_and_validation(source, view, size=6, seed=3)
    held = 10 if name == "dtd" else 6
    assert note == (
        f"validation: that of {source}"
        if name == "dtd"
        else f"validation: 6 of the {TRAIN} training examples, drawn by seed 3"
    )
    which = [nearest(everything(part)[0], IMAGES).tolist() for part in (train, validation)]
    assert [len(part) for part in which] == [TRAIN - held, held]
    assert sorted([*which[0], *which[1]]) == list(range(TRAIN))
    assert has_test(source) == (name != "module")
    if name != "module":
        test = nearest(everything(open_data(source, "test", view))[0], IMAGES)
        assert sorted(test.tolist()) == list(range(TRAIN, TRAIN + TEST))


def test_a_source_is_read_alike_every_time(made: Any) -> None:
    name, source = made
    view = View() if name == "module" else VIEW
    first, second = (everything(open_data(source, "train", view)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_every_source_can_be_out_of_distribution(made: Any) -> None:
    name, source = made
    if name == "module":
        return
    like = Images(torch.zeros(2, 1, 16, 16, dtype=torch.uint8), torch.zeros(2).long())
    data, note = open_ood(source, like)
    x, y = everything(data)
    assert x.shape == (TEST, 1, 16, 16)
    assert (y == -100).all()
    in_memory = name in ("npz", "cifar10", "cifar100", "svhn")
    how = "resized from 32 x 32 to 16 x 16" if in_memory else "brought to 16 x 16, in proportion"
    assert how in note
    grey = normalised(X["test"])
    grey = (grey * torch.tensor(VIEW.std).reshape(3, 1, 1)).add(
        torch.tensor(VIEW.mean).reshape(3, 1, 1)
    )
    expected = (grey * torch.tensor([0.299, 0.587, 0.114]).reshape(3, 1, 1)).sum(1).mean((1, 2))
    torch.testing.assert_close(
        x.mean((1, 2, 3)).sort().values, expected.sort().values, atol=0.01, rtol=0
    )


def test_every_set_can_be_given_to_workers(made: Any) -> None:
    name, source = made
    data = open_data(source, "train", View() if name == "module" else VIEW)
    assert torch.equal(everything(pickle.loads(pickle.dumps(data)))[0], everything(data)[0])


# Folders


def test_a_folder_without_parts_is_one_set(tmp_path: Path) -> None:
    write_folder(tmp_path, "train")
    (tmp_path / ".cache").mkdir()
    source = f"folder:{tmp_path}"
    parts = [len(open_data(source, part, VIEW)) for part in ("train", "test")]  # type: ignore[arg-type]
    assert parts == [TRAIN, TRAIN]
    assert not has_test(source)


@pytest.mark.parametrize("name", ["val", "validation", "valid"])
def test_the_validation_part_of_a_folder_has_several_names(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "train", "train")
    write_folder(tmp_path / name, "test")
    train, validation, _ = train_and_validation(f"folder:{tmp_path}", VIEW)
    assert (len(train), len(validation)) == (TRAIN, TEST)  # type: ignore[arg-type]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_folder(tmp_path, "train", lambda k: ["bus", "car", "train"][k % 3])
    assert classes_of(open_data(f"folder:{tmp_path}", "train", VIEW)) == ("bus", "car", "train")


def test_all_parts_of_a_folder_number_the_classes_alike(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", "train")
    write_folder(tmp_path / "test", "test")
    for file in (tmp_path / "test" / NAMES[0]).iterdir():
        file.unlink()
    (tmp_path / "test" / NAMES[0]).rmdir()
    source = f"folder:{tmp_path}"
    with pytest.raises(ValueError, match="test has no example of the class class 0; add examples"):
        open_data(source, "test", VIEW)
    data = open_data(source, "test", VIEW, skip_broken=True)
    assert sorted(set(everything(data)[1].tolist())) == list(range(1, K))
    assert notes_of(data) == (f"{tmp_path}/test has no example of the class class 0",)
    write_folder(tmp_path / "test", "test", lambda k: f"other {k % 2}")
    with pytest.raises(ValueError, match="classes other 0, other 1, which .*train has not"):
        open_data(source, "test", VIEW)


def test_a_folder_is_read_as_torchvision_does(tmp_path: Path) -> None:
    write_folder(tmp_path, "train")
    for name in ("b/2.png", "b.png", "a/1.JPG", "ü ä/1.jpeg", "notes.txt"):
        (tmp_path / NAMES[3] / name).parent.mkdir(exist_ok=True)
        (tmp_path / NAMES[3] / name).write_bytes(png(IMAGES[0]))
    theirs = ImageFolder(str(tmp_path))
    ours: Any = open_data(f"folder:{tmp_path}", "train", VIEW)
    assert list(ours.paths) == [path for path, _ in theirs.samples]
    assert ours.y.tolist() == theirs.targets


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write_folder(tmp_path / "d", "train")
    before: Any = open_data(f"folder:{tmp_path}/d", "train", VIEW)
    (tmp_path / "d" / NAMES[0] / "all").symlink_to(tmp_path / "d")  # with images of other classes
    (tmp_path / "d" / NAMES[1] / "itself").symlink_to(".")
    data: Any = open_data(f"folder:{tmp_path}/d", "train", VIEW)
    assert data.paths == before.paths
    write_folder(tmp_path / "more", "test")
    (tmp_path / "d" / NAMES[2] / "more").symlink_to(tmp_path / "more" / NAMES[2])
    (tmp_path / "more" / NAMES[2] / "back").symlink_to(tmp_path / "d" / NAMES[2])
    data = open_data(f"folder:{tmp_path}/d", "train", VIEW)
    assert len(data) == len(before) + 2
    assert len(pictures(tmp_path / "d" / NAMES[2], VIEW)) == 3 + 2


def test_what_tools_leave_beside_images_is_no_image(tmp_path: Path) -> None:
    write_folder(tmp_path, "train")
    before: Any = open_data(f"folder:{tmp_path}", "train", VIEW)
    (tmp_path / NAMES[0] / "._000.png").write_bytes(b"of a Mac")
    (tmp_path / NAMES[0] / ".ipynb_checkpoints").mkdir()
    (tmp_path / NAMES[0] / ".ipynb_checkpoints/000-checkpoint.png").write_bytes(png(IMAGES[0]))
    (tmp_path / NAMES[0] / "folder.png").mkdir()
    data: Any = open_data(f"folder:{tmp_path}", "train", VIEW)
    assert data.paths == before.paths
    assert len(pictures(tmp_path, VIEW)) == len(data)


def test_what_is_no_folder_of_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder none"):
        open_data("folder:none", "train")
    with pytest.raises(ValueError, match="has no folders of classes; put"):
        open_data(f"folder:{tmp_path}", "train")
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="holds no images; give some"):
        open_data(f"folder:{tmp_path}", "train")
    write_folder(tmp_path, "train")
    with pytest.raises(ValueError, match="no example of the class cat; add"):
        open_data(f"folder:{tmp_path}", "train")


# Sets that are downloaded


def test_a_damaged_download_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    MAKERS["cifar10"](tmp_path, monkeypatch)
    archive = tmp_path / "downloaded" / CIFAR10.filename
    archive.write_bytes(archive.read_bytes()[:-1])  # so it is downloaded again, from nowhere
    message = r"cifar10 is neither complete in .*downloaded nor could it .* \(.*none.*\); put its"
    with pytest.raises(ValueError, match=message):
        open_data("cifar10", "train")


def test_imagenet_without_its_archives_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder none; give imagenet:"):
        open_data("imagenet:none", "train")
    with pytest.raises(ValueError, match="is not complete .*not present.*; put the archives"):
        open_data(f"imagenet:{tmp_path}", "train")


# The hub


def hub(root: Path, columns: dict[str, Any], features: dict[str, Any]) -> str:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    data.save_to_disk(root / "hub")
    return f"hf:{root}/hub"


def test_columns_of_the_hub_are_found_by_their_type(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    image = {"bytes": stream(IMAGES[:1])["jpeg"].tobytes(), "path": None}
    coarse, fine = datasets.ClassLabel(names=["x"]), datasets.ClassLabel(names=["a", "b"])
    columns = {"coarse": [0, 0], "x": [image] * 2, "label": [1, 0], "note": ["", ""]}
    features = {"coarse": coarse, "x": datasets.Image(), "label": fine}
    data = open_data(
        hub(tmp_path, columns, {**features, "note": datasets.Value("string")}), "train", VIEW
    )
    assert classes_of(data) == ("a", "b")
    assert everything(data)[1].tolist() == [1, 0]
    assert notes_of(data) == ("labels are the column label, not coarse",)


def test_a_set_of_the_hub_without_images_or_labels_is_told(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    text = hub(tmp_path / "a", {"text": ["a"]}, {"text": datasets.Value("string")})
    with pytest.raises(ValueError, match=r"has no column of images; it has text \(Value\)"):
        open_data(text, "train")
    image = {"bytes": stream(IMAGES[:1])["jpeg"].tobytes(), "path": None}
    bare = hub(tmp_path / "b", {"x": [image]}, {"x": datasets.Image()})
    with pytest.raises(ValueError, match="has no labels; give data that has"):
        open_data(bare, "train")
    with pytest.raises(ValueError, match=r"can't be opened \(.*; give the name of a set"):
        open_data(f"hf:{tmp_path}/none@plain", "train")
    some = {"x": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    partly = hub(tmp_path / "c", {"x": [image] * 3, "label": [0, None, 1]}, some)
    with pytest.raises(ValueError, match="A label of hf:.* is -1; labels are numbers from 0"):
        open_data(partly, "train")
    assert len(open_ood(partly, Images(torch.zeros(1, 3, 32, 32).byte(), None))[0]) == 3  # type: ignore[arg-type]


# JPEGs in an npz file


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([0, 5, 3])},
        {"offsets": np.array([0, 10**9])},
        {"offsets": np.array([0.0, 1.0])},
        {"offsets": np.array([[0, 1]])},
        {"jpeg": np.zeros(9, np.float32)},
    ],
)
def test_offsets_must_divide_the_stream(tmp_path: Path, change: dict[str, Any]) -> None:
    np.savez(tmp_path / "d.npz", **{**stream(IMAGES[:2]), "y": [0, 1], **change})
    with pytest.raises(ValueError, match="offsets of .* do not divide its jpeg; image i"):
        open_data(f"npz:{tmp_path}/d.npz", "train")


# Real data


def test_real_jpegs_are_read() -> None:
    source = f"npz:{shared('data/imagenet_val1k_224_jpeg.npz')}"
    view = View((224, 224), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), crop=0.875)
    data: Any = open_data(source, "train", view)
    assert len(data) == 1000
    x, _ = data[7]
    assert (x.shape, bool(x.abs().max() <= 1)) == ((3, 224, 224), True)
    assert sorted(int(label) for label in data.y) == list(range(1000))
    rest, held = held_out_split(data, 0.1)
    assert (len(rest), len(held)) == (900, 100)


def test_real_textures_are_brought_to_the_size_of_others() -> None:
    source = f"npz:{shared('data/textures_224_jpeg.npz')}"
    like = Images(torch.from_numpy(X["test"]), torch.from_numpy(Y["test"]), VIEW)
    data: Any
    data, note = open_ood(source, like)
    assert note == "brought to 32 x 32, in proportion"
    assert data[5][0].shape == (3, 32, 32)
    assert type(data[5][0]) is Tensor
