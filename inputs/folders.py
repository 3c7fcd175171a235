"""Folders of photographs, one a class, as batches of uint8 crops: ImageNet-1k or one's own. Needs Pillow.

    folder = read_folder("data/imagenet/train")
    order = epoch_order(len(folder.labels), batch=1024, repeats=3, generator=generator)
    for images, labels in batches(folder, plan, random_crop, 224, workers=8):  # uint8 (B, 3, S, S), int64 (B,)

Pillow decodes, torch resizes (bytes, and faster than Pillow), augment.py augments. A crop is a function of the file and
one seed: neither workers nor processes change what a run sees. An image that cannot be decoded is left out; a file that
the system does not hand over (OSError), or too many damaged images, end the run.
"""

import contextlib
import io
import itertools
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from inputs.randaugment import OPS, apply_op, draw_operations

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the field's for ImageNet, which all published numbers use
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
COPIES = (".", "__MACOSX", "@eaDir")  # how what looks like images, but was put there by systems, begins
MOST_UNREADABLE = 0.2  # of train's images, or of val's


class ImageFolder(NamedTuple):
    root: Path
    files: list[str]  # below the root
    labels: list[int]
    classes: tuple[str, ...]
    sizes: list[int]  # in bytes, of at most 4096 of the files: with their names, enough to tell other images


def read_folder(root: str | Path, classes: tuple[str, ...] | None = None) -> ImageFolder:
    """The images below `root`, whose folders are the classes, in sorted order; or those of `classes`, in theirs.

    Looks at names, and a few sizes, alone. Raises FileNotFoundError where there is no folder, ValueError where it has
    fewer than two classes, a class without images, or one that `classes` lacks.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; --data-dir wants train/CLASS/*.jpg and val/CLASS/*.jpg.")
    found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(COPIES))
    if unknown := sorted(set(found) - set(classes or found)):
        raise ValueError(f"{root} has classes that train has not: {', '.join(unknown[:5])}; the folders must match.")
    if len(found) < 2:
        names = found[0] if found else "none"
        raise ValueError(f"{root} must hold one folder a class, of two classes or more; it holds {names}.")
    classes, files, labels = classes or tuple(found), [], []
    for name in found:
        inside = sorted(list_images(root / name, set()))
        if not inside:
            raise ValueError(f"{root / name} holds no images ({', '.join(sorted(ENDINGS))}); fill or remove it.")
        files += [str(file.relative_to(root)) for file in inside]
        labels += [classes.index(name)] * len(inside)
    sizes = [os.path.getsize(root / file) for file in files[:: -(-len(files) // 4096)]]
    return ImageFolder(root, files, labels, classes, sizes)


def list_images(folder: Path, seen: set[str]) -> list[Path]:
    """The image files at any depth below `folder`, behind links to folders too, but for folders that were `seen`."""
    if (real := os.path.realpath(folder)) in seen:
        return []
    seen.add(real)
    files = []
    for entry in os.scandir(folder):
        if entry.name.startswith(COPIES):
            continue
        if entry.is_dir():
            files += list_images(Path(entry), seen)
        elif os.path.splitext(entry.name)[1].lower() in ENDINGS and (entry.is_file() or not os.path.exists(entry)):
            files.append(Path(entry))  # no pipe, whose writer one would wait for
    return files


# ---- one image


def check_pillow() -> None:
    """Raises ValueError, with what to do, where Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ValueError("decoding photographs needs one package more: pip install pillow.") from error


class Damaged(ValueError):
    """An image that cannot be decoded."""


