"""Augmentation of a whole batch of images at once, on the device where the batch lives.

RandAugment (Cubuk et al., arXiv 1909.13719) with the operations, ranges and rounding of torchvision 0.29's
`RandAugment` on tensors: nearest neighbour, black outside the image, shears about the top left corner, blends
truncated. Two differences: each image draws its own operations (torchvision draws once a call), and the
magnitude varies about its mean, as in timm; `magnitude_std=0` gives torchvision's distribution.
Cutout (DeVries & Taylor, arXiv 1708.04552) as its authors do it: after normalization, always, clipped at the
border.

    images = random_flip(random_crop(images, generator=generator), generator)   # uint8 (B, 3, H, W)
    images = rand_augment(images, generator=generator)                          # uint8 (B, 3, H, W)
    images = cutout(normalize(images, mean, std), generator=generator)          # float32 (B, 3, H, W)
    images, targets = mix(images, targets)                                      # and (B, classes)

Every draw comes from `generator` (None: torch's own on the CPU), is made on that generator's device and
depends on no pixel: a CPU generator's seed gives the same draws whatever the images hold, wherever they are.
`mix` alone takes one of numpy's instead.
"""

import numpy as np
import torch
import torch.nn.functional as F


def random_crop(images, padding=4, generator=None):
    """Shift each image by its own offset, up to `padding` pixels each way. uint8 (B, 3, H, W) in and out.

    What comes in from outside is black. Raises TypeError if not uint8, ValueError if not (B, 3, H, W).
    """
    _check_uint8(images)
    B, _, H, W = images.shape
    corner = _randint(2 * padding + 1, (2, B), generator).to(images.device)
    windows = F.pad(images, [padding] * 4).unfold(2, H, 1).unfold(3, W, 1)  # (B, 3, 2p+1, 2p+1, H, W), a view
    return windows[torch.arange(B, device=images.device), :, corner[0], corner[1]]  # (B, 3, H, W)


def random_flip(images, generator=None):
    """Mirror each image left to right with probability one half. uint8 (B, 3, H, W) in and out.

    Raises TypeError if not uint8, ValueError if not (B, 3, H, W).
    """
    _check_uint8(images)
    flip = _randint(2, (len(images), 1, 1, 1), generator).to(images.device)
    return torch.where(flip.bool(), images.flip(-1), images)


def rand_augment(images, num_ops=2, magnitude=9.0, magnitude_std=0.5, generator=None):
    """Apply `num_ops` operations of OPS in turn, drawn for each image. uint8 (B, 3, H, W) in and out.

    Operations are drawn uniformly; each has a magnitude of its own, normal with this mean and deviation,
    clipped to 0..30. Raises TypeError if not uint8, ValueError if not (B, 3, H, W).
    """
    _check_uint8(images)
    op, strength = draw_operations(len(images), num_ops, magnitude, magnitude_std, generator)
    row = torch.arange(len(images), device=op.device)  # where each image of the batch in hand was at first
    with torch.inference_mode():  # 8 % faster: many small operations, no gradients
        for r in range(num_ops):
            # Sorted by operation, the images of each operation are one contiguous batch.
            order = op[r, row].argsort()
            row = row[order]
            images = images.index_select(0, order.to(images.device))
            counts = op[r].bincount(minlength=len(OPS)).tolist()
            groups, strengths = images.split(counts), strength[r, row].split(counts)
            for name, group, group_strengths in zip(OPS, groups, strengths, strict=True):
                group.copy_(apply_op(group, name, group_strengths))
    return images.index_select(0, row.argsort().to(images.device))


def draw_operations(batch, num_ops=2, magnitude=9.0, magnitude_std=0.5, generator=None):
    """The draws of `rand_augment`: indices into OPS and strengths in their unit, both (num_ops, batch).

    All numbers are drawn, used or not, so that none depends on another's outcome.
    """
    size = (num_ops, batch)
    op, flip = _randint(len(OPS), size, generator), _randint(2, size, generator)
    noise = torch.randn(size, generator=generator, device=op.device, dtype=torch.float64)
    level = (magnitude + magnitude_std * noise).clamp_(0, 30)
    signed = torch.tensor([row[2] for row in OPS.values()], device=op.device)[op]
    # Between torchvision's 31 values: at a whole level it is that very value, and the pixels are the same.
    values, below = STRENGTHS.to(op.device), level.long().clamp_(max=29)
    strength = torch.lerp(values[op, below], values[op, below + 1], level - below)
    return op, torch.where(signed & flip.bool(), -strength, strength)


