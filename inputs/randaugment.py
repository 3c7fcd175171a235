"""RandAugment (Cubuk et al., arXiv 1909.13719) of a whole batch of images, on the device where the batch lives.

Operations, ranges and rounding are those of torchvision 0.29's `RandAugment` on tensors: nearest neighbour, black
outside the image, shears about the top left corner, blends truncated. Two differences: each image draws its own
operations (torchvision draws once per call), and the magnitude varies about its mean, as in timm; `magnitude_std=0`
gives torchvision's distribution.

`draw_operations` draws and `prepare` sorts, on the CPU; `operate` works, on the images' device, with one call for all
images of a group of operations.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def rand_augment(
    images: Tensor,
    num_ops: int = 2,
    magnitude: float = 9.0,
    magnitude_std: float = 0.5,
    generator: Generator | None = None,
) -> Tensor:
    """Apply `num_ops` operations of OPS in turn, drawn for each image. uint8 (B, 3, H, W) in and out.

    Operations are drawn uniformly; each has a magnitude of its own, normal with this mean and deviation, clipped to
    0..30. Raises TypeError if not uint8, ValueError if not (B, 3, H, W).
    """
    check_uint8(images)
    op, strength = draw_operations(len(images), num_ops, magnitude, magnitude_std, generator)
    batch = torch.zeros(len(images), dtype=torch.int64, device=op.device)
    order, numbers, counts = prepare(op, strength, batch, 1, *images.shape[2:])
    return operate(images, order.to(images.device), numbers.to(images.device), counts[0])


def draw_operations(
    batch: int,
    num_ops: int = 2,
    magnitude: float = 9.0,
    magnitude_std: float = 0.5,
    generator: Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The draws of `rand_augment`: indices into OPS and strengths in their unit, both (num_ops, batch).

    All numbers are drawn, used or not, so that none depends on another's outcome.
    """
    size = (num_ops, batch)
    op, negate = randint(len(OPS), size, generator), randint(2, size, generator)
    noise = torch.randn(size, generator=generator, device=op.device, dtype=torch.float64)
    level = (magnitude + magnitude_std * noise).clamp_(0, 30)
    signed = torch.tensor([o.signed for o in OPS.values()], device=op.device)[op]
    # Between torchvision's 31 values: at a whole level it is that very value, and the pixels are the same.
    values, below = STRENGTHS.to(op.device), level.long().clamp_(max=29)
    strength = torch.lerp(values[op, below], values[op, below + 1], level - below)
    return op, torch.where(signed & negate.bool(), -strength, strength)


def prepare(op: Tensor, strength: Tensor, batch: Tensor, batches: int, H: int, W: int) -> tuple[Tensor, Tensor, list]:
    """Sort drawn operations (num_ops, N) of the images of several batches, `batch` (N,) telling which, for `operate`.

    order (num_ops + 1, N): which image of its batch to take before an operation, so that each of GROUPS is a contiguous
    part; the last row undoes it all. numbers (num_ops, 6, N) float32: what an operation has to know of each image.
    counts: how many images each group has, for each batch and operation.
    """
    numbers = torch.zeros(op.numel(), 6, dtype=torch.float64, device=op.device)
    op, strength, (rounds, N) = op.flatten().long(), strength.flatten().double(), op.shape
    for operation, which in zip(OPS.values(), op.argsort().split(op.bincount(minlength=len(OPS)).tolist())):
        columns = operation.numbers(strength[which], H, W)
        numbers[which, : columns.shape[1]] = columns
    numbers = numbers.float().view(rounds, N, 6)  # computed in float64, rounded once

    group = torch.tensor([i for i, (_, names) in enumerate(GROUPS) for _ in names], device=op.device)[op]
    row, order, sorted_numbers, counts = (
        torch.arange(N, device=op.device),
        [],
        [],
        [],
    )  # row: where an image was at first
    for groups, columns in zip(group.view(rounds, N), numbers):
        place = batch * len(GROUPS) + groups[row]
        counts.append(place.bincount(minlength=batches * len(GROUPS)).view(batches, -1))
        order.append(place.argsort())
        row = row[order[-1]]
        sorted_numbers.append(columns[row].T)
    first = torch.searchsorted(batch, batch)  # the column that an image's batch begins at
    order = torch.stack([*order, row.argsort()]) - first
    if not counts:
        return order, numbers.mT, [[]] * batches
    return order, torch.stack(sorted_numbers), torch.stack(counts, 1).tolist()


@torch.inference_mode()  # 8 % faster: many small operations, no gradients
def operate(images: Tensor, order: Tensor, numbers: Tensor, counts: list) -> Tensor:
    """The operations in turn, by what `prepare` returns for this batch."""
    for which, rows, sizes in zip(order, numbers, counts):
        images = images.index_select(0, which)
        for (function, _), group, columns in zip(GROUPS, images.split(sizes), rows.split(sizes, dim=1)):
            if function and len(group):
                group.copy_(function(group, columns))
    return images.index_select(0, order[-1])


