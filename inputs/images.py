"""Image data sets as uint8 tensors: CIFAR-10 and -100, SVHN, Tiny ImageNet, and procedural line drawings ("shapes").

    data = load_images("cifar10", "data")        # downloads 170 MB once; an unpacked copy in data/ is used as it is
    data = load_images("svhn", "data")           # two .mat files, 246 MB; needs scipy
    data = load_images("tiny-imagenet", "data")  # a zip file of 248 MB; the first load needs Pillow
    data = load_images("shapes")                 # no files and no network: drawn in about a second
    few = balanced_subset(data.train_labels, 1000)

A loader takes (data_dir, download) and returns an ImageData. To add a data set, write a loader and give it
an entry in DATASETS. Scripts can show two errors to their users as they are, for they say in one sentence
what to do: ValueError for bad arguments and damaged files, FileNotFoundError for files that cannot be had.
"""

import io
import json
import os
import pickle
import shutil
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from inputs.download import check_md5, fetch, find, kept, progress


class ImageData(NamedTuple):
    name: str
    train_images: torch.Tensor  # (N, 3, H, W) uint8
    train_labels: torch.Tensor  # (N,) int64
    test_images: torch.Tensor  # (M, 3, H, W) uint8
    test_labels: torch.Tensor  # (M,) int64
    classes: tuple[str, ...]
    mean: tuple[float, float, float]  # of the training pixels, per channel, where 255 counts as 1
    std: tuple[float, float, float]  # over all pixels, not the mean of per-image deviations


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
        return not _missing_files(source, folder)
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
    return _load_cifar("cifar10", Path(data_dir), download)


def load_cifar100(data_dir: str | Path = "data", download: bool = True) -> ImageData:
    """CIFAR-100 with its hundred fine labels, else as CIFAR-10."""
    return _load_cifar("cifar100", Path(data_dir), download)


def _load_cifar(name: str, data_dir: Path, download: bool) -> ImageData:
    source = ARCHIVES[name]
    folder = _find_folder(source, data_dir, download)
    meta = folder / source.meta_file
    classes = _read_pickle(meta).get(source.classes_key)
    if not isinstance(classes, list) or len(classes) != source.num_classes:
        raise ValueError(f"{meta} does not list {source.num_classes} {source.classes_key}")
    train = _read_batches([folder / file for file in source.train_files], source)
    test = _read_batches([folder / source.test_file], source)
    return ImageData(name, *train, *test, tuple(map(_text, classes)), source.mean, source.std)


def _find_folder(source: CifarArchive, data_dir: Path, download: bool) -> Path:
    """The unpacked folder; made from the archive if need be, the archive from its address if need be."""
    folder, archive = kept(data_dir, source.folder), data_dir / source.archive
    if folder.exists():
        if missing := _missing_files(source, folder):
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: delete it and try again")
        return folder
    if archive.is_file():
        check_md5(archive, source.md5, f"delete {archive} and try again")
    elif download:
        fetch(source.url, archive, source.md5, _what_to_do(source, data_dir))
    else:
        raise FileNotFoundError(f"there is no {source.folder} in {data_dir}: {_what_to_do(source, data_dir)}")
    _unpack(source, archive, folder)
    return folder


def _missing_files(source: CifarArchive, folder: Path) -> list[str]:
    return [file for file in source.files if not (folder / file).is_file()]


def _what_to_do(source: CifarArchive, data_dir: Path) -> str:
    return (
        f"put {source.archive}, or the unpacked folder {source.folder}, into {data_dir} "
        f"(the archive is at {source.url}); `--demo` needs no download"
    )


def _unpack(source: CifarArchive, archive: Path, folder: Path) -> None:
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
        if missing := _missing_files(source, fresh):
            raise ValueError(f"{archive} lacks {', '.join(missing)}: delete it and try again")
        try:
            os.replace(fresh, folder)
        except OSError:  # another process may have been faster, which is as good
            if not folder.exists() or _missing_files(source, folder):
                raise


def _read_batches(paths: list[Path], source: CifarArchive) -> tuple[torch.Tensor, torch.Tensor]:
    """-> images (N, 3, 32, 32) uint8, labels (N,) int64, of all files together."""
    pixels, labels = [], []
    for path in paths:
        batch = _read_pickle(path)
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


