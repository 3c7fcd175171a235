"""Train a Vision Transformer on CIFAR-10 and other small images, to compare default and mimetic initialization.

python train_cifar.py --demo                      the effect at small scale, minutes on two CPU cores
python train_cifar.py --out runs/paper            the paper's recipe (one GPU, 100 epochs)
python train_cifar.py --seeds 0,1,2 --init default,mimetic --limit 10000 --augment crop --batch-size 128 --lr 1e-3 \\
    --width 96 --depth 6 --epochs 8 --out runs/small

What the paper leaves open is our choice: the settings marked "(ours)", and these. Training images are shifted by up to
4 pixels and mirrored, then go through RandAugment, whose magnitude varies with standard deviation 0.5 for each
operation on each image, and Cutout. AdamW decays all parameters. Attention has no biases. The patch embedding has
torch's default initialization. Positions are fixed sinusoids, half of the width for the row and half for the column,
temperature 10 000. --image-size upsamples the augmented and normalized batch, bilinearly, so that augmentation sees the
data set's own pixels. SVHN's digits are not mirrored.
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads: no traceback
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # under PYTHONSAFEPATH as well

import dataclasses
import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F

from inits import VISION_INITS, VisionInitFlags, transfer_init_
from inputs.augment import Draws, augment, draw, normalize, send
from inputs.images import DATASETS, ImageData, balanced_subset, is_available, load_images
from training import ranks, records
from training.flags import Common, check_runs, flag, init_flag, parse_settings
from training.loop import Run, compare
from training.start import compile_and_parallelize, run_script, start
from training.step import (
    AUGMENT,
    INIT,
    ORDER,
    WEIGHTS,
    accuracy,
    backward,
    derive_seed,
    generator,
    learning_rate,
    set_learning_rate,
    to_device,
)
from variants import ATTENTIONS, ConViT
from vit import ViT


@dataclasses.dataclass
class Settings(VisionInitFlags, Common):
    init: tuple = init_flag(VISION_INITS)
    # data
    dataset: str = flag("cifar10", "what to train on", tuple(DATASETS))
    data_dir: str = flag("data", "folder of the data sets, or for their download", free=True)
    limit: int = flag(0, "train on a class-balanced subset of this many images; 0: all", low=0)
    holdout: int = flag(
        0, "for tuning: hold out this many training images and report on them, not on the test set", low=0
    )
    image_size: int = flag(
        0, "upsample images to this many pixels a side, after augmentation; 0: do not", low=0, high=4096
    )
    # model: ViT-Tiny (paper)
    width: int = flag(192, "token width (paper)", low=1)
    depth: int = flag(12, "layers (paper)", low=1, high=1000)
    heads: int = flag(3, "heads per layer (paper)", low=1)
    patch_size: int = flag(2, "pixels (paper; Tiny ImageNet: 4)", low=1)
    pos: str = flag("sinusoidal", "position embeddings: fixed, or random and learned", ("sinusoidal", "learned"))
    pos_scale: float = flag(1.0, "scale of the position embeddings, the paper's gamma")
    attention: str = flag("softmax", "plain, or one of the variants in variants.py", tuple(ATTENTIONS))
    local_layers: int = flag(0, "use --attention in the first N layers, then plain ones; 0: in all (ConViT: 10)", low=0)
    pool: str = flag("mean", "mean of all tokens or a class token (ours: mean, better and faster)", ("mean", "cls"))
    # recipe (paper)
    epochs: int = flag(100, "(paper)", low=1)
    batch_size: int = flag(512, "images per step (paper)", low=1)
    lr: float = flag(3e-3, "peak learning rate of AdamW (paper)", low=0)
    weight_decay: float = flag(0.01, "(paper)", low=0)
    augment: str = flag("randaugment", "randaugment: crop, flip, RandAugment, Cutout", ("randaugment", "crop", "none"))
    # recipe: what the paper leaves open, our choices
    warmup: float = flag(0.1, "share of the steps with a linear warm-up; a cosine to 0 follows (ours)", low=0, high=1)
    clip: float = flag(1.0, "clip the gradient's norm; 0: never (ours)", low=0)
    ra_ops: int = flag(2, "RandAugment: operations per image (ours: the usual N = 2)", low=0, high=100)
    ra_magnitude: float = flag(9.0, "RandAugment: magnitude, out of 30 (ours: the usual M = 9)", low=0, high=30)
    cutout: int = flag(16, "Cutout: side of the square in pixels (ours: its authors' for CIFAR-10)", low=0)
    # machine
    micro_batch: int = flag(
        0, "images per forward pass, gradients added up; 0: 64 on a CPU (its caches), all on a GPU", low=0
    )
    eval_every: int = flag(
        1, "epochs from one evaluation to the next; the last epoch is always evaluated", low=1, free=True
    )


# --demo, by data set: small patches, which show the effect of the method; lr tuned for the *default* init.
DEMO = dict(width=64, depth=4, heads=2, batch_size=64, augment="crop")
DEMOS = {
    "cifar10": dict(DEMO, patch_size=2, limit=5000, epochs=5, lr=2e-3, eval_every=5),
    "shapes": dict(DEMO, patch_size=4, epochs=10, lr=1e-3, eval_every=2, dataset="shapes"),
}
PRESETS = {"tiny-imagenet": dict(patch_size=4)}  # the paper's, if they differ from those for CIFAR


def load_data(s: Settings) -> ImageData:
    """The data set, cut down by --limit, with --holdout training images instead of the test set."""
    data = load_images(s.dataset, s.data_dir)
    if s.holdout:
        if s.holdout >= len(data.train_labels):
            raise ValueError(f"--holdout {s.holdout} leaves none of the {len(data.train_labels)} images to train on.")
        held = balanced_subset(data.train_labels, s.holdout)
        kept = torch.ones(len(data.train_labels), dtype=torch.bool)
        kept[held] = False
        data = data._replace(
            test_images=data.train_images[held], test_labels=data.train_labels[held],
            train_images=data.train_images[kept], train_labels=data.train_labels[kept],
        )  # fmt: skip
    if s.limit:
        subset = balanced_subset(data.train_labels, s.limit)
        data = data._replace(train_images=data.train_images[subset], train_labels=data.train_labels[subset])
    return data


def build(s: Settings, init: str, seed: int, data: ImageData, device: torch.device) -> ViT:
    """The model with its default weights, which depend only on the seed, and the init applied on top."""
    torch.manual_seed(derive_seed(seed, WEIGHTS))
    _, channels, size, _ = data.train_images.shape
    if 0 < s.image_size < size:
        raise ValueError(f"--image-size {s.image_size} is less than the images' own {size}; they are only made larger.")
    if s.attention != "softmax" and s.pool == "cls" and not s.local_layers:
        raise ValueError(f"--attention {s.attention} has no place for a class token: --pool mean, or --local-layers.")
    kind = partial(ConViT, local_layers=s.local_layers) if s.local_layers else ViT
    model = kind(
        image_size=s.image_size or size, patch_size=s.patch_size, in_channels=channels, num_classes=len(data.classes),
        dim=s.width, depth=s.depth, heads=s.heads, pos=s.pos, pos_scale=s.pos_scale, pool=s.pool,
        attention=ATTENTIONS[s.attention],
    )  # fmt: skip
    VISION_INITS[init](model, s, generator(seed, INIT))
    return model.to(device)


def batches(s: Settings, seed: int, data: ImageData, first_step: int, device: torch.device):
    """For each step from `first_step` on: the indices of its images, and the draws of their augmentation (None: none).

    Both are on the device and sent ahead: the order once per epoch, the draws for sixteen steps at once.
    """
    n, (H, W) = len(data.train_labels), data.train_images.shape[2:]
    full = s.augment == "randaugment"
    recipe = dict(mirror=data.name != "svhn", num_ops=s.ra_ops * full, magnitude=s.ra_magnitude, cutout=full)
    first_epoch, i = divmod(first_step, -(-n // s.batch_size))
    for epoch in itertools.count(first_epoch):
        order = to_device(torch.randperm(n, generator=generator(seed, ORDER, epoch)), device).split(s.batch_size)
        while block := order[i : i + 16]:
            draws = itertools.repeat(None)
            if s.augment != "none":
                draws = [
                    draw(len(indices), H, W, generator(seed, AUGMENT, epoch * len(order) + step), **recipe)
                    for step, indices in enumerate(block, start=i)
                ]
                draws = send(draws, H, W, device)
            yield from zip(block, draws)
            i += len(block)
        i = 0


def prepare_images(images: torch.Tensor, s: Settings, data: ImageData, draws: Draws | None) -> torch.Tensor:
    """uint8 (B, 3, S, S) to normalized float of the same shape, augmented by the draws."""
    if draws is None:
        return normalize(images, data.mean, data.std)
    return augment(images, draws, data.mean, data.std, s.cutout)


def upsample(images: torch.Tensor, size: int) -> torch.Tensor:
    """Float images (B, 3, S, S) to (B, 3, size, size), bilinearly; size 0 leaves them unchanged."""
    if size in (0, images.shape[-1]):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", align_corners=False)


def evaluate(model: ViT, s: Settings, data: ImageData, precision: str, batch: int) -> tuple[float, float]:
    """Test accuracy in percent, and mean cross-entropy in nats; each rank takes its shard of the images."""
    shards = ranks.shard(data.test_images).split(batch), ranks.shard(data.test_labels).split(batch)
    test = (
        (upsample(normalize(images, data.mean, data.std), s.image_size), labels)
        for images, labels in zip(*shards, strict=True)
    )
    return accuracy(model, test, data.test_labels.device, precision)


def train(s: Settings, init: str, seed: int, data: ImageData, device: torch.device, precision: str) -> dict:
    """One run of `s.epochs` over `data`, which is on the device already. Returns the contents of result.json."""
    model = ranks.call_in_turn(build, s, init, seed, data, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=s.weight_decay, fused=True)
    steps_per_epoch = -(-len(data.train_labels) // s.batch_size)
    run = Run(s, init, seed, model, optimizer, steps_per_epoch, device, precision, data=data._asdict())
    trained = compile_and_parallelize(model, s, device)
    micro = s.micro_batch or (64 if device.type == "cpu" else s.batch_size)

    for step, (indices, draws) in zip(run, batches(s, seed, data, run.start_step, device)):
        # Every rank augments the whole batch (cheap, and the draws are those of one process) and trains on its shard.
        images = ranks.shard(prepare_images(data.train_images[indices], s, data, draws))
        labels = ranks.shard(data.train_labels[indices])
        set_learning_rate(optimizer, learning_rate(step, run.steps, s.lr, s.warmup))
        loss = backward(trained, images, labels, len(indices), micro, precision, partial(upsample, size=s.image_size))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if run.completed(loss + 0 * norm, len(indices)):  # not finite if either is not
            test_acc, test_loss = evaluate(model, s, data, precision, max(micro, 128))
            run.record(test_acc=test_acc, test_loss=test_loss)
    return run.finish(dataset=s.dataset)


def load_and_check(s: Settings) -> ImageData:
    """Load the data and check that all the user asked for fits, so that no run starts that cannot finish."""
    check_runs(s)
    records.check_folders(s)  # before a download
    data = load_data(s)
    model = build(s, "default", 0, data, torch.device("cpu"))
    if "transfer" in s.init:
        copied = transfer_init_(model, s.transfer_from)
        ranks.print0(f"transfer: {len(copied)} tensors from {s.transfer_from}, {copied[0]} ... {copied[-1]}")
    records.claim_folders(s, data._asdict())
    return data


def settings(argv: list[str]) -> Settings:
    """Settings from flags; --demo and the data set change the defaults."""

    def parse(argv: list[str], demo: str, preset: dict | None = None) -> Settings:
        return parse_settings(Settings, argv, __doc__, DEMOS[demo] | (preset or {}), preset)

    quiet = [word for word in argv if word not in ("-h", "--help")]  # --help shows the values that will really run
    s, drawn = parse(quiet, "cifar10"), parse(quiet, "shapes")
    if drawn.dataset == "shapes" and (s.dataset == "shapes" or not is_available(s.dataset, s.data_dir)):
        return parse(argv, "shapes")  # and no flag says otherwise
    return parse(argv, "cifar10", PRESETS.get(s.dataset))


def main(argv: list[str] | None = None) -> None:
    s = settings(sys.argv[1:] if argv is None else argv)
    device, precision = start(s)
    data = ranks.call_in_turn(load_and_check, s)
    data = data._replace(**{k: v.to(device) for k, v in data._asdict().items() if isinstance(v, torch.Tensor)})
    what = f"{s.dataset}: {len(data.train_labels)} training images, {len(data.test_labels)} to evaluate"
    ranks.print0(f"{what}; {records.describe(device, precision)}")
    metrics = {"test_acc": "held-out accuracy %" if s.holdout else "test accuracy %"}
    compare(s, metrics, lambda init, seed: train(s, init, seed, data, device, precision))


if __name__ == "__main__":
    run_script(main)