def apply_op(images: Tensor, op: str, strengths: Tensor) -> Tensor:
    """One operation of OPS, by name, on each image with its own strength. uint8 (B, 3, H, W) in and out.

    strengths (B,) are signed, in the unit that OPS states. Raises TypeError if images are not uint8, ValueError if they
    are not (B, 3, H, W) or the name is not in OPS.
    """
    check_uint8(images)
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}, expected one of {', '.join(OPS)}")
    numbers = OPS[op].numbers(torch.as_tensor(strengths, dtype=torch.float64), *images.shape[2:])
    (function,) = [function for function, names in GROUPS if op in names]
    return function(images, numbers.float().mT.to(images.device)) if function and len(images) else images


# ---- the operations: each takes images (n, 3, H, W) and their numbers (6, n), where they lie


def warp(images: Tensor, numbers: Tensor) -> Tensor:
    """Fetch output pixel (x, y) from (xx x + xy y + x1, yx x + yy y + y1): nearest, black outside.

    Coordinates are in pixels from the image's centre. A point exactly between two pixels goes where rounding sends it,
    as in torchvision (slopes .04, .12, ...).
    """
    B, _, H, W = images.shape
    xx, xy, x1, yx, yy, y1 = numbers.view(6, B, 1, 1)
    x = torch.arange(W, device=images.device) - (W - 1) / 2  # (W,)
    y = (torch.arange(H, device=images.device) - (H - 1) / 2)[:, None]  # (H, 1)
    # In units of half a side. Each sum over a whole plane is one pass, since both its terms are lines.
    grid = torch.empty(B, 2, H, W, device=images.device)
    grid[:, 0] = (xx * x + x1) * (2 / W) + xy * y * (2 / W)
    grid[:, 1] = (yy * y + y1) * (2 / H) + yx * x * (2 / H)
    grid = grid.permute(0, 2, 3, 1)  # (B, H, W, 2)
    return byte(F.grid_sample(images.float(), grid, mode="nearest", align_corners=False))


def brightness(images: Tensor, numbers: Tensor) -> Tensor:
    return truncate(images * numbers[0].view(-1, 1, 1, 1))


def color(images: Tensor, numbers: Tensor) -> Tensor:
    return blend(images, gray(images), numbers)


def contrast(images: Tensor, numbers: Tensor) -> Tensor:
    planes = gray(images)
    # A sum of whole numbers, so the same in any order (below 2**24: up to 256 x 256 pixels).
    mean = planes.sum((1, 2, 3), keepdim=True) / planes[0].numel()
    return blend(images, mean, numbers)


def sharpness(images: Tensor, numbers: Tensor) -> Tensor:
    # Weights 1 around 5, over 13, summed along the flat batch, since long rows are fast. A sum that runs over
    # an edge is centred on one of the outermost pixels, which are not smoothed.
    W = images.shape[3]
    flat = images.reshape(-1).short()
    line = (flat[:-2] + flat[1:-1]).add_(flat[2:])
    square = (line[: -2 * W] + line[W:-W]).add_(line[2 * W :])
    total = flat.mul_(4)
    total[W + 1 : -W - 1] += square
    smooth = images.float()
    smooth[..., 1:-1, 1:-1] = total.float().div_(13).round_().view_as(images)[..., 1:-1, 1:-1]
    return blend(images, smooth, numbers)


def blend(images: Tensor, other: Tensor, numbers: Tensor) -> Tensor:
    """ratio images + (1 - ratio) other; other is float32, and overwritten."""
    ratio, rest = numbers[:2].view(2, -1, 1, 1, 1)
    return truncate((images * ratio).add_(other.mul_(rest)))


def truncate(values: Tensor) -> Tensor:
    return byte(values.clamp_(0, 255))


def byte(values: Tensor) -> Tensor:
    return values.short().byte()  # from float, several times as fast as byte() alone


def gray(images: Tensor) -> Tensor:
    r, g, b = images.unbind(1)
    return (0.2989 * r).add_(0.587 * g).add_(0.114 * b).trunc_()[:, None]  # float32 (B, 1, H, W)


def posterize(images: Tensor, numbers: Tensor) -> Tensor:
    return images & numbers[0].byte().view(-1, 1, 1, 1)


def solarize(images: Tensor, numbers: Tensor) -> Tensor:
    bright = images >= numbers[0].byte().view(-1, 1, 1, 1)
    return images ^ (bright.byte() * 255)  # v ^ 255 = 255 - v


def auto_contrast(images: Tensor, _) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = low == high  # a channel of one value stays
    # torch, and so torchvision, computes 255 / x as this product.
    scale = (high - low + 255 * flat).float().reciprocal() * 255
    return truncate((images - low * ~flat) * scale)