def _array_dtype(name, *_):
    # The files say dtype("u1", 0, 1), and numpy 2.4.0 warns about a 0 that is no False.
    return np.dtype(name)


PICKLE_NAMES = {  # numpy's own functions, wherever this version keeps them: of arrays, also in protocol 5, and numbers
    "_reconstruct": np.empty(0).__reduce__()[0],
    "_frombuffer": np.empty(0).__reduce_ex__(5)[0],
    "scalar": np.int64(0).__reduce__()[0],
    "ndarray": np.ndarray,
    "dtype": _array_dtype,
    "encode": lambda text, encoding: text.encode("latin1"),  # bytes, as protocol 2 of Python 3 has them
}
PICKLE_MODULES = "numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"


class _ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and arrays. Anything else could run code on loading, and is refused."""

    def find_class(self, module, name):
        if name not in PICKLE_NAMES or module not in (*PICKLE_MODULES, "_codecs"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return PICKLE_NAMES[name]


def _read_pickle(path: Path) -> dict:
    """The dictionary in an official file, which Python 2 pickled (or a newer one anew), with its keys as str."""
    try:
        with path.open("rb") as file:
            value = _ArrayUnpickler(file, encoding="latin1").load()
        return {_text(key): item for key, item in value.items()}
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(
            f"{path} is damaged or no official file ({error}): delete {path.parent} and try again"
        ) from error


def _text(value) -> str:
    # Keys and names are str in the official files read as latin1, and bytes where Python 3 pickled them anew.
    return value.decode() if isinstance(value, bytes) else str(value)


# ---- SVHN: Street View House Numbers, the cropped digits

SVHN_URL = "http://ufldl.stanford.edu/housenumbers/"
SVHN_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
SVHN_MEAN, SVHN_STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)


def load_svhn(data_dir: str | Path = "data", download: bool = True) -> ImageData:
    """SVHN: 73 257 and 26 032 images of 32x32, ten digits; not its easier "extra" images. Needs scipy.

    Files and errors as in load_images.
    """
    train, test = (_read_svhn(Path(data_dir) / file, download) for file in SVHN_MD5)
    return ImageData("svhn", *train, *test, tuple("0123456789"), SVHN_MEAN, SVHN_STD)


def _read_svhn(path: Path, download: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """-> images (N, 3, 32, 32) uint8, labels (N,) int64, of an official .mat file."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ValueError("reading SVHN's .mat files needs one package more: pip install scipy.") from error
    url = SVHN_URL + path.name
    if path.is_file():
        check_md5(path, SVHN_MD5[path.name], f"delete {path} and try again")
    elif download:
        fetch(url, path, SVHN_MD5[path.name], f"put {path.name} into {path.parent} (it is at {url})")
    else:
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}: put it there (it is at {url})")
    content = loadmat(path)
    images = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))  # (32, 32, 3, N) -> (N, 3, 32, 32)
    return torch.from_numpy(images), torch.from_numpy(content["y"].ravel().astype(np.int64) % 10)  # label 10 is digit 0


# ---- Tiny ImageNet

TINY_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
TINY_FOLDER = "tiny-imagenet-200"  # in the zip file, and that of an unpacked copy
TINY_DECODED = "tiny-imagenet-200-uint8"  # what the first load leaves behind
TINY_SIZE = 64


def load_tiny_imagenet(data_dir: str | Path = "data", download: bool = True) -> ImageData:
    """Tiny ImageNet: 100 000 and 10 000 images of 64x64, 200 classes. Files and errors as in load_images.

    The official test set has no labels: as is usual, its validation set stands for it. The first load decodes all
    images (which needs Pillow) into data_dir/tiny-imagenet-200-uint8, 1.35 GB; later ones map those files into memory.
    """
    folder = kept(Path(data_dir), TINY_DECODED)
    if not folder.exists():
        _decode_tiny(Path(data_dir), folder, download)
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        # Copy on write: pages are read when they are looked at, and the file never changes.
        files = [folder / f"{part}.npy" for part in ("train_images", "test_images")]
        parts = [torch.from_numpy(np.load(file, mmap_mode="c")) for file in files]
        (train, test), labels = parts, [torch.tensor(about[part]) for part in ("train_labels", "test_labels")]
        for images, numbers in zip((train, test), labels):
            if images.shape[1:] != (3, TINY_SIZE, TINY_SIZE) or images.dtype != torch.uint8:
                raise ValueError("its images are not of 3x64x64 bytes")
            if len(numbers) != len(images) or not 0 <= numbers.min() <= numbers.max() < len(about["classes"]):
                raise ValueError("there are not as many labels as images, or other ones than classes")
        statistics = tuple(map(float, about["mean"])), tuple(map(float, about["std"]))
        return ImageData("tiny-imagenet", train, labels[0], test, labels[1], tuple(about["classes"]), *statistics)
    except Exception as error:  # whatever it stumbles on in a damaged one
        raise ValueError(f"{folder} is damaged ({error}): delete it and try again") from error


