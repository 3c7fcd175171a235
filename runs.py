"""A trained model from the folder of its run, without its data set at hand.

model, s, text = load_run("runs/paper/mimetic-seed0")     # --out of a training script, then INIT-seedK
model(images)                                             # normalized (B, 3, S, S) -> logits
model.attention_maps(images)                              # (depth, B, heads, N, N)
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import train_cifar
import train_imagenet
import train_lm
from inputs.images import ImageData
from inputs.text import TextData
from training import checkpoint, records
from training.flags import Common
from training.start import pick_device


class LoadedRun(NamedTuple):
    model: nn.Module  # in eval mode
    settings: Common  # those of the script that trained it
    text: TextData | None  # of a language model: its vocabulary and unit, without text


def load_run(folder: str | Path, device: str | torch.device = "auto") -> LoadedRun:
    """The run in `folder`, finished or not, of any training script. Raises ValueError for other folders."""
    folder = Path(folder)
    device = pick_device(device) if isinstance(device, str) else device
    saved = checkpoint.read(folder / "last.pt")
    try:
        with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are overwritten
            model, s, text = build(saved, folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not a run of these scripts; give one, OUT/INIT-seedK.") from error
    checkpoint.load_weights(model, saved["model"], folder / "last.pt")
    return LoadedRun(model.eval().to(device), s, text)


def build(saved: dict, folder: Path) -> LoadedRun:
    """An untrained model of the kind and sizes that the checkpoint `saved` is of."""
    config, weights, cpu = saved.get("config", {}), saved["model"], torch.device("cpu")
    if "vocabulary" in saved:
        s = records.restore_settings(train_lm.Settings, config)
        none = torch.zeros(0, dtype=torch.int32)
        text = TextData(folder.name, none, none, none, tuple(saved["vocabulary"]), saved["unit"])
        return LoadedRun(train_lm.build(s, len(text.vocabulary)), s, text)
    if "patch_size" not in config:
        raise ValueError(f"{folder} is not a run of these scripts; give one, OUT/INIT-seedK.")
    if "pipeline" in config:
        s = records.restore_settings(train_imagenet.Settings, config)
        return LoadedRun(train_imagenet.build(s, "default", 0, len(weights["head.weight"]), cpu), s, None)
    s = records.restore_settings(train_cifar.Settings, config)
    return LoadedRun(train_cifar.build(s, "default", 0, data_like(weights, s), cpu), s, None)


def data_like(weights: dict, s: train_cifar.Settings) -> ImageData:
    """An ImageData without images of as many classes, channels and pixels as a ViT of these weights was built for."""
    side = round(weights["pos_embed"].shape[1] ** 0.5) * s.patch_size
    channels = weights["patch_embed.weight"].shape[1] // s.patch_size**2
    images, labels = torch.zeros(0, channels, side, side, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    return ImageData(s.dataset, images, labels, images, labels, ("",) * len(weights["head.weight"]), (), ())