def apply_op(images, op, strengths):
    """One operation of OPS, by name, on each image with its own strength. uint8 (B, 3, H, W) in and out.

    strengths (B,) are signed, in the unit that OPS states. Raises TypeError if images are not uint8,
    ValueError if they are not (B, 3, H, W) or the name is not in OPS.
    """
    _check_uint8(images)
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}, expected one of {', '.join(OPS)}")
    # Factors are computed in float64 where the strengths are, and rounded once, on the way to the images.
    strengths = torch.as_tensor(strengths, dtype=torch.float64)
    return OPS[op][3](images, strengths) if len(images) else images


def normalize(images, mean, std):
    """(images / 255 - mean) / std: uint8 (B, 3, H, W) to float32. mean, std: 3 numbers, for pixels in 0..1.

    Raises TypeError if not uint8, ValueError if not (B, 3, H, W).
    """
    _check_uint8(images)
    mean, std = torch.as_tensor(mean, dtype=torch.float64), torch.as_tensor(std, dtype=torch.float64)
    # The same line, multiplied out. Bytes become floats first: a product of both kinds is three times as slow.
    return images.float().mul_(_send(1 / (255 * std), images, 3)).sub_(_send(mean / std, images, 3))


def cutout(images, size=16, generator=None):
    """Set a square of each image to 0, the mean of normalized images. Floating (B, 3, H, W) in and out.

    The centre is uniform over all pixels and the square is clipped at the border. Side 16 reaches from 8
    pixels before the centre to 7 after it; an odd side is rounded down, as by the authors. Raises TypeError
    if not floating point, ValueError if not (B, 3, H, W).
    """
    if not (torch.is_tensor(images) and images.is_floating_point()):
        raise TypeError(f"cutout works on floating-point images, after normalize(), not on {_kind(images)}")
    _check_shape(images)
    B, _, H, W = images.shape
    y, x = (_randint(side, (B, 1), generator).to(images.device) for side in (H, W))
    y = torch.arange(H, device=images.device) - y  # (B, H), rows from the centre
    x = torch.arange(W, device=images.device) - x  # (B, W)
    half = size // 2
    keep_y, keep_x = (y < -half) | (y >= half), (x < -half) | (x >= half)
    return images * (keep_y[:, None, :, None] | keep_x[:, None, None, :])


def mix(images, targets, mixup=0.8, cutmix=1.0, rng=None):
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


def _shear_x(images, slope):
    return _warp(images, xy=slope, x1=slope * images.shape[2] / 2)  # the top line stays


def _shear_y(images, slope):
    return _warp(images, yx=slope, y1=slope * images.shape[3] / 2)  # the left line stays


def _translate_x(images, fraction):
    return _warp(images, x1=-(fraction * images.shape[3]).trunc())


def _translate_y(images, fraction):
    return _warp(images, y1=-(fraction * images.shape[2]).trunc())


def _rotate(images, degrees):
    cos, sin = degrees.deg2rad().cos(), degrees.deg2rad().sin()
    return _warp(images, xx=cos, xy=-sin, yx=sin, yy=cos)


def _warp(images, xx=1, xy=0, x1=0, yx=0, yy=1, y1=0):
    """Fetch output pixel (x, y) from (xx x + xy y + x1, yx x + yy y + y1): nearest, black outside.

    Coordinates are in pixels from the image's centre; a coefficient is a number, or (B,), one an image. A
    point exactly between two pixels goes where rounding sends it, as in torchvision (slopes .04, .12, ...).
    """
    B, _, H, W = images.shape
    coefficients = (xx, xy, x1, yx, yy, y1)
    xx, xy, x1, yx, yy, y1 = (_send(k, images, 3) if torch.is_tensor(k) else k for k in coefficients)
    x = torch.arange(W, device=images.device) - (W - 1) / 2  # (W,)
    y = (torch.arange(H, device=images.device) - (H - 1) / 2)[:, None]  # (H, 1)
    # In units of half a side. Each sum over a whole plane is one pass, since both its terms are lines.
    grid = torch.empty(B, 2, H, W, device=images.device)
    grid[:, 0] = (xx * x + x1) * (2 / W) + xy * y * (2 / W)
    grid[:, 1] = (yy * y + y1) * (2 / H) + yx * x * (2 / H)
    grid = grid.permute(0, 2, 3, 1)  # (B, H, W, 2)
    return _byte(F.grid_sample(images.float(), grid, mode="nearest", align_corners=False))


def _brightness(images, s):
    return _truncate(images * _send(1 + s, images))


def _color(images, s):
    return _blend(images, _gray(images), s)


def _contrast(images, s):
    gray = _gray(images)
    # A sum of whole numbers, so the same in any order (below 2**24: up to 256 x 256 pixels).
    mean = gray.sum((1, 2, 3), keepdim=True) / gray[0].numel()
    return _blend(images, mean, s)