def equalize(images: Tensor, _) -> Tensor:
    B, C, H, W = images.shape
    pixels = images.flatten(2).long()  # (B, 3, H*W)
    one = torch.ones((), dtype=torch.int32, device=images.device)
    count = torch.zeros(B, C, 256, dtype=torch.int32, device=images.device)
    count.scatter_add_(2, pixels, one.expand_as(pixels))
    # As in PIL: pixels of the brightest value do not count, and a channel whose step is 0 stays.
    brightest = images.amax((2, 3))[..., None].long()
    step = (H * W - count.gather(2, brightest)) // 255  # (B, 3, 1)
    below = count.cumsum(2, dtype=torch.int32) - count  # (B, 3, 256); of whole numbers CUDA's sum is deterministic
    # The floor of a float32 quotient is the integers' own below 2**24, and much faster.
    table = ((below + step // 2).float() / step).floor_()
    table = torch.where(step == 0, torch.arange(256, device=images.device), table)
    return truncate(table).gather(2, pixels).view_as(images)


class Operation(NamedTuple):
    low: float  # strength at magnitude 0
    high: float  # and at 30
    signed: bool  # whether half of the draws are negated
    numbers: Callable  # float64 strengths (n,), H, W -> (n, up to 6), for the function in GROUPS


def affine(like: Tensor, xx=1.0, xy=0.0, x1=0.0, yx=0.0, yy=1.0, y1=0.0) -> Tensor:
    """Coefficients, each a number or as many as `like` has, side by side (n, 6)."""
    return torch.stack([c if torch.is_tensor(c) else torch.full_like(like, c) for c in (xx, xy, x1, yx, yy, y1)], -1)


def rotation(degrees: Tensor, *_) -> Tensor:
    cos, sin = degrees.deg2rad().cos(), degrees.deg2rad().sin()
    return affine(degrees, xx=cos, xy=-sin, yx=sin, yy=cos)


def ratios(s: Tensor, *_) -> Tensor:
    """Of `blend`: (1 + s) image - s other."""
    return torch.stack([1 + s, 1 - (1 + s)], -1)


def nothing(s: Tensor, *_) -> Tensor:
    return s.new_zeros(len(s), 1)


OPS = {
    "Identity": Operation(0.0, 0.0, False, nothing),
    "ShearX": Operation(0.0, 0.3, True, lambda s, H, W: affine(s, xy=s, x1=s * H / 2)),  # slope; the top line stays
    "ShearY": Operation(0.0, 0.3, True, lambda s, H, W: affine(s, yx=s, y1=s * W / 2)),  # the left line stays
    "TranslateX": Operation(0.0, 150 / 331, True, lambda s, H, W: affine(s, x1=-(s * W).trunc())),  # share of W
    "TranslateY": Operation(0.0, 150 / 331, True, lambda s, H, W: affine(s, y1=-(s * H).trunc())),  # share of H
    "Rotate": Operation(0.0, 30.0, True, rotation),  # degrees, counter-clockwise
    "Brightness": Operation(0.0, 0.9, True, ratios),  # with black
    "Color": Operation(0.0, 0.9, True, ratios),  # with the gray image
    "Contrast": Operation(0.0, 0.9, True, ratios),  # with the mean of the gray image
    "Sharpness": Operation(0.0, 0.9, True, ratios),  # with the smoothed image
    "Posterize": Operation(8.0, 4.0, False, lambda s, *_: 256 - 2 ** (8 - s.round())[:, None]),  # bits kept: a mask
    "Solarize": Operation(255.0, 0.0, False, lambda s, *_: s.ceil()[:, None]),  # values from here on are inverted
    "AutoContrast": Operation(0.0, 0.0, False, nothing),
    "Equalize": Operation(0.0, 0.0, False, nothing),
}

# In the order of OPS: what does which operations. Five of them are one, with other numbers.
GROUPS = [
    (None, ["Identity"]),
    (warp, ["ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"]),
    (brightness, ["Brightness"]),
    (color, ["Color"]),
    (contrast, ["Contrast"]),
    (sharpness, ["Sharpness"]),
    (posterize, ["Posterize"]),
    (solarize, ["Solarize"]),
    (auto_contrast, ["AutoContrast"]),
    (equalize, ["Equalize"]),
]

# Strengths at magnitudes 0 to 30, (14, 31), in float32 steps as torchvision's: the last bit can move a pixel by one.
STRENGTHS = torch.stack([torch.linspace(op.low, op.high, 31) for op in OPS.values()]).double()


def randint(high: int, size: tuple, generator: Generator | None) -> Tensor:
    return torch.randint(high, size, generator=generator, device=generator.device if generator else "cpu")


def kind(images) -> str:
    return images.dtype if torch.is_tensor(images) else type(images).__name__


def check_uint8(images: Tensor) -> None:
    if not torch.is_tensor(images) or images.dtype != torch.uint8:
        raise TypeError(f"this works on uint8 images, before normalize(), not on {kind(images)}")
    check_shape(images)


def check_shape(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"expected images of shape (B, 3, H, W), got {tuple(images.shape)}")
