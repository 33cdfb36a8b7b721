"""Images that can't be read: told by name, or left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from abnn.data import (
    BrokenImageError,
    View,
    notes_of,
    open_data,
    open_ood,
    pictures,
    train_and_validation,
)
from abnn.data.stored import Encoded
from data_sources import IMAGES, K, jpeg, png, stream

VIEW = View((32, 32), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
WHOLE = jpeg(IMAGES[0])
BROKEN = {
    "cut.jpg": WHOLE[: len(WHOLE) // 2],
    "cut.png": png(IMAGES[0])[:-300],
    "damaged.png": png(IMAGES[0])[:60] + bytes(40) + png(IMAGES[0])[100:],
    "empty.png": b"",
    "text.jpg": b"not found",
}


def folder(root: Path, broken: dict[str, bytes]) -> Path:
    """Four whole images of two classes, and the broken ones among the second."""
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for i in range(2):
            (root / name / f"{name}{i}.jpg").write_bytes(WHOLE)
    for name, content in broken.items():
        (root / "dog" / name).write_bytes(content)
    return root


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named(tmp_path: Path, name: str) -> None:
    data: Any = open_data(f"folder:{folder(tmp_path, {name: BROKEN[name]})}", "train", VIEW)
    with pytest.raises(BrokenImageError) as told:
        [data[i] for i in range(5)]
    message = str(told.value)
    assert message.startswith(f"{tmp_path}/dog/{name} can't be read as an image (")
    assert message.endswith(
        "put a whole one in its place, or leave broken ones out by skip_broken (--skip-broken)."
    )
    assert "\n" not in message


def test_a_worker_tells_it_in_the_same_sentence(tmp_path: Path) -> None:
    source = f"folder:{folder(tmp_path, {'cut.jpg': BROKEN['cut.jpg']})}"
    data: Any = open_data(source, "train", VIEW)
    with pytest.raises(BrokenImageError) as told:
        list(DataLoader(data, 8, num_workers=1))
    assert str(told.value).startswith(f"{tmp_path}/dog/cut.jpg can't be read as an image (")
    assert "\n" not in str(told.value)


def test_broken_images_are_left_out_and_counted_when_asked(tmp_path: Path) -> None:
    source = f"folder:{folder(tmp_path, BROKEN)}"
    data: Any = open_data(source, "train", VIEW, skip_broken=True)
    assert notes_of(data) == (
        f"5 of 9 images can't be read and are left out: {tmp_path}/dog/cut.jpg, "
        f"{tmp_path}/dog/cut.png, {tmp_path}/dog/damaged.png and 2 more",
    )
    assert data.y.tolist() == [0, 0, 1, 1]
    for _ in range(2):  # the same batches in every epoch
        assert [len(x) for x, _ in DataLoader(data, 3)] == [3, 1]
    rest, held, _ = train_and_validation(source, VIEW, size=1, skip_broken=True)
    assert (len(rest), len(held)) == (3, 1)  # type: ignore[arg-type]


def test_whole_images_are_all_kept(tmp_path: Path) -> None:
    for name, write in (("a", png), ("b", jpeg)):
        (tmp_path / name).mkdir()
        for i, image in enumerate(IMAGES[:20]):
            (tmp_path / name / f"{i}.png").write_bytes(write(image))
    data: Any = open_data(f"folder:{tmp_path}", "train", VIEW, skip_broken=True)
    assert (len(data), notes_of(data)) == (40, ())


def test_a_class_whose_images_are_all_broken_is_told(tmp_path: Path) -> None:
    root = folder(tmp_path, {})
    for file in (root / "cat").iterdir():
        file.write_bytes(b"")
    data = open_data(f"folder:{root}", "train", VIEW, skip_broken=True)
    assert notes_of(data)[1] == f"{root} has no example of the class cat"
    for file in (root / "dog").iterdir():
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"No image of .* can be read; .*cat0\.jpg is one"):
        open_data(f"folder:{root}", "train", VIEW, skip_broken=True)


def archive(root: Path) -> str:
    arrays = stream(IMAGES[:10])
    begin = int(arrays["offsets"][7])
    damaged = arrays["jpeg"].copy()
    damaged[begin : begin + 20] = 0
    np.savez(root / "d.npz", jpeg=damaged, offsets=arrays["offsets"], y=np.arange(10) % K)
    return f"npz:{root}/d.npz"


def test_a_broken_image_of_an_archive_is_named_by_its_place(tmp_path: Path) -> None:
    source = archive(tmp_path)
    data: Any = open_data(source, "train", VIEW)
    with pytest.raises(BrokenImageError, match=r"d\.npz, image 7 can't be read .*format is unkn"):
        data[7]
    less: Any = open_data(source, "train", VIEW, skip_broken=True)
    assert notes_of(less) == (
        f"1 of 10 images can't be read and are left out: {tmp_path}/d.npz, image 7",
    )
    assert less.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert torch.equal(less[7][0], data[8][0])
    assert less.paths[7] == f"{tmp_path}/d.npz, image 8"
    ood, note = open_ood(source, data, skip_broken=True)
    assert len(ood) == 9  # type: ignore[arg-type]
    assert note.startswith("1 of 10 images can't be read")


def test_a_row_of_the_hub_without_an_image_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": WHOLE, "path": None}, None], "label": [0, 1]}
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "hub")
    data: Any = open_data(f"hf:{tmp_path}/hub", "train", VIEW)
    with pytest.raises(BrokenImageError, match="hub, image 1 can't be read .*there is no image"):
        data[1]


def test_an_image_is_not_broken_because_there_is_no_memory() -> None:
    def read(row: int) -> bytes:
        raise MemoryError

    images = Encoded(range(2), read, str)
    for use in (lambda: images[0], images.broken):
        with pytest.raises(MemoryError):
            use()


# Images to predict


def test_images_to_predict_are_files_or_all_in_a_folder(tmp_path: Path) -> None:
    root = folder(tmp_path, {"notes.txt": b"no image", "last.JPG": WHOLE})
    data = pictures(root, VIEW)
    names = ["cat0.jpg", "cat1.jpg", "dog0.jpg", "dog1.jpg", "last.JPG"]
    assert [Path(path).name for path in data.paths] == names
    assert next(iter(DataLoader(data, 5))).shape == (5, 3, 32, 32)
    few = pictures([root / "dog" / "dog1.jpg", root / "cat"], VIEW)
    assert [Path(path).name for path in few.paths] == ["dog1.jpg", "cat0.jpg", "cat1.jpg"]


def test_broken_images_to_predict_are_left_out_of_the_names(tmp_path: Path) -> None:
    root = folder(tmp_path, BROKEN)
    with pytest.raises(BrokenImageError, match=r"cut\.jpg can't be read"):
        [pictures(root / "dog", VIEW)[i] for i in range(3)]
    data = pictures(root, VIEW, skip_broken=True)
    assert [Path(path).name for path in data.paths] == [
        "cat0.jpg", "cat1.jpg", "dog0.jpg", "dog1.jpg"
    ]  # fmt: skip
    assert notes_of(data)[0].startswith("5 of 9 images can't be read and are left out: ")


def test_nothing_to_predict_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no images; give a folder that does"):
        pictures(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file or folder none"):
        pictures("none")
    with pytest.raises(ValueError, match="no file to predict; give one"):
        pictures([])
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"No image of .* can be read; .*a\.png is one"):
        pictures(tmp_path, skip_broken=True)
