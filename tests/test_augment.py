"""Each operation against a plain loop over one image, and against torchvision where that is installed."""

import math

import numpy as np
import pytest
import torch

from inputs.augment import cutout, normalize, random_crop, random_flip
from inputs.randaugment import (
    OPS,
    STRENGTHS,
    apply_op,
    draw_operations,
    rand_augment,
)

SIGNED = [name for name, op in OPS.items() if op.signed]
UINT8_FUNCTIONS = {
    "random_crop": random_crop,
    "random_flip": random_flip,
    "rand_augment": rand_augment,
    "apply_op": lambda images: apply_op(images, "Equalize", torch.zeros(len(images))),
    "normalize": lambda images: normalize(images, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def pictures(height=12, width=20):
    """Noise, noise, two flat ones, dark, few values, a ramp: (7, 3, H, W)."""
    images = torch.randint(256, (7, 3, height, width), dtype=torch.uint8, generator=seeded(0))
    images[2], images[3] = 77, 0
    images[4] //= 9
    images[5] = images[5] // 64 * 64
    images[6] = torch.arange(height * width).view(height, width) % 256
    return images


def at_levels(op):
    """The operation's strengths at a few magnitudes, with both signs where it has signs."""
    levels = STRENGTHS[list(OPS).index(op), [0, 3, 9, 10, 17, 30]]
    return torch.cat([levels, -levels]) if op in SIGNED else levels


# The plain reference: one image (3, H, W), one strength.


def plain_warp(image, source):
    _, height, width = image.shape
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            from_x, from_y = (math.floor(v) for v in source(x + 0.5, y + 0.5))
            if 0 <= from_x < width and 0 <= from_y < height:
                out[:, y, x] = image[:, from_y, from_x]
    return out


def plain_geometry(image, op, s):
    _, height, width = image.shape
    if op == "ShearX":
        return plain_warp(image, lambda x, y: (x + s * y, y))
    if op == "ShearY":
        return plain_warp(image, lambda x, y: (x, y + s * x))
    if op == "TranslateX":
        return plain_warp(image, lambda x, y: (x - int(s * width), y))
    if op == "TranslateY":
        return plain_warp(image, lambda x, y: (x, y - int(s * height)))
    cos, sin = math.cos(math.radians(s)), math.sin(math.radians(s))

    def turned(x, y):
        x, y = x - width / 2, y - height / 2
        return cos * x - sin * y + width / 2, sin * x + cos * y + height / 2

    return plain_warp(image, turned)


def plain_blend(image, op, s):
    pixels = image.astype(np.float32)
    gray = np.float32(0.2989) * pixels[0] + np.float32(0.587) * pixels[1] + np.float32(0.114) * pixels[2]
    gray = np.floor(gray)
    if op == "Brightness":
        other = np.zeros_like(pixels)
    elif op == "Color":
        other = gray[None]
    elif op == "Contrast":
        other = np.float32(gray.mean(dtype=np.float64))
    else:
        other = pixels.copy()
        for y in range(1, image.shape[1] - 1):
            for x in range(1, image.shape[2] - 1):
                total = pixels[:, y - 1 : y + 2, x - 1 : x + 2].sum((1, 2)) + 4 * pixels[:, y, x]
                other[:, y, x] = np.round(total / 13)
    ratio = 1 + s
    return np.clip(np.float32(ratio) * pixels + np.float32(1 - ratio) * other, 0, 255).astype(np.uint8)


def plain_values(image, op, s):
    """Operations that map values; where the map depends on the picture, channel by channel."""
    out = image.astype(np.int64)
    if op == "Posterize":
        step = 2 ** (8 - round(s))
        return (out // step * step).astype(np.uint8)
    if op == "Solarize":
        return np.where(out >= s, 255 - out, out).astype(np.uint8)
    for channel in out:  # views: written in place
        low, high = channel.min(), channel.max()
        step = (channel.size - (channel == high).sum()) // 255
        if op == "AutoContrast" and low < high:
            scale = np.float32(255) * (np.float32(1) / np.float32(high - low))
            channel[:] = (channel - low).astype(np.float32) * scale  # truncated by the assignment
        elif op == "Equalize" and step > 0:
            table = [min(255, ((channel < value).sum() + step // 2) // step) for value in range(256)]
            channel[:] = np.array(table)[channel]
    return out.astype(np.uint8)


def plain(image, op, s):
    if op == "Identity":
        return image
    if op in ("Brightness", "Color", "Contrast", "Sharpness"):
        return plain_blend(image, op, s)
    if op in ("Posterize", "Solarize", "AutoContrast", "Equalize"):
        return plain_values(image, op, s)
    return plain_geometry(image, op, s)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("height, width", [(12, 20), (40, 33)])
def test_operation_equals_plain_loop(op, height, width):
    images = pictures(height, width)
    for s in at_levels(op).tolist():
        expected = np.stack([plain(image, op, s) for image in images.numpy()])
        found = apply_op(images, op, torch.full((7,), s, dtype=torch.float64)).numpy()
        assert np.array_equal(found, expected), f"{op} at {s}"


@pytest.mark.parametrize("op", OPS)
def test_operation_equals_torchvisions(op):
    autoaugment = pytest.importorskip("torchvision.transforms.autoaugment", reason="torchvision is not installed")
    images = pictures(32, 32)
    values, signed = autoaugment.RandAugment()._augmentation_space(31, (32, 32))[op]
    assert signed == (op in SIGNED)
    # Shears of .04, .12, .2 and .28 send points exactly between two pixels, where float rounding decides.
    for level in sorted(set(range(31)) - ({4, 12, 20, 28} if op.startswith("Shear") else set())):
        for sign in (1, -1) if signed else (1,):
            theirs = sign * float(values[level] if values.ndim else 0)
            ours = (sign * STRENGTHS[list(OPS).index(op), level]).expand(len(images))
            nearest = autoaugment.InterpolationMode.NEAREST
            expected = torch.stack([autoaugment._apply_op(image, op, theirs, nearest, None) for image in images])
            assert torch.equal(apply_op(images, op, ours), expected), f"{op} at {theirs}"


def test_operation_takes_a_strength_for_each_image():
    images = pictures()
    for op in OPS:
        strengths = at_levels(op)[:5].tile(2)[: len(images)]
        alone = [apply_op(images[i : i + 1], op, strengths[i : i + 1]) for i in range(len(images))]
        assert torch.equal(apply_op(images, op, strengths), torch.cat(alone)), op


def test_operation_takes_any_memory_layout():
    images = pictures()
    strided = images.to(memory_format=torch.channels_last)
    for op in OPS:
        strengths = at_levels(op)[2].expand(len(images))
        assert torch.equal(apply_op(strided, op, strengths), apply_op(images, op, strengths)), op


def test_rand_augment_applies_the_draws_image_by_image():
    images = pictures()[torch.arange(70) % 7]
    op, strength = draw_operations(70, num_ops=3, generator=seeded(1))
    expected = []
    for i in range(70):
        image = images[i : i + 1]
        for r in range(3):
            image = apply_op(image, list(OPS)[op[r, i]], strength[r, i : i + 1])
        expected.append(image)
    assert torch.equal(rand_augment(images, num_ops=3, generator=seeded(1)), torch.cat(expected))


def test_operations_are_drawn_uniformly_and_independently():
    op, _ = draw_operations(28_000, generator=seeded(2))
    pairs = (op[0] * 14 + op[1]).bincount(minlength=196)  # expected: 143 each, deviation 12
    assert pairs.min() > 80 and pairs.max() < 210


def test_half_of_the_signed_strengths_are_negative_and_no_other():
    op, strength = draw_operations(28_000, generator=seeded(3))
    for i, name in enumerate(OPS):
        negative = (strength[op == i] < 0).double().mean().item()
        assert negative == pytest.approx(0.5 if name in SIGNED else 0, abs=0.05), name


def test_strengths_run_over_torchvisions_ranges():
    unsigned = {"Identity": (0, 0), "Posterize": (8, 4), "Solarize": (255, 0), "AutoContrast": (0, 0)}
    unsigned |= {"Equalize": (0, 0)}
    signed = {"ShearX": 0.3, "ShearY": 0.3, "TranslateX": 150 / 331, "TranslateY": 150 / 331, "Rotate": 30}
    signed |= dict.fromkeys(["Brightness", "Color", "Contrast", "Sharpness"], 0.9)
    expected = unsigned | {name: (0, high) for name, high in signed.items()}
    assert expected.keys() == OPS.keys() and set(SIGNED) == set(signed)
    for name, ends in expected.items():
        strengths = STRENGTHS[list(OPS).index(name)].numpy()
        assert np.allclose(strengths, np.linspace(*ends, 31), rtol=1e-6), name


def test_without_deviation_strengths_are_those_of_the_level():
    op, strength = draw_operations(2000, magnitude=9, magnitude_std=0, generator=seeded(4))
    signed = torch.tensor([name in SIGNED for name in OPS])
    assert torch.equal(torch.where(signed[op], strength.abs(), strength), STRENGTHS[op, 9])


def test_magnitudes_are_normal_about_their_mean():
    op, strength = draw_operations(56_000, magnitude=9.0, magnitude_std=0.5, generator=seeded(5))
    for name in ("Rotate", "Solarize"):
        drawn = strength[op == list(OPS).index(name)].abs()
        level = drawn if name == "Rotate" else (255 - drawn) / 8.5
        assert level.mean().item() == pytest.approx(9, abs=0.03)
        assert level.std().item() == pytest.approx(0.5, abs=0.02)


def test_magnitudes_are_clipped_to_0_and_30():
    op, strength = draw_operations(5000, magnitude=15, magnitude_std=1000, generator=seeded(6))
    low, high = STRENGTHS.amin(1)[op], STRENGTHS.amax(1)[op]
    assert (strength.abs() >= low).all() and (strength.abs() <= high).all()
    assert (strength.abs() == low).any() and (strength.abs() == high).any()


each_random_function = pytest.mark.parametrize("function", [random_crop, random_flip, rand_augment])


@each_random_function
def test_same_seed_same_result(function):
    images = pictures()
    first, second = (function(images, generator=seeded(seed)) for seed in (7, 7))
    assert torch.equal(first, second)
    assert not torch.equal(first, function(images, generator=seeded(8)))


@each_random_function
def test_an_image_does_not_depend_on_its_neighbours(function):
    images, others = pictures(), pictures().flip(0)
    others[4] = images[4]
    assert torch.equal(function(images, generator=seeded(9))[4], function(others, generator=seeded(9))[4])


@each_random_function
def test_draws_do_not_depend_on_pixels(function):
    generators = seeded(10), seeded(10)
    function(pictures(), generator=generators[0])
    function(torch.zeros_like(pictures()), generator=generators[1])
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


@each_random_function
def test_input_is_left_alone(function):
    images = pictures()
    result = function(images, generator=seeded(11))
    assert torch.equal(images, pictures())
    assert result.dtype == torch.uint8 and result.shape == images.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_random_function
def test_a_cpu_generator_gives_the_same_on_the_gpu(function):
    images = pictures()
    on_gpu = function(images.cuda(), generator=seeded(12)).cpu()
    assert (on_gpu != function(images, generator=seeded(12))).float().mean() < 1e-3


def test_crop_equals_a_slice_of_the_padded_image_and_every_offset_occurs():
    image = torch.randint(256, (3, 6, 9), dtype=torch.uint8, generator=seeded(13))
    padded = torch.zeros(3, 10, 13, dtype=torch.uint8)
    padded[:, 2:8, 2:11] = image
    windows = [padded[:, y : y + 6, x : x + 9] for y in range(5) for x in range(5)]
    crops = random_crop(image.expand(1000, 3, 6, 9), padding=2, generator=seeded(14))
    which = [[torch.equal(crop, window) for window in windows].index(True) for crop in crops]
    assert np.bincount(which, minlength=25).min() > 15  # expected: 40, deviation 6


def test_flip_mirrors_half_of_the_images_left_to_right():
    images = torch.randint(256, (1000, 3, 4, 5), dtype=torch.uint8, generator=seeded(15))
    flipped = random_flip(images, generator=seeded(16))
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert ((flipped == images).flatten(1).all(1) ^ mirrored).all()
    assert 430 < mirrored.sum() < 570


def test_normalize_equals_its_formula():
    images, mean, std = pictures(), (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
    result = normalize(images, mean, std)
    expected = (images.numpy() / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    assert result.dtype == torch.float32
    assert np.allclose(result.numpy(), expected, rtol=0, atol=1e-6)


def test_cutout_is_a_square_about_a_uniform_centre_clipped_at_the_border():
    images = torch.ones(4096, 3, 32, 32)
    zero = cutout(images, generator=seeded(17)) == 0
    assert torch.equal(zero[:, 0], zero[:, 1]) and torch.equal(zero[:, 0], zero[:, 2])
    rows, columns = zero[:, 0].any(2), zero[:, 0].any(1)  # (B, 32) each
    assert torch.equal(zero[:, 0], rows[:, :, None] & columns[:, None, :])
    # Centre c covers c - 8 to c + 7.
    spans = [tuple(max(0, c - 8) <= i < c + 8 for i in range(32)) for c in range(32)]
    for side in (rows, columns):
        centres = [spans.index(tuple(span)) for span in side.tolist()]
        assert np.bincount(centres, minlength=32).min() > 80  # expected: 128, deviation 11
    area = zero[:, 0].sum((1, 2))
    assert area.min() == 64 and area.max() == 256
    assert (area == 256).double().mean().item() == pytest.approx((17 / 32) ** 2, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cutout_keeps_the_type_and_the_other_pixels(dtype):
    images = torch.randn(8, 3, 10, 14, generator=seeded(18)).to(dtype)
    result = cutout(images, size=4, generator=seeded(19))
    assert result.dtype == dtype
    assert torch.equal(result[result != 0], images[result != 0])
    assert (result == 0).flatten(1).sum(1).max() <= 3 * 16


def test_empty_batch_stays_empty():
    images = torch.zeros(0, 3, 8, 8, dtype=torch.uint8)
    for function in UINT8_FUNCTIONS.values():
        assert function(images).shape == images.shape


@pytest.mark.parametrize("name", UINT8_FUNCTIONS)
def test_float_images_are_an_error_before_normalize(name):
    with pytest.raises(TypeError, match=r"uint8 images, before normalize.*float32"):
        UINT8_FUNCTIONS[name](pictures().float())
    with pytest.raises(TypeError, match="ndarray"):
        UINT8_FUNCTIONS[name](pictures().numpy())


def test_uint8_images_are_an_error_in_cutout():
    with pytest.raises(TypeError, match=r"after normalize.*uint8"):
        cutout(pictures())


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 1, 8, 8), (2, 8, 8, 3)])
def test_other_shapes_are_an_error(shape):
    for function in UINT8_FUNCTIONS.values():
        with pytest.raises(ValueError, match="shape"):
            function(torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ValueError, match="shape"):
        cutout(torch.zeros(shape))


def test_unknown_operation_is_an_error():
    with pytest.raises(ValueError, match=r"'Invert'.*ShearX"):
        apply_op(pictures(), "Invert", torch.zeros(7))