def _decode_tiny(data_dir: Path, folder: Path, download: bool) -> None:
    """Write all images, labels and class names to `folder`, which appears all at once."""
    try:
        import PIL  # noqa: F401, asked for before anything is downloaded
    except ImportError as error:
        raise ValueError("decoding Tiny ImageNet needs one package more: pip install pillow.") from error
    unpacked, archive = data_dir / TINY_FOLDER, data_dir / f"{TINY_FOLDER}.zip"
    what_to_do = f"put {archive.name}, or the unpacked folder, into {data_dir} (the file is at {TINY_URL})"
    if unpacked.exists():
        return _decode_tiny_files(partial(_read_file, unpacked), folder, unpacked)
    if archive.is_file():
        check_md5(archive, TINY_MD5, f"delete {archive} and try again")
    elif download:
        fetch(TINY_URL, archive, TINY_MD5, what_to_do)
    else:
        raise FileNotFoundError(f"there is no {archive.name} in {data_dir}: {what_to_do}")
    with zipfile.ZipFile(archive) as files:
        _decode_tiny_files(lambda name: files.read(f"{TINY_FOLDER}/{name}"), folder, archive)


def _read_file(folder: Path, name: str) -> bytes:
    if not (folder / name).is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"there is no file {name}")
    return (folder / name).read_bytes()


def _decode_tiny_files(read, folder: Path, source: Path) -> None:
    """read: from a file's name in the official folder to its bytes."""
    try:
        ids = sorted(read("wnids.txt").decode().split())
        words = dict(line.split("\t", 1) for line in read("words.txt").decode().splitlines())
        train = []
        for wnid in ids:  # a line of boxes: name, x, y, x, y
            boxes = read(f"train/{wnid}/{wnid}_boxes.txt").decode().splitlines()
            train += [(f"train/{wnid}/images/{line.split()[0]}", ids.index(wnid)) for line in boxes]
        rows = [line.split() for line in read("val/val_annotations.txt").decode().splitlines()]
        test = [(f"val/images/{row[0]}", ids.index(row[1])) for row in rows]
    except (KeyError, FileNotFoundError, ValueError, IndexError) as error:
        raise ValueError(f"{source} is not as the official one ({error}): delete it and try again") from error
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".decode-") as temporary:
        fresh = Path(temporary) / folder.name
        fresh.mkdir()
        mean, std = _write_images(read, [name for name, _ in train], fresh / "train_images.npy")
        _write_images(read, [name for name, _ in test], fresh / "test_images.npy")
        classes = [words[wnid].split(",")[0] for wnid in ids]
        labels = {"train_labels": [label for _, label in train], "test_labels": [label for _, label in test]}
        about = dict(mean=mean, std=std, classes=classes, **labels)
        (fresh / "about.json").write_text(json.dumps(about), encoding="utf-8")
        os.replace(fresh, folder)


def _write_images(read, names: list[str], path: Path) -> tuple[list[float], list[float]]:
    """Decode into one file (N, 3, 64, 64) of uint8; returns mean and deviation of its pixels, per channel."""
    file = np.lib.format.open_memmap(path, "w+", np.uint8, (len(names), 3, TINY_SIZE, TINY_SIZE))
    levels = np.zeros((3, 256), np.int64)  # how many pixels of each value
    told = progress if len(names) > 1000 else lambda *_: None
    told(f"decoding {path.stem}", 0, len(names), "images")
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # Pillow decodes without Python's lock
        for start in range(0, len(names), 1000):
            chunk = np.stack([*pool.map(partial(_decode, read), names[start : start + 1000])])
            file[start : start + len(chunk)] = chunk
            levels += [np.bincount(chunk[:, c].ravel(), minlength=256) for c in range(3)]
            told(f"decoding {path.stem}", start + len(chunk), len(names), "images")
    file.flush()
    share, value = levels / levels.sum(1, keepdims=True), np.arange(256) / 255
    mean = share @ value
    return mean.tolist(), np.sqrt(share @ value**2 - mean**2).tolist()