@contextlib.contextmanager
def decoding():
    """Within, whatever Pillow stumbles on in a damaged image is Damaged; memory that runs out is not."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # damaged images raise nearly anything
        raise Damaged(str(error).partition(" <")[0]) from error


def load_image(file: Path, crop, size: int) -> Tensor:
    """crop(image, size) of the Pillow image in a file, upright as its camera's note (EXIF) says.

    Raises Damaged, and OSError for a file that cannot be read at all.
    """
    from PIL import Image, ImageOps

    content = io.BytesIO(file.read_bytes())
    with decoding():
        image = Image.open(content)
        ImageOps.exif_transpose(image, in_place=True)
    return crop(image, size).contiguous()


def square(image, box: tuple[int, int, int, int], size: int) -> Tensor:
    """What lies in the box (top, left, height, width) of a Pillow image, resized to uint8 (3, size, size).

    Bicubic and antialiased. Gray and transparent images become RGB, of an animation the first one is taken. A JPEG file
    that has twice the pixels needed, or more, is decoded at a half, a quarter or an eighth of its size. Raises Damaged.
    """
    from PIL import Image

    full, (top, left, height, width) = image.width, box
    with decoding():
        if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):  # which old Pillows call 16 bits
            raise ValueError("32 bits a pixel have no agreed white: save it with 8 or 16")
        image.draft(None, (image.width * size // width, image.height * size // height))
        top, left, bottom, right = (round(x * image.width / full) for x in (top, left, top + height, left + width))
        image = image.crop((left, top, right, bottom))
        if image.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
            image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
        image = image if image.mode == "RGB" else image.convert("RGB")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return F.interpolate(pixels[None], (size, size), mode="bicubic", antialias=True)[0]


def centre_crop(image, size: int, share: float = 0.875) -> Tensor:
    """To evaluate: the square in the middle whose side is so much of the shorter one. (3, size, size)."""
    side = max(1, round(share * min(image.size)))
    return square(image, ((image.height - side) // 2, (image.width - side) // 2, side, side), size)


def random_crop(image, size: int, ra_ops=0, ra_magnitude=0.0, ra_deviation=0.0, erasing=0.0) -> Tensor:
    """To train: a box of 8 to 100 % of the area, mirrored or not; RandAugment; random erasing. (3, size, size).

    Draws from torch's global generator. As in timm, whose recipe DeiT's is, each of the `ra_ops` operations is done
    with probability one half; magnitudes are of 30.
    """
    H, W = image.height, image.width
    image = square(image, random_box(H, W, 0.08, 1.0, 3 / 4) or middle_box(H, W, 3 / 4), size)
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
    operations, strengths = draw_operations(1, ra_ops, ra_magnitude, ra_deviation)
    for done, op, strength in zip(torch.rand(ra_ops) < 0.5, operations[:, 0].tolist(), strengths):
        if done:
            image = apply_op(image[None], list(OPS)[op], strength)[0]
    return erased(image) if torch.rand(()) < erasing else image


def erased(image: Tensor) -> Tensor:
    """Random erasing (Zhong et al., 2020): noise in a box of 2 to 33 % of the area, aspect 0.3 to 3.3. uint8 (3, H, W).

    The noise has mean 0 and deviation 1 once the image is normalized, but for values that are no pixels.
    """
    if box := random_box(*image.shape[1:], 0.02, 1 / 3, 0.3):
        top, left, height, width = box
        noise = torch.randn(3, height, width) * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
        image = image.clone()
        image[:, top : top + height, left : left + width] = (255 * noise).round_().clamp_(0, 255).byte()
    return image


def random_box(H: int, W: int, smallest: float, largest: float, aspect: float) -> tuple[int, int, int, int] | None:
    """top, left, height, width of a box in H x W: its share of the area uniform, its aspect log-uniform from `aspect`
    to 1 / aspect, its place uniform. None where ten such boxes would not fit.
    """
    for _ in range(10):
        area = H * W * float(torch.empty(()).uniform_(smallest, largest))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(aspect), -math.log(aspect))))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= H and 0 < width <= W:
            return int(torch.randint(H - height + 1, ())), int(torch.randint(W - width + 1, ())), height, width
    return None


def middle_box(H: int, W: int, aspect: float) -> tuple[int, int, int, int]:
    """The largest box in the middle whose aspect is not beyond `aspect` or 1 / aspect."""
    height, width = min(H, round(W / aspect)), min(W, round(H / aspect))
    return (H - height) // 2, (W - width) // 2, height, width


# ---- batches


def epoch_order(n: int, batch: int, repeats: int, generator: torch.Generator) -> Tensor:
    """Which image each of an epoch's n places shows, (n,): a permutation, or with repeated augmentation less than that.

    Repeated augmentation (Hoffer et al., 2020; DeiT: 3): a batch shows each of its images so many times, each time
    another crop, and an epoch of n places sees n / repeats images. Copies are never neighbours, whom `mix` mixes.
    """
    groups = torch.randperm(n, generator=generator).split(-(-batch // repeats))
    return torch.cat([group.repeat(repeats)[:batch] for group in groups])[:n]


class Crops:
    """(index, seed) -> the crop of that image, and its label; of a damaged image, -1 - index."""

    def __init__(self, folder: ImageFolder, crop, size: int):
        self.folder, self.crop, self.size = folder, crop, size

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        index, seed = item
        torch.manual_seed(seed)
        try:
            image = load_image(self.folder.root / self.folder.files[index], self.crop, self.size)
            return image, self.folder.labels[index]
        except Damaged:
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), -1 - index


def ignore_signals(worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the main process's to handle
        signal.signal(number, signal.SIG_IGN)


def collated(items: list, size: int) -> list[Tensor]:
    """Images (B, 3, S, S) and labels (B,); a rank may have none of a last small batch."""
    if not items:
        return [torch.zeros(0, 3, size, size, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)]
    return default_collate(items)


def batches(folder: ImageFolder, plan, crop, size: int, workers: int, pin: bool = False):
    """Batches of (images, labels) for each list of (index, seed) in `plan`. Labels below 0: see Crops.

    workers: processes that read, 0 for this one. Each has at most two batches under way.
    """
    many = dict(prefetch_factor=2, worker_init_fn=ignore_signals) if workers else {}
    collate = partial(collated, size=size)
    return DataLoader(
        Crops(folder, crop, size), batch_sampler=plan, collate_fn=collate, num_workers=workers, pin_memory=pin, **many
    )


def readable(images: Tensor, labels: Tensor, folder: ImageFolder, unreadable: set[str]) -> tuple[Tensor, Tensor]:
    """The batch without the images that could not be read, whose names (train/CLASS/...) join `unreadable`.

    Raises OSError once those are too many of the folder's.
    """
    good = labels >= 0
    if good.all():
        return images, labels
    unreadable.update(f"{folder.root.name}/{folder.files[-1 - label]}" for label in labels[~good].tolist())
    check_share(folder, unreadable)
    return images[good], labels[good]


def check_share(folder: ImageFolder, unreadable) -> None:
    """Raises OSError if more than MOST_UNREADABLE of the folder's images are `unreadable`."""
    found = [name for name in unreadable if name.startswith(folder.root.name + "/")]
    if len(found) > MOST_UNREADABLE * len(folder.files):
        raise OSError(
            f"{len(found)} of the {len(folder.files)} images in {folder.root} cannot be read, {min(found)} for one: "
            f"repair or remove them, then --resume. Up to {MOST_UNREADABLE:.0%} are left out."
        )


def check_classes(folder: ImageFolder) -> None:
    """Raises OSError if a class has no image that can be decoded: it tries each class's until one can."""
    crops = Crops(folder, centre_crop, 32)
    for label, indices in itertools.groupby(range(len(folder.files)), folder.labels.__getitem__):
        if all(crops[i, 0][1] < 0 for i in indices):
            name = folder.root / folder.classes[label]
            raise OSError(f"no image in {name} can be decoded: they are empty, no images, or of 32 bits a pixel.")
