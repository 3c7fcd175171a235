"""Train a Vision Transformer on ImageNet-1k or on your own folders, to compare default and mimetic initialization.

torchrun --nproc-per-node 8 train_imagenet.py --data-dir imagenet --out runs/imagenet       ViT-Tiny, 150 epochs
torchrun --nproc-per-node 8 train_imagenet.py --pipeline deit --width 384 --heads 6 ...      ViT-Small, 300 epochs
python train_imagenet.py --data-dir photos --image-size 128 --batch-size 64 --epochs 30      photos/train/CLASS/*.jpg

Section 5.2 of the paper. ViT-Tiny, default and mimetic: 70.28 and 73.08 % (resnet, batch 640), 67.80 and 71.92 %
(resnet, 1024), 72.08 and 72.65 % (deit); ViT-Small 79.83 and 80.36 % (deit). The script is tested on small folders;
none of these runs has been made with it. It needs Pillow. --data-dir holds train/ and val/, each with one folder per
class; images that cannot be decoded are named and left out, up to a fifth of them.

AdamW decays only the weight matrices, as in DeiT's code: no biases, LayerNorms, positions or class tokens. The cosine
ends at 0; in DeiT's code it stops at 1e-5. Attention has no biases; the patch embedding has torch's default
initialization.
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads: no traceback
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # under PYTHONSAFEPATH as well

import dataclasses
import math
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from inits import VISION_INITS, VisionInitFlags, transfer_init_
from inputs.augment import mix, normalize
from inputs.folders import (
    MEAN,
    STD,
    ImageFolder,
    batches,
    centre_crop,
    check_classes,
    check_pillow,
    check_share,
    epoch_order,
    random_crop,
    read_folder,
    readable,
)
from training import ranks, records
from training.flags import Common, check_runs, flag, init_flag, parse_settings
from training.loop import Run, compare
from training.start import compile_and_parallelize, run_script, start
from training.step import (
    AUGMENT,
    DROPOUT,
    INIT,
    MIX,
    ORDER,
    WEIGHTS,
    accuracy,
    backward,
    derive_seed,
    generator,
    learning_rate,
    set_learning_rate,
)
from vit import ViT

PIPELINES = {
    "resnet": dict(
        epochs=150,  # the paper
        batch_size=1024,  # the paper; also 640
        mixup=0.0, cutmix=0.0, smoothing=0.0,  # the paper: cross-entropy
        ra_ops=0, erasing=0.0, repeats=1,  # random crops and flips alone, as ResNets are trained (He et al., 2016)
        lr=5e-4, weight_decay=0.05, warmup_epochs=5.0,  # ours: DeiT's
        drop_path=0.0,  # ours
        clip=1.0,  # ours: usual for ViTs
        pool="mean",  # ours: as on CIFAR
    ),
    "deit": dict(  # Touvron et al., 2021, table 9, and their code where the table is silent
        epochs=300, batch_size=1024,  # table 9, and the mimetic paper
        mixup=0.8, cutmix=1.0,  # table 9; their code: the parameters of the Beta distributions
        smoothing=0.1,  # table 9
        ra_ops=2, ra_magnitude=27.0, ra_deviation=1.5,  # table 9: 9/0.5, of the 10 of timm; here of 30
        erasing=0.25,  # table 9
        repeats=3,  # table 9: repeated augmentation; their code: 3
        lr=5e-4, weight_decay=0.05, warmup_epochs=5.0,  # table 9: learning rate times batch / 512
        drop_path=0.1,  # table 9: stochastic depth
        clip=0.0,  # table 9
        pool="cls",  # their model
    ),
}  # fmt: skip


@dataclasses.dataclass
class Settings(VisionInitFlags, Common):
    init: tuple = init_flag(VISION_INITS)
    pipeline: str = flag("resnet", "sets the defaults of all flags marked *", tuple(PIPELINES))
    # data
    data_dir: str = flag("data/imagenet", "folder with train/CLASS/ and val/CLASS/", free=True)
    image_size: int = flag(224, "pixels a side (paper)", low=1, high=4096)
    workers: int = flag(
        -1, "processes per GPU that read images; -1: one per core; 0: none", low=-1, high=256, free=True
    )
    # model: ViT-Tiny (paper); ViT-Small: --width 384 --heads 6
    width: int = flag(192, "token width (paper)", low=1)
    depth: int = flag(12, "layers (paper)", low=1, high=1000)
    heads: int = flag(3, "heads per layer (paper)", low=1)
    patch_size: int = flag(16, "pixels (paper)", low=1)
    pos: str = flag("sinusoidal", "position embeddings: fixed, or random and learned", ("sinusoidal", "learned"))
    pos_scale: float = flag(1.0, "scale of the position embeddings, the paper's gamma")
    pool: str = flag("mean", "mean of all tokens, or a class token *", ("mean", "cls"))
    # recipe: see PIPELINES for the sources
    epochs: int = flag(150, "*", low=1)
    batch_size: int = flag(1024, "images per step, over all processes *", low=1)
    lr: float = flag(5e-4, "peak learning rate of AdamW for a batch of 512; it grows with the batch *", low=0)
    weight_decay: float = flag(0.05, "*", low=0)
    warmup_epochs: float = flag(5.0, "epochs of linear warm-up; a cosine to 0 follows *", low=0)
    clip: float = flag(1.0, "clip the gradient's norm; 0: never *", low=0)
    drop_path: float = flag(0.0, "stochastic depth: rate of the last layer, lower in earlier ones *", low=0, high=1)
    smoothing: float = flag(0.0, "label smoothing *", low=0, high=1)
    mixup: float = flag(0.0, "parameter of its Beta distribution; 0: none *", low=0)
    cutmix: float = flag(0.0, "the same for CutMix; with both, each batch tosses a coin *", low=0)
    repeats: int = flag(1, "repeated augmentation: crops of each image in a batch *", low=1, high=1000)
    ra_ops: int = flag(0, "RandAugment: operations per image, each applied with probability 1/2 *", low=0, high=100)
    ra_magnitude: float = flag(27.0, "RandAugment: magnitude, out of 30 *", low=0, high=30)
    ra_deviation: float = flag(1.5, "RandAugment: standard deviation of the magnitude *", low=0)
    erasing: float = flag(0.0, "random erasing: probability *", low=0, high=1)
    # machine
    micro_batch: int = flag(
        0, "images per forward pass, gradients added up; 0: 64 on a CPU (its caches), all on a GPU", low=0
    )
    eval_every: int = flag(
        1, "epochs from one evaluation to the next; the last epoch is always evaluated", low=1, free=True
    )


DEMO = dict(image_size=64, width=64, depth=4, heads=2, batch_size=64, epochs=5, warmup_epochs=0.5)


def build(s: Settings, init: str, seed: int, classes: int, device: torch.device) -> ViT:
    """The model with its default weights, which depend only on the seed, and the init applied on top."""
    torch.manual_seed(derive_seed(seed, WEIGHTS))
    model = ViT(
        image_size=s.image_size, patch_size=s.patch_size, num_classes=classes, dim=s.width, depth=s.depth,
        heads=s.heads, pos=s.pos, pos_scale=s.pos_scale, pool=s.pool, drop_path=s.drop_path,
    )  # fmt: skip
    VISION_INITS[init](model, s, generator(seed, INIT))
    return model.to(device)


def adamw(model: ViT, s: Settings) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [dict(params=decayed), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=s.lr, weight_decay=s.weight_decay, fused=True)


def plan(s: Settings, seed: int, n: int, first: int, steps: int):
    """For each step from `first` on: (index, seed) of the crops that this rank trains on."""
    steps_an_epoch, order = -(-n // s.batch_size), None
    for step in range(first, steps):
        epoch, i = divmod(step, steps_an_epoch)
        if order is None or i == 0:
            order = epoch_order(n, s.batch_size, s.repeats, generator(seed, ORDER, epoch))
        batch = order[i * s.batch_size : (i + 1) * s.batch_size]
        places = torch.arange(len(batch)) + step * s.batch_size  # an image's seed is that of its place in the run
        pairs = zip(ranks.shard(batch).tolist(), ranks.shard(places).tolist())
        yield [(index, derive_seed(seed, AUGMENT, place)) for index, place in pairs]


def targets(labels: torch.Tensor, classes: int, smoothing: float) -> torch.Tensor:
    """Labels (B,) as probabilities (B, classes)."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes


def open_loader(s: Settings, folder: ImageFolder, rows, crop, device: torch.device):
    workers = s.workers
    if workers < 0:
        workers = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return batches(folder, rows, crop, s.image_size, workers, pin=device.type == "cuda")


def evaluate(model, s: Settings, folder: ImageFolder, device, precision: str, batch: int, unreadable: set):
    """Accuracy in percent, and mean cross-entropy in nats; each rank takes its share of the images."""
    rows = [
        [(index, 0) for index in part.tolist()] for part in ranks.shard(torch.arange(len(folder.files))).split(batch)
    ]
    read = (
        readable(*pair, folder, unreadable)
        for pair in open_loader(s, folder, [r for r in rows if r], centre_crop, device)
    )
    moved = (
        (normalize(images.to(device, non_blocking=True), MEAN, STD), labels.to(device, non_blocking=True))
        for images, labels in read
    )
    return accuracy(model, moved, device, precision)


def say_unreadable(known: list[str], unreadable: set[str], data) -> list[str]:
    """All ranks' unreadable files, sorted; names those not `known` yet. Ends the program if there are too many."""
    found = sorted(set(known).union(*ranks.gather(unreadable)))
    for file in sorted(set(found) - set(known)):
        ranks.print0(f"left out, for it cannot be read: {data[0].root.parent / file}")
    ranks.call_in_turn(lambda: [check_share(folder, found) for folder in data])
    return found


