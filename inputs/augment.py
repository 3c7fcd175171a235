"""Augmentation of a whole batch of images at once, on the device where the batch lives.

    images = random_flip(random_crop(images, generator=generator), generator)   # uint8 (B, 3, H, W)
    images = rand_augment(images, generator=generator)                          # uint8, see randaugment.py
    images = cutout(normalize(images, mean, std), generator=generator)          # float32 (B, 3, H, W)
    images, targets = mix(images, targets)                                      # and (B, classes)

Every draw comes from `generator` (None: torch's own on the CPU), is made on that generator's device and depends on no
pixel: a CPU generator's seed gives the same draws whatever the images hold, wherever they are. `mix` alone takes one of
numpy's instead. A GPU should not wait for draws: `draw` makes those of a batch, `send` sends those of many batches in
one copy that does not block, and `augment` applies them; the pixels are those of the first three lines above.

Cutout (DeVries & Taylor, arXiv 1708.04552) is as its authors do it: after normalization, always, clipped at the border.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from inputs.randaugment import check_shape, check_uint8, draw_operations, kind, operate, prepare, randint

# ---- draw and apply


def random_crop(images: Tensor, padding: int = 4, generator: Generator | None = None) -> Tensor:
    """Shift each image by its own offset, up to `padding` pixels each way. uint8 (B, 3, H, W) in and out.

    What comes in from outside is black. Raises TypeError if not uint8, ValueError if not (B, 3, H, W).
    """
    check_uint8(images)
    return crop(images, randint(2 * padding + 1, (2, len(images)), generator).to(images.device), padding)


def random_flip(images: Tensor, generator: Generator | None = None) -> Tensor:
    """Mirror each image left to right with probability one half. uint8 (B, 3, H, W) in and out.

    Raises TypeError if not uint8, ValueError if not (B, 3, H, W).
    """
    check_uint8(images)
    return flip(images, randint(2, (1, len(images)), generator).to(images.device))


def cutout(images: Tensor, size: int = 16, generator: Generator | None = None) -> Tensor:
    """Set a square of each image to 0, the mean of normalized images. Floating (B, 3, H, W) in and out.

    The centre is uniform over all pixels and the square is clipped at the border. Side 16 reaches from 8 pixels before
    the centre to 7 after it; an odd side is rounded down, as by the authors. Raises TypeError if not floating point,
    ValueError if not (B, 3, H, W).
    """
    if not (torch.is_tensor(images) and images.is_floating_point()):
        raise TypeError(f"cutout works on floating-point images, after normalize(), not on {kind(images)}")
    check_shape(images)
    return cut(images, draw_centre(len(images), *images.shape[2:], generator).to(images.device), size)


def draw_centre(batch: int, H: int, W: int, generator: Generator | None) -> Tensor:
    """Rows and columns of Cutout's centres (2, batch)."""
    return torch.cat([randint(side, (1, batch), generator) for side in (H, W)])


# ---- many batches ahead


class Draws(NamedTuple):
    """What happens to a batch of B images: a column of numbers for each, where the images lie."""

    corner: Tensor  # (2, B) of `crop`; no rows: no crop, and so for the others
    flip: Tensor  # (1, B), 0 or 1
    op: Tensor  # (num_ops, B), indices into OPS; once sent (num_ops + 1, B), `prepare`'s order
    strength: Tensor  # (num_ops, B); once sent (num_ops, 6, B), the operations' numbers
    centre: Tensor  # (2, B) of `cut`
    counts: list  # once sent: how many images each of GROUPS has, for each operation


def draw(
    batch: int, H: int, W: int, generator: Generator, *, mirror=True, num_ops=0, magnitude=9.0, magnitude_std=0.5,
    cutout=False, padding=4,
) -> Draws:  # fmt: skip
    """The draws of random_crop, random_flip if `mirror`, rand_augment if `num_ops`, and cutout, in this order."""
    none = torch.zeros(0, batch)
    return Draws(
        randint(2 * padding + 1, (2, batch), generator),
        randint(2, (1, batch), generator) if mirror else none,
        *(draw_operations(batch, num_ops, magnitude, magnitude_std, generator) if num_ops else (none, none)),
        draw_centre(batch, H, W, generator) if cutout else none,
        [],
    )


