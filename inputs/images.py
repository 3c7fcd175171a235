"""Image data sets as uint8 tensors: CIFAR-10 and -100, SVHN, Tiny ImageNet, and procedural line drawings ("shapes").

    data = load_images("cifar10", "data")        # downloads 170 MB once; an unpacked copy in data/ is used as it is
    data = load_images("svhn", "data")           # two .mat files, 246 MB; needs scipy
    data = load_images("tiny-imagenet", "data")  # a zip file of 248 MB; the first load needs Pillow
    data = load_images("shapes")                 # no files and no network: drawn in about a second
    few = balanced_subset(data.train_labels, 1000)

A loader takes (data_dir, download) and returns an ImageData. To add a data set, write a loader and give it an entry in
DATASETS. Two errors say in one sentence what to do, and scripts show them as they are: ValueError for bad arguments and
damaged files, FileNotFoundError for files that cannot be found.
"""

import os
import pickle
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from inputs.download import find, kept, obtain
from inputs.image_data import ImageData
from inputs.other_images import (
    SVHN_MD5,
    TINY_DECODED,
    TINY_FOLDER,
    load_svhn,
    load_tiny_imagenet,
)
from inputs.shapes import load_shapes

# ---- any data set


def load_images(name: str, data_dir: str | Path = "data", download: bool = True) -> ImageData:
    """Load a data set of DATASETS; what is not in `data_dir` is downloaded there if `download`.

    Raises ValueError for an unknown name or damaged files, FileNotFoundError if the files cannot be had.
    """
    return find(DATASETS, name, "data set")(data_dir, download)


def is_available(name: str, data_dir: str | Path = "data") -> bool:
    """Whether `name` can be loaded from `data_dir` without the network. Only looks for the files' names.

    Raises ValueError for an unknown name.
    """
    find(DATASETS, name, "data set")
    if name == "svhn":
        return all((Path(data_dir) / file).is_file() for file in SVHN_MD5)
    if name == "tiny-imagenet":
        return any((Path(data_dir) / file).exists() for file in (TINY_DECODED, TINY_FOLDER, f"{TINY_FOLDER}.zip"))
    if name not in ARCHIVES:
        return True
    source, folder = ARCHIVES[name], Path(data_dir) / ARCHIVES[name].folder
    if folder.exists():
        return not missing_files(source, folder)
    return (Path(data_dir) / source.archive).is_file()


def balanced_subset(labels: torch.Tensor, limit: int, seed: int = 0) -> torch.Tensor:
    """Choose `limit` of the examples at random, the same number from each class, give or take one.

    labels (N,) int64 -> indices (limit,) int64. A class with too few examples gives all it has. With the same
    seed, a smaller subset is the beginning of a larger one. Raises ValueError if `limit` is not in 1..N.
    """
    if not 1 <= limit <= len(labels):
        raise ValueError(f"a subset (--limit, --holdout) can have 1 to {len(labels)} images here, not {limit}")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    grouped = order[torch.argsort(labels[order], stable=True)]  # class by class, shuffled within each
    counts = torch.bincount(labels)
    turn = torch.empty_like(order)  # how many of its class come before an image
    turn[grouped] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[grouped]]
    # One of each class, then another of each, and so on; within a turn the classes come in random order.
    return order[torch.argsort(turn[order], stable=True)][:limit]


# ---- CIFAR


class CifarArchive(NamedTuple):
    """Where an official archive is, and what lies in it under which key."""

    url: str
    md5: str
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    meta_file: str
    labels_key: str
    classes_key: str
    num_classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def archive(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train_files, self.test_file, self.meta_file)


