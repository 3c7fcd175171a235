"""Procedural line drawings, for a demo without files or network: ten classes that need local structure."""

from pathlib import Path

import numpy as np
import torch

from inputs.image_data import ImageData


def arc(start: float, stop: float, steps: int, radius_start: float = 1.0, radius_stop: float = 1.0) -> list:
    """Points on an arc or a spiral; start and stop in turns."""
    turns, radii = np.linspace(start, stop, steps + 1), np.linspace(radius_start, radius_stop, steps + 1)
    return [(r * np.cos(2 * np.pi * t), r * np.sin(2 * np.pi * t)) for r, t in zip(radii, turns, strict=True)]


# A class is a set of pen strokes, each a list of points in a circle of radius 1.
SHAPES = {
    "circle": [arc(0, 1, 12)],
    "triangle": [arc(0, 1, 3)],
    "square": [arc(0, 1, 4)],
    "hourglass": [[(-0.7, -0.7), (0.7, -0.7), (-0.7, 0.7), (0.7, 0.7), (-0.7, -0.7)]],
    "star": [arc(0, 2, 5)],
    "cross": [[(-1, 0), (1, 0)], [(0, -1), (0, 1)]],
    "arrow": [[(0, -1), (0, 1)], [(-0.7, 0.2), (0, 1), (0.7, 0.2)]],
    "zigzag": [[(-1, -0.4), (-0.5, 0.4), (0, -0.4), (0.5, 0.4), (1, -0.4)]],
    "arc": [arc(0, 0.5, 6)],
    "spiral": [arc(0, 2, 16, 0.1, 1.0)],
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
    train = draw_split(train_size, np.random.default_rng([seed, 0]))
    test = draw_split(test_size, np.random.default_rng([seed, 1]))
    return ImageData("shapes", *train, *test, tuple(SHAPES), SHAPES_MEAN, SHAPES_STD)


def draw_split(count: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """-> images (count, 3, 32, 32) uint8, labels (count,) int64: as many of each class, give or take one."""
    labels = np.sort(np.arange(count) % len(SHAPES))
    per_class = np.bincount(labels, minlength=len(SHAPES))
    images = [draw(strokes, n, rng) for strokes, n in zip(SHAPES.values(), per_class, strict=True)]
    order = rng.permutation(count)
    return torch.from_numpy(np.concatenate(images)[order]), torch.from_numpy(labels[order])


def draw(strokes: list, count: int, rng: np.random.Generator) -> np.ndarray:
    """-> (count, 3, 32, 32) uint8."""
    segments = np.concatenate([place(strokes, count, rng), stray_strokes(count, rng)], axis=1)
    half_width = rng.uniform(0.5, 1.0, (count, 1, 1)).astype(np.float32)  # in pixels
    ink = np.clip(half_width + 0.5 - distance(segments), 0, 1)[:, None]  # (count, 1, 32, 32), antialiased
    ground = rng.uniform(0.25, 0.75, (count, 3, 1, 1)).astype(np.float32)
    contrast = rng.uniform(0.3, 0.6, (count, 3, 1, 1)) * rng.choice([-1, 1], (count, 3, 1, 1))
    image = rng.standard_normal((count, 3, SHAPES_SIZE, SHAPES_SIZE), dtype=np.float32)
    image *= 0.04  # grain; levels are in units of 0..1
    image += ground + wave(count, rng)
    image += ink * contrast.astype(np.float32)
    image *= 255
    return np.clip(image, 0, 255, out=image).astype(np.uint8)


def place(strokes: list, count: int, rng: np.random.Generator) -> np.ndarray:
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


def stray_strokes(count: int, rng: np.random.Generator) -> np.ndarray:
    """Two short lines anywhere: (count, 2, 2 ends, x and y)."""
    start = rng.uniform(0, SHAPES_SIZE, (count, 2, 1, 2))
    return np.concatenate([start, start + rng.uniform(-8, 8, start.shape)], axis=2)


def distance(segments: np.ndarray) -> np.ndarray:
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


def wave(count: int, rng: np.random.Generator) -> np.ndarray:
    """Faint stripes for a ground: (count, 3, 32, 32) float32."""
    frequency = rng.uniform(-0.5, 0.5, (count, 2)).astype(np.float32)  # radians a pixel
    grid = np.arange(SHAPES_SIZE, dtype=np.float32)
    phase = (grid * frequency[:, :1])[:, None, :] + (grid * frequency[:, 1:])[:, :, None]
    amplitude = rng.uniform(-0.08, 0.08, (count, 3, 1, 1)).astype(np.float32)
    return amplitude * np.sin(phase)[:, None]