@torch.inference_mode()
def send(draws: list[Draws], H: int, W: int, device: torch.device) -> list[Draws]:
    """The draws of several batches, sorted and computed together, to `device` in one copy that does not block."""
    sizes = [draw.corner.shape[1] for draw in draws]
    corner, flip, op, strength, centre = (torch.cat(part, dim=1) for part in list(zip(*draws))[:5])
    batch = torch.arange(len(draws)).repeat_interleave(torch.tensor(sizes))  # which batch a column belongs to
    order, numbers, counts = prepare(op, strength, batch, len(draws), H, W)
    parts = [corner, flip, order, numbers.flatten(0, 1), centre]
    rows = [len(part) for part in parts]
    table = torch.cat([part.float() for part in parts])  # whole numbers below 2**24 are exact in float32
    if device.type == "cuda":
        table = table.pin_memory()
    sent = []
    for columns, count in zip(table.to(device, non_blocking=True).split(sizes, dim=1), counts, strict=True):
        corner, flip, order, numbers, centre = columns.split(rows)
        sent.append(Draws(corner.long(), flip, order.long(), numbers.unflatten(0, (len(op), 6)), centre, count))
    return sent


def augment(images: Tensor, draws: Draws, mean: tuple, std: tuple, cutout: int = 16, padding: int = 4) -> Tensor:
    """Augment by `draws` that were sent, and normalize: uint8 (B, 3, H, W) to float32."""
    images = crop(images, draws.corner, padding)
    images = flip(images, draws.flip) if len(draws.flip) else images
    images = operate(images, draws.op, draws.strength, draws.counts)
    images = normalize(images, mean, std)
    return cut(images, draws.centre, cutout) if len(draws.centre) else images


def crop(images: Tensor, corner: Tensor, padding: int) -> Tensor:
    """corner (2, B): row and column of each image's corner within the padded image, 0 to 2 * padding."""
    B, _, H, W = images.shape
    windows = F.pad(images, [padding] * 4).unfold(2, H, 1).unfold(3, W, 1)  # (B, 3, 2p+1, 2p+1, H, W), a view
    return windows[torch.arange(B, device=images.device), :, corner[0], corner[1]]  # (B, 3, H, W)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """chosen (1, B): whether to mirror an image."""
    return torch.where(chosen.view(-1, 1, 1, 1).bool(), images.flip(-1), images)


def normalize(images: Tensor, mean: tuple, std: tuple) -> Tensor:
    """(images / 255 - mean) / std: uint8 (B, 3, H, W) to float32. mean, std: 3 numbers, for pixels in 0..1.

    Raises TypeError if not uint8, ValueError if not (B, 3, H, W).
    """
    check_uint8(images)
    # The same line, multiplied out. Bytes become floats first: a product of both kinds is three times as slow.
    scale, shift = scale_and_shift(tuple(mean), tuple(std), images.device)
    return images.float().mul_(scale).sub_(shift)


@functools.cache  # on a GPU these constants are sent once, not with each batch
def scale_and_shift(mean: tuple, std: tuple, device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
    return tuple(values.float().view(3, 1, 1).to(device) for values in (1 / (255 * std), mean / std))


def cut(images: Tensor, centre: Tensor, size: int) -> Tensor:
    """centre (2, B): row and column of each square's centre."""
    H, W = images.shape[2:]
    y = torch.arange(H, device=images.device) - centre[0][:, None]  # (B, H), rows from the centre
    x = torch.arange(W, device=images.device) - centre[1][:, None]  # (B, W)
    half = size // 2
    keep_y, keep_x = (y < -half) | (y >= half), (x < -half) | (x >= half)
    return images * (keep_y[:, None, :, None] | keep_x[:, None, None, :])


def mix(
    images: Tensor, targets: Tensor, mixup: float = 0.8, cutmix: float = 1.0, rng: np.random.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix of neighbours 2i and 2i + 1, as DeiT has it: a coin for which, one share for the whole batch.

    Mixup (Zhang et al., arXiv 1710.09412) takes lam ~ Beta(mixup, mixup) of an image and 1 - lam of its neighbour,
    CutMix (Yun et al., arXiv 1905.04899) pastes a box of 1 - lam of the area, lam ~ Beta(cutmix, cutmix), clipped at
    the border. 0 leaves one out. Images (B, 3, H, W), floating; targets (B, classes), rows summing to one, mixed by the
    pixels' shares. rng: numpy's. Returns both; an odd last image stays as it is.
    """
    if not mixup and not cutmix:
        return images, targets
    rng = rng or np.random.default_rng()
    (B, _, H, W), paste = images.shape, rng.random() < (0.5 if mixup and cutmix else float(cutmix > 0))
    lam = rng.beta(*[cutmix if paste else mixup] * 2)
    partner = torch.arange(B, device=images.device).bitwise_xor(1).clamp_(max=B - 1)  # 1, 0, 3, 2, ...
    if paste:
        sides, centre = np.array([H, W]) * np.sqrt(1 - lam), rng.integers([H, W])
        (top, left), (bottom, right) = np.clip([centre - sides // 2, centre + sides // 2], 0, [H, W]).astype(int)
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images[partner, :, top:bottom, left:right]
        lam = 1 - (bottom - top) * (right - left) / (H * W)
    else:
        mixed = torch.lerp(images[partner], images, lam)
    return mixed, torch.lerp(targets[partner], targets, lam)