def _sharpness(images, s):
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
    return _blend(images, smooth, s)


def _blend(images, other, s):
    """(1 + s) images - s other; other is float32, and overwritten."""
    ratio = 1 + s
    return _truncate((images * _send(ratio, images)).add_(other.mul_(_send(1 - ratio, images))))


def _truncate(values):
    return _byte(values.clamp_(0, 255))


def _byte(values):
    return values.short().byte()  # from float, several times as fast as byte() alone


def _gray(images):
    r, g, b = images.unbind(1)
    return (0.2989 * r).add_(0.587 * g).add_(0.114 * b).trunc_()[:, None]  # float32 (B, 1, H, W)


def _posterize(images, bits):
    mask = 256 - 2 ** (8 - bits.round())  # ties to even, as torchvision rounds
    return images & mask.view(-1, 1, 1, 1).to(images.device, torch.uint8)


def _solarize(images, threshold):
    bright = images >= threshold.ceil().view(-1, 1, 1, 1).to(images.device, torch.uint8)
    return images ^ (bright.byte() * 255)  # v ^ 255 = 255 - v


def _auto_contrast(images, _):
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    flat = low == high  # a channel of one value stays
    # torch, and so torchvision, computes 255 / x as this product.
    scale = (high - low + 255 * flat).float().reciprocal() * 255
    return _truncate((images - low * ~flat) * scale)


def _equalize(images, _):
    B, C, H, W = images.shape
    pixels = images.flatten(2).long()  # (B, 3, H*W)
    one = torch.ones((), dtype=torch.int32, device=images.device)
    count = torch.zeros(B, C, 256, dtype=torch.int32, device=images.device)
    count.scatter_add_(2, pixels, one.expand_as(pixels))
    # As in PIL: pixels of the brightest value do not count, and a channel whose step is 0 stays.
    brightest = images.amax((2, 3))[..., None].long()
    step = (H * W - count.gather(2, brightest)) // 255  # (B, 3, 1)
    # The floor of a float32 quotient is the integers' own below 2**24, and much faster.
    count = count.float()
    below = count.cumsum(2) - count  # (B, 3, 256)
    table = ((below + step // 2) / step).floor_()
    table = torch.where(step == 0, torch.arange(256, device=images.device), table)
    return _truncate(table).gather(2, pixels).view_as(images)


def _identity(images, _):
    return images


# name: (strength at magnitude 0, at magnitude 30, whether half of the draws are negated, function)
OPS = {
    "Identity": (0.0, 0.0, False, _identity),
    "ShearX": (0.0, 0.3, True, _shear_x),  # slope
    "ShearY": (0.0, 0.3, True, _shear_y),
    "TranslateX": (0.0, 150 / 331, True, _translate_x),  # fraction of the width, cut to whole pixels
    "TranslateY": (0.0, 150 / 331, True, _translate_y),  # fraction of the height
    "Rotate": (0.0, 30.0, True, _rotate),  # degrees, counter-clockwise
    "Brightness": (0.0, 0.9, True, _brightness),  # (1 + s) image - s black
    "Color": (0.0, 0.9, True, _color),  # (1 + s) image - s gray image
    "Contrast": (0.0, 0.9, True, _contrast),  # (1 + s) image - s mean of the gray image
    "Sharpness": (0.0, 0.9, True, _sharpness),  # (1 + s) image - s smoothed image
    "Posterize": (8.0, 4.0, False, _posterize),  # bits kept, rounded
    "Solarize": (255.0, 0.0, False, _solarize),  # values from here on are inverted
    "AutoContrast": (0.0, 0.0, False, _auto_contrast),
    "Equalize": (0.0, 0.0, False, _equalize),
}

# The strengths at magnitudes 0 to 30, (14, 31), in float32 steps as torchvision's: the last bit can move a
# pixel's value by one.
STRENGTHS = torch.stack([torch.linspace(low, high, 31) for low, high, _, _ in OPS.values()]).double()


def _randint(high, size, generator):
    return torch.randint(high, size, generator=generator, device=generator.device if generator else "cpu")


def _send(values, images, ndim=4):
    """(n,) float64, where they were computed, to float32 (n, 1, 1) or (n, 1, 1, 1), where the images are."""
    return values.float().to(images.device).view(-1, *[1] * (ndim - 1))


def _kind(images):
    return images.dtype if torch.is_tensor(images) else type(images).__name__


def _check_uint8(images):
    if not torch.is_tensor(images) or images.dtype != torch.uint8:
        raise TypeError(f"this works on uint8 images, before normalize(), not on {_kind(images)}")
    _check_shape(images)


def _check_shape(images):
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"expected images of shape (B, 3, H, W), got {tuple(images.shape)}")
