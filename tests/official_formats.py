"""Small data sets in the official formats: CIFAR byte for byte as Python 2 pickled it, SVHN, Penn Treebank and more."""

import hashlib
import io
import struct
import zipfile
from pathlib import Path

import numpy as np

from inputs import text

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_cifar10(data_dir: Path, per_batch: int = 20, seed: int = 0) -> Path:
    """Write data_dir/cifar-10-batches-py: five training batches and a test batch of `per_batch` images each.

    Returns the folder. Classes differ in brightness, so that a model can learn them.
    """
    folder = Path(data_dir) / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data, labels = _images(per_batch, 10, rng)
        batch = {b"batch_label": b"a batch", b"labels": labels, b"data": data}
        (folder / name).write_bytes(python2_pickle({**batch, b"filenames": [b"a.png"] * per_batch}))
    names = [name.encode() for name in CIFAR10_CLASSES]
    meta = {b"num_cases_per_batch": per_batch, b"label_names": names, b"num_vis": 3072}
    (folder / "batches.meta").write_bytes(python2_pickle(meta))
    return folder


def write_cifar100(data_dir: Path, train_size: int = 200, test_size: int = 100, seed: int = 0) -> Path:
    """Write data_dir/cifar-100-python: train, test and meta. Returns the folder."""
    folder = Path(data_dir) / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name, size in (("train", train_size), ("test", test_size)):
        data, labels = _images(size, 100, rng)
        coarse = [label // 5 for label in labels]
        batch = {b"fine_labels": labels, b"coarse_labels": coarse, b"data": data}
        (folder / name).write_bytes(python2_pickle({**batch, b"filenames": [b"a.png"] * size}))
    fine, coarse = ([f"{kind}_{i}".encode() for i in range(n)] for kind, n in (("fine", 100), ("coarse", 20)))
    (folder / "meta").write_bytes(python2_pickle({b"fine_label_names": fine, b"coarse_label_names": coarse}))
    return folder


def write_svhn(data_dir: Path, train_size: int = 60, test_size: int = 30, seed: int = 0) -> dict[str, np.ndarray]:
    """Write train_32x32.mat and test_32x32.mat, compressed; returns their arrays X. Needs scipy."""
    from scipy.io import savemat

    rng, pixels = np.random.default_rng(seed), {}
    for name, size in (("train_32x32.mat", train_size), ("test_32x32.mat", test_size)):
        data, labels = _images(size, 10, rng)
        pixels[name] = data.reshape(size, 3, 32, 32).transpose(2, 3, 1, 0)  # (32, 32, 3, N)
        y = np.array([[label or 10] for label in labels], np.uint8)
        savemat(Path(data_dir) / name, {"X": pixels[name], "y": y}, do_compression=True)
    return pixels


WNIDS = ("n02124075", "n01443537", "n09256479")  # unsorted, as in the official file


def write_tiny_imagenet(data_dir: Path, per_class: int = 4, val: int = 6, unpacked: bool = False) -> Path:
    """Write tiny-imagenet-200.zip, or the folder, with three classes. Each class has one gray image. Needs Pillow.

    Image i of a class is nearly of one colour: 40 * class (in the order of WNIDS), 30 * i, 100.
    """
    root = "tiny-imagenet-200"
    files = {"wnids.txt": "\n".join(WNIDS) + "\n", "words.txt": ""}
    for wnid, words in zip(
        ("n00000001", *WNIDS), ("thing", "Egyptian cat", "goldfish, Carassius auratus", "coral reef")
    ):
        files["words.txt"] += f"{wnid}\t{words}\n"
    for c, wnid in enumerate(WNIDS):
        names = [f"{wnid}_{i}.JPEG" for i in range(per_class)]
        files[f"train/{wnid}/{wnid}_boxes.txt"] = "".join(f"{name}\t0\t0\t62\t62\n" for name in names)
        for i, name in enumerate(names):
            files[f"train/{wnid}/images/{name}"] = jpeg((40 * c, 30 * i, 100), 64, gray=i == per_class - 1)
    rows = [(f"val_{i}.JPEG", WNIDS[i % 3]) for i in range(val)]
    files["val/val_annotations.txt"] = "".join(f"{name}\t{wnid}\t0\t32\t44\t62\n" for name, wnid in rows)
    for i in range(val):
        files[f"val/images/val_{i}.JPEG"] = jpeg((200, 40 * i, 0), 64)
    files["test/images/test_0.JPEG"] = jpeg((0, 0, 0), 64)
    if unpacked:
        for name, content in files.items():
            path = Path(data_dir) / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return Path(data_dir) / root
    with zipfile.ZipFile(Path(data_dir) / f"{root}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{root}/{name}", content)
    return Path(data_dir) / f"{root}.zip"


def write_folders(data_dir: Path, per_class: int = 12, val: int = 4) -> None:
    """Write train/CLASS and val/CLASS with photographs of several sizes, each class of its own colour. Needs Pillow."""
    rng, colours = np.random.default_rng(0), dict(apple=(220, 60, 60), banana=(210, 200, 60), cherry=(120, 20, 160))
    for split, count in (("train", per_class), ("val", val)):
        for name, colour in colours.items():
            folder = Path(data_dir) / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                side = tuple(int(x) for x in rng.integers(24, 60, 2))
                (folder / f"{i:03}.jpg").write_bytes(jpeg(colour, side, gray=i == 1))


def jpeg(colour: tuple[int, int, int], side: int | tuple[int, int], gray: bool = False) -> bytes:
    """A photograph of one colour, of `side` pixels or (width, height). Needs Pillow."""
    from PIL import Image

    image = Image.new("RGB", (side, side) if isinstance(side, int) else side, colour)
    file = io.BytesIO()
    (image.convert("L") if gray else image).save(file, "JPEG", quality=95)
    return file.getvalue()


def write_ptb(data_dir: Path, monkeypatch, train: str, valid: str, test: str) -> None:
    """Write the three files to data_dir/ptb; for as long as the test runs, theirs are the official MD5s."""
    (Path(data_dir) / "ptb").mkdir()
    for file, content in zip(text.PTB_FILES, (train, valid, test), strict=True):
        (Path(data_dir) / "ptb" / file).write_text(content)
        monkeypatch.setitem(text.PTB_FILES, file, hashlib.md5(content.encode()).hexdigest())


def _images(count: int, num_classes: int, rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    labels = rng.permutation(np.arange(count) % num_classes)
    brightness = 255 * (labels[:, None] + 0.5) / num_classes
    data = brightness + rng.normal(0, 20, (count, 3072))
    return np.clip(data, 0, 255).astype(np.uint8), labels.tolist()


def python2_pickle(value) -> bytes:
    """Protocol 2 with byte strings as BINSTRING, which Python 3 cannot write but the official files hold."""
    return b"\x80\x02" + _emit(value) + b"."


def _emit(value) -> bytes:
    if isinstance(value, bytes):
        length = len(value)
        return (b"U" + bytes([length]) if length < 256 else b"T" + struct.pack("<i", length)) + value
    if isinstance(value, int):
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(_emit, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_emit(key) + _emit(item) for key, item in value.items()) + b"u"
    kind = value.dtype.str[1:].encode()  # u1; other kinds are for tests of files that are wrong
    order = b"|" if value.dtype.itemsize == 1 else b"<"
    dtype = b"cnumpy\ndtype\n(U\x02" + kind + b"K\x00K\x01tR(K\x03U\x01" + order
    dtype += b"NNN" + _emit(-1) + _emit(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    shape = b"(" + b"".join(map(_emit, value.shape)) + b"t"
    return array + b"(K\x01" + shape + dtype + b"\x89" + _emit(value.tobytes()) + b"tb"
