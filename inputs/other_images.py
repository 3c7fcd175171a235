"""SVHN, the cropped digits of house numbers, and Tiny ImageNet. Files and errors are as in `images.load_images`."""

import io
import json
import os
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from inputs.download import kept, obtain, progress
from inputs.image_data import ImageData

# ---- SVHN

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
    train, test = (read_svhn(Path(data_dir) / file, download) for file in SVHN_MD5)
    return ImageData("svhn", *train, *test, tuple("0123456789"), SVHN_MEAN, SVHN_STD)


def read_svhn(path: Path, download: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """-> images (N, 3, 32, 32) uint8, labels (N,) int64, of an official .mat file."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ValueError("reading SVHN's .mat files needs one package more: pip install scipy.") from error
    url = SVHN_URL + path.name
    obtain(url, path, SVHN_MD5[path.name], f"put {path.name} into {path.parent} (it is at {url})", download)
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
        decode_tiny(Path(data_dir), folder, download)
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        # Copy on write: pages are read when they are looked at, and the file never changes.
        parts = [np.load(folder / f"{part}.npy", mmap_mode="c") for part in ("train_images", "test_images")]
        (train, test), labels = parts, [torch.tensor(about[part]) for part in ("train_labels", "test_labels")]
        for images, numbers in zip((train, test), labels):
            if images.shape[1:] != (3, TINY_SIZE, TINY_SIZE) or images.dtype != np.uint8:
                raise ValueError("its images are not of 3x64x64 bytes")
            if len(numbers) != len(images) or not 0 <= numbers.min() <= numbers.max() < len(about["classes"]):
                raise ValueError("there are not as many labels as images, or other ones than classes")
        statistics = tuple(map(float, about["mean"])), tuple(map(float, about["std"]))
        train, test = torch.from_numpy(train), torch.from_numpy(test)
        return ImageData("tiny-imagenet", train, labels[0], test, labels[1], tuple(about["classes"]), *statistics)
    except Exception as error:  # a damaged one can cause nearly any error
        raise ValueError(f"{folder} is damaged ({error}): delete it and try again") from error


def decode_tiny(data_dir: Path, folder: Path, download: bool) -> None:
    """Write all images, labels and class names to `folder`, which appears all at once."""
    try:
        import PIL  # noqa: F401, checked before anything is downloaded
    except ImportError as error:
        raise ValueError("decoding Tiny ImageNet needs one package more: pip install pillow.") from error
    unpacked, archive = data_dir / TINY_FOLDER, data_dir / f"{TINY_FOLDER}.zip"
    what_to_do = f"put {archive.name}, or the unpacked folder, into {data_dir} (the file is at {TINY_URL})"
    if unpacked.exists():
        return decode_tiny_files(partial(read_file, unpacked), folder, unpacked)
    obtain(TINY_URL, archive, TINY_MD5, what_to_do, download)
    with zipfile.ZipFile(archive) as files:
        decode_tiny_files(lambda name: files.read(f"{TINY_FOLDER}/{name}"), folder, archive)


def read_file(folder: Path, name: str) -> bytes:
    if not (folder / name).is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"there is no file {name}")
    return (folder / name).read_bytes()


def decode_tiny_files(read, folder: Path, source: Path) -> None:
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
        mean, std = write_images(read, [name for name, _ in train], fresh / "train_images.npy")
        write_images(read, [name for name, _ in test], fresh / "test_images.npy")
        classes = [words[wnid].split(",")[0] for wnid in ids]
        labels = {"train_labels": [label for _, label in train], "test_labels": [label for _, label in test]}
        about = dict(mean=mean, std=std, classes=classes, **labels)
        (fresh / "about.json").write_text(json.dumps(about), encoding="utf-8")
        os.replace(fresh, folder)


def write_images(read, names: list[str], path: Path) -> tuple[list[float], list[float]]:
    """Decode into one file (N, 3, 64, 64) of uint8; returns mean and deviation of its pixels, per channel."""
    file = np.lib.format.open_memmap(path, "w+", np.uint8, (len(names), 3, TINY_SIZE, TINY_SIZE))
    levels = np.zeros((3, 256), np.int64)  # how many pixels of each value
    told = progress if len(names) > 1000 else lambda *_: None
    told(f"decoding {path.stem}", 0, len(names), "images")
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # Pillow decodes without Python's lock
        for start in range(0, len(names), 1000):
            chunk = np.stack([*pool.map(partial(decode, read), names[start : start + 1000])])
            file[start : start + len(chunk)] = chunk
            levels += [np.bincount(chunk[:, c].ravel(), minlength=256) for c in range(3)]
            told(f"decoding {path.stem}", start + len(chunk), len(names), "images")
    file.flush()
    share, value = levels / levels.sum(1, keepdims=True), np.arange(256) / 255
    mean = share @ value
    return mean.tolist(), np.sqrt(share @ value**2 - mean**2).tolist()


def decode(read, name: str) -> np.ndarray:
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
