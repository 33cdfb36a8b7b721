"""A small set of images, written as every source of `abnn.data` stores it."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

K, TRAIN, TEST = 10, 30, 20
RNG = np.random.default_rng(0)
# Smooth, as JPEGs of noise would be far from it.
_COARSE = RNG.integers(0, 256, (TRAIN + TEST, 4, 4, 3), dtype=np.uint8)
IMAGES = np.stack(
    [np.asarray(Image.fromarray(x).resize((32, 32), Image.Resampling.BICUBIC)) for x in _COARSE]
)
LABELS = np.arange(TRAIN + TEST) % K
NAMES = [f"class {k}" for k in range(K)]
X = {"train": IMAGES[:TRAIN], "test": IMAGES[TRAIN:]}
Y = {"train": LABELS[:TRAIN], "test": LABELS[TRAIN:]}


def png(image: Any) -> bytes:
    return _encoded(image, "png")


def jpeg(image: Any) -> bytes:
    return _encoded(image, "jpeg")


def _encoded(image: Any, kind: str) -> bytes:
    Image.fromarray(image).save(buffer := io.BytesIO(), kind)
    return buffer.getvalue()


def stream(images: Any) -> dict[str, Any]:
    """JPEGs one after the other, and where each begins."""
    parts = [jpeg(image) for image in images]
    offsets = np.cumsum([0, *map(len, parts)])
    return {"jpeg": np.frombuffer(b"".join(parts), np.uint8), "offsets": offsets}


def npz(root: Path, _: pytest.MonkeyPatch) -> str:
    arrays: dict[str, Any] = {"classes": NAMES}
    for part in X:
        arrays |= {f"x_{part}": X[part], f"y_{part}": Y[part]}
    np.savez(root / "d.npz", **arrays)
    return f"npz:{root}/d.npz"


def jpegs(root: Path, _: pytest.MonkeyPatch) -> str:
    arrays: dict[str, Any] = {"classes": np.array(NAMES)}
    for part in X:
        found = stream(X[part]) | {"y": Y[part]}
        arrays |= {f"{name}_{part}": array for name, array in found.items()}
    np.savez(root / "d.npz", **arrays)
    return f"npz:{root}/d.npz"


def write_folder(root: Path, part: str, name: Callable[[int], str] = NAMES.__getitem__) -> None:
    for i, (image, label) in enumerate(zip(X[part], Y[part], strict=True)):
        (root / name(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / name(label) / f"{i:03}.png")


def folder(root: Path, _: pytest.MonkeyPatch) -> str:
    for part in X:
        write_folder(root / "d" / part, part)
    return f"folder:{root}/d"


def imagenet(root: Path, _: pytest.MonkeyPatch) -> str:
    for part, name in (("train", "train"), ("test", "val")):
        write_folder(root / name, part, wordnet)
    write_meta(root, NAMES)
    return f"imagenet:{root}"


def wordnet(k: int) -> str:
    """What ImageNet calls the folder of a class."""
    return f"n{k:08}"


def write_meta(root: Path, names: list[str]) -> None:
    torch.save(({wordnet(k): (name,) for k, name in enumerate(names)}, []), root / "meta.bin")


def _archive(path: Path, files: dict[str, bytes]) -> str:
    """The checksum of an archive where its download would be; the rest is up to torchvision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return md5(path.read_bytes())


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def _cifar(
    root: Path, patch: pytest.MonkeyPatch, name: str, labels: str, names: str, classes: int
) -> str:
    from torchvision import datasets

    reader, files = getattr(datasets, name), {}
    for part, images in X.items():
        y = np.arange(max(len(images), classes)) % classes  # an example of every class
        x = np.resize(images, (len(y), 32, 32, 3)).transpose(0, 3, 1, 2).reshape(len(y), -1)
        files[part] = pickle.dumps({"data": x, labels: [*y]})
    files["meta"] = pickle.dumps({names: [f"class {k}" for k in range(classes)]})
    inside = {f"{reader.base_folder}/{key}": content for key, content in files.items()}
    patch.setattr(reader, "tgz_md5", _archive(root / "downloaded" / reader.filename, inside))
    patch.setattr(reader, "url", (root / "none").as_uri())
    patch.setattr(reader, "train_list", [["train", md5(files["train"])]])
    patch.setattr(reader, "test_list", [["test", md5(files["test"])]])
    patch.setattr(reader, "meta", {"filename": "meta", "key": names, "md5": md5(files["meta"])})
    patch.setenv("ABNN_DATA", str(root / "downloaded"))
    return name.lower()


def cifar10(root: Path, patch: pytest.MonkeyPatch) -> str:
    return _cifar(root, patch, "CIFAR10", "labels", "label_names", K)


def cifar100(root: Path, patch: pytest.MonkeyPatch, classes: int = K) -> str:
    return _cifar(root, patch, "CIFAR100", "fine_labels", "fine_label_names", classes)


def svhn(root: Path, patch: pytest.MonkeyPatch) -> str:
    from torchvision.datasets import SVHN

    scipy = pytest.importorskip("scipy.io")
    split = {}
    for part, x in X.items():
        path = root / "downloaded" / f"{part}.mat"
        path.parent.mkdir(exist_ok=True)
        scipy.savemat(
            path, {"X": x.transpose(1, 2, 3, 0), "y": np.where(Y[part], Y[part], 10)[:, None]}
        )
        split[part] = [(root / "none").as_uri(), path.name, md5(path.read_bytes())]
    patch.setattr(SVHN, "split_list", split)
    return f"svhn:{root}/downloaded"


def dtd(root: Path, patch: pytest.MonkeyPatch) -> str:
    from torchvision.datasets import DTD

    files, lists = {}, {"train": "", "val": "", "test": ""}
    for part in X:
        for i, (image, k) in enumerate(zip(X[part], Y[part], strict=True)):
            # Its own validation part: the last third of the training images.
            name = "val" if part == "train" and i >= 20 else part
            lists[name] += f"{NAMES[k]}/{part}{i}.png\n"
            files[f"dtd/images/{NAMES[k]}/{part}{i}.png"] = png(image)
    files |= {f"dtd/labels/{name}1.txt": text.encode() for name, text in lists.items()}
    patch.setattr(DTD, "_MD5", _archive(root / "downloaded/dtd/dtd-r1.0.1.tar.gz", files))
    return f"dtd:{root}/downloaded"


def saved_by_datasets(root: Path, _: pytest.MonkeyPatch) -> str:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"picture": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    parts = {
        part: datasets.Dataset.from_dict(
            {"picture": [{"bytes": png(image), "path": None} for image in x], "label": Y[part]},
            features=features,
        )
        for part, x in X.items()
    }
    datasets.DatasetDict(parts).save_to_disk(root / "saved")
    return f"hf:{root}/saved"


def read_by_datasets(root: Path, patch: pytest.MonkeyPatch) -> str:
    datasets = pytest.importorskip("datasets")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
    return folder(root, patch).replace("folder:", "hf:")


def module(root: Path, patch: pytest.MonkeyPatch) -> str:
    np.savez(root / "own.npz", x=X["train"], y=Y["train"])
    (root / "own_data.py").write_text(
        "from abnn.data import View, open_data\n"
        "def build():\n"
        "    view = View((32, 32), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))\n"
        "    return open_data('npz:own.npz', 'train', view)\n"
    )
    patch.chdir(root)
    return "module:own_data:build"


MAKERS = {
    maker.__name__: maker
    for maker in (
        npz, jpegs, folder, cifar10, cifar100, svhn, imagenet, dtd, saved_by_datasets,
        read_by_datasets, module,
    )
}  # fmt: skip