ARCHIVES = {
    "cifar10": CifarArchive(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        train_files=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test_file="test_batch",
        meta_file="batches.meta",
        labels_key="labels",
        classes_key="label_names",
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": CifarArchive(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        train_files=("train",),
        test_file="test",
        meta_file="meta",
        labels_key="fine_labels",
        classes_key="fine_label_names",
        num_classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def load_cifar10(data_dir: str | Path = "data", download: bool = True) -> ImageData:
    """CIFAR-10: 50 000 and 10 000 images of 32x32, ten classes. Files and errors as in load_images."""
    return load_cifar("cifar10", Path(data_dir), download)


def load_cifar100(data_dir: str | Path = "data", download: bool = True) -> ImageData:
    """CIFAR-100 with its hundred fine labels, else as CIFAR-10."""
    return load_cifar("cifar100", Path(data_dir), download)


def load_cifar(name: str, data_dir: Path, download: bool) -> ImageData:
    source = ARCHIVES[name]
    folder = find_folder(source, data_dir, download)
    meta = folder / source.meta_file
    classes = read_pickle(meta).get(source.classes_key)
    if not isinstance(classes, list) or len(classes) != source.num_classes:
        raise ValueError(f"{meta} does not list {source.num_classes} {source.classes_key}")
    train = read_batches([folder / file for file in source.train_files], source)
    test = read_batches([folder / source.test_file], source)
    return ImageData(name, *train, *test, tuple(map(text, classes)), source.mean, source.std)


def find_folder(source: CifarArchive, data_dir: Path, download: bool) -> Path:
    """The unpacked folder; made from the archive if need be, the archive from its address if need be."""
    folder, archive = kept(data_dir, source.folder), data_dir / source.archive
    if folder.exists():
        if missing := missing_files(source, folder):
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: delete it and try again")
        return folder
    obtain(source.url, archive, source.md5, what_to_do(source, data_dir), download)
    unpack(source, archive, folder)
    return folder


def missing_files(source: CifarArchive, folder: Path) -> list[str]:
    return [file for file in source.files if not (folder / file).is_file()]


def what_to_do(source: CifarArchive, data_dir: Path) -> str:
    return (
        f"put {source.archive}, or the unpacked folder {source.folder}, into {data_dir} "
        f"(the archive is at {source.url}); `--demo` needs no download"
    )


def unpack(source: CifarArchive, archive: Path, folder: Path) -> None:
    """Write the regular files we expect, and no others, to `folder`, which appears all at once."""
    wanted = {f"{source.folder}/{file}": file for file in source.files}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as temporary:
        fresh = Path(temporary) / folder.name
        fresh.mkdir()
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.isfile() and member.name in wanted:
                    with (fresh / wanted[member.name]).open("wb") as file:
                        shutil.copyfileobj(tar.extractfile(member), file)
        if missing := missing_files(source, fresh):
            raise ValueError(f"{archive} lacks {', '.join(missing)}: delete it and try again")
        try:
            os.replace(fresh, folder)
        except OSError:  # another process may have been faster, which is as good
            if not folder.exists() or missing_files(source, folder):
                raise


def read_batches(paths: list[Path], source: CifarArchive) -> tuple[torch.Tensor, torch.Tensor]:
    """-> images (N, 3, 32, 32) uint8, labels (N,) int64, of all files together."""
    pixels, labels = [], []
    for path in paths:
        batch = read_pickle(path)
        data, targets = batch.get("data"), batch.get(source.labels_key)
        if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (3072,)):
            raise ValueError(f"{path} does not hold its images as a uint8 array of 3072 columns")
        targets = np.asarray(targets)
        if targets.shape != (len(data),) or len(data) == 0:
            raise ValueError(f"{path} does not hold as many {source.labels_key} as images, {len(data)}")
        if targets.dtype.kind not in "iu" or not 0 <= targets.min() <= targets.max() < source.num_classes:
            raise ValueError(f"{path} has {source.labels_key} outside 0..{source.num_classes - 1}")
        pixels.append(data)
        labels.extend(targets.tolist())
    images = np.concatenate(pixels).reshape(-1, 3, 32, 32)  # a row holds a plane of red, of green, of blue
    return torch.from_numpy(images), torch.tensor(labels, dtype=torch.int64)


def array_dtype(name, *_):
    # The files say dtype("u1", 0, 1), and numpy 2.4.0 warns about a 0 that is no False.
    return np.dtype(name)


PICKLE_NAMES = {  # numpy's own functions, wherever this version keeps them: of arrays, also in protocol 5, and numbers
    "_reconstruct": np.empty(0).__reduce__()[0],
    "_frombuffer": np.empty(0).__reduce_ex__(5)[0],
    "scalar": np.int64(0).__reduce__()[0],
    "ndarray": np.ndarray,
    "dtype": array_dtype,
    "encode": lambda text, encoding: text.encode("latin1"),  # bytes, as protocol 2 of Python 3 has them
}
PICKLE_MODULES = "numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"


class ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and arrays. Anything else could run code on loading, and is refused."""

    def find_class(self, module, name):
        if name not in PICKLE_NAMES or module not in (*PICKLE_MODULES, "_codecs"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return PICKLE_NAMES[name]


def read_pickle(path: Path) -> dict:
    """The dictionary in an official file, which Python 2 pickled (or a newer one anew), with its keys as str."""
    try:
        with path.open("rb") as file:
            value = ArrayUnpickler(file, encoding="latin1").load()
        return {text(key): item for key, item in value.items()}
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(
            f"{path} is damaged or no official file ({error}): delete {path.parent} and try again"
        ) from error


def text(value) -> str:
    # Keys and names are str in the official files read as latin1, and bytes where Python 3 pickled them anew.
    return value.decode() if isinstance(value, bytes) else str(value)


DATASETS = {
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "svhn": load_svhn,
    "tiny-imagenet": load_tiny_imagenet,
    "shapes": load_shapes,
}
