"""Folders of photographs, one a class, as batches of uint8 crops: ImageNet-1k or one's own. Needs torchvision.

    folder = read_folder("data/imagenet/train")
    order = epoch_order(len(folder.labels), batch=1024, repeats=3, generator=generator)
    for images, labels in batches(folder, plan, crop, workers=8):  # uint8 (B, 3, S, S), int64 (B,)

torchvision decodes, torch resizes (on uint8, twice as fast as Pillow), augment.py augments. A crop is a function of the
file and one seed: neither workers nor processes change what a run sees.
"""

import io
import math
import signal
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from augment import rand_augment

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the field's for ImageNet, which all published numbers use
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}


class ImageFolder(NamedTuple):
    root: Path
    files: list[str]  # below the root
    labels: list[int]
    classes: tuple[str, ...]


def read_folder(root: str | Path, classes: tuple[str, ...] | None = None) -> ImageFolder:
    """The images below `root`, whose folders are the classes, in sorted order; or those of `classes`, in theirs.

    Looks at names alone. Raises FileNotFoundError where there is no folder, ValueError where it has fewer than two
    classes, a class without images, or one that `classes` lacks.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; --data-dir wants train/CLASS/*.jpg and val/CLASS/*.jpg.")
    found = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if unknown := sorted(set(found) - set(classes or found)):
        raise ValueError(f"{root} has classes that train has not: {', '.join(unknown[:5])}; the folders must match.")
    if len(found) < 2:
        names = found[0] if found else "none"
        raise ValueError(f"{root} must hold one folder a class, of two classes or more; it holds {names}.")
    classes, files, labels = classes or tuple(found), [], []
    for name in found:
        inside = sorted(f for f in (root / name).rglob("*") if f.suffix.lower() in ENDINGS)
        if not inside:
            raise ValueError(f"{root / name} holds no images ({', '.join(sorted(ENDINGS))}); fill or remove it.")
        files += [str(file.relative_to(root)) for file in inside]
        labels += [classes.index(name)] * len(inside)
    return ImageFolder(root, files, labels, classes)


# ---- one image


def check_torchvision() -> None:
    """Raises ValueError, with what to do, where torchvision is not installed."""
    try:
        import torchvision  # noqa: F401
    except ImportError as error:
        raise ValueError("decoding photographs needs one package more: pip install torchvision.") from error


def decode(path: Path) -> Tensor:
    """The image in a file, uint8 (3, H, W); gray and transparent ones become RGB, of an animation the first is taken.

    torchvision reads JPEG, PNG, GIF and WebP, Pillow the rest. Whatever they raise for damaged files is raised.
    """
    from torchvision.io import ImageReadMode, decode_image

    content = path.read_bytes()
    try:
        image = decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError:
        from PIL import Image

        with Image.open(io.BytesIO(content)) as opened:
            image = torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1)
    if image.dtype != torch.uint8:  # PNG of 16 bits
        image = image.int().div(256, rounding_mode="floor").byte()
    return image[0] if image.ndim == 4 else image


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """Bicubic and antialiased, uint8 (3, H, W) to (3, height, width)."""
    return F.interpolate(image[None], (height, width), mode="bicubic", antialias=True)[0]


def centre_crop(image: Tensor, size: int, share: float = 0.875) -> Tensor:
    """To evaluate: the shorter side resized to size / share, and the square in the middle. (3, size, size)."""
    shorter, (H, W) = round(size / share), image.shape[1:]
    H, W = (max(shorter, round(shorter * side / min(H, W))) for side in (H, W))
    top, left = (H - size) // 2, (W - size) // 2
    return resized(image, H, W)[:, top : top + size, left : left + size]


def random_crop(image: Tensor, size: int, ra_ops=0, ra_magnitude=0.0, ra_deviation=0.0, erasing=0.0) -> Tensor:
    """To train: a box of 8 to 100 % of the area, mirrored or not; RandAugment; random erasing. (3, size, size).

    Draws from torch's global generator. As in timm, whose recipe DeiT's is, each of the `ra_ops` operations is done
    with probability one half; magnitudes are of 30.
    """
    from torchvision.transforms import RandomResizedCrop

    top, left, height, width = RandomResizedCrop.get_params(image, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    image = resized(image[:, top : top + height, left : left + width], size, size)
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
    if ops := int((torch.rand(ra_ops) < 0.5).sum()):
        image = rand_augment(image[None], ops, ra_magnitude, ra_deviation)[0]
    return erased(image) if torch.rand(()) < erasing else image


def erased(image: Tensor) -> Tensor:
    """Random erasing (Zhong et al., 2020): noise in a box of 2 to 33 % of the area, aspect 0.3 to 3.3. uint8 (3, H, W).

    The noise has mean 0 and deviation 1 once the image is normalized, but for values that are no pixels.
    """
    _, H, W = image.shape
    for _ in range(10):
        area = H * W * float(torch.empty(()).uniform_(0.02, 1 / 3))
        aspect = math.exp(float(torch.empty(()).uniform_(math.log(0.3), -math.log(0.3))))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < height < H and 0 < width < W:
            top, left = int(torch.randint(H - height + 1, ())), int(torch.randint(W - width + 1, ()))
            noise = torch.randn(3, height, width) * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
            image = image.clone()
            image[:, top : top + height, left : left + width] = (255 * noise).round_().clamp_(0, 255).byte()
            break
    return image


# ---- batches


def epoch_order(n: int, batch: int, repeats: int, generator: torch.Generator) -> Tensor:
    """Which image each of an epoch's n places shows, (n,): a permutation, or with repeated augmentation less than that.

    Repeated augmentation (Hoffer et al., 2020; DeiT: 3): a batch shows each of its images so many times, each time
    another crop, and an epoch of n places sees n / repeats images. Copies are never neighbours, whom `mix` mixes.
    """
    groups = torch.randperm(n, generator=generator).split(-(-batch // repeats))
    return torch.cat([group.repeat(repeats)[:batch] for group in groups])[:n]


class Crops:
    """(index, seed) -> the crop of that image, and its label; of an image that cannot be read, -1 - index."""

    def __init__(self, folder: ImageFolder, crop, size: int):
        self.folder, self.crop, self.size = folder, crop, size

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        index, seed = item
        try:
            image = decode(self.folder.root / self.folder.files[index])
        except Exception:  # damaged images raise nearly anything
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), -1 - index
        torch.manual_seed(seed)
        return self.crop(image, self.size).contiguous(), self.folder.labels[index]


def ignore_interrupts(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle


def collated(items: list, size: int) -> list[Tensor]:
    """Images (B, 3, S, S) and labels (B,); a rank may have none of a last small batch."""
    if not items:
        return [torch.zeros(0, 3, size, size, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)]
    return default_collate(items)


def batches(folder: ImageFolder, plan, crop, size: int, workers: int, pin: bool = False):
    """Batches of (images, labels) for each list of (index, seed) in `plan`. Labels below 0: see Crops.

    workers: processes that read, 0 for this one. Each has at most two batches under way.
    """
    many = dict(prefetch_factor=2, worker_init_fn=ignore_interrupts) if workers else {}
    collate = partial(collated, size=size)
    return DataLoader(
        Crops(folder, crop, size), batch_sampler=plan, collate_fn=collate, num_workers=workers, pin_memory=pin, **many
    )


def readable(images: Tensor, labels: Tensor, folder: ImageFolder, unreadable: set[str]) -> tuple[Tensor, Tensor]:
    """The batch without the images that could not be read, whose names (train/CLASS/...) join `unreadable`."""
    good = labels >= 0
    if good.all():
        return images, labels
    unreadable.update(f"{folder.root.name}/{folder.files[-1 - label]}" for label in labels[~good].tolist())
    return images[good], labels[good]