def _decode(read, name: str) -> np.ndarray:
    """-> (3, 64, 64) uint8; gray images become three equal planes."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(read(name))) as image:
            pixels = np.asarray(image.convert("RGB"))
    except Exception as error:  # damaged images raise nearly anything
        raise ValueError(f"{name} of Tiny ImageNet cannot be read ({error}): delete the file or folder") from error
    if pixels.shape != (TINY_SIZE, TINY_SIZE, 3):
        raise ValueError(f"{name} is not of {TINY_SIZE}x{TINY_SIZE} pixels, as Tiny ImageNet's images are")
    return pixels.transpose(2, 0, 1)


# ---- shapes


def _arc(start: float, stop: float, steps: int, radius_start: float = 1.0, radius_stop: float = 1.0) -> list:
    """Points on an arc or a spiral; start and stop in turns."""
    turns, radii = np.linspace(start, stop, steps + 1), np.linspace(radius_start, radius_stop, steps + 1)
    return [(r * np.cos(2 * np.pi * t), r * np.sin(2 * np.pi * t)) for r, t in zip(radii, turns, strict=True)]


# A class is a set of pen strokes, each a list of points in a circle of radius 1.
SHAPES = {
    "circle": [_arc(0, 1, 12)],
    "triangle": [_arc(0, 1, 3)],
    "square": [_arc(0, 1, 4)],
    "hourglass": [[(-0.7, -0.7), (0.7, -0.7), (-0.7, 0.7), (0.7, 0.7), (-0.7, -0.7)]],
    "star": [_arc(0, 2, 5)],
    "cross": [[(-1, 0), (1, 0)], [(0, -1), (0, 1)]],
    "arrow": [[(0, -1), (0, 1)], [(-0.7, 0.2), (0, 1), (0.7, 0.2)]],
    "zigzag": [[(-1, -0.4), (-0.5, 0.4), (0, -0.4), (0.5, 0.4), (1, -0.4)]],
    "arc": [_arc(0, 0.5, 6)],
    "spiral": [_arc(0, 2, 16, 0.1, 1.0)],
}
SHAPES_SIZE = 32
SHAPES_MEAN, SHAPES_STD = (0.497, 0.497, 0.497), (0.189, 0.189, 0.189)  # measured with seed 0


def load_shapes(
    data_dir: str | Path | None = None,
    download: bool = True,
    train_size: int = 10_000,
    test_size: int = 2_000,
    seed: int = 0,
) -> ImageData:
    """Draw ten kinds of figures in thin strokes, 32x32 pixels; `data_dir` and `download` are not used.

    A class is which strokes meet where: a square and an hourglass are four lines each, joined differently.
    Place, size, rotation, stretch, wobble, pen width, colours and ground are random; ink is darker or lighter
    than the ground by chance in each channel; two stray strokes have the figure's ink. So mean colour tells
    nothing of the class and a single patch little: how neighbouring patches continue each other does. The
    same sizes and seed give the same images. Raises ValueError for sizes below 1.
    """
    if min(train_size, test_size) < 1:
        raise ValueError(f"train_size {train_size} and test_size {test_size} must be at least 1")
    train = _draw_split(train_size, np.random.default_rng([seed, 0]))
    test = _draw_split(test_size, np.random.default_rng([seed, 1]))
    return ImageData("shapes", *train, *test, tuple(SHAPES), SHAPES_MEAN, SHAPES_STD)


def _draw_split(count: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """-> images (count, 3, 32, 32) uint8, labels (count,) int64: as many of each class, give or take one."""
    labels = np.sort(np.arange(count) % len(SHAPES))
    per_class = np.bincount(labels, minlength=len(SHAPES))
    images = [_draw(strokes, n, rng) for strokes, n in zip(SHAPES.values(), per_class, strict=True)]
    order = rng.permutation(count)
    return torch.from_numpy(np.concatenate(images)[order]), torch.from_numpy(labels[order])


def _draw(strokes: list, count: int, rng: np.random.Generator) -> np.ndarray:
    """-> (count, 3, 32, 32) uint8."""
    segments = np.concatenate([_place(strokes, count, rng), _stray_strokes(count, rng)], axis=1)
    half_width = rng.uniform(0.5, 1.0, (count, 1, 1)).astype(np.float32)  # in pixels
    ink = np.clip(half_width + 0.5 - _distance(segments), 0, 1)[:, None]  # (count, 1, 32, 32), antialiased
    ground = rng.uniform(0.25, 0.75, (count, 3, 1, 1)).astype(np.float32)
    contrast = rng.uniform(0.3, 0.6, (count, 3, 1, 1)) * rng.choice([-1, 1], (count, 3, 1, 1))
    image = rng.standard_normal((count, 3, SHAPES_SIZE, SHAPES_SIZE), dtype=np.float32)
    image *= 0.04  # grain; levels are in units of 0..1
    image += ground + _wave(count, rng)
    image += ink * contrast.astype(np.float32)
    image *= 255
    return np.clip(image, 0, 255, out=image).astype(np.uint8)


def _place(strokes: list, count: int, rng: np.random.Generator) -> np.ndarray:
    """The strokes' segments at random places, in pixels: (count, segments, 2 ends, x and y)."""
    pairs = [pair for stroke in strokes for pair in zip(stroke[:-1], stroke[1:], strict=True)]
    points = np.array(pairs).reshape(1, -1, 2)
    # Warp the plane, not single points, so that strokes which meet still do.
    wobble = 0.08 * np.sin(3 * points[..., ::-1] + rng.uniform(0, 2 * np.pi, (count, 1, 2)))
    points = (points + wobble) * rng.uniform(0.75, 1, (count, 1, 2))
    angle = rng.uniform(0, 2 * np.pi, count)
    rotation = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(-1, 2, 2)
    radius = rng.uniform(9, 13, (count, 1, 1))
    centre = SHAPES_SIZE / 2 + rng.uniform(-1, 1, (count, 1, 2)) * (SHAPES_SIZE / 2 - radius)
    return (points @ rotation * radius + centre).reshape(count, len(pairs), 2, 2)