def train(s: Settings, init: str, seed: int, data, device: torch.device, precision: str) -> dict:
    """One run of `s.epochs` over `data`, two ImageFolders. Returns the contents of result.json."""
    (folder, val), classes, n = data, len(data[0].classes), len(data[0].files)
    model = ranks.call_in_turn(build, s, init, seed, classes, device)
    optimizer = adamw(model, s)
    run = Run(s, init, seed, model, optimizer, -(-n // s.batch_size), device, precision, data=contents(*data))
    trained = compile_and_parallelize(model, s, device)
    micro = s.micro_batch or (64 if device.type == "cpu" else s.batch_size)
    peak, warmup = s.lr * s.batch_size / 512, min(1.0, s.warmup_epochs / s.epochs)
    crop = partial(
        random_crop, ra_ops=s.ra_ops, ra_magnitude=s.ra_magnitude, ra_deviation=s.ra_deviation, erasing=s.erasing
    )
    loader, unreadable = open_loader(s, folder, plan(s, seed, n, run.start_step, run.steps), crop, device), set()

    for step, (images, labels) in zip(run, loader):
        images, labels = readable(images, labels, folder, unreadable)
        images = normalize(images.to(device, non_blocking=True), MEAN, STD)
        soft = targets(labels.to(device, non_blocking=True), classes, s.smoothing)
        images, soft = mix(images, soft, s.mixup, s.cutmix, np.random.default_rng((seed, MIX, step)))
        set_learning_rate(optimizer, learning_rate(step, run.steps, peak, warmup))
        torch.manual_seed(derive_seed(seed, DROPOUT, step * ranks.world_size() + ranks.rank()))
        size = min(s.batch_size, n - step % run.steps_per_epoch * s.batch_size)  # of all ranks, with unreadable images
        loss = backward(trained, images, soft, size, micro, precision)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if run.completed(loss + 0 * norm, size):  # not finite if either is not
            test_acc, test_loss = evaluate(model, s, val, device, precision, min(micro, 128), unreadable)
            known = run.state["unreadable"] = say_unreadable(run.state.get("unreadable", []), unreadable, data)
            run.record(test_acc=test_acc, test_loss=test_loss, unreadable=len(known))
    return run.finish(dataset=folder.root.parent.name, classes=classes)


def load_and_check(s: Settings) -> tuple[ImageFolder, ImageFolder]:
    """Read the folders and check that all the user asked for fits, so that no run starts that cannot finish."""
    check_runs(s)
    records.check_folders(s)  # before 1.3 million names are read
    check_pillow()
    folder = read_folder(os.path.join(s.data_dir, "train"))
    val = read_folder(os.path.join(s.data_dir, "val"), folder.classes)
    model = build(s, "default", 0, len(folder.classes), torch.device("cpu"))
    if "transfer" in s.init:
        transfer_init_(model, s.transfer_from)
    check_classes(folder)
    check_classes(val)
    records.claim_folders(s, contents(folder, val))
    return folder, val


def contents(folder: ImageFolder, val: ImageFolder) -> dict:
    """The data that a run is trained on, for its fingerprint."""
    return {f"{part} {key}": v for part, f in (("train", folder), ("val", val)) for key, v in f._asdict().items()}


def settings(argv: list[str]) -> Settings:
    """Settings from flags; the pipeline changes the defaults."""
    quiet = [word for word in argv if word not in ("-h", "--help")]  # --help shows the values that will really run
    pipeline = parse_settings(Settings, quiet, __doc__, DEMO).pipeline
    return parse_settings(Settings, argv, __doc__, DEMO, PIPELINES[pipeline])


def main(argv: list[str] | None = None) -> None:
    s = settings(sys.argv[1:] if argv is None else argv)
    device, precision = start(s)
    data = ranks.call_in_turn(load_and_check, s)
    what = f"{data[0].root.parent}: {len(data[0].files)} training images of {len(data[0].classes)} classes"
    ranks.print0(f"{what}, {len(data[1].files)} to evaluate; {records.describe(device, precision)}")
    compare(s, {"test_acc": "accuracy %"}, lambda init, seed: train(s, init, seed, data, device, precision))


if __name__ == "__main__":
    run_script(main)
