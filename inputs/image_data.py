"""What every loader of images returns."""

from typing import NamedTuple

import torch


class ImageData(NamedTuple):
    name: str
    train_images: torch.Tensor  # (N, 3, H, W) uint8
    train_labels: torch.Tensor  # (N,) int64
    test_images: torch.Tensor  # (M, 3, H, W) uint8
    test_labels: torch.Tensor  # (M,) int64
    classes: tuple[str, ...]
    mean: tuple[float, float, float]  # of the training pixels, per channel, where 255 counts as 1
    std: tuple[float, float, float]  # over all pixels, not the mean of per-image deviations