def _stray_strokes(count: int, rng: np.random.Generator) -> np.ndarray:
    """Two short lines anywhere: (count, 2, 2 ends, x and y)."""
    start = rng.uniform(0, SHAPES_SIZE, (count, 2, 1, 2))
    return np.concatenate([start, start + rng.uniform(-8, 8, start.shape)], axis=2)


def _distance(segments: np.ndarray) -> np.ndarray:
    """From each pixel to the nearest of the image's segments, in pixels: (count, 32, 32) float32."""
    grid = np.arange(SHAPES_SIZE, dtype=np.float32) + 0.5
    nearest = np.full((len(segments), SHAPES_SIZE, SHAPES_SIZE), np.inf, np.float32)
    for start, end in segments.astype(np.float32).transpose(1, 2, 0, 3):  # each (count, x and y)
        along = end - start
        x, y = grid - start[:, :1], grid - start[:, 1:]  # (count, 32) each, of the columns and of the rows
        unit = along / np.maximum((along**2).sum(1, keepdims=True), 1e-6)
        t = (x * unit[:, :1])[:, None, :] + (y * unit[:, 1:])[:, :, None]  # 0 at the start, 1 at the end
        np.clip(t, 0, 1, out=t)
        dx = x[:, None, :] - t * along[:, :1, None]
        dy = y[:, :, None] - t * along[:, 1:, None]
        np.minimum(nearest, dx * dx + dy * dy, out=nearest)
    return np.sqrt(nearest)


def _wave(count: int, rng: np.random.Generator) -> np.ndarray:
    """Faint stripes for a ground: (count, 3, 32, 32) float32."""
    frequency = rng.uniform(-0.5, 0.5, (count, 2)).astype(np.float32)  # radians a pixel
    grid = np.arange(SHAPES_SIZE, dtype=np.float32)
    phase = (grid * frequency[:, :1])[:, None, :] + (grid * frequency[:, 1:])[:, :, None]
    amplitude = rng.uniform(-0.08, 0.08, (count, 3, 1, 1)).astype(np.float32)
    return amplitude * np.sin(phase)[:, None]


DATASETS = {
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "svhn": load_svhn,
    "tiny-imagenet": load_tiny_imagenet,
    "shapes": load_shapes,
}
